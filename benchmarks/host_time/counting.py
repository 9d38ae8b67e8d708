"""Counts what the host does in a call: calls of Python and C functions, and operations that a GPU gets as kernels."""

import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = {"clone", "copy_", "_to_copy", "cat"}
# Operations without a kernel that torch does not call views.
NO_KERNEL = {"detach", "_unsafe_view", "_reshape_alias", "lift_fresh", "set_", "is_same_size", "resize_", "is_pinned"}

Work = Callable[[], object]


class Operations(TorchDispatchMode):
    """Operations of aten by name, without views and those that only allocate. Some have a kernel, or several."""

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
    """Of Python functions and of functions in C, in all threads."""
    counts: Counter[str] = Counter()

    def note(frame: object, event: str, argument: object) -> None:
        counts[event] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return counts["call"], counts["c_call"] - 1  # which ended it


def device() -> torch.device:
    """A GPU, real or pretended (tests/pretend), if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
