"""The slice that is being computed: what modules inside of a stage must know, and what they tell.

::

    cache.begin(8, 4)      makes a new SliceContext:    cache.current
    with cache:            the cache is on the stack:   current_cache()
        stage(x, cache)    linear layers, embeddings, attention and hooks of Hugging Face models read both

A ``SliceCache`` outlives its slices. A ``SliceContext`` does not: it is made anew for a slice's forward and again for
its backward, so nothing that one slice sets can reach another.
"""

from collections.abc import Hashable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor


class SliceContext:
    """One forward or one backward of a slice.

    Args:
        start: Tokens of the sequence before the slice.
        length: Tokens of the slice.
        defer: Whether the backward puts off gradients of weights: they are left in ``deferred``.
        main_grads: Whether gradients of half-precision weights are summed in float32, see main_grads.py.

    Attributes:
        end: Where the next slice begins.
        fuses: Whether gradients of weights are added where they lie, see linear.py.
        deferred: What the backward put off, see linear.py.
        calls: How often each module has called attention since the cache was entered.
        checkpointed: Which forward of a checkpointed layer is running: the "first", or "again" in the backward.
        is_in_forward: Whether the slice's forward is running.
        own_task: Autograd's number of the running backward of the slice.
    """

    def __init__(self, start: int, length: int, *, defer: bool = False, main_grads: bool = False) -> None:
        self.start, self.length, self.end = start, length, start + length
        self.defer, self.main_grads, self.fuses = defer, main_grads, False
        self.deferred: list[Any] = []
        self.calls: dict[Hashable, int] = {}
        self.checkpointed: Literal["", "first", "again"] = ""
        self.is_in_forward = False
        self.own_task: int | None = None
        self._sums: dict[str, Tensor] = {}

    def name_call(self, module: Hashable) -> tuple[Hashable, int]:
        """A name for attention that a module calls: the module and how often it has called it for this slice."""
        number = self.calls.get(module, 0)
        self.calls[module] = number + 1
        return module, number

    def pop_deferred(self) -> list[Any]:
        """Returns the gradients of weights that the backward put off, and forgets them."""
        deferred, self.deferred = self.deferred, []
        return deferred

    def add_sums(self, name: str, sums: Tensor) -> None:
        """See ``SliceCache.add_sums``. A layer that is computed again adds nothing."""
        if self.checkpointed != "again":
            self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    def pop_sums(self) -> dict[str, Tensor]:
        """Returns the sums that layers have added, and forgets them."""
        sums, self._sums = self._sums, {}
        return sums

    def run_backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor] | None = None) -> None:
        """A backward that belongs to the slice: gradients of weights go where ``linear`` adds them."""
        # Before autograd goes on from a root it calls the root's hook, which so learns the number of this backward.
        handles = [root.register_hook(self._note_task) for root in roots]  # type: ignore[no-untyped-call]
        try:
            torch.autograd.backward(roots, gradients)
        finally:
            self.own_task = None
            for handle in handles:
                handle.remove()

    def _note_task(self, _: Tensor) -> None:
        self.own_task = torch._C._current_graph_task_id()

    @property
    def is_own_backward(self) -> bool:
        """Whether autograd is at work for ``run_backward`` itself, not for another backward such as
        ``torch.autograd.grad`` inside a layer, which must change no ``.grad``."""
        return torch._C._current_graph_task_id() == self.own_task
