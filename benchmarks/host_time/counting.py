"""Counts what the host does in a call: calls of Python and C functions, and operations that a GPU gets as kernels."""

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = {"clone", "copy_", "_to_copy", "cat"}
# Operations without a kernel that torch does not call views.
NO_KERNEL = {"detach", "_unsafe_view", "_reshape_alias", "lift_fresh", "set_", "is_same_size", "promote_types"}

Work = Callable[[], object]


class Counts(NamedTuple):
    """Of one call, or of a part of it."""

    python: float = 0.0  # calls of functions in Python
    c: float = 0.0  # calls of functions in C from Python
    kernels: float = 0.0  # operations of aten without views and without those that only allocate
    copies: float = 0.0  # of these, those that only move numbers
    microseconds: float = 0.0

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(*(a - b for a, b in zip(self, other, strict=True)))

    def over(self, divisor: float) -> "Counts":
        return Counts(*(a / divisor for a in self))


class Operations(TorchDispatchMode):
    """Operations by name, without views and those that only allocate. Some have a kernel, others several."""

    def __init__(self, matrix: tuple[int, int] = (0, 0)) -> None:
        """``matrix`` is the shape of a weight: operations with a result like it or its transpose are counted apart."""
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.on_matrix: Counter[str] = Counter()
        self._shapes = {matrix, matrix[::-1]}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if not function.is_view and name not in NO_KERNEL and "empty" not in name:
            self.counts[name] += 1
            if isinstance(result, Tensor) and tuple(result.shape) in self._shapes:
                self.on_matrix[name] += 1
        return result


def operations(work: Work, matrix: tuple[int, int] = (0, 0)) -> Operations:
    with Operations(matrix) as counter:
        work()
    return counter


def calls(work: Work) -> tuple[int, int]:
    """Of functions in Python, and of functions in C from Python. What the collector of garbage calls, which depends on
    all that the process did before, does not count."""
    counts: Counter[str] = Counter()

    def note(frame: object, event: str, argument: object) -> None:
        counts[event] += 1

    gc.collect()
    gc.disable()
    threading.setprofile(note)  # autograd has a thread for each GPU
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        gc.enable()
    return counts["call"], counts["c_call"] - 1  # without the one that ends it
