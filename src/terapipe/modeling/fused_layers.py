"""Linear layers and embeddings of any module, whose gradients are added where they lie (linear.py, embedding.py).

``fuse_weight_grads`` gives them other classes, once, when a stage is to be computed in slices. Inside of a slice
(``with cache``) modules of these classes work on it; outside they do what they did before. Parameters, names, hooks and
``state_dict`` stay as they are, and copies and pickles are of the module's own class. Megatron has the same under the
name gradient accumulation fusion.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from terapipe.modeling.embedding import embed
from terapipe.modeling.linear import is_split_alike, project
from terapipe.modeling.slice_cache import cache_that_adds

_KEEPS_CLASS = "_keeps_class"


def fuse_weight_grads(stage: nn.Module) -> None:
    """Of all modules of the stage that ``nn.Linear``, transformers' ``Conv1D`` or ``nn.Embedding`` compute. Subclasses
    of linear layers may compute something else, and are left alone."""
    for module in stage.modules():
        kind = _fused_class(type(module))
        if kind is not None and _KEEPS_CLASS not in vars(module):
            # Not by nn.Module's own __setattr__, which looks for parameters.
            object.__setattr__(module, "__class__", kind)


def keep_plain(modules: Iterable[nn.Module]) -> None:
    """Gives modules the classes that they had before, for good."""
    for module in modules:
        object.__setattr__(module, "__class__", plain_class(module))
        vars(module)[_KEEPS_CLASS] = True


def has_plain_products(stage: nn.Module) -> bool:
    """Whether some linear layers make gradients as autograd does, for good: those of compiled layers."""
    return any(_KEEPS_CLASS in vars(m) and _fused_class(type(m)) is not None for m in stage.modules())


def plain_class(module: nn.Module) -> type[nn.Module]:
    """A module's class without what ``fuse_weight_grads`` did."""
    return _plain.get(type(module), type(module))


class _Fused(nn.Module):
    """What the classes here have in common."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(1)  # later protocols compare the class with the module's
        create, (kind, *rest), *state = reduced
        return create, (_plain.get(kind, kind), *rest), *state

    def _get_name(self) -> str:
        return plain_class(self).__name__


class _FusedLinear(_Fused, nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        cache = cache_that_adds(weight)
        is_split = isinstance(x, DTensor) or isinstance(weight, DTensor)
        if cache is None or (is_split and not is_split_alike(x, weight)):
            return super().forward(x)
        return project(x, weight, self.bias, cache)


class _FusedConv1D(_Fused):
    """Of transformers, for GPT-2: a linear layer whose weight is (inputs, outputs)."""

    def forward(self: Any, x: Tensor) -> Tensor:
        cache = cache_that_adds(self.weight)
        if cache is None or isinstance(x, DTensor) or isinstance(self.weight, DTensor):
            plain: Tensor = super().forward(x)
            return plain
        return project(x, self.weight, self.bias, cache, inputs_first=True)


class _FusedEmbedding(_Fused, nn.Embedding):
    """Also below a subclass that calls ``super().forward``, as those do that scale embeddings."""

    def forward(self, ids: Tensor) -> Tensor:
        cache = cache_that_adds(self.weight)
        special = self.max_norm is not None or self.scale_grad_by_freq or self.sparse  # more than a sum of rows
        if cache is None or special or isinstance(self.weight, DTensor):
            return super().forward(ids)
        return embed(ids, self.weight, self.padding_idx, cache)


_fused: dict[type[nn.Module], type[nn.Module] | None] = {nn.Linear: _FusedLinear, nn.Embedding: _FusedEmbedding}
_plain: dict[type[nn.Module], type[nn.Module]] = {_FusedLinear: nn.Linear, _FusedEmbedding: nn.Embedding}


def _fused_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """What modules of a class become; None if they stay as they are."""
    if kind not in _fused:
        _fused[kind] = None
        if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
            _fused[kind] = type("Conv1D", (_FusedConv1D, kind), {})
        elif issubclass(kind, nn.Embedding) and not issubclass(kind, _Fused):
            _fused[kind] = type(kind.__name__, (kind, _FusedEmbedding), {})
        fused = _fused[kind]
        if fused is not None:
            _plain[fused] = kind
    return _fused[kind]
