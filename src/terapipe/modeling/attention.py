"""Attention over slices: the only code that knows that keys and values outlive a slice.

A slice attends to itself causally and to everything before it in full; the two results are merged exactly by their
log-sum-exps. Backwards run last slice first, so when a slice's backward runs, all later slices have left in the cache
what they owe to this slice's keys and values. It adds that to its own gradients and hands them to autograd: a slice's
backward is an ordinary ``backward()``, and no model code has to know.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from terapipe.modeling.kernels import Kernel, kernel_for


class KeyValueStore:
    """Keys, values and their gradients of one attention layer for all tokens of one microbatch, written in place."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def write(self, k: Tensor, v: Tensor, context: int, tokens: int) -> None:
        for name, x in (("k", k), ("v", v)):
            self._room(name, x, tokens)[:, :, context : context + x.shape[2]] = x

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        return self._tensors["k"][:, :, start:end], self._tensors["v"][:, :, start:end]

    def owe(self, dk: Tensor, dv: Tensor, tokens: int, first: bool) -> None:
        """Adds to the gradients of the context. The first to come overwrites what an earlier step left."""
        for name, x in (("dk", dk), ("dv", dv)):
            room = self._room(name, x, tokens)[:, :, : x.shape[2]]
            if first:
                room.copy_(x)
            else:
                room.add_(x)

    def owed(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        return self._tensors["dk"][:, :, start:end], self._tensors["dv"][:, :, start:end]

    def _room(self, name: str, like: Tensor, tokens: int) -> Tensor:
        room = self._tensors.get(name)
        if room is None:
            batch, heads, _, size = like.shape
            room = self._tensors[name] = like.new_empty(batch, heads, tokens, size)
        return room


class SliceCache:
    """What a stage keeps of one microbatch from slice to slice: one store for each attention layer.

    ``begin`` says which tokens the calls that follow are about; set it before a slice's forward and again before its
    backward. A cache may be used again for another microbatch of the same size: nothing is read before it is written.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.context = 0
        self.length = 0
        self._stores: dict[int, KeyValueStore] = {}
        self.defer = False  # whether backwards put off the gradients of weights ...
        self.owed: list[Any] = []  # ... and what they put off: see linear.py

    def begin(self, context: int, length: int) -> None:
        if length < 1 or context < 0 or context + length > self.tokens:
            raise ValueError(
                f"a slice must lie within its cache of {self.tokens} tokens, got tokens {context} to {context + length}"
            )
        self.context, self.length = context, length

    def take_owed(self) -> list[Any]:
        """The gradients of weights that backwards put off since it was last asked."""
        owed, self.owed = self.owed, []
        return owed

    def store(self, layer: int) -> KeyValueStore:
        return self._stores.setdefault(layer, KeyValueStore())


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: SliceCache,
    layer: int,
    *,
    scale: float | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    """Causal attention of the current slice to itself and to all slices before it.

    Shapes as in ``scaled_dot_product_attention``: (batch, heads, tokens, head size), where keys and values may have
    fewer heads (grouped-query attention). ``layer`` is any number that is unique to the attention layer on its stage.
    """
    if not q.shape[2] == k.shape[2] == v.shape[2] == cache.length:
        raise ValueError(
            f"queries, keys and values must have the {cache.length} tokens of the current slice, got "
            f"{q.shape[2]}, {k.shape[2]} and {v.shape[2]}"
        )
    if q.shape[3] != k.shape[3] or k.shape != v.shape or q.shape[1] % k.shape[1]:
        raise ValueError(
            "keys and values must have the same shape, the head size of the queries, and a number of heads that "
            f"divides theirs, got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    scale = q.shape[3] ** -0.5 if scale is None else scale
    kernel = kernel or kernel_for(q.device, q.dtype)
    out: Tensor = _Attend.apply(q, k, v, cache.store(layer), cache.context, cache.tokens, scale, kernel)  # type: ignore[no-untyped-call]
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        store: KeyValueStore,
        context: int,
        tokens: int,
        scale: float,
        kernel: Kernel,
    ) -> Tensor:
        q = q.contiguous()  # a copy of the queries alone, so that a fused projection is not kept for their sake
        end = context + q.shape[2]
        store.write(k, v, context, tokens)
        out, lse = kernel.forward(q, *store.read(context, end), True, scale)
        if context:  # an empty block would crash the kernel
            past, past_lse = kernel.forward(q, *store.read(0, context), False, scale)
            out = torch.lerp(past, out, torch.sigmoid(lse - past_lse).unsqueeze(-1).to(out.dtype))
            lse = torch.logaddexp(lse, past_lse)
        ctx.save_for_backward(q, out, lse)
        # The store is changed by later slices, on purpose: autograd must not guard it.
        ctx.store, ctx.context, ctx.tokens, ctx.scale, ctx.kernel = store, context, tokens, scale, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, out, lse = ctx.saved_tensors
        store, context, tokens = ctx.store, ctx.context, ctx.tokens
        end = context + q.shape[2]
        last = end == tokens
        dq, dk, dv = ctx.kernel.backward(grad, q, *store.read(context, end), out, lse, True, ctx.scale)
        if not last:
            owed_k, owed_v = store.owed(context, end)
            dk, dv = dk.add_(owed_k), dv.add_(owed_v)
        if context:
            past = ctx.kernel.backward(grad, q, *store.read(0, context), out, lse, False, ctx.scale)
            dq = dq.add_(past[0])
            store.owe(past[1], past[2], tokens, first=last)
        return dq, dk, dv, None, None, None, None, None
