"""Embeddings over slices: gradients of rows are added where they lie.

Autograd makes every slice's gradient of an embedding as a whole table, zeros but for the rows of the slice's tokens,
and adds it to the sum. For a vocabulary of 100,000 that takes longer than a layer. Here only those rows are touched.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from terapipe.modeling.linear import call_hooks
from terapipe.modeling.main_grads import HALF, add_rows
from terapipe.modeling.slice_cache import SliceCache

NO_PADDING = -1  # what torch takes for it


def embed(ids: Tensor, weight: Tensor, padding: int | None, cache: SliceCache) -> Tensor:
    """As ``F.embedding``. The backward of a slice (``SliceCache.backward``) adds to ``.grad`` in place; any other gets
    the gradient from autograd. The row of ``padding`` gets none."""
    out: Tensor = _apply_embed(ids, weight, NO_PADDING if padding is None else padding, cache)
    return out


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int, cache: SliceCache) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.of_forward = weight, padding, cache
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None, None]:
        (ids,) = ctx.saved_tensors
        weight, padding, cache = ctx.of_forward
        if not weight.requires_grad:  # frozen since the forward: autograd adds nothing then
            return None, None, None, None
        if cache.current.is_own_backward and not weight._backward_hooks:
            _add(
                weight, ids.flatten(), grad.reshape(-1, grad.shape[-1]), padding, to_main_grad=cache.current.main_grads
            )
            return None, None, None, None
        return None, _table(grad, ids, weight, padding), None, None


_apply_embed: Any = super(torch.autograd.Function, _Embed).apply  # see linear.py


def _table(grad: Tensor, ids: Tensor, weight: Tensor, padding: int) -> Tensor:
    table: Tensor = torch.ops.aten.embedding_dense_backward(grad, ids, weight.shape[0], padding, False)
    return table


@torch.no_grad()
def _add(weight: Tensor, ids: Tensor, rows: Tensor, padding: int, *, to_main_grad: bool) -> None:
    if padding != NO_PADDING:
        rows = rows.masked_fill((ids == padding)[:, None], 0.0)
    if to_main_grad and weight.dtype in HALF:
        add_rows(weight, ids, rows)
        return
    if weight.grad is None:
        weight.grad = _table(rows, ids, weight, NO_PADDING)
    else:
        weight.grad.index_add_(0, ids, rows)
    call_hooks(weight)
