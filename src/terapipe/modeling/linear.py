"""Linear layers over slices: weight gradients are added where they lie, now or later.

Autograd makes every slice's weight gradient as a matrix of its own and adds it to the sum; for a short slice, moving
those matrices costs as much as a tenth of the product itself. Here the product adds to the sum directly. And since
nobody waits for a weight's gradient, it may also be put off: then a slice's backward hands on its input's gradient
sooner, and what is owed to one weight is added slice after slice while that weight's sum is at hand.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Shard

from terapipe.modeling.cache import SliceCache
from terapipe.modeling.split import is_by_rows, laid_out_like, local


class Owed(NamedTuple):
    """One slice's part of a weight's gradient, not yet multiplied out."""

    weight: Tensor
    grad: Tensor  # of the layer's output, one row for each token
    x: Tensor  # the layer's input, likewise

    def add(self) -> None:
        total = self.weight.grad
        if total is None:
            self.weight.grad = laid_out_like(self.weight, self.product().to(self.weight.dtype))
        elif total.dtype == self.grad.dtype:
            local(total).addmm_(self.grad.t(), self.x)
        else:
            local(total).add_(self.product())

    def product(self) -> Tensor:
        return self.grad.t() @ self.x


def settle(owed: Iterable[Owed]) -> None:
    """Adds all that is owed, weight by weight."""
    by_weight: dict[int, list[Owed]] = {}
    for part in owed:
        by_weight.setdefault(id(part.weight), []).append(part)
    with torch.no_grad():
        for parts in by_weight.values():
            for part in parts:
                part.add()


class Linear(nn.Linear):
    """With a cache, the weight's gradient goes to ``.grad`` alone: ``torch.autograd.grad`` and hooks on the weight do
    not see it. Split by torch's ColwiseParallel or RowwiseParallel it works on its local part."""

    def forward(self, x: Tensor, cache: SliceCache | None = None) -> Tensor:
        if cache is None:
            return super().forward(x)
        if isinstance(x, DTensor) and isinstance(self.weight, DTensor):
            return self._split(x, self.weight, cache)
        return _project(x, self.weight, self.bias, True, cache)

    def _split(self, x: DTensor, weight: DTensor, cache: SliceCache) -> DTensor:
        mesh, bias = weight.device_mesh, None if self.bias is None else local(self.bias)
        if is_by_rows(weight):  # the outputs are sums over devices, to which one of them adds the bias
            adds_bias = mesh.get_local_rank() == 0
            out = _project(x.to_local(), weight, bias, adds_bias, cache)
            return DTensor.from_local(out, mesh, [Partial()], run_check=False)
        # Each device has some of the outputs, and knows their part of the input's gradient.
        out = _project(x.to_local(grad_placements=[Partial()]), weight, bias, True, cache)
        return DTensor.from_local(out, mesh, [Shard(-1)], run_check=False)


def _project(x: Tensor, weight: Tensor, bias: Tensor | None, adds_bias: bool, cache: SliceCache) -> Tensor:
    out: Tensor = _Project.apply(x, weight, bias, adds_bias, cache)  # type: ignore[no-untyped-call]
    return out


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, adds_bias: bool, cache: SliceCache) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.cache = cache
        return F.linear(x, local(weight), bias if adds_bias else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        want_x, want_weight, want_bias, _, _ = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        if want_weight:
            owed = Owed(weight, rows, x.flatten(0, -2))
            if ctx.cache.defer:
                ctx.cache.owed.append(owed)
            else:
                owed.add()
        return grad @ local(weight) if want_x else None, None, rows.sum(0) if want_bias else None, None, None
