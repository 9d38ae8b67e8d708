"""The general seam: the model's own cache, cut between slices.

To the model a slice is a part of a prompt, continued with what its cache holds of the parts before. After each slice
every tensor in the cache is cut off from the graph that made it and goes on as a leaf; its gradient comes back the same
way. Windows, biases, convolutions and recurrent states are then the model's own business. It keeps more than the
attention backend does: for every slice the keys and values of all tokens up to it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from terapipe.modeling.cache import SliceCache
from terapipe.modeling.hf.attention_backend import UnsupportedModelError, computing


class ViewCache(SliceCache):
    """For the fast seam: what a model asks of a cache it is told, but keys and values go to ``attend`` alone."""

    def __init__(self, seq_len: int, config: PretrainedConfig) -> None:
        super().__init__(seq_len)
        self._view = _adapted(config, [_ExternalKV] * config.num_hidden_layers)
        self.inputs: dict[int, Tensor] = {}  # of the stage, by the slice's context

    def states(self) -> Cache:
        return _seen(self._view, self.context)

    def backward(self, out: Tensor, gradient: Tensor) -> None:
        with computing(self):  # layers may be computed again
            super().backward(out, gradient)
        del self.inputs[self.context]

    def clear(self) -> None:
        super().clear()
        self.inputs.clear()


class LengthOnlyCache(Cache):
    """All that a layer may ask of a cache in the fast seam. Transformers' own knows layers by their numbers, so that
    compiled code would be one layer's only."""

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return self.seq_len

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def told(argument: Any) -> Any:
    """A cache that is a layer's argument as one that only tells; any other argument as it is."""
    return LengthOnlyCache(argument.get_seq_length()) if isinstance(argument, Cache) else argument


class StateCache(SliceCache):
    """A microbatch's states on a stage that holds some of the layers."""

    def __init__(self, seq_len: int, config: PretrainedConfig, held: range) -> None:
        super().__init__(seq_len)
        self._config, self._held = config, held
        self._states: Any = None
        self._next = 0

    def states(self) -> Cache:
        """For the forward of the current slice, which must come after those before it."""
        if self.has_documents:
            raise UnsupportedModelError(
                "documents in one row need the attention backend; give each document its own row"
            )
        if self.context not in (0, self._next):
            raise UnsupportedModelError("slices of this model cannot be computed again; leave recomputation off")
        self._next = self.end
        if self.context == 0 or self._states is None:
            held = [number in self._held for number in range(self._config.num_hidden_layers)]
            self._states = _adapted(self._config, [_StateLayer if here else _ExternalKV for here in held])
        return _seen(self._states, self.context)

    def cut(self) -> None:
        """To be called after a slice's forward."""
        for number in self._held:
            for name, holder, key, tensor in _tensors(vars(self._states.layers[number])):
                if tensor.is_floating_point() and tensor.numel():
                    holder[key] = self.set_state((number, name), tensor)

    def clear(self) -> None:
        super().clear()
        self._states = None


def _tensors(holder: dict[Any, Any], path: str = "") -> Iterator[tuple[str, dict[Any, Any], Any, Tensor]]:
    for key, value in list(holder.items()):
        if isinstance(value, Tensor):
            yield f"{path}{key}", holder, key, value
        elif isinstance(value, dict):
            yield from _tensors(value, f"{path}{key}.")


def _adapted(config: PretrainedConfig, kinds: Sequence[type]) -> Any:
    """Transformers' cache for this model, its layers changed to these kinds."""
    cache: Any = DynamicCache(config=config)
    for i, (layer, kind) in enumerate(zip(cache.layers, kinds, strict=False)):
        if kind is _ExternalKV or isinstance(layer, LinearAttentionLayer):
            cache.layers[i] = object.__new__(type(kind.__name__, (kind, type(layer)), {}))
            cache.layers[i].__dict__.update(vars(layer))
    return cache


def _seen(cache: Any, seq_len: int) -> Cache:
    for layer in cache.layers:
        if isinstance(layer, _ExternalKV):
            layer.seen(seq_len)
    told: Cache = cache
    return told


class _StateLayer:
    """Transformers copies recurrent states into one place, which autograd would object to."""

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
    """A layer whose keys and values are kept elsewhere. It knows how many tokens there were: models ask any layer."""

    _seen = 0

    def seen(self: Any, seq_len: int) -> None:
        self._seen = seq_len
        if hasattr(self, "cumulative_length"):
            self.cumulative_length = seq_len
        if isinstance(self, LinearAttentionLayer):
            self.has_previous_state = dict.fromkeys(self.has_previous_state, seq_len > 0)

    def get_seq_length(self) -> int:
        return self._seen

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def update_conv_state(self, *_: Any, **__: Any) -> Tensor:
        raise UnsupportedModelError("a layer carries a state that is not keys and values")

    update_recurrent_state = update_conv_state
