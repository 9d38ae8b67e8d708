"""The cache backend: the model's own cache carries state between slices.

For the model, a slice continues a prompt of which its cache holds the earlier part. After each slice, every tensor in
the cache is detached and becomes a leaf for the next slice; in the backward, the leaf's gradient goes to the tensor:

    slice 0 -> state --detach--> leaf -> slice 1 -> state --detach--> leaf -> slice 2
               grad <----------- grad              grad <----------- grad

So windows, biases, convolutions and recurrent states work as the model defines them. It needs more memory than the
attention backend: every slice keeps the keys and values of all tokens up to it.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from terapipe.hf.attention_backend import UnsupportedModelError
from terapipe.modeling.slice_cache import SliceCache


class ViewCache(SliceCache):
    """For the attention backend: shows the model a cache that reports lengths but stores nothing. ``attend`` keeps keys
    and values.

    Args:
        seq_len: Tokens of a sequence.
        config: Of the decoder.
    """

    def __init__(self, seq_len: int, config: PretrainedConfig) -> None:
        super().__init__(seq_len)
        self._view = _StageCache(config)
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
    """For the cache backend: the model's own cache for a microbatch, on a stage that holds some of the layers.

    Args:
        seq_len: Tokens of a sequence.
        config: Of the decoder.
        numbers: Of the layers that the stage holds.
    """

    def __init__(self, seq_len: int, config: PretrainedConfig, numbers: range) -> None:
        super().__init__(seq_len)
        self._config, self._numbers = config, numbers
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
            self._states = _StageCache(self._config, self._numbers)
        states: Cache = self._states.after(self.context)
        return states

    def detach_states(self) -> None:
        """Makes leaves of all state tensors. Called after a slice's forward."""
        for number in self._numbers:
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

    A cache of transformers is a list with one object per layer, of a class by the layer's kind: full attention, a
    sliding window, a recurrence. Models call these objects and ask for their class with isinstance. Two things about
    them do not fit slices, and ``_SliceLayer`` overrides them:

    - With the attention backend, and for layers of other stages, nothing may be stored, but the object must tell its
      length: models compute positions and masks from it.
    - Recurrent states are copied in place, which autograd does not permit.

    An override alone would lose the class. So each object becomes an instance of a class that is made here, with the
    mixin in front of the object's own class, and with the object's attributes. For a layer with a sliding window:

        before    DynamicSlidingWindowLayer                          update: concatenates keys and values, cuts them
        after     _SliceLayer(_SliceLayer, DynamicSlidingWindowLayer)    update: returns them, stores nothing
                  isinstance(after, DynamicSlidingWindowLayer) holds; is_sliding, sliding_window are as before

    The constructor of the class is not called (``object.__new__``): it may take anything, and what it would set is
    copied. Layers with plain keys and values that this stage stores stay as transformers made them.

    Transformers asks for the kinds of all layers in every forward. They are computed once, so that a forward costs the
    same however many layers other stages have.

    Args:
        config: Of the decoder.
        stored: The numbers of layers whose state this cache stores.
    """

    def __init__(self, config: PretrainedConfig, stored: Collection[int] = ()) -> None:
        super().__init__(config=config)
        self._length = _Length()
        layers: list[Any] = self.layers
        for i, layer in enumerate(layers):
            if i not in stored:
                layers[i] = _make_slice_layer(layer, self._length)
            elif isinstance(layer, LinearAttentionLayer):
                layers[i] = _make_slice_layer(layer, None)
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


def _make_slice_layer(layer: Any, length: _Length | None) -> Any:
    """The same object of a cache, as a ``_SliceLayer``. With a ``length`` it stores nothing: attributes that say how
    many tokens there were then become properties that ask for it."""
    members: dict[str, Any] = {}
    if length is not None and hasattr(layer, "cumulative_length"):
        members["cumulative_length"] = property(lambda self: self._length.tokens)
    if length is not None and isinstance(layer, LinearAttentionLayer):
        states = list(layer.has_previous_state)
        members["has_previous_state"] = property(lambda self: dict.fromkeys(states, self._length.tokens > 0))
    changed: Any = object.__new__(type(_SliceLayer.__name__, (_SliceLayer, type(layer)), members))
    changed.__dict__.update(vars(layer), _length=length)
    return changed


class _SliceLayer:
    """Mixin, see ``_StageCache``: a layer that stores nothing, or one that stores new recurrent states where
    transformers copies them in place."""

    _length: _Length | None  # None: it stores states

    def get_seq_length(self: Any, *arguments: Any) -> int:
        if self._length is None:
            return int(super().get_seq_length(*arguments))  # type: ignore[misc]
        return int(self._length.tokens)

    def update(self: Any, key_states: Tensor, value_states: Tensor, *arguments: Any, **named: Any) -> Any:
        if self._length is None:
            return super().update(key_states, value_states, *arguments, **named)  # type: ignore[misc]
        return key_states, value_states

    def update_conv_state(
        self: Any, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Appends the slice's inputs to the last ones of the slice before, and keeps as many as the kernel is wide."""
        self._refuse_without_store()
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
        self._refuse_without_store()
        if not self.is_recurrent_states_initialized[state_idx]:
            self.lazy_initialization(recurrent_states=recurrent_states.detach(), state_idx=state_idx)
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    def _refuse_without_store(self) -> None:
        if self._length is not None:
            raise UnsupportedModelError("a layer carries a state that is not keys and values")
