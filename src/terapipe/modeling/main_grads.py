"""Gradients of half-precision parameters, summed over slices in float32.

A slice's gradient is rounded to the parameter's dtype. The more slices there are, the more such numbers are added, and
in half precision each addition rounds again. So during a step the sum is ``main_grad``, in float32 (Megatron has the
same under this name). At the end it is rounded once, to ``.grad``.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from terapipe.modeling.dtensor import as_dtensor_like

HALF = (torch.float16, torch.bfloat16)
TOGETHER = 1 << 24  # numbers that are rounded in one operation
SMALL = 1 << 16  # numbers of a gradient that is added together with others
_NAME = "main_grad"


def is_half(parameter: Tensor) -> bool:
    return parameter.dtype in HALF


def main_grad(parameter: Tensor) -> Tensor | None:
    """The sum so far; None before the first part, and for parameters that need none."""
    total: Tensor | None = getattr(parameter, _NAME, None)
    return total


@torch.no_grad()
def add_to_main_grad(parameter: Tensor, part: Tensor) -> None:
    """``part`` is laid out as ``.grad`` is, or for linear layers local."""
    total = main_grad(parameter)
    if total is None:
        setattr(parameter, _NAME, part.float())
    else:
        total.add_(part)


@torch.no_grad()
def add_product(parameter: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds ``left.T @ right``, this device's part of a weight's gradient. On a GPU that is one operation, which rounds
    nothing to half precision."""
    if not (left.is_cuda and _fuses(left.dtype)):
        add_to_main_grad(parameter, left.t() @ right)
        return
    total = main_grad(parameter)
    is_first = total is None
    if total is None:
        total = torch.empty(left.shape[1], right.shape[1], device=left.device)
        setattr(parameter, _NAME, total)
    _add_product_to(total, left, right, is_first=is_first)


def _add_product_to(total: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
    torch.addmm(total, left.t(), right, beta=0 if is_first else 1, out_dtype=torch.float32, out=total)


@torch.no_grad()
def add_rows(parameter: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Adds to some rows of an embedding's gradient; an id may occur several times."""
    total = main_grad(parameter)
    if total is None:
        total = torch.zeros_like(parameter, dtype=torch.float32)
        setattr(parameter, _NAME, total)
    total.index_add_(0, ids, rows.float())


_fused: dict[torch.dtype, bool] = {}


def _fuses(dtype: torch.dtype) -> bool:
    """Whether this torch multiplies half-precision matrices on a GPU and adds to a sum in float32, in one operation."""
    if dtype not in _fused:
        one = torch.ones(8, 8, dtype=dtype, device="cuda")
        total = torch.full((8, 8), torch.nan, device="cuda")
        try:
            _add_product_to(total, one, one, is_first=True)
            total += 2**-12  # which half precision would round away
            _add_product_to(total, one, one, is_first=False)
            _fused[dtype] = bool((total == 16 + 2**-12).all())
        except (RuntimeError, TypeError):
            _fused[dtype] = False
    return _fused[dtype]


def drop_main_grads(parameters: Iterable[nn.Parameter]) -> None:
    for p in parameters:
        _pop(p)


def sum_in_float32(parameters: Iterable[nn.Parameter]) -> list[Any]:
    """From now on, what autograd adds to ``.grad`` of half-precision parameters goes to ``main_grad`` instead. Returns
    handles of the hooks that do it."""
    half, mover = (p for p in parameters if p.requires_grad and is_half(p)), _Mover()
    return [p.register_post_accumulate_grad_hook(mover.take) for p in half]  # type: ignore[no-untyped-call]


@contextmanager
def summed_in_float32(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, as ``sum_in_float32``. Gradients of an earlier step must be set aside. On failure no sum is left."""
    held = list(parameters)
    handles = sum_in_float32(held)
    try:
        yield
    except BaseException:
        drop_main_grads(held)
        raise
    finally:
        for handle in handles:
            handle.remove()


class _Mover:
    """Moves gradients to their sums: large ones at once, small ones (norms, biases) together when the backward is over.
    A slice has two to eight of those for each layer, and a kernel for each would cost a GPU's host more than the sum.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._task = -1  # autograd's number of the backward that they are of

    def take(self, parameter: Tensor) -> None:
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
    """As ``add_to_main_grad`` for each, in two operations: their sums lie in one tensor, one after the other."""
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
    """Whether they are all of it, in this order."""
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
    """Gives the sum the layout of its parameter."""
    total = main_grad(parameter)
    if isinstance(parameter, DTensor) and isinstance(total, DTensor) and total.placements != parameter.placements:
        setattr(parameter, _NAME, total.redistribute(placements=parameter.placements))


@torch.no_grad()
def round_to_grad(parameters: Iterable[nn.Parameter]) -> None:
    """The sums become ``.grad``, a few at a time, so that only those exist twice."""
    waiting: list[tuple[nn.Parameter, Tensor]] = []
    numbers = 0
    for p in parameters:
        total = _pop(p)
        if isinstance(total, DTensor):
            p.grad = total.to(p.dtype)
        elif total is not None:
            waiting.append((p, total))
            numbers += total.numel()
            if numbers > TOGETHER:
                _round(waiting)
                numbers = 0
    _round(waiting)


def _round(sums: list[tuple[nn.Parameter, Tensor]]) -> None:
    """In one operation."""
    grads = [torch.empty_like(total, dtype=p.dtype) for p, total in sums]
    if sums:
        torch._foreach_copy_(grads, [total for _, total in sums])
    for (p, _), grad in zip(sums, grads, strict=True):
        p.grad = as_dtensor_like(p, grad)
    sums.clear()
