"""The two backends: what carries a sequence's state from one slice to the next.

The attention backend registers ``attend`` over a SliceCache as an attention implementation of transformers. A model
that takes its attention from transformers' interface needs no other change: its queries, keys and values arrive here
with positions applied. Masks are never built: the mask interface returns a ``MaskSpec``, which transformers passes on
to the attention.

The cache backend lets the model's own cache carry state. For the model, a slice continues a prompt of which its cache
holds the earlier part. After each slice, every tensor in the cache is detached and becomes a leaf for the next slice;
in the backward, the leaf's gradient goes to the tensor:

    slice 0 -> state --detach--> leaf -> slice 1 -> state --detach--> leaf -> slice 2
               grad <----------- grad              grad <----------- grad

So windows, biases, convolutions and recurrent states work as the model defines them. It needs more memory than the
attention backend: every slice keeps the keys and values of all tokens up to it.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from terapipe.modeling.attention import attend
from terapipe.modeling.slice_cache import SliceCache, current_cache

NAME = "terapipe"  # of the attention implementation

MaskFunction = Callable[..., Any]  # (batch, head, query position, key position) -> whether the query sees the key
Backend = Literal["attention", "cache"]  # what carries state between slices: ``attend`` or the model's own cache


class UnsupportedModelError(ValueError):
    """A model, or a use of it, that would not be exact in stages and slices; the message says why."""


@dataclass(frozen=True)
class MaskSpec:
    """Which of the tokens before it a query sees, in place of a mask: all, a window of them, or those of its chunk.

    Args:
        window: How many tokens, itself included; None for no limit.
        chunk: The length of chunks; a query sees those of its own chunk. None for no chunks.
        unknown: What makes it neither. It is refused only where it is used, because models also make masks in vain.
    """

    window: int | None = None
    chunk: int | None = None
    unknown: str = ""


def mask_spec(mask_function: MaskFunction = causal_mask_function, **_: Any) -> MaskSpec:
    """What transformers calls to make a mask: the limits of a mask function, in place of a matrix.

    Its mask functions are closures, made of others by ``and_masks`` and ``or_masks``. The numbers are read from their
    variables. What cannot be read is refused where the mask is used. ::

        and_masks(sliding_window_overlay(4096), causal_mask_function)   ->   MaskSpec(window=4096)

    Args:
        mask_function: What the model's mask would be filled by.
        **_: Shapes, offsets, dtype and the like, which a matrix would need.
    """
    limits: dict[str, int] = {}
    for part in _parts(mask_function):
        if part is causal_mask_function:
            continue
        name = _maker(part)
        if name not in LIMITS:
            return MaskSpec(unknown=name)
        kind, variable = LIMITS[name]
        limit = inspect.getclosurevars(part).nonlocals[variable]
        limits[kind] = min(limit, limits.get(kind, limit))
    return MaskSpec(limits.get("window"), limits.get("chunk"))


# Functions of transformers that make a mask function: what it limits, and the variable that holds the number.
LIMITS = {"sliding_window_overlay": ("window", "sliding_window"), "chunked_overlay": ("chunk", "chunk_size")}


# Tokens of one image see each other. Only token ids reach a stage, so there are none, and it adds nothing.
IMAGES = "blockwise_overlay"


def _maker(mask_function: MaskFunction) -> str:
    """The function of transformers that made it, or its own name."""
    return str(getattr(mask_function, "__qualname__", mask_function)).partition(".")[0]


def _parts(mask_function: MaskFunction) -> Iterator[MaskFunction]:
    """The conjuncts of a mask function: a query sees a key if all of them say so."""
    maker = _maker(mask_function)
    if maker not in ("and_masks", "or_masks"):
        yield mask_function
        return
    parts = inspect.getclosurevars(mask_function).nonlocals["mask_functions"]
    if maker == "or_masks":
        parts = [part for part in parts if _maker(part) != IMAGES]
        if len(parts) > 1:
            yield mask_function
            return
    for part in parts:
        yield from _parts(part)


def slice_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskSpec | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls as attention: ``attend`` over the cache whose slice is being computed.

    Args:
        module: The attention module. With the number of its call in this slice it names the store of keys and values.
        query: (batch, heads, tokens of the slice, head size), with positions applied.
        key: (batch, heads of keys and values, tokens of the slice, head size).
        value: As ``key``.
        attention_mask: What ``mask_spec`` returned; None for all earlier tokens.
        scaling: Of scores, by default that of the head size.
        dropout: Refused, unless 0.
        softcap: Bounds scores by a tanh.
        s_aux: A score for each head that no token has (attention sinks).

    Returns:
        (batch, tokens, heads, head size), and None in place of the probabilities.
    """
    cache = current_cache()
    if cache is None:
        raise UnsupportedModelError("this attention works on slices only: call the model through a Pipeline")
    if dropout:
        raise UnsupportedModelError(
            f"dropout in attention is not supported, got {dropout}; set the model's attention dropout to 0"
        )
    if not getattr(module, "is_causal", True) or not isinstance(attention_mask, MaskSpec | None):
        raise UnsupportedModelError("attention is not causal, or its mask is the model's own")
    seen = attention_mask or MaskSpec()
    if seen.unknown:
        raise UnsupportedModelError(f"attention has a mask that slices do not know ({seen.unknown})")
    layer = cache.current.name_call(module)
    out = attend(
        query, key, value, cache, layer, scale=scaling, softcap=softcap, sinks=s_aux, window=seen.window,
        chunk=seen.chunk,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def keep_outside() -> None:
    """Excludes attention from compiled layers from now on: it reads the cache, which graphs cannot."""
    outside = torch.compiler.disable(slice_attention)  # type: ignore[no-untyped-call]
    ALL_ATTENTION_FUNCTIONS.register(NAME, outside)


ALL_ATTENTION_FUNCTIONS.register(NAME, slice_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask_spec)


# Caches, for both backends


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
        self.inputs: dict[int, Tensor] = {}  # of the stage, by context of the slice: only the current one's
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
        """Makes leaves of all state tensors. Called after a slice's forward, which is never computed again: so its
        input can go."""
        self.inputs.clear()
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
    # Transformers enters every subclass that names a kind of layer into its table of caches, from which it makes those
    # of any model from then on. Ours names none; its objects do, as some models ask them.
    members: dict[str, Any] = {"_layer_type": None}
    if length is not None and hasattr(layer, "cumulative_length"):
        members["cumulative_length"] = property(lambda self: self._length.tokens)
    if length is not None and isinstance(layer, LinearAttentionLayer):
        states = list(layer.has_previous_state)
        members["has_previous_state"] = property(lambda self: dict.fromkeys(states, self._length.tokens > 0))
    changed: Any = object.__new__(type(_SliceLayer.__name__, (_SliceLayer, type(layer)), members))
    changed.__dict__.update(vars(layer), _length=length, _layer_type=getattr(layer, "_layer_type", None))
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
