"""Products with weights over slices: gradients of weights are added where they lie, now or later.

Autograd makes every slice's weight gradient as a matrix of its own and adds it to the sum; for a short slice, moving
those matrices costs as much as a tenth of the product itself. Here the product adds to the sum directly. And since
nobody waits for a weight's gradient, it may also be put off: then a slice's backward hands on its input's gradient
sooner, and what was deferred for one weight is added slice after slice while that weight's sum is at hand.

Under torch.autocast inputs, weights and biases are cast as autocast casts those of torch's own linear layers, and the
gradients of slices, each rounded to that dtype, are added up in the weight's own.

``fused_layers.py`` makes the linear layers of a stage call ``project``.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from terapipe.modeling.autocast import autocast_dtype, autocasted
from terapipe.modeling.dtensor import is_by_rows, laid_out_like, to_local
from terapipe.modeling.main_grads import HALF, add_product
from terapipe.modeling.slice_cache import SliceCache


class DeferredGrad(NamedTuple):
    """One slice's part of a weight's gradient, not yet multiplied out."""

    weight: Tensor
    # Gradients of the layer's output, one row for each token, and its input. If the weight is (inputs, outputs), the
    # other way round.
    left: Tensor
    right: Tensor
    to_main_grad: bool = False  # adds to a sum in float32, see main_grads.py

    def add(self) -> None:
        weight = self.weight
        if not weight.requires_grad:  # frozen since the forward: autograd adds nothing then
            return
        if self.to_main_grad:
            add_product(weight, self.left, self.right)
            return
        total = weight.grad
        if total is None:
            weight.grad = laid_out_like(weight, self.product().to(weight.dtype))
        else:
            total = to_local(total) if type(total) is DTensor else total
            if total.dtype == self.left.dtype:
                total.addmm_(self.left.t(), self.right)
            else:
                total.add_(self.product())
        if weight._post_accumulate_grad_hooks:
            call_hooks(weight)

    def product(self) -> Tensor:
        return self.left.t() @ self.right


def call_hooks(weight: Tensor) -> None:
    """What autograd calls when it has added to ``.grad``, after it was done here."""
    for hook in list((weight._post_accumulate_grad_hooks or {}).values()):
        hook(weight)


def accumulate_deferred(deferred: Iterable[DeferredGrad]) -> None:
    """Adds deferred weight gradients, weight by weight."""
    by_weight: dict[int, list[DeferredGrad]] = {}
    for part in deferred:
        by_weight.setdefault(id(part.weight), []).append(part)
    with torch.no_grad():
        for parts in by_weight.values():
            for part in parts:
                part.add()


def is_split_alike(x: Tensor, weight: Tensor) -> bool:
    """Whether both are split as torch's ColwiseParallel or RowwiseParallel split them: ``project`` knows no other."""
    if not (isinstance(x, DTensor) and isinstance(weight, DTensor)):
        return False
    inputs, weights = x.placements, weight.placements
    by_rows = weights == (Shard(1),) and inputs in ((Shard(x.ndim - 1),), (Shard(-1),))
    return by_rows or (weights == (Shard(0),) and inputs == (Replicate(),))


def project(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache: SliceCache,
    *,
    inputs_first: bool = False,
    adds_bias: bool = True,
) -> Tensor:
    """As ``F.linear``; with ``inputs_first`` the weight is (inputs, outputs). Split weights are DTensors.

    The backward of a slice (``SliceCache.backward``) adds the weight's gradient to ``.grad`` in place, and then calls
    what ``register_post_accumulate_grad_hook`` registered. Any other backward, such as ``torch.autograd.grad`` inside
    a layer, gets it from autograd. Without ``adds_bias``, the bias has its gradient only.
    """
    if isinstance(x, DTensor):
        return _project_split(x, weight, bias, cache)
    dtype: torch.dtype | None = None
    keeper: list[Any] | None = None
    if torch.is_autocast_enabled(x.device.type):
        dtype, x, bias = autocast_dtype(weight), autocasted(x), None if bias is None else autocasted(bias)
    if cache.current.checkpointed and x.requires_grad:
        keeper = []
        x = _Keep.apply(x, keeper)  # type: ignore[no-untyped-call]
    x = torch._C._functorch.unwrap_if_dead(x)
    out: Tensor = _apply_project(x, weight, bias, cache, dtype, inputs_first, adds_bias, keeper)
    return out


def _project_split(x: DTensor, weight: Tensor, bias: Tensor | None, cache: SliceCache) -> DTensor:
    assert isinstance(weight, DTensor)
    mesh, bias = weight.device_mesh, None if bias is None else to_local(bias)
    if is_by_rows(weight):  # the outputs are sums over devices, to which one of them adds the bias
        out = project(x.to_local(), weight, bias, cache, adds_bias=mesh.get_local_rank() == 0)
        return DTensor.from_local(out, mesh, [Partial()], run_check=False)
    # Each device has some of the outputs, and knows their part of the input's gradient.
    out = project(x.to_local(grad_placements=[Partial()]), weight, bias, cache)
    shape = torch.Size((*out.shape[:-1], weight.shape[0]))  # devices may have unequal parts, of a vocabulary for one
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(out, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)


class _Keep(torch.autograd.Function):
    """Saves the input of a product before it is computed. torch.utils.checkpoint computes a layer again until the last
    saved tensor is there: so the last product of a layer is not computed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keeper: list[Any]) -> Tensor:
        ctx.save_for_backward(x)
        keeper.append(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Project(torch.autograd.Function):
    """Its backward adds the weight's gradient in place only where that is what its caller wants: in the backward of the
    slice. Elsewhere it returns it, and may itself be differentiated."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cache: SliceCache,
        dtype: torch.dtype | None,  # what autocast casts the weight to, if it does
        inputs_first: bool,
        adds_bias: bool,
        keeper: list[Any] | None,  # holds the context of _Keep, which saved the input
    ) -> Tensor:
        if keeper is None:
            ctx.save_for_backward(x)
        # Not saved by autograd: where that computes what was saved again, it gives another tensor than the parameter.
        local = weight if dtype is None else cache.cast(weight, dtype)
        local = to_local(local) if type(local) is DTensor else local
        local = local.t() if inputs_first else local
        ctx.of_forward = weight, local, cache, dtype, inputs_first, keeper
        ctx.version = weight._version if ctx.needs_input_grad[0] else None
        # Of F.linear the output would be a view, which models may not change in place behind a Function.
        out = x.new_empty(*x.shape[:-1], local.shape[0])
        rows, flat = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
        if bias is not None and adds_bias:
            torch.addmm(bias, rows, local.t(), out=flat)
        else:
            torch.mm(rows, local.t(), out=flat)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, local, cache, dtype, inputs_first, keeper = ctx.of_forward
        (x,) = ctx.saved_tensors if keeper is None else keeper[0].saved_tensors
        want_x, want_weight, want_bias = ctx.needs_input_grad[:3]
        if want_x and weight._version != ctx.version:
            raise changed_weight("a weight", weight, ctx.version)
        rows, returned = grad.reshape(-1, grad.shape[-1]), None
        if torch.is_grad_enabled():  # somebody will differentiate this: by the weight, too
            local = to_local(weight) if dtype is None else to_local(weight).to(dtype)
            local = local.t() if inputs_first else local
        if want_weight:
            inputs = x.reshape(-1, x.shape[-1])
            left, right = (inputs, rows) if inputs_first else (rows, inputs)
            current = cache.current
            deferred = DeferredGrad(weight, left, right, current.main_grads and weight.dtype in HALF)
            # Whether this backward is the slice's own, as ``is_own_backward`` says, without one more call.
            if torch._C._current_graph_task_id() != current.own_task or weight._backward_hooks:
                returned = laid_out_like(weight, deferred.product().to(weight.dtype))
            elif current.defer:
                current.deferred.append(deferred)
            else:
                deferred.add()
        want_rest = grad @ local if want_x else None, returned, rows.sum(0) if want_bias else None
        return *want_rest, None, None, None, None, None


# In C alone. ``Function.apply`` prepares for transforms of torch.func, which ``cache_that_adds`` leaves to autograd:
# eight calls in Python for every product of every slice.
_apply_project: Any = super(torch.autograd.Function, _Project).apply


def changed_weight(name: str, weight: Tensor, version: int) -> RuntimeError:
    """What autograd raises for tensors that it saved."""
    return RuntimeError(
        f"{name} of shape {tuple(weight.shape)}, which a slice's backward needs, has been modified by an inplace "
        f"operation since the slice's forward: it is at version {weight._version}, expected version {version}; change "
        "weights between steps only, and in no layer's forward"
    )
