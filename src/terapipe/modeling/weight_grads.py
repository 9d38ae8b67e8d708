"""Where the gradient of a weight is added: when, in which dtype, and in which layout.

Every slice has a gradient for every weight, and the step wants their sum::

    part of a slice                      sum over slices                               end of the step
    float32 weight: left.T @ right --->  .grad, in place
    half precision: left.T @ right --->  .main_grad, float32 ------ rounded once --->  .grad
    deferred:       (left, right) ---->  a list, multiplied later, into either of them

*When.* Nobody waits for a weight's gradient, while other stages wait for the gradient of the slice's input. So a
backward may leave the two factors of the product (``DeferredGrad``), and a later action of the schedule multiplies
them.

*In which dtype.* A slice's gradient is rounded to the parameter's dtype. The more slices there are, the more such
numbers are added, and in half precision each addition rounds again: with 128 slices the error of bfloat16 gradients
doubled. So during a step the sum is ``main_grad``, in float32 (Megatron has the same under this name).

*In which layout.* A weight that is split over devices is a DTensor. The products are of local parts, and what lies in
``.grad`` is a DTensor again.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

HALF = (torch.float16, torch.bfloat16)
ROUNDED_TOGETHER = 1 << 24  # numbers that one operation rounds to .grad: that many exist in both dtypes at once
SMALL = 1 << 16  # numbers of a gradient that is added together with others
_NAME = "main_grad"


# Layout


def to_local(x: Tensor) -> Tensor:
    """This device's part of a DTensor, as autograd sees it; any other tensor as it is."""
    local: Tensor = x.to_local() if isinstance(x, DTensor) else x
    return local


def as_dtensor_like(x: Tensor, part: Tensor) -> Tensor:
    """A local part as a DTensor with the layout of ``x``; the part itself if ``x`` is an ordinary tensor.

    Args:
        x: A parameter, whose mesh, placements and shape the result gets.
        part: What this device has of the result. Nothing is sent, and it is not checked against other devices.
    """
    if not isinstance(x, DTensor):
        return part
    return DTensor.from_local(part, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def gather_tokens(x: Tensor, mesh: DeviceMesh, *, wait: bool = True) -> Tensor:
    """Gathers all tokens of an input, of which each device has an equal part.

    Args:
        x: This device's part, (batch, tokens, width).
        mesh: The devices.
        wait: With False, the result is waited for when it is used, so that a product may be computed meanwhile.
    """
    part = DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
    whole: Tensor = part.redistribute(placements=[Replicate()], async_op=not wait).to_local()
    return whole


class GradientSum:
    """A hook that sums a parameter's gradient over devices, each of which knows a part of it.

    Some parameters are whole on every device, though each device computes only some of what they take part in: the norm
    of queries that is applied to each head, for one, where devices share the heads. The hook belongs to how a stage
    computes gradients. So it is called for each slice, not once per step as the hooks of users are; gradient_sync.py
    tells them apart by this class.

    Args:
        mesh: The devices that share the stage.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def __call__(self, gradient: Tensor) -> Tensor:
        return DTensor.from_local(gradient, self._mesh, [Partial()], run_check=False).full_tensor()


# Gradients that wait


class DeferredGrad(NamedTuple):
    """One slice's part of a weight's gradient, ``left.T @ right``, not yet multiplied out.

    Attributes:
        weight: The parameter. Its gradient has the shape (columns of ``left``, columns of ``right``).
        left: Gradients of the layer's output, one row for each token.
        right: The layer's input, one row for each token. For a weight of (inputs, outputs) the two change places.
        to_main_grad: Whether it is added to ``main_grad``, not to ``.grad``.
        mesh: Devices among which the tokens of ``right`` are shared out, (batch, tokens, inputs), so that they must be
            gathered for the product. None if all are here.
    """

    weight: Tensor
    left: Tensor
    right: Tensor
    to_main_grad: bool = False
    mesh: DeviceMesh | None = None

    def gather(self) -> "DeferredGrad":
        """The same with all tokens, of which the gathering has begun."""
        if self.mesh is None:
            return self
        rows = gather_tokens(self.right, self.mesh, wait=False)
        return self._replace(right=rows.flatten(0, -2), mesh=None)

    def add(self) -> None:
        """Multiplies, and adds to the weight's sum. Then calls the weight's hooks, as autograd would have."""
        weight = self.weight
        if not weight.requires_grad:  # frozen since the forward: autograd adds nothing then
            return
        if self.mesh is not None:
            self.gather().add()
            return
        if self.to_main_grad:
            add_product(weight, self.left, self.right)
            return
        total = weight.grad
        if total is None:
            weight.grad = as_dtensor_like(weight, self.product().to(weight.dtype))
        else:
            total = to_local(total) if type(total) is DTensor else total
            if total.dtype == self.left.dtype:
                total.addmm_(self.left.t(), self.right)  # one product that adds: no matrix of its own
            else:  # autocast multiplies in half precision and the weight is float32
                total.add_(self.product())
        if weight._post_accumulate_grad_hooks:
            call_hooks(weight)

    def product(self) -> Tensor:
        """The gradient as a matrix of its own, local and in the factors' dtype."""
        whole = self.gather()
        return whole.left.t() @ whole.right


def call_hooks(weight: Tensor) -> None:
    """Calls what autograd calls when it has added to ``.grad``, after that was done here."""
    for hook in list((weight._post_accumulate_grad_hooks or {}).values()):
        hook(weight)


def accumulate_deferred(deferred: Iterable[DeferredGrad]) -> None:
    """Adds deferred gradients weight by weight, so that a weight's sum stays at hand (in a CPU's or GPU's cache) while
    its slices are added to it.

    Args:
        deferred: Of any slices and weights. Those of one weight are added in the order that they have here.
    """
    by_weight: dict[int, list[DeferredGrad]] = {}
    for part in deferred:
        by_weight.setdefault(id(part.weight), []).append(part)
    with torch.no_grad():
        for parts in by_weight.values():
            for part in parts:
                part.add()


# Sums in float32


def is_half(parameter: Tensor) -> bool:
    """Whether gradients of such a parameter are summed in ``main_grad``."""
    return parameter.dtype in HALF


def main_grad(parameter: Tensor) -> Tensor | None:
    """The sum so far; None before the first part, and for parameters that need none."""
    total: Tensor | None = getattr(parameter, _NAME, None)
    return total


@torch.no_grad()
def add_to_main_grad(parameter: Tensor, part: Tensor) -> None:
    """Adds a gradient that exists as a matrix.

    Args:
        parameter: A parameter in half precision.
        part: Laid out as ``.grad`` is, or for linear layers local. All parts of a parameter must be laid out alike.
    """
    total = main_grad(parameter)
    if total is None:
        setattr(parameter, _NAME, part.float())
    else:
        total.add_(part)


@torch.no_grad()
def add_product(parameter: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds ``left.T @ right``, this device's part of a weight's gradient.

    On a GPU that is one operation, which rounds nothing to half precision and makes no matrix beside the sum.

    Args:
        parameter: A weight in half precision.
        left: One row for each token, in the weight's dtype.
        right: As many rows.
    """
    if not (left.is_cuda and can_add_in_float32(left.dtype)):
        add_to_main_grad(parameter, left.t() @ right)
        return
    total = main_grad(parameter)
    is_first = total is None
    if total is None:
        total = torch.empty(left.shape[1], right.shape[1], device=left.device)
        setattr(parameter, _NAME, total)
    _add_product_to(total, left, right, is_first=is_first)


def _add_product_to(total: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
    """With ``is_first``, what lies in ``total`` is overwritten: it need not be zeroed before."""
    torch.addmm(total, left.t(), right, beta=0 if is_first else 1, out_dtype=torch.float32, out=total)


@torch.no_grad()
def add_rows(parameter: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Adds to some rows of an embedding's gradient.

    Args:
        parameter: The table, (vocabulary, width), in half precision.
        ids: Numbers of rows; one may occur several times.
        rows: What to add to each, (ids, width).
    """
    total = main_grad(parameter)
    if total is None:
        total = torch.zeros_like(to_local(parameter), dtype=torch.float32)
        setattr(parameter, _NAME, total)
    total.index_add_(0, ids, rows.float())


@cache
def can_add_in_float32(dtype: torch.dtype) -> bool:
    """Whether this torch, on a GPU, multiplies half-precision matrices and adds to a sum in float32 in one operation.

    It is tried once, because versions of torch differ: older ones know no ``out_dtype``, and one that rounded the sum
    to half precision on the way would undo what the sum is for.
    """
    one = torch.ones(8, 8, dtype=dtype, device="cuda")
    total = torch.full((8, 8), torch.nan, device="cuda")
    try:
        _add_product_to(total, one, one, is_first=True)
        total += 2**-12  # which half precision would round away
        _add_product_to(total, one, one, is_first=False)
        return bool((total == 16 + 2**-12).all())
    except (RuntimeError, TypeError):
        return False


def drop_main_grads(parameters: Iterable[nn.Parameter]) -> None:
    """Forgets the sums, of a step that failed or was only measured.

    Args:
        parameters: Those that may have one.
    """
    for p in parameters:
        _pop(p)


def sum_in_float32(parameters: Iterable[nn.Parameter]) -> list[Any]:
    """From now on, what autograd adds to ``.grad`` of half-precision parameters goes to ``main_grad`` instead.

    Linear layers and embeddings add to ``main_grad`` themselves. This is for all others: norms, biases, and whatever
    else a model has.

    Args:
        parameters: Those of a stage; the ones that are frozen or not in half precision are left alone.

    Returns:
        Handles of the hooks that do it. Call ``remove()`` of each to end it.
    """
    half, mover = (p for p in parameters if p.requires_grad and is_half(p)), _Mover()
    return [p.register_post_accumulate_grad_hook(mover.take) for p in half]  # type: ignore[no-untyped-call]


@contextmanager
def summed_in_float32(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, as ``sum_in_float32``. On failure no sum is left.

    Args:
        parameters: Those of all stages of a rank. Gradients of an earlier step must be set aside before.
    """
    parameters = list(parameters)
    handles = sum_in_float32(parameters)
    try:
        yield
    except BaseException:
        drop_main_grads(parameters)
        raise
    finally:
        for handle in handles:
            handle.remove()


class _Mover:
    """Moves gradients to their sums: large ones at once, small ones (norms, biases) together when the backward is over.

    A slice has two to eight small ones for each layer, and a kernel for each would cost a GPU's host more than the sum.

    ::

        autograd, one backward     norm1.grad   norm1.bias   norm2.grad   ...          end of the backward
        _parts                     [norm1,      norm1.bias,  norm2,       ...]  --->   one cat, one add
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._task = -1  # autograd's number of the backward that they are of

    def take(self, parameter: Tensor) -> None:
        """The hook: autograd has just added to the parameter's ``.grad``."""
        grad, parameter.grad = parameter.grad, None
        if grad is None:  # torch calls hooks of parameters without a gradient, too
            return
        if grad.numel() > SMALL or isinstance(grad, DTensor):
            add_to_main_grad(parameter, grad)
            return
        task = torch._C._current_graph_task_id()
        if task != self._task:  # what a backward left that failed is let go of
            self._task, self._parts = task, []
            torch.autograd.Variable._execution_engine.queue_callback(self._add)
        self._parts.append((parameter, grad))

    def _add(self) -> None:
        parts, self._parts, self._task = self._parts, [], -1
        add_to_main_grads(parts)


@torch.no_grad()
def add_to_main_grads(parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """As ``add_to_main_grad`` for each, in two operations: their sums lie in one tensor, one after the other.

    ::

        first backward    cat of the parts, in float32   | norm1 | bias1 | norm2 | ... |    each main_grad is a view
        later ones        whole.add_(cat of the parts)                                      one addition for all

    Args:
        parts: Pairs of a parameter and a gradient of its shape. If they are not those of the backward before, in its
            order, each is added alone.
    """
    parameters = [parameter for parameter, _ in parts]
    totals = [main_grad(p) for p in parameters]
    whole = totals[0]._base if totals[0] is not None else None
    flat = torch.cat([part.flatten() for _, part in parts])
    if whole is not None and _lie_in(whole, totals) and whole.numel() == flat.numel():
        whole.add_(flat)
    elif all(total is None for total in totals):
        sums = torch.split(flat.float(), [p.numel() for p in parameters])
        for p, total in zip(parameters, sums, strict=True):
            setattr(p, _NAME, total.view_as(p))
    else:  # not the parameters of the backward before, or not in its order
        for parameter, part in parts:
            add_to_main_grad(parameter, part)


def _lie_in(whole: Tensor, totals: Iterable[Tensor | None]) -> bool:
    """Whether the sums are views of ``whole`` that follow each other without a gap."""
    at = 0
    for total in totals:
        if total is None or total._base is not whole or total.storage_offset() != at:
            return False
        at += total.numel()
    return True


def _pop(parameter: Tensor) -> Tensor | None:
    total = main_grad(parameter)
    if total is not None:
        delattr(parameter, _NAME)
    return total


def match_main_grad(parameter: nn.Parameter) -> None:
    """Gives the sum the layout of its parameter, where autograd left it as sums over devices.

    Args:
        parameter: Changed only if both it and its sum are DTensors.
    """
    total = main_grad(parameter)
    if isinstance(parameter, DTensor) and isinstance(total, DTensor) and total.placements != parameter.placements:
        setattr(parameter, _NAME, total.redistribute(placements=parameter.placements))


@torch.no_grad()
def round_to_grad(parameters: Iterable[nn.Parameter]) -> None:
    """Makes the sums ``.grad``, rounded to each parameter's dtype, and forgets them.

    A few are rounded at a time: one operation for each would keep a GPU's host busy, and one for all would need memory
    for every gradient in both dtypes at once.

    Args:
        parameters: Those of a stage; the ones without a sum are left alone.
    """
    waiting: list[tuple[nn.Parameter, Tensor]] = []
    numbers = 0
    for p in parameters:
        total = _pop(p)
        if isinstance(total, DTensor):
            p.grad = total.to(p.dtype)
        elif total is not None:
            waiting.append((p, total))
            numbers += total.numel()
            if numbers > ROUNDED_TOGETHER:
                _round(waiting)
                numbers = 0
    _round(waiting)


def _round(sums: list[tuple[nn.Parameter, Tensor]]) -> None:
    """In one operation. Empties the list, and so frees the sums."""
    grads = [torch.empty_like(total, dtype=p.dtype) for p, total in sums]
    if sums:
        torch._foreach_copy_(grads, [total for _, total in sums])
    for (p, _), grad in zip(sums, grads, strict=True):
        p.grad = as_dtensor_like(p, grad)
    sums.clear()
