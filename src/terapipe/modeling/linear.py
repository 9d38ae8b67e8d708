"""Linear layers over slices: weight gradients are added where they lie, now or later.

Autograd makes every slice's weight gradient as a matrix of its own and adds it to the sum; for a short slice, moving
those matrices costs as much as a tenth of the product itself. Here the product adds to the sum directly. And since
nobody waits for a weight's gradient, it may also be put off: then a slice's backward hands on its input's gradient
sooner, and what was deferred for one weight is added slice after slice while that weight's sum is at hand.

Under torch.autocast inputs, weights and biases are cast as autocast casts those of torch's own linear layers, and the
gradients of slices, each rounded to that dtype, are added up in the weight's own.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from terapipe.modeling.autocast import autocast_dtype, autocasted
from terapipe.modeling.cache import SliceCache
from terapipe.modeling.dtensor import is_by_rows, laid_out_like, to_local
from terapipe.modeling.main_grads import add_product, is_half


class DeferredGrad(NamedTuple):
    """One slice's part of a weight's gradient, not yet multiplied out."""

    weight: Tensor
    # Gradients of the layer's output, one row for each token, and its input. If the weight is (inputs, outputs), the
    # other way round.
    left: Tensor
    right: Tensor
    to_main_grad: bool = False  # adds to a sum in float32, see main_grads.py

    def add(self) -> None:
        if not self.weight.requires_grad:  # frozen since the forward: autograd adds nothing then
            return
        if self.to_main_grad:
            add_product(self.weight, self.left, self.right)
            return
        total = self.weight.grad
        if total is None:
            self.weight.grad = laid_out_like(self.weight, self.product().to(self.weight.dtype))
        elif total.dtype == self.left.dtype:
            to_local(total).addmm_(self.left.t(), self.right)
        else:
            to_local(total).add_(self.product())
        for hook in list((self.weight._post_accumulate_grad_hooks or {}).values()):
            hook(self.weight)

    def product(self) -> Tensor:
        return self.left.t() @ self.right


def accumulate_deferred(deferred: Iterable[DeferredGrad]) -> None:
    """Adds deferred weight gradients, weight by weight."""
    by_weight: dict[int, list[DeferredGrad]] = {}
    for part in deferred:
        by_weight.setdefault(id(part.weight), []).append(part)
    with torch.no_grad():
        for parts in by_weight.values():
            for part in parts:
                part.add()


class Linear(nn.Linear):
    """With a cache, the backward of a slice (``SliceCache.backward``) adds the weight's gradient to ``.grad`` in place.
    ``register_post_accumulate_grad_hook`` is called whenever something was added. Any other backward, such as
    ``torch.autograd.grad`` inside a layer, gets it from autograd. Split by torch's ColwiseParallel or RowwiseParallel
    it works on its local part."""

    def forward(self, x: Tensor, cache: SliceCache | None = None) -> Tensor:
        if cache is None or not can_project(x, self.weight):
            return super().forward(x)
        return project(x, self.weight, self.bias, cache)


def can_project(x: Tensor, weight: Tensor) -> bool:
    """Weights that are computed from others (parametrizations) have no ``.grad`` to add to; tensor classes with
    products of their own (low precision training) and the transforms of torch.func know better how to multiply."""
    if (
        not weight.is_leaf
        or type(weight) not in (nn.Parameter, Tensor, DTensor)
        or x.ndim < 2
        or torch._C._are_functorch_transforms_active()
    ):
        return False
    return _fits(x, weight) if type(weight) is DTensor or isinstance(x, DTensor) else True


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Split as torch's ColwiseParallel or RowwiseParallel split it."""
    if not (isinstance(x, DTensor) and isinstance(weight, DTensor)):
        return False
    inputs, weights = x.placements, weight.placements
    by_rows = weights == (Shard(1),) and inputs in ((Shard(x.ndim - 1),), (Shard(-1),))
    return by_rows or (weights == (Shard(0),) and inputs == (Replicate(),))


def project(x: Tensor, weight: Tensor, bias: Tensor | None, cache: SliceCache, *, inputs_first: bool = False) -> Tensor:
    """As ``F.linear``; with ``inputs_first`` the weight is (inputs, outputs). Split weights are DTensors."""
    call = _Call(autocast_dtype(weight), True, inputs_first, cache)
    if isinstance(x, DTensor) and isinstance(weight, DTensor):
        return _split(x, weight, bias, call)
    return _project(x, weight, bias, call)


def _split(x: DTensor, weight: DTensor, bias: Tensor | None, call: "_Call") -> DTensor:
    mesh, bias = weight.device_mesh, None if bias is None else to_local(bias)
    if is_by_rows(weight):  # the outputs are sums over devices, to which one of them adds the bias
        out = _project(x.to_local(), weight, bias, call._replace(adds_bias=mesh.get_local_rank() == 0))
        return DTensor.from_local(out, mesh, [Partial()], run_check=False)
    # Each device has some of the outputs, and knows their part of the input's gradient.
    out = _project(x.to_local(grad_placements=[Partial()]), weight, bias, call)
    return DTensor.from_local(out, mesh, [Shard(-1)], run_check=False)


def _project(x: Tensor, weight: Tensor, bias: Tensor | None, call: "_Call") -> Tensor:
    x, bias = autocasted(x), None if bias is None else autocasted(bias)
    if call.cache.is_checkpointed and x.requires_grad and torch.is_grad_enabled():
        call = call._replace(kept=[])
        x = _Keep.apply(x, call.kept)  # type: ignore[no-untyped-call]
    out: Tensor = _Project.apply(x, weight, bias, call)  # type: ignore[no-untyped-call]
    return out


class _Call(NamedTuple):
    """What a call is about, beside its tensors."""

    dtype: torch.dtype | None  # what autocast casts the weight to, if it does
    adds_bias: bool
    inputs_first: bool  # the weight is (inputs, outputs)
    cache: SliceCache
    kept: list[Any] | None = None  # holds the context of _Keep, which saved the input


class _Keep(torch.autograd.Function):
    """Saves the input of a product before it is computed. torch.utils.checkpoint computes a layer again until the last
    saved tensor is there: so the last product of a layer is not computed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: list[Any]) -> Tensor:
        ctx.save_for_backward(x)
        kept.append(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Project(torch.autograd.Function):
    """Its backward adds the weight's gradient in place only where that is what its caller wants: in the backward of the
    slice. Elsewhere it returns it, and may itself be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        if call.kept is None:
            ctx.save_for_backward(x)
        # Not saved by autograd: where that computes what was saved again, it gives another tensor than the parameter.
        local = to_local(weight) if call.dtype is None else call.cache.cast(weight, call.dtype)
        local = local.t() if call.inputs_first else local
        ctx.of_forward = weight, local, call, weight._version if ctx.needs_input_grad[0] else None
        # Of F.linear the output would be a view, which models may not change in place behind a Function.
        out = x.new_empty(*x.shape[:-1], local.shape[0])
        rows, flat = x.flatten(0, -2), out.flatten(0, -2)
        if bias is not None and call.adds_bias:
            torch.addmm(bias, rows, local.t(), out=flat)
        else:
            torch.mm(rows, local.t(), out=flat)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        weight, local, call, version = ctx.of_forward
        cache, returned = call.cache, None
        (x,) = ctx.saved_tensors if call.kept is None else call.kept[0].saved_tensors
        want_x, want_weight, want_bias, _ = ctx.needs_input_grad
        if want_x and weight._version != version:
            raise changed_weight("a weight", weight, version)
        rows = grad.flatten(0, -2)
        if torch.is_grad_enabled():  # somebody will differentiate this: by the weight, too
            local = to_local(weight) if call.dtype is None else to_local(weight).to(call.dtype)
            local = local.t() if call.inputs_first else local
        if want_weight:
            left, right = (x.flatten(0, -2), rows) if call.inputs_first else (rows, x.flatten(0, -2))
            deferred = DeferredGrad(weight, left, right, cache.main_grads and is_half(weight))
            if not cache.is_own_backward or weight._backward_hooks:
                returned = laid_out_like(weight, deferred.product().to(weight.dtype))
            elif cache.defer:
                cache.deferred.append(deferred)
            else:
                deferred.add()
        return grad @ local if want_x else None, returned, rows.sum(0) if want_bias else None, None


def changed_weight(name: str, weight: Tensor, version: int) -> RuntimeError:
    """What autograd raises for tensors that it saved."""
    return RuntimeError(
        f"{name} of shape {tuple(weight.shape)}, which a slice's backward needs, has been modified by an inplace "
        f"operation since the slice's forward: it is at version {weight._version}, expected version {version}; change "
        "weights between steps only, and in no layer's forward"
    )
