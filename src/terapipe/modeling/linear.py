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

from terapipe.modeling.attention import SliceCache


class Owed(NamedTuple):
    """One slice's part of a weight's gradient, not yet multiplied out."""

    weight: Tensor
    grad: Tensor  # of the layer's output, one row for each token
    x: Tensor  # the layer's input, likewise

    def add(self) -> None:
        if self.weight.grad is None:
            self.weight.grad = self.product().to(self.weight.dtype)
        elif self.weight.grad.dtype == self.grad.dtype:
            self.weight.grad.addmm_(self.grad.t(), self.x)
        else:
            self.weight.grad.add_(self.product())

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


def project(layer: nn.Linear, x: Tensor, cache: SliceCache | None) -> Tensor:
    """``layer(x)``. With a cache, the weight's gradient goes to ``.grad`` alone: ``torch.autograd.grad`` and hooks on
    the weight do not see it."""
    if cache is None:
        out: Tensor = layer(x)
        return out
    return _Project.apply(x, layer.weight, layer.bias, cache)  # type: ignore[no-any-return, no-untyped-call]


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, cache: SliceCache) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.cache = cache
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        want_x, want_weight, want_bias, _ = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        if want_weight:
            owed = Owed(weight, rows, x.flatten(0, -2))
            if ctx.cache.defer:
                ctx.cache.owed.append(owed)
            else:
                owed.add()
        return grad @ weight if want_x else None, None, rows.sum(0) if want_bias else None, None
