"""Attention over slices.

A slice attends to itself and to what it sees of the tokens before it, whose keys and values are in the cache. Backwards
run last slice first, so when a slice's backward runs, all later slices have left the gradients of its keys and values
in the cache. It adds those to its own and hands them to autograd: a slice's backward is an ordinary one, and no model
code has to know. With three slices::

    forwards                               backwards, last slice first

        keys   0   1   2                       keys   0    1    2
    slice 0    c                           slice 2    dk   dk   own    leaves dk for 0 and 1 in the store
    slice 1    e   c                       slice 1    dk   own         own + what slice 2 left; leaves dk for 0
    slice 2    e   e   c                   slice 0    own              own + what slices 1 and 2 left

    c  the slice's own keys, causal        e  keys of earlier slices, read from the store        dv goes with dk
"""

from collections.abc import Hashable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from terapipe.modeling.kernel_choice import kernel_of
from terapipe.modeling.kernels import Kernel, KernelRequest, Scores
from terapipe.modeling.key_values import KeyValueStore
from terapipe.modeling.slice_cache import SliceCache, cast_input
from terapipe.modeling.visibility import EVERY, Visibility


class _Call(NamedTuple):
    """What a call of attention is about, beside its tensors. Forward and backward of one slice share it.

    Attributes:
        store: Keys and values of the layer, of all tokens so far, and their gradients.
        seen: What the slice's tokens see.
        seq_len: Tokens of each sequence.
        scores: How scores are made.
        kernel: What computes it.
        cache: The stage's, which knows which forward or backward is running.
        layer: The layer's name in the cache.
    """

    store: KeyValueStore
    seen: Visibility
    seq_len: int
    scores: Scores
    kernel: Kernel
    cache: SliceCache
    layer: Hashable


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: SliceCache,
    layer: Hashable,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    chunk: int | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    """Causal attention of the current slice to itself and to all slices before it.

    It takes the place of ``F.scaled_dot_product_attention(q, k, v, is_causal=True)`` in a model's own code. Keys and
    values of the slice are left in the cache for later slices, and their gradients come back the same way.

    Args:
        q: (batch, heads, tokens, head size), as in ``scaled_dot_product_attention``.
        k: It may have fewer heads (grouped-query attention).
        v: As many heads as keys; it may have another head size.
        cache: What the stage was given.
        layer: Any name that is unique to the attention layer on its stage.
        scale: What scores are multiplied by; by default one over the square root of the head size.
        softcap: Limits scores to that size by a tanh.
        sinks: Scores, one for each head, of a token that all see and that has no value.
        window: How many tokens of its document a token sees at most, itself included.
        chunk: A token sees those of its own chunk of so many tokens.
        kernel: By default chosen by device, dtype and what is asked for.

    Returns:
        The output, (batch, heads, tokens, head size of the values).
    """
    return _attend(q, k, v, cache, layer, scale, softcap, sinks, window, chunk, kernel)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: SliceCache,
    layer: Hashable,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    window: int | None,
    chunk: int | None,
    kernel: Kernel | None,
) -> Tensor:
    """A separate function, so that compiling.py can wrap it with torch.compiler.disable."""
    _check(q, k, v, cache.current.length)
    _check_limits(window, chunk)
    q, k, v = cast_input(q), cast_input(k), cast_input(v)
    with torch.autocast(q.device.type, enabled=False) if torch.is_autocast_enabled(q.device.type) else nullcontext():
        scores = Scores(q.shape[3] ** -0.5 if scale is None else scale, softcap or None)
        seen = cache.visibility(window, chunk)
        if kernel is None:
            segments = chunk is not None or cache.has_documents
            features = (scores.softcap is not None, sinks is not None, window is not None, segments)
            kernel = kernel_of(q, seen, KernelRequest(q.device, q.dtype, q.shape[3], *features))
        width = v.shape[3]
        # Kernels know one head size: zeros add nothing to scores, and values of zeros are cut off.
        size = -(-max(width, q.shape[3]) // kernel.head_multiple) * kernel.head_multiple
        q, k, v = (x if x.shape[3] == size else F.pad(x, (0, size - x.shape[3])) for x in (q, k, v))
        call = _Call(cache.store(layer), seen, cache.seq_len, scores, kernel, cache, layer)
        out: Tensor = _Attend.apply(q, k, v, sinks, call)  # type: ignore[no-untyped-call]
        return out if size == width else out[..., :width]


def _check(q: Tensor, k: Tensor, v: Tensor, length: int) -> None:
    if not q.shape[2] == k.shape[2] == v.shape[2] == length:
        raise ValueError(
            f"queries, keys and values must have the {length} tokens of the current slice, got "
            f"{q.shape[2]}, {k.shape[2]} and {v.shape[2]}"
        )
    if q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3] or q.shape[1] % k.shape[1]:
        raise ValueError(
            "keys must have the head size of the queries, keys and values the same number of heads, which divides "
            f"theirs, got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )


def _check_limits(window: int | None, chunk: int | None) -> None:
    for name, limit in (("window", window), ("chunk", chunk)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name} must be a number of tokens, at least 1, got {limit}; leave it out to see all")


class _Attend(torch.autograd.Function):
    """Attention as one function of autograd: its backward is where gradients pass from slice to slice.

    The backward's loop takes the kernel's parts. A part's keys may lie in earlier slices, in this one, or across the
    edge::

        keys of the sequence    0 ......... context ........ end ......... seq_len
        a part's keys                 |---------+------|
        its dk, dv                    |  to the |  to dk, dv of
                                      |  store  |  this slice
        from the store                          |<----------->|    what later slices left for this slice's keys

    What lies in the store for this slice's tokens is complete when this backward runs, because all later slices have
    run theirs. What this slice adds to the store lies before ``context``, where only earlier slices will read.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: _Call) -> Tensor:
        """A layer that is computed again in its backward gets the output that its first forward left: attention is the
        one thing that recomputation of blocks does not repeat."""
        by_tokens = _lies_by_tokens(q)
        q = q.contiguous() if call.kernel.by_heads else _alone(q)
        recalled = call.cache.recall_attention(call.layer)
        if recalled is None:
            out, lse = _compute(q, k, v, sinks, call, by_tokens)
        else:
            out, lse, queries = recalled
            q = q if queries is None else queries
        ctx.save_for_backward(q, out, lse, sinks)
        ctx.call = call  # the store is changed by later slices, on purpose: autograd must not guard it
        ctx.by_tokens = _lies_by_tokens(k), _lies_by_tokens(v)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, out, lse, sinks = ctx.saved_tensors
        store, seen, seq_len, scores, kernel, cache = ctx.call[:6]
        context, end = seen.context, seen.end
        if cache.current.is_in_forward and (context > 0 or end < seq_len):
            raise ValueError(
                "gradients inside a layer (torch.autograd.grad in its forward) must not go through attention: a "
                f"token's keys and values get gradients from all later slices, and this slice holds tokens {context} "
                f"to {end} of {seq_len}; differentiate what happens within tokens only, or take one slice"
            )
        like = store.read(EVERY, slice(context, end))  # for the shapes of dk and dv only
        dq, dk, dv = _Sum(q), *map(_Sum, like)
        store.begin_backward(seen.bounds)
        first_seen = max(context, seen.bounds.oldest_after)  # by later slices, of this slice's tokens
        later = store.grad(first_seen, end) if first_seen < end < seq_len else (None, None)
        earlier = _EarlierGradients(store, seen, is_first=end == seq_len)
        for part in kernel.backward(grad, q, out, lse, store, seen, scores):
            dq.add(part.dq, (part.sequences, EVERY, part.rows))
            before = max(0, min(part.keys.stop, context) - part.keys.start)  # keys of earlier slices
            if before:
                earlier.add(part.dk[:, :, :before], part.dv[:, :, :before], part.sequences, part.keys.start)
            if before < part.dk.shape[2]:
                inside = (part.sequences, EVERY, slice(part.keys.start + before - context, part.keys.stop - context))
                dk.add(part.dk[:, :, before:], inside)
                dv.add(part.dv[:, :, before:], inside)
        earlier.finish()
        start = first_seen - context
        owns = zip((dk, dv), later, ctx.by_tokens, strict=True)
        totals = (own.total(rest, by_tokens, start) for own, rest, by_tokens in owns)
        return dq.total(), *totals, _sink_gradient(grad, out, lse, sinks), None


def _alone(q: Tensor) -> Tensor:
    """The queries as they lie, if they have their memory for themselves, otherwise a copy.

    Models lay them out as (batch, tokens, heads, size), kernels lay out their outputs and gradients alike, and none of
    them is copied on its way through the model. Of a view a copy is made, or a whole fused projection (queries, keys
    and values) would be kept for the backward.
    """
    if q.stride(-1) == 1 and q.untyped_storage().nbytes() == q.numel() * q.itemsize:
        return q
    if _lies_by_tokens(q):
        return q.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    return q.clone(memory_format=torch.contiguous_format)


def _lies_by_tokens(x: Tensor) -> bool:
    """Whether, of (batch, heads, tokens, size), the heads of a token lie together, not the tokens of a head."""
    return x.stride(1) < x.stride(2)


def _compute(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: _Call, by_tokens: bool
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exps of a slice, with sinks.

    A sink is one more score in each row's sum, with a value of zero. So it only makes the output smaller, by the share
    that the others have of the new sum: the kernel need not know.

    Args:
        q: Queries, laid out as the kernel wants them.
        k: The slice's own keys; they are written to the store first.
        v: Its values.
        sinks: (heads,), or None.
        call: What the call is about.
        by_tokens: Whether the model laid out queries as (batch, tokens, heads, size), and so wants the output.
    """
    seen, store = call.seen, call.store
    store.write(k, v, seen.context, call.seq_len, seen.bounds, call.cache.current.forward_only)
    out, lse = call.kernel.forward(q, call.store, call.seen, call.scores)
    if by_tokens and not _lies_by_tokens(out):  # or the model would lay it out so, and both would be kept
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    if sinks is not None:
        total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        out = (out * (lse - total).exp().unsqueeze(-1)).to(out.dtype)
        lse = total
    call.cache.keep_attention(call.layer, q, out, lse)
    return out, lse


class _EarlierGradients:
    """What a slice leaves in the store for the slices before it.

    The store is used again step after step, and is never zeroed where that can be spared. The last slice is the first
    to leave something, so it overwrites what a step before left there, or zeroes it if the slice does not see every
    earlier token (documents) or sees them in several parts.

    Of layers with windows or chunks the store has room only for what one slice sees. It moves back slice by slice::

        keys of the sequence          oldest ........ context ......... end
        later slices left                    |-----------------------|     |-------| of it is for earlier slices, too
        this slice leaves             |---------------|                    in other room, to which that is added

    Args:
        store: The layer's.
        seen: What the slice sees.
        is_first: Whether this is the sequence's last slice, whose backward is the first.
    """

    def __init__(self, store: KeyValueStore, seen: Visibility, *, is_first: bool) -> None:
        bounds = seen.bounds
        self._store, self._keys = store, slice(bounds.oldest, seen.context)
        self._overlap = slice(bounds.oldest_after, seen.context)
        self._before: Tensor | None = None
        # What lies in the room is of other tokens: the first part overwrites it, or it is set to zero.
        self._stale = bounds.oldest < seen.context and (is_first or bounds.oldest < bounds.oldest_after)
        if self._stale:
            self._before = store.move_gradients(bounds, keep=not is_first and bounds.oldest_after < seen.end)

    def add(self, dk: Tensor, dv: Tensor, sequences: slice, start: int) -> None:
        """Adds a part, or overwrites with it if it is the first one and covers all earlier tokens of all sequences.

        Args:
            dk: Gradients of keys.
            dv: Gradients of their values.
            sequences: Those that the part is about.
            start: The part's first token.
        """
        keys = slice(start, start + dk.shape[2])
        overwrite = self._stale and sequences == EVERY and keys == self._keys
        if self._stale and not overwrite:
            self._store.zero_grad()
        self._stale = False
        self._store.add_grad(dk, dv, sequences, keys, overwrite)

    def finish(self) -> None:
        """Zeroes the store if nobody has written to it: earlier slices will add to what lies there. Adds what later
        slices left in the room before."""
        if self._stale:
            self._store.zero_grad()
        if self._before is not None:
            self._store.take_over(self._before, self._overlap)


class _Sum:
    """A sum of parts of a tensor, in float32 or wider; one part that is whole is taken as it is.

    Most slices have one part (FlashAttention) or two: then nothing is zeroed and nothing is copied.

    Args:
        like: A tensor with the shape and dtype of the result.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._sum: Tensor | None = None

    def add(self, part: Tensor, at: tuple[slice, ...] = (EVERY,)) -> None:
        """Adds a part at its place; by default it is whole."""
        if self._sum is None and part.shape == self._like.shape:
            self._sum = part
            return
        wide = torch.promote_types(self._like.dtype, torch.float32)
        if self._sum is None:
            self._sum = torch.zeros_like(self._like, dtype=wide)
        self._sum = self._sum.to(wide)
        self._sum[at].add_(part)

    def total(self, rest: Tensor | None = None, by_tokens: bool = False, start: int = 0) -> Tensor | None:
        """The sum, with one more part.

        Args:
            rest: What later slices left in the store, in float32; it must not be changed.
            by_tokens: Whether the result is laid out as (batch, tokens, heads, size), as the model's own tensor is. In
                half precision one operation adds, rounds, and lays out.
            start: Where the part begins, counted in tokens of the slice; it goes to the end. Later slices may not see
                the first ones.
        """
        if rest is not None and start > 0 and self._sum is not None:
            self._sum[:, :, start:].add_(rest)
            rest = None
        if rest is not None and (self._sum is None or self._sum.dtype == rest.dtype):
            self.add(rest)
            rest = None
        if self._sum is None or rest is None:
            return None if self._sum is None else self._sum.to(self._like.dtype)
        batch, heads, tokens, size = self._like.shape
        out = self._like.new_empty((batch, tokens, heads, size) if by_tokens else self._like.shape)
        return torch.add(self._sum, rest, out=out.transpose(1, 2) if by_tokens else out)


def _sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """The gradient of the sinks' scores, (heads,).

    A sink's weight is exp(sink - lse), its value 0. So d(score) = weight * (0 - rowsum(grad * out)), summed over
    sequences and rows.
    """
    if sinks is None:
        return None
    weight = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(weight * (grad.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
