"""Attention over slices.

A slice attends to itself causally and to everything before it in full; the two results are merged exactly by their
log-sum-exps. Backwards run last slice first, so when a slice's backward runs, all later slices have left in the cache
what they owe to this slice's keys and values. It adds that to its own gradients and hands them to autograd: a slice's
backward is an ordinary one, and no model code has to know.

Where documents begin inside a sequence, or a window or a chunk limits what is seen, there are more or other blocks.
"""

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from terapipe.modeling.autocast import autocasted
from terapipe.modeling.cache import EVERY, AttentionBlock, KeyValueStore, SliceCache
from terapipe.modeling.kernels import PLAIN, How, Kernel, PlainKernel, kernel_for


class _Call(NamedTuple):
    """What a call of attention is about, beside its tensors."""

    store: KeyValueStore
    blocks: Sequence[AttentionBlock]
    context: int
    seq_len: int
    scale: float
    kernel: Kernel

    def kernel_of(self, block: AttentionBlock) -> tuple[Kernel, How]:
        """Kernels that know no masks leave blocks with one to the plain kernel."""
        kernel = PLAIN if block.mask is not None and not self.kernel.takes_masks else self.kernel
        return kernel, How(self.scale, block.causal, block.mask)

    @property
    def sees_all_before(self) -> bool:
        """Whether one block is all of the context: then its gradients need not be added to zeros."""
        before = [block for block in self.blocks if block.keys.start < self.context]
        return len(before) == 1 and before[0].keys == slice(0, self.context) and before[0].sequences == EVERY


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
    blocks: Sequence[AttentionBlock] | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    """Causal attention of the current slice to itself and to all slices before it.

    Shapes as in ``scaled_dot_product_attention``: (batch, heads, tokens, head size), where keys and values may have
    fewer heads (grouped-query attention) and values another head size. ``layer`` is any name that is unique to the
    attention layer on its stage. ``softcap`` limits scores to that size by a tanh; ``sinks`` are scores, one for each
    head, of a token that all see and that has no value. ``blocks`` say what is seen, by default what the cache says.
    """
    return _attend(q, k, v, cache, layer, scale, softcap, sinks, blocks, kernel)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: SliceCache,
    layer: Hashable,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    blocks: Sequence[AttentionBlock] | None,
    kernel: Kernel | None,
) -> Tensor:
    """By a name of its own, so that compiling.py can keep it out of compiled code."""
    _check(q, k, v, cache)
    q, k, v = autocasted(q), autocasted(k), autocasted(v)
    with torch.autocast(q.device.type, enabled=False) if torch.is_autocast_enabled(q.device.type) else nullcontext():
        scale = q.shape[3] ** -0.5 if scale is None else scale
        width = v.shape[3]
        if width != q.shape[3]:  # kernels know one size: zeros add nothing to scores, and values of zeros are cut off
            most = max(width, q.shape[3])
            q, k, v = (F.pad(x, (0, most - x.shape[3])) for x in (q, k, v))
        if kernel is None:
            kernel = PlainKernel(softcap) if softcap else kernel_for(q.device, q.dtype)
        seen = cache.blocks() if blocks is None else blocks
        call = _Call(cache.store(layer), seen, cache.context, cache.seq_len, scale, kernel)
        out: Tensor = _Attend.apply(q, k, v, sinks, call)  # type: ignore[no-untyped-call]
        return out if out.shape[3] == width else out[..., :width]


def _check(q: Tensor, k: Tensor, v: Tensor, cache: SliceCache) -> None:
    if not q.shape[2] == k.shape[2] == v.shape[2] == cache.length:
        raise ValueError(
            f"queries, keys and values must have the {cache.length} tokens of the current slice, got "
            f"{q.shape[2]}, {k.shape[2]} and {v.shape[2]}"
        )
    if q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3] or q.shape[1] % k.shape[1]:
        raise ValueError(
            "keys must have the head size of the queries, keys and values the same number of heads, which divides "
            f"theirs, got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: _Call) -> Tensor:
        q = q.contiguous()  # a copy of the queries alone, so that a fused projection is not kept for their sake
        call.store.write(k, v, call.context, call.seq_len)
        out, lse = _merged(q, call)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out = out * (lse - total).exp().unsqueeze(-1).to(out.dtype)
            lse = total
        ctx.save_for_backward(q, out, lse, sinks)
        ctx.call = call  # the store is changed by later slices, on purpose: autograd must not guard it
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, out, lse, sinks = ctx.saved_tensors
        call: _Call = ctx.call
        context, end = call.context, call.context + q.shape[2]
        own = call.store.read(EVERY, slice(context, end))
        dq, dk, dv = _Sum(q), _Sum(own[0]), _Sum(own[1])
        first = end == call.seq_len and call.sees_all_before
        if end == call.seq_len and context and not first:
            call.store.zero_grad()
        for block in call.blocks:
            at = (block.sequences, EVERY, block.rows)
            keys, values = call.store.read(block.sequences, block.keys)
            kernel, how = call.kernel_of(block)
            found = kernel.backward(grad[at], q[at], keys, values, out[at], lse[at], how)
            dq.add(found[0], at)
            before = max(0, min(block.keys.stop, context) - block.keys.start)  # keys of earlier slices
            if before:
                earlier = slice(block.keys.start, block.keys.start + before)
                call.store.add_grad(found[1][:, :, :before], found[2][:, :, :before], block.sequences, earlier, first)
            if before < keys.shape[2]:
                mine = (block.sequences, EVERY, slice(block.keys.start + before - context, block.keys.stop - context))
                dk.add(found[1][:, :, before:], mine)
                dv.add(found[2][:, :, before:], mine)
        if end < call.seq_len:
            later_k, later_v = call.store.grad(context, end)
            dk.add(later_k)
            dv.add(later_v)
        return dq.total, dk.total, dv.total, _sink_gradient(grad, out, lse, sinks), None


class _Sum:
    """Of parts of a tensor; one that is whole is taken as it is."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self.total: Tensor | None = None

    def add(self, part: Tensor, at: tuple[slice, ...] = (EVERY,)) -> None:
        if self.total is None and part.shape == self._like.shape:
            self.total = part
            return
        if self.total is None:
            self.total = torch.zeros_like(self._like)
        self.total[at] += part


def _merged(q: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    """The blocks' results, where several concern the same token merged by their shares."""
    out: Tensor | None = None
    lse: Tensor | None = None
    for block in call.blocks:
        at = (block.sequences, EVERY, block.rows)
        keys, values = call.store.read(block.sequences, block.keys)
        kernel, how = call.kernel_of(block)
        part, part_lse = kernel.forward(q[at], keys, values, how)
        if part.shape == q.shape and out is None:
            out, lse = part, part_lse
            continue
        if out is None or lse is None:
            out = torch.zeros_like(q)
            lse = part_lse.new_full(q.shape[:3], -torch.inf)
        share = torch.sigmoid(part_lse - lse[at]).unsqueeze(-1).to(out.dtype)
        total = torch.logaddexp(lse[at], part_lse)
        if part.shape == q.shape:
            out, lse = torch.lerp(out, part, share), total
        else:
            out[at], lse[at] = torch.lerp(out[at], part, share), total
    assert out is not None and lse is not None
    return out, lse


def _sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    if sinks is None:
        return None
    weight = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(weight * (grad * out).sum(-1).to(lse.dtype)).sum((0, 2)).to(sinks.dtype)
