"""Values for each token as autograd sees them: forwards of a pipeline make them, and its backwards run when their
gradients are known."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from terapipe.losses.objective import Targets
from terapipe.runtime.last_stage import TokenOutputs
from terapipe.runtime.transport import Transport

PerToken = Callable[[Tensor, Targets], Tensor | Mapping[str, Tensor]]
Described = list[tuple[str, tuple[int, ...], torch.dtype]]  # name, shape after (rows, tokens), dtype; one "" if unnamed


class Spread:
    """What the last stage found, on every rank of its pipeline."""

    def __init__(self, transport: Transport, last_rank: int) -> None:
        self._transport, self._last_rank = transport, last_rank
        self._known: dict[PerToken, Described] = {}

    def __call__(self, per_token: PerToken, head: TokenOutputs, rows: int, tokens: int) -> dict[str, Tensor]:
        """By name; of a single tensor, under an empty name."""
        is_last = self._transport.rank == self._last_rank
        found = _named(head.collected()) if is_last else {}
        if per_token not in self._known:
            mine = [(name, tuple(x.shape[2:]), x.dtype) for name, x in found.items()]
            self._known[per_token] = self._transport.gather(mine)[self._last_rank]
        values = {}
        for name, shape, dtype in self._known[per_token]:
            if is_last:
                value = found[name].contiguous()
            else:
                value = torch.empty(rows, tokens, *shape, dtype=dtype, device=self._transport.device)
            numbers = value.view(torch.uint8) if dtype is torch.bool else value  # gloo sends no booleans
            self._transport.broadcast(numbers, self._last_rank, "values of tokens")
            values[name] = value
        return values


def _named(values: Any) -> dict[str, Tensor]:
    return dict(values) if isinstance(values, Mapping) else {"": values}


def unnamed(values: dict[str, Tensor]) -> Any:
    return values.get("", values)


class _Join(torch.autograd.Function):
    """The values, connected to a function that gets their gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, values: list[Tensor], backward: Callable[[list[Tensor]], None]) -> Any:
        ctx.on_backward, ctx.values = backward, values
        ctx.mark_non_differentiable(*[value for value in values if not value.is_floating_point()])
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        given = zip(gradients, ctx.values, strict=True)
        ctx.on_backward([torch.zeros_like(value) if gradient is None else gradient for gradient, value in given])
        return None, None, None


def with_backward(values: dict[str, Tensor], backward: Callable[[dict[str, Tensor]], None]) -> dict[str, Tensor]:
    """The values as outputs of a differentiable operation, whose backward calls the function with their gradients."""
    anchor = torch.zeros((), requires_grad=True)
    names = list(values)

    def named(gradients: list[Tensor]) -> None:
        backward(dict(zip(names, gradients, strict=True)))

    joined = _Join.apply(anchor, list(values.values()), named)  # type: ignore[no-untyped-call]
    return dict(zip(names, joined, strict=True))
