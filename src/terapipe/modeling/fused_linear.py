"""Linear layers of any module, whose weight gradients are added in place, now or later (see linear.py).

While a slice is computed, each ``nn.Linear`` of a stage is an instance of ``_FusedLinear``. Outside of it, it is an
``nn.Linear`` as before: parameters, names, hooks and ``state_dict`` are the same all the time. Megatron has the same
under the name gradient accumulation fusion.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from terapipe.modeling.cache import SliceCache
from terapipe.modeling.linear import project

# The cache of the slice that is being computed. Per process, not per thread: on a GPU, the backward recomputes layers
# in a thread of its own.
_current: list[SliceCache] = []


class _FusedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not _fuses(x, self.weight):
            return super().forward(x)
        return project(x, self.weight, self.bias, _current[-1])


def _fuses(x: Tensor, weight: Tensor) -> bool:
    """A frozen weight has no gradient. One that is computed from others (parametrizations), one with hooks that want to
    see each gradient (``register_hook``), and one of a tensor class with products of its own (low precision training)
    are left to autograd."""
    if (
        not (weight.requires_grad and weight.is_leaf and torch.is_grad_enabled())
        or weight._backward_hooks
        or type(weight) not in (nn.Parameter, Tensor, DTensor)
        or x.ndim < 2
    ):
        return False
    return _fits(x, weight) if isinstance(x, DTensor) or isinstance(weight, DTensor) else True


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Split as torch's ColwiseParallel or RowwiseParallel split it."""
    if not (isinstance(x, DTensor) and isinstance(weight, DTensor)):
        return False
    inputs, weights = x.placements, weight.placements
    by_rows = weights == (Shard(1),) and inputs in ((Shard(x.ndim - 1),), (Shard(-1),))
    return by_rows or (weights == (Shard(0),) and inputs == (Replicate(),))


class _FusedConv1D(nn.Module):
    """Of transformers, for GPT-2: a linear layer whose weight is (inputs, outputs)."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if not _fuses(x, self.weight) or isinstance(x, DTensor):
            plain: Tensor = super().forward(x)
            return plain
        return project(x, self.weight, self.bias, _current[-1], inputs_first=True)


def _fused_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """What modules of this very class become; subclasses may compute something else."""
    if kind is nn.Linear:
        return _FusedLinear
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        if kind not in _conv1d:
            _conv1d[kind] = type("Conv1D", (_FusedConv1D, kind), {})
        return _conv1d[kind]
    return None


_conv1d: dict[type[nn.Module], type[nn.Module]] = {}


class FusedLinears:
    """The linear layers of a stage. Those of compiled layers are left as they are: compiled code knows their class."""

    def __init__(self, stage: nn.Module, blocks: Iterable[nn.Module]) -> None:
        compiled = {m for block in blocks if getattr(block.forward, "_compiled_layer", False) for m in block.modules()}
        kinds = {module: _fused_class(type(module)) for module in stage.modules() if module not in compiled}
        self._modules = [module for module, kind in kinds.items() if kind is not None]
        self._plain = [type(module) for module in self._modules]
        self._fused = [kinds[module] for module in self._modules]

    @contextmanager
    def over(self, cache: SliceCache) -> Iterator[None]:
        """Inside, they work on this cache's slice."""
        _current.append(cache)
        try:
            self._become(self._fused)
            yield
        finally:
            self._become(self._plain)
            _current.pop()

    def _become(self, kinds: Iterable[type[nn.Module] | None]) -> None:
        # Twice per slice for many modules, so without a loop in Python and without nn.Module's own __setattr__.
        deque(map(object.__setattr__, self._modules, repeat("__class__"), kinds), maxlen=0)
