"""One way to run a step, judged: its time by simulation, its memory by count."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from terapipe.planning.cost import Array, Cost, Memory, Numbers, StageSpec, slice_time, stage_specs
from terapipe.planning.layout import Layout
from terapipe.planning.slices import Plan
from terapipe.planning.stages import balance
from terapipe.scheduling.footprint import peaks
from terapipe.scheduling.simulator import makespan, program
from terapipe.search.cuts import Grid, Lengths
from terapipe.search.request import Request
from terapipe.search.source import Source


@dataclass(frozen=True)
class PlanEstimate:
    """A plan of one replica, the layout it is part of, and what it costs."""

    layout: Layout
    plan: Plan
    step_time: float
    idle: float
    peak_bytes: int
    fits: bool
    name: str = ""

    @property
    def title(self) -> str:
        """Its name in a comparison, or its order; with one pipeline rank what it amounts to, since orders are alike."""
        if self.name or self.layout.pp > 1:
            return self.name or self.plan.order
        kind = "data parallel" if self.layout.dp > 1 else "tensor parallel" if self.layout.tp > 1 else "one device"
        return kind + (", sliced" if self.sliced else "")

    @property
    def sliced(self) -> bool:
        return any(len(row) > 1 for row in self.plan.lengths)

    @property
    def tokens_per_second(self) -> float:
        return self.plan.batch_size * self.layout.dp * self.plan.seq_len / self.step_time

    def to_dict(self) -> dict[str, Any]:
        plan = self.plan
        return {
            **({"name": self.name} if self.name else {}),
            "step_time": self.step_time,
            "tokens_per_second": self.tokens_per_second,
            "order": plan.order,
            "layout": asdict(self.layout),
            "chunks": plan.chunks,
            "recompute": plan.recompute,
            "boundaries": list(plan.boundaries),
            "sizes": list(plan.sizes),
            "lengths": [list(row) for row in plan.lengths],
            "idle": self.idle,
            "peak_bytes": self.peak_bytes,
            "fits": self.fits,
        }


def pareto_front(choices: Iterable[PlanEstimate]) -> list[PlanEstimate]:
    """Those that no other beats in both time and memory, fastest first."""
    kept: list[PlanEstimate] = []
    for choice in sorted(choices, key=lambda c: (c.step_time, c.peak_bytes)):
        if not kept or choice.peak_bytes < kept[-1].peak_bytes:
            kept.append(choice)
    return kept


class PlanEvaluator:
    """Builds plans for one layout and judges them."""

    def __init__(self, source: Source, request: Request, layout: Layout, recompute: bool) -> None:
        self.source, self.request, self.layout, self.recompute = source, request, layout, recompute
        self.cost: Cost = source.cost(layout, recompute)
        self.memory: Memory = source.memory(layout, recompute)
        self.batch_size = request.batch_size // layout.dp
        self._grids: dict[int, Grid] = {}

    @cached_property
    def tile(self) -> int:
        return self.request.tile_for(tile=self.source.tile, tp=self.layout.tp)

    @cached_property
    def budget(self) -> int | None:
        return self.request.budget or self.source.budget

    def boundaries(self, chunks: int = 1) -> tuple[int, ...]:
        layer = self._whole(StageSpec(1))
        first, last = self._whole(StageSpec(1, first=True)) - layer, self._whole(StageSpec(1, last=True)) - layer
        return _balanced(self.source.layers, self.layout.pp * chunks, layer, max(first, 0.0), max(last, 0.0))

    def _whole(self, part: StageSpec) -> float:
        """Seconds of a whole sequence; an eighth of it at a time, so that fixed costs weigh as they will."""
        length = max(1, self.request.seq_len // 8)
        context = np.arange(8.0) * length
        one, lengths = np.ones(8), np.full(8, float(length))
        seconds = self.cost.forward(part, one, lengths, context) + self.cost.backward(part, one, lengths, context)
        return float(seconds.sum())

    @cached_property
    def slowest_stage(self) -> StageSpec:
        """The stage that the others wait for."""
        return max(stage_specs(self.boundaries()), key=self._whole)

    @cached_property
    def _slowest_links(self) -> int:
        """The rank that takes longest to reach its neighbours."""
        seq_len, ranks = self.request.seq_len, range(self.layout.pp)

        def sent(rank: int) -> float:
            near = [other for other in (rank + 1, rank - 1) if other in ranks]
            return sum(float(self.cost.transfer(rank, other, 1, seq_len)) for other in near)

        return max(ranks, key=sent)

    def seconds(self, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """A slice's time there, forward and backward and transfers."""
        return slice_time(self.cost, self.slowest_stage, self._slowest_links, self.layout.pp, size, length, context)

    def grid(self, size: int) -> Grid:
        if size not in self._grids:
            request = self.request
            self._grids[size] = Grid.of(lambda l, c: self.seconds(size, l, c), request.seq_len, self.tile)
        return self._grids[size]

    def plan(self, order: str, size: int, lengths: Lengths, chunks: int = 1) -> Plan:
        """Microbatches of one size, the last one smaller if need be, all cut alike."""
        sizes = tuple(min(size, self.batch_size - row) for row in range(0, self.batch_size, size))
        return Plan(sizes, (lengths,) * len(sizes), self.boundaries(chunks), order, chunks, self.recompute)

    def evaluate(self, plan: Plan) -> PlanEstimate:
        seconds, idle = makespan(plan, self.cost)
        step = seconds + self.per_step(plan)
        peak = max(peaks(program(plan), plan, self.memory))
        fits = self.budget is None or peak <= self.budget
        return PlanEstimate(self.layout, plan, step, idle * seconds / step, peak, fits)

    def per_step(self, plan: Plan) -> float:
        """What comes once per step, on the rank where it takes longest."""
        held = stage_specs(plan.boundaries)
        ranks = {tuple(held[k] for k in plan.stages_of(rank)) for rank in range(plan.num_ranks)}
        return max(map(self.cost.per_step, ranks))


@lru_cache(maxsize=1024)
def _balanced(layers: int, stages: int, layer: float, first: float, last: float) -> tuple[int, ...]:
    return balance([layer] * layers, stages, first=first, last=last)
