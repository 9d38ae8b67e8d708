"""What a step is given, checked before anything is computed: a batch, where its documents begin, how it is cut."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from terapipe.planning.slices import Plan

Vary = Literal["refuse", "replan", "pad"]
Documents = Sequence[Sequence[int]]


class Intake:
    """``tile``: slices' lengths must be multiples of it."""

    def __init__(self, plan: Plan, vary: Vary, tile: int, rank: int, device: torch.device) -> None:
        self._plan, self._vary, self._tile, self._rank, self._device = plan, vary, tile, rank, device

    @property
    def pads(self) -> bool:
        return self._vary == "pad"

    def own_plan(self, plan: Plan) -> Plan:
        """A plan of one's own for a batch must leave the stages where they are."""
        if plan.placement != self._plan.placement:
            raise ValueError(
                f"a batch's own plan must leave the stages on their ranks: the pipeline has boundaries "
                f"{self._plan.boundaries}, chunks {self._plan.chunks} and order {self._plan.order!r}, got "
                f"{plan.boundaries}, {plan.chunks} and {plan.order!r}"
            )
        if any(length % self._tile for row in plan.lengths for length in row):
            raise ValueError(
                f"tokens are shared out: slice lengths must be multiples of {self._tile}, got {plan.lengths}"
            )
        return plan

    def plan_for(self, given: Tensor | None) -> Plan:
        """The plan of a batch, by its shape alone: nobody is asked."""
        if self._vary != "replan" or (given is not None and given.shape == (self._plan.batch, self._plan.tokens)):
            return self._plan
        if given is None or given.ndim != 2:
            raise ValueError(
                f"with vary='replan' every rank must be given input_ids or labels, (batch, tokens), rank {self._rank} "
                f"got {None if given is None else tuple(given.shape)}"
            )
        return self._plan.resized(given.shape[0], given.shape[1], self._tile)

    def batch(self, name: str, tensor: Tensor | None, plan: Plan, filler: int) -> Tensor:
        shape = (plan.batch, plan.tokens)
        if self._vary == "pad" and tensor is not None and tensor.ndim == 2:
            missing = [most - size for most, size in zip(shape, tensor.shape, strict=True)]
            tensor = F.pad(tensor, (0, max(0, missing[1]), 0, max(0, missing[0])), value=filler)
        if tensor is None or tensor.shape != shape or tensor.dtype != torch.int64:
            got = "None" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"
            raise ValueError(
                f"{name} on rank {self._rank} must be {shape} of torch.int64, (batch, tokens) of the plan, got {got}"
            )
        return tensor.to(self._device)

    def starts(self, documents: Documents | None, plan: Plan) -> Documents:
        """Every rank cuts attention at them, so every rank must be told."""
        rows = () if documents is None else tuple(tuple(row) for row in documents)
        ordered = all(row[:1] == (0,) and all(a < b for a, b in pairwise(row)) for row in rows)
        if self._vary == "pad":
            rows += ((0,),) * (plan.batch - len(rows) if rows else 0)
        if rows and (len(rows) != plan.batch or not ordered or any(row[-1] >= plan.tokens for row in rows)):
            raise ValueError(
                f"documents must be, for each of the {plan.batch} sequences, the rising places below "
                f"{plan.tokens} where documents begin, 0 first, got {documents}"
            )
        return rows
