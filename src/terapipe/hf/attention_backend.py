"""The attention backend: registers ``attend`` over a SliceCache as an attention implementation of transformers.

A model that takes its attention from transformers' interface needs no other change: its queries, keys and values arrive
here with positions applied. Masks are never built: the mask interface returns a ``MaskSpec``, which transformers passes
on to the attention.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from terapipe.modeling.attention import attend
from terapipe.modeling.slice_cache import current_cache

NAME = "terapipe"  # of the attention implementation

MaskFunction = Callable[..., Any]  # (batch, head, query position, key position) -> whether the query sees the key
Backend = Literal["attention", "cache"]  # what carries state between slices: ``attend`` or the model's own cache


class UnsupportedModelError(ValueError):
    """A model, or a use of it, that would not be exact in stages and slices; the message says why."""


@dataclass(frozen=True)
class MaskSpec:
    """Which of the tokens before it a query sees, in place of a mask: all, a window of them, or those of its chunk."""

    window: int | None = None
    chunk: int | None = None
    unknown: str = ""  # what makes it neither: refused only where it is used, because models also make masks in vain


def mask_spec(mask_function: MaskFunction = causal_mask_function, **_: Any) -> MaskSpec:
    """What transformers calls to make a mask: the limits of a mask function, in place of a matrix.

    Its mask functions are closures, made of others by ``and_masks`` and ``or_masks``. The numbers are read from their
    variables. What cannot be read is refused where the mask is used.
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
    """What transformers calls as attention: from (batch, heads, tokens, head size) to (batch, tokens, heads, size)."""
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
    """Excludes attention from compiled layers from now on."""
    outside = torch.compiler.disable(slice_attention)  # type: ignore[no-untyped-call]
    ALL_ATTENTION_FUNCTIONS.register(NAME, outside)


ALL_ATTENTION_FUNCTIONS.register(NAME, slice_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask_spec)
