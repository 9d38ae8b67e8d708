"""Gradients of half-precision parameters, summed over slices in float32.

A slice's gradient is rounded to the parameter's dtype. The more slices there are, the more such numbers are added, and
in half precision each addition rounds again. So during a step the sum is ``main_grad``, in float32 (Megatron has the
same under this name). At the end it is rounded once, to ``.grad``.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from terapipe.modeling.dtensor import laid_out_like, to_local

HALF = (torch.float16, torch.bfloat16)
_NAME = "main_grad"


def is_half(parameter: Tensor) -> bool:
    return parameter.dtype in HALF


def main_grad(parameter: Tensor) -> Tensor | None:
    """The sum so far; None before the first part, and for parameters that need none."""
    found: Tensor | None = getattr(parameter, _NAME, None)
    return found


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
    """Adds ``left.T @ right``, this device's part of a weight's gradient."""
    total = main_grad(parameter)
    if total is not None and left.is_cuda and _fuses(left.dtype):
        torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total)
    else:
        add_to_main_grad(parameter, left.t() @ right)


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
        total = torch.ones(8, 8, device="cuda")
        try:
            torch.addmm(total, one.t(), one, out_dtype=torch.float32, out=total)
            _fused[dtype] = bool((total == 9).all())
        except (RuntimeError, TypeError):
            _fused[dtype] = False
    return _fused[dtype]


def drop_main_grads(parameters: Iterable[nn.Parameter]) -> None:
    for p in parameters:
        _pop(p)


def sum_in_float32(parameters: Iterable[nn.Parameter]) -> list[Any]:
    """From now on, what autograd adds to ``.grad`` of half-precision parameters goes to ``main_grad`` instead. Returns
    handles of the hooks that do it."""
    half = (p for p in parameters if p.requires_grad and is_half(p))
    return [p.register_post_accumulate_grad_hook(_move) for p in half]  # type: ignore[no-untyped-call]


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


def _move(parameter: Tensor) -> None:
    grad, parameter.grad = parameter.grad, None
    if grad is not None:  # torch calls hooks of parameters without a gradient, too
        add_to_main_grad(parameter, grad)


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
    """The sums become ``.grad``, one after the other, so that only one exists twice."""
    for p in parameters:
        total = _pop(p)
        if total is None:
            continue
        grad = total.to(p.dtype)
        p.grad = grad if isinstance(grad, DTensor) else laid_out_like(p, to_local(grad))
