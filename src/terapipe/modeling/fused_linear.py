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
from torch.distributed.tensor import DTensor

from terapipe.modeling.cache import SliceCache
from terapipe.modeling.linear import can_project, project

# The cache of the slice that is being computed. Per process, not per thread: on a GPU, the backward recomputes layers
# in a thread of its own.
_current: list[SliceCache] = []


class _Fused(nn.Module):
    """What the classes here have in common: copies of their modules, and pickles, are of the module's own class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(1)  # later protocols compare the class with the module's
        create, (kind, *rest), *state = reduced
        return create, (_plain[kind], *rest), *state


class _FusedLinear(_Fused, nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not _fuses(x, self.weight):
            return super().forward(x)
        return project(x, self.weight, self.bias, _current[-1])


def _fuses(x: Tensor, weight: Tensor) -> bool:
    """A frozen weight has no gradient."""
    return weight.requires_grad and torch.is_grad_enabled() and can_project(x, weight)


class _FusedConv1D(_Fused):
    """Of transformers, for GPT-2: a linear layer whose weight is (inputs, outputs)."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if not _fuses(x, self.weight) or isinstance(x, DTensor):
            plain: Tensor = super().forward(x)
            return plain
        return project(x, self.weight, self.bias, _current[-1], inputs_first=True)


_fused: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: _FusedLinear}
_plain: dict[type[nn.Module], type[nn.Module]] = {_FusedLinear: nn.Linear}


def _fused_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """What modules of this very class become; subclasses may compute something else."""
    if kind not in _fused and kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        _fused[kind] = type("Conv1D", (_FusedConv1D, kind), {})
        _plain[_fused[kind]] = kind
    return _fused.get(kind)


class FusedLinears:
    """The linear layers of a stage. Those of compiled layers are left as they are: compiled code knows their class."""

    def __init__(self, stage: nn.Module, blocks: Iterable[nn.Module]) -> None:
        self._stage, self._blocks = stage, list(blocks)
        self._find()

    def _find(self) -> None:
        layers = [block for block in self._blocks if getattr(block.forward, "_compiled_layer", False)]
        compiled = {module for layer in layers for module in layer.modules()}
        kinds = {module: _fused_class(type(module)) for module in self._stage.modules() if module not in compiled}
        self._modules = [module for module, kind in kinds.items() if kind is not None]
        self._own = [type(module) for module in self._modules]
        self._other = [kind for kind in kinds.values() if kind is not None]

    @contextmanager
    def over(self, cache: SliceCache) -> Iterator[None]:
        """Inside, they work on this cache's slice."""
        if list(map(type, self._modules)) != self._own:  # parametrizations, for one, give modules classes of their own
            self._find()
        _current.append(cache)
        try:
            _become(self._modules, self._other)
            yield
        finally:
            if list(map(type, self._modules)) == self._other:
                _become(self._modules, self._own)
            else:
                changed = [module for module in self._modules if type(module) in _plain]
                _become(changed, [_plain[type(module)] for module in changed])
            _current.pop()


def _become(modules: Iterable[nn.Module], kinds: Iterable[type[nn.Module]]) -> None:
    # Twice per slice for many modules, so without a loop in Python and without nn.Module's own __setattr__.
    deque(map(object.__setattr__, modules, repeat("__class__"), kinds), maxlen=0)
