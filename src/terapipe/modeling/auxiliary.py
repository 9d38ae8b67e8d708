"""Auxiliary losses: terms of the loss that are functions of sums over layers and tokens, such as the load-balancing
loss of a mixture of experts.

A layer adds to the sums with ``cache.add_sums(name, sums)``. They are collected over slices, layers and stages in the
forwards. The last stage computes the loss of the totals, and its gradient, which is the same for all layers and slices,
goes back with the backwards. So the result is exact, whatever the loss makes of the sums.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

from torch import Tensor

SumsOver = Literal["microbatch", "batch", "replicas"]


@dataclass(frozen=True)
class AuxiliaryLoss:
    """``value(totals)`` is the loss, a scalar, of ``size`` sums, in float64. They are totals of one microbatch; of the
    batch, for which all forwards must come before the first backward; or of the batches of all replicas. The step's
    loss has the mean over microbatches, weighted by their sequences."""

    size: int
    value: Callable[[Tensor], Tensor]
    over: SumsOver = "microbatch"

    def __post_init__(self) -> None:
        if self.over not in get_args(SumsOver):
            raise ValueError(f"over is one of {', '.join(get_args(SumsOver))}, got {self.over!r}")


@runtime_checkable
class HasAuxiliaryLosses(Protocol):
    """What a stage may also be. All stages of a model have the same ones."""

    @property
    def auxiliary_losses(self) -> Mapping[str, AuxiliaryLoss]: ...


def auxiliary_losses(stage: object) -> Mapping[str, AuxiliaryLoss]:
    return stage.auxiliary_losses if isinstance(stage, HasAuxiliaryLosses) else {}
