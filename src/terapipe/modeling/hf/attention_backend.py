"""The attention backend: registers ``attend`` over a SliceCache as an attention implementation of transformers.

A model that takes its attention from transformers' interface needs no other change: its queries, keys and values arrive
here with positions applied. Masks are never built: the mask interface returns a ``MaskSpec``, which transformers passes
on to the attention.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from terapipe.modeling.attention import attend
from terapipe.modeling.cache import AttentionBlock, SliceCache, Span

NAME = "terapipe"  # of the attention implementation

Predicate = Callable[..., Any]  # (batch, head, query position, key position) -> whether the query sees the key
Backend = Literal["attention", "cache"]  # what carries state between slices: ``attend`` or the model's own cache


class UnsupportedModelError(ValueError):
    """A model, or a use of it, that would not be exact in stages and slices; the message says why."""


class _SliceContext:
    """The slice that is being computed. A layer is identified by its module and the number of calls of it so far."""

    def __init__(self, cache: SliceCache) -> None:
        self.cache = cache
        self.calls: Counter[nn.Module] = Counter()


# Per process, not per thread: on a GPU, the backward recomputes layers in a thread of its own.
_current: list[_SliceContext] = []


@contextmanager
def computing(cache: SliceCache) -> Iterator[Counter[nn.Module]]:
    """Attention inside uses the cache's current slice. Yields the number of attention calls of each module."""
    _current.append(_SliceContext(cache))
    try:
        yield _current[-1].calls
    finally:
        _current.pop()


def current() -> Any:
    """The cache of the slice that is being computed."""
    return _current[-1].cache


class MaskSpec:
    """Which keys a query sees, by positions in the sequence; used in place of a mask."""

    def __init__(self, predicate: Predicate) -> None:
        self.predicate = predicate
        self._blocks: list[AttentionBlock] | None = None  # shared by all layers of a forward

    def blocks(self, cache: SliceCache, device: torch.device) -> list[AttentionBlock]:
        if self._blocks is None:
            causal = self.predicate is causal_mask_function
            self._blocks = cache.blocks() if causal else [self._block(span, cache, device) for span in cache.spans()]
        return self._blocks

    def _block(self, span: Span, cache: SliceCache, device: torch.device) -> AttentionBlock:
        """Positions count from the start of the document, as if it were alone: chunked attention starts there."""
        zero = torch.zeros((), dtype=torch.int64, device=device)
        rows = torch.arange(span.first - span.start, span.last - span.start, device=device)[:, None]
        keys = torch.arange(span.last - span.start, device=device)[None]
        seen = torch.as_tensor(self.predicate(zero, zero, rows, keys), device=device)
        seen = (seen & (keys <= rows)).expand(len(rows), keys.shape[1])
        oldest = int(seen.any(0).nonzero()[0])  # older keys are not read at all
        return AttentionBlock(
            slice(span.first - cache.context, span.last - cache.context),
            slice(span.start + oldest, span.last),
            sequences=span.sequences,
            mask=seen[:, oldest:].contiguous(),
        )


def mask_spec(mask_function: Predicate = causal_mask_function, **_: Any) -> MaskSpec:
    """What transformers calls to make a mask."""
    return MaskSpec(mask_function)


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
    if not _current:
        raise UnsupportedModelError("this attention works on slices only: call the model through a Pipeline")
    now = _current[-1]
    if dropout:
        raise UnsupportedModelError(
            f"dropout in attention is not supported, got {dropout}; set the model's attention dropout to 0"
        )
    if not getattr(module, "is_causal", True) or not isinstance(attention_mask, MaskSpec | None):
        raise UnsupportedModelError("attention is not causal, or its mask is the model's own")
    layer = (module, now.calls[module])
    now.calls[module] += 1
    seen = attention_mask or MaskSpec(causal_mask_function)
    blocks = seen.blocks(now.cache, query.device)
    out = attend(query, key, value, now.cache, layer, scale=scaling, softcap=softcap, sinks=s_aux, blocks=blocks)
    return out.transpose(1, 2).contiguous(), None


def keep_outside() -> None:
    """Excludes attention from compiled layers from now on."""
    outside = torch.compiler.disable(slice_attention)  # type: ignore[no-untyped-call]
    ALL_ATTENTION_FUNCTIONS.register(NAME, outside)


ALL_ATTENTION_FUNCTIONS.register(NAME, slice_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask_spec)
