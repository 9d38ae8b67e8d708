"""The cache backend: the model's own cache carries state between slices.

For the model, a slice continues a prompt of which its cache holds the earlier part. After each slice, every tensor in
the cache is detached and becomes a leaf for the next slice; in the backward, the leaf's gradient goes to the tensor:

    slice 0 -> state --detach--> leaf -> slice 1 -> state --detach--> leaf -> slice 2
               grad <----------- grad              grad <----------- grad

So windows, biases, convolutions and recurrent states work as the model defines them. It needs more memory than the
attention backend: every slice keeps the keys and values of all tokens up to it.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from terapipe.hf.attention_backend import UnsupportedModelError
from terapipe.modeling.slice_cache import SliceCache


class ViewCache(SliceCache):
    """For the attention backend: shows the model a cache that reports lengths but stores nothing. ``attend`` keeps keys
    and values."""

    def __init__(self, seq_len: int, config: PretrainedConfig) -> None:
        super().__init__(seq_len)
        self._view = _StageCache(config, [_ExternalKV] * config.num_hidden_layers)
        self.inputs: dict[int, Tensor] = {}  # of the stage by context of the slice, for recomputation

    def states(self) -> Cache:
        return self._view.after(self.context)

    def backward(self, out: Tensor, gradient: Tensor, others: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        self.states()  # layers that are recomputed may ask for its length
        super().backward(out, gradient, others)
        del self.inputs[self.context]

    def clear(self) -> None:
        super().clear()
        self.inputs.clear()


class LengthOnlyCache(Cache):
    """What a compiled layer sees of the cache with the attention backend: only its length.

    The caches of transformers index layers by number, so code compiled with one would fit a single layer.
    """

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return self.seq_len

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def length_only(argument: Any) -> Any:
    """A cache as a ``LengthOnlyCache``; any other argument as it is."""
    return LengthOnlyCache(argument.get_seq_length()) if isinstance(argument, Cache) else argument


class StateCache(SliceCache):
    """The model's cache for a microbatch, on a stage that holds some of the layers."""

    def __init__(self, seq_len: int, config: PretrainedConfig, held: range) -> None:
        super().__init__(seq_len)
        self._config, self._held = config, held
        self._states: Any = None
        self._next = 0

    def states(self) -> Cache:
        """The cache for the forward of the current slice. Slices come in order."""
        if self.has_documents:
            raise UnsupportedModelError(
                "documents in one row need the attention backend; give each document its own row"
            )
        if self.context not in (0, self._next):
            raise UnsupportedModelError("slices of this model cannot be computed again; leave recomputation off")
        self._next = self.end
        if self.context == 0 or self._states is None:
            held = [number in self._held for number in range(self._config.num_hidden_layers)]
            self._states = _StageCache(self._config, [_StateLayer if here else _ExternalKV for here in held])
        states: Cache = self._states.after(self.context)
        return states

    def detach_states(self) -> None:
        """Makes leaves of all state tensors. Called after a slice's forward."""
        for number in self._held:
            for name, holder, key, tensor in _tensors(vars(self._states.layers[number])):
                if tensor.is_floating_point() and tensor.numel():
                    holder[key] = self.set_state((number, name), tensor)

    def clear(self) -> None:
        super().clear()
        self._states = None


def _tensors(holder: dict[Any, Any], path: str = "") -> Iterator[tuple[str, dict[Any, Any], Any, Tensor]]:
    """All tensors in nested dicts: their path, and the dict and key that hold them."""
    for key, value in list(holder.items()):
        if isinstance(value, Tensor):
            yield f"{path}{key}", holder, key, value
        elif isinstance(value, dict):
            yield from _tensors(value, f"{path}{key}.")


class _Length:
    """How many tokens there were before the slice: one number for all layers that store nothing."""

    tokens = 0


class _StageCache(DynamicCache):
    """Transformers' cache for all layers of a model, on a stage that holds some of them.

    A model's cache has layers of several classes (full, sliding window, recurrent, ...), and models check for these
    with isinstance. So a layer of class C becomes an instance of a new class (mixin, C) with the same attributes:

        DynamicSlidingWindowLayer  ->  class _ExternalKV(_ExternalKV, DynamicSlidingWindowLayer)

    Layers with plain keys and values on this stage need no mixin. Transformers asks for the kinds of all layers in
    every forward; they are found once, so that a forward costs the same however many layers other stages have.
    """

    def __init__(self, config: PretrainedConfig, mixins: Sequence[type]) -> None:
        super().__init__(config=config)
        self._length = _Length()
        layers: list[Any] = self.layers
        for i, (layer, mixin) in enumerate(zip(layers, mixins, strict=False)):
            if mixin is _ExternalKV:
                layers[i] = _as_external(layer, self._length)
            elif isinstance(layer, LinearAttentionLayer):
                layers[i] = _with_mixin(layer, mixin, {})
        self._sliding: list[bool] = [getattr(layer, "is_sliding", False) for layer in layers]
        self._compileable = bool(layers) and all(layer.is_compileable for layer in layers)

    def after(self, tokens: int) -> Self:
        """The same cache, after telling layers that store nothing how many tokens there were."""
        self._length.tokens = tokens
        return self

    @property
    def is_sliding(self) -> list[bool]:
        return self._sliding

    @property
    def is_compileable(self) -> bool:
        return self._compileable


def _with_mixin(layer: Any, mixin: type, members: dict[str, Any]) -> Any:
    # __new__ alone: the constructor of C may take anything, and its attributes are copied.
    changed: Any = object.__new__(type(mixin.__name__, (mixin, type(layer)), members))
    changed.__dict__.update(vars(layer))
    return changed


def _as_external(layer: Any, length: _Length) -> Any:
    """Attributes of a layer that say how many tokens there were become properties that ask the shared length."""
    members: dict[str, Any] = {}
    if hasattr(layer, "cumulative_length"):
        members["cumulative_length"] = property(lambda self: self._shared.tokens)
    if isinstance(layer, LinearAttentionLayer):
        states = list(layer.has_previous_state)
        members["has_previous_state"] = property(lambda self: dict.fromkeys(states, self._shared.tokens > 0))
    external = _with_mixin(layer, _ExternalKV, members)
    external._shared = length
    return external


class _StateLayer:
    """Mixin: keeps new recurrent states, where transformers copies them in place, which autograd does not permit."""

    def update_conv_state(
        self: Any, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        if not self.is_conv_states_initialized[state_idx]:
            self.lazy_initialization(
                conv_states=conv_states.detach(), state_idx=state_idx, conv_kernel_size=conv_kernel_size
            )
        size = self.conv_kernel_size[state_idx]
        full = conv_states
        if self.has_previous_state[state_idx]:
            full = torch.cat([self.conv_states[state_idx], conv_states], dim=-1)
        elif full.shape[-1] < size:
            full = torch.nn.functional.pad(full, (size - full.shape[-1], 0))
        self.has_previous_state[state_idx] = True
        self.conv_states[state_idx] = full[..., -size:]
        return full

    def update_recurrent_state(self: Any, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        if not self.is_recurrent_states_initialized[state_idx]:
            self.lazy_initialization(recurrent_states=recurrent_states.detach(), state_idx=state_idx)
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class _ExternalKV:
    """Mixin: a layer that stores nothing but knows its length, for which models may ask any layer."""

    _shared: _Length

    def get_seq_length(self) -> int:
        return self._shared.tokens

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def update_conv_state(self, *_: Any, **__: Any) -> Tensor:
        raise UnsupportedModelError("a layer carries a state that is not keys and values")

    update_recurrent_state = update_conv_state
