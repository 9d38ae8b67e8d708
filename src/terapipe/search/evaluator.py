"""Evaluates plans: step time by simulation, peak memory by counting bytes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np

from terapipe.planning.cost import (
    Array,
    Cost,
    Memory,
    Numbers,
    StageSpec,
    by_side,
    slice_time,
    stage_specs,
    with_recompute,
)
from terapipe.planning.layout import Layout, balance, balance_ranks
from terapipe.planning.order import order_named
from terapipe.planning.recompute import Recompute
from terapipe.planning.slices import Plan, microbatch_sizes
from terapipe.scheduling.footprint import host_peaks, peaks
from terapipe.scheduling.simulator import makespan, program
from terapipe.search.long_plans import extrapolate, shorten, shorter_counts
from terapipe.search.request import Request
from terapipe.search.source import ClusterSource, Source
from terapipe.search.throughput import Throughput
from terapipe.search.traffic import Traffic, plan_traffic

Lengths = tuple[int, ...]
Seconds = Callable[[Array, Array], Array]  # from lengths and contexts of slices
UNITS = 256  # maximum number of cut points for equal-time cuts


@dataclass(frozen=True)
class PlanEstimate(Throughput):
    """A plan for one replica, the layout around it, and its predicted time and memory.

    What follows from them (tokens per second and day, MFU, days, cost) is in ``Throughput``.
    """

    layout: Layout
    plan: Plan
    step_time: float  # seconds
    idle: float  # share of the step in which ranks compute nothing, on average
    peak_bytes: int  # of the device that needs most
    fits: bool  # within the memory budgets
    host_bytes: int = 0  # that offloaded slices take of the host's memory, for the device that takes most
    name: str = ""  # in a comparison
    evaluator: "PlanEvaluator | None" = field(default=None, compare=False, repr=False)  # None: a cost table made it

    @property
    def title(self) -> str:
        """For display: the name in a comparison, or the order. With one pipeline rank, where all orders are the same,
        the kind of parallelism."""
        if self.name or self.layout.pp > 1:
            return self.name or self.plan.order
        kind = "data parallel" if self.layout.dp > 1 else "tensor parallel" if self.layout.tp > 1 else "one device"
        return kind + (", sliced" if self.sliced else "")

    @property
    def sliced(self) -> bool:
        """Whether some microbatch is cut into several slices."""
        return any(len(row) > 1 for row in self.plan.lengths)

    @property
    def devices(self) -> int:
        return self.layout.devices

    @property
    def batch(self) -> tuple[int, int]:
        return self.plan.batch_size * self.layout.dp, self.plan.seq_len

    @property
    def costs(self) -> Source | None:
        return None if self.evaluator is None else self.evaluator.source

    @cached_property
    def traffic(self) -> Traffic | None:
        """Bytes that a device sends in a step, inside of its host and to others. None for measured costs: a profile
        does not say which links tensor parallel ranks would have."""
        source = self.costs
        return plan_traffic(self.plan, self.layout, source) if isinstance(source, ClusterSource) else None

    def to_dict(self) -> dict[str, Any]:
        plan = self.plan
        return {
            **({"name": self.name} if self.name else {}),
            "step_time": self.step_time,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "traffic": None if self.traffic is None else asdict(self.traffic),
            "order": plan.order,
            "layout": asdict(self.layout),
            "chunks": plan.chunks,
            "recompute": plan.recompute,
            "boundaries": list(plan.boundaries),
            "sizes": list(plan.sizes),
            "lengths": [list(row) for row in plan.lengths],
            "idle": self.idle,
            "peak_bytes": self.peak_bytes,
            **({"offload": plan.offload, "host_bytes": self.host_bytes} if plan.offloads else {}),
            "fits": self.fits,
        }


def preference(estimate: PlanEstimate) -> tuple[bool, float]:
    """Sort key: plans that fit come first, by time, then those that do not, by memory."""
    return (False, estimate.step_time) if estimate.fits else (True, float(estimate.peak_bytes))


class Measured(Protocol):
    """Anything with a time and a peak."""

    @property
    def step_time(self) -> float: ...

    @property
    def peak_bytes(self) -> int: ...


M = TypeVar("M", bound=Measured)


def pareto_front(choices: Iterable[M]) -> list[M]:
    """The Pareto front by step time and peak memory, fastest first."""
    front: list[M] = []
    for estimate in sorted(choices, key=lambda c: (c.step_time, c.peak_bytes)):
        if not front or estimate.peak_bytes < front[-1].peak_bytes:
            front.append(estimate)
    return front


@dataclass(frozen=True)
class Grid:
    """Seconds of all slices between at most ``UNITS`` evenly spaced cut points, and cuts by these seconds."""

    ends: list[int]  # tokens at which slices may end
    rows: list[Array]  # for each start, the seconds of slices by their end; made monotonic for binary search

    @classmethod
    def of(cls, seconds: Seconds, seq_len: int, tile: int) -> Self:
        """Asks for the seconds of all slices at once.

        Args:
            seconds: Of slices, by their lengths and contexts.
            seq_len: Tokens in a sequence.
            tile: Cut points are multiples of it.
        """
        tile *= -(-seq_len // (tile * UNITS))
        ends = np.minimum(np.arange(1, -(-seq_len // tile) + 1) * tile, seq_len).astype(np.float64)
        starts = np.concatenate(([0.0], ends[:-1]))
        table = seconds(np.maximum(ends - starts[:, None], 1.0), np.broadcast_to(starts[:, None], (len(ends),) * 2))
        rows = [np.maximum.accumulate(row[i:]) for i, row in enumerate(table)]
        return cls([int(end) for end in ends], rows)

    def equal_time(self, count: int) -> Lengths:
        """At most ``count`` slices of about the same time."""
        return self.cut_by_shares((1,) * count)

    def cut_by_shares(self, shares: Sequence[float]) -> Lengths:
        """At most ``len(shares)`` slices with times in about these proportions.

        Bisects over the scale: with a large one, the first slices take the whole sequence; with a small one, the slices
        do not reach its end. The smallest scale that reaches it gives the most even times.
        """
        low, high = 0.0, float(self.rows[0][-1])
        best: Lengths = (self.ends[-1],)
        for _ in range(24):
            middle = (low + high) / 2
            if lengths := self._greedy([middle * share for share in shares]):
                best, high = lengths, middle
            else:
                low = middle
        return best

    def _greedy(self, limits: Sequence[float]) -> Lengths | None:
        """The longest slices within these limits on their times, or None if they do not reach the end."""
        cuts = [0]
        for limit in limits:
            if cuts[-1] == len(self.ends):
                break
            reach = int(self.rows[cuts[-1]].searchsorted(limit, side="right"))
            if not reach:
                return None
            cuts.append(cuts[-1] + reach)
        if cuts[-1] < len(self.ends):
            return None
        edges = [0, *self.ends]
        return tuple(edges[b] - edges[a] for a, b in pairwise(cuts))


class Needs(NamedTuple):
    """Bytes that a plan needs on a device, and of the memory of its host."""

    device: int
    host: int


def max_needs(needs: Iterable[Needs]) -> Needs:
    """The most of each."""
    return Needs(*map(max, zip(*needs, strict=True)))


class PlanEvaluator:
    """Builds plans for one layout with one mode of recomputation, and evaluates plans, which may mix modes.

    Args:
        source: Model and devices: what computations and transfers cost.
        request: The batch, and what the user has fixed.
        layout: Replicas, pipeline ranks and tensor parallel ranks.
        recompute: The mode of plans that are built here.
    """

    def __init__(self, source: Source, request: Request, layout: Layout, recompute: Recompute) -> None:
        self.source, self.request, self.layout, self.recompute = source, request, layout, recompute
        self.cost: Cost = with_recompute(source.cost(layout), recompute)
        self.memory: Memory = with_recompute(source.memory(layout), recompute)
        self.batch_size = request.batch_size // layout.dp
        self._grids: dict[int, Grid] = {}
        self._once: dict[tuple[StageSpec, ...], float] = {}
        self._placements: dict[tuple[str, int], tuple[int, ...]] = {}

    def with_recompute(self, mode: Recompute) -> "PlanEvaluator":
        """The evaluator of the same layout for plans with another mode."""
        return self if mode == self.recompute else PlanEvaluator(self.source, self.request, self.layout, mode)

    @cached_property
    def tile(self) -> int:
        """Slice lengths are multiples of it."""
        return self.request.tile_for(tile=self.source.tile, tp=self.layout.tp)

    @cached_property
    def budget(self) -> int | None:
        """Memory per device in bytes, if known."""
        return self.request.budget or self.source.budget

    @cached_property
    def host_budget(self) -> int | None:
        """Memory of the host for each device in bytes. None where the device is the host."""
        return None if self.source.host_budget is None else self.request.host_budget or self.source.host_budget

    def boundaries(self, chunks: int = 1) -> tuple[int, ...]:
        """Stages balanced by time, including embedding and head.

        Args:
            chunks: Stages per rank.
        """
        return _balance(self.source.layers, self.layout.pp * chunks, *self._parts, self.request.bare_ends)

    def even_boundaries(self, chunks: int = 1) -> tuple[int, ...]:
        """Stages with as equal numbers of layers as there can be, whatever embedding and head take. They are
        slower than stages of equal time, but no rank needs memory for more layers than another.

        Args:
            chunks: Stages per rank.
        """
        return _balance(self.source.layers, self.layout.pp * chunks, 1.0, 0.0, 0.0, self.request.bare_ends)

    def rank_boundaries(self, order: str, chunks: int) -> tuple[int, ...]:
        """Ranks balanced by time, each with all of its stages.

        Args:
            order: Says where stages are placed: in a loop, or in a V.
            chunks: Stages per rank.
        """
        if chunks == 1:
            return self.boundaries()
        placement = order_named(order).placement
        if (placement, chunks) not in self._placements:
            stages = Plan((1,), ((1,),), tuple(range(self.layout.pp * chunks + 1)), order, chunks)
            self._placements[placement, chunks] = _balance_ranks(
                self.source.layers, tuple(rank for rank, _ in stages.placement), *self._parts, self.request.bare_ends
            )
        return self._placements[placement, chunks]

    @cached_property
    def _parts(self) -> tuple[float, float, float]:
        """Seconds of a layer, of the embedding and of the head."""
        layer = self._sequence_time(StageSpec(1))
        first = self._sequence_time(StageSpec(1, first=True)) - layer
        last = self._sequence_time(StageSpec(1, last=True)) - layer
        return layer, max(first, 0.0), max(last, 0.0)

    def _sequence_time(self, stage: StageSpec) -> float:
        """Seconds of a whole sequence, cut into eight slices, so that fixed costs per slice count."""
        length = max(1, self.request.seq_len // 8)
        context = np.arange(8.0) * length
        one, lengths = np.ones(8), np.full(8, float(length))
        seconds = self.cost.forward(stage, one, lengths, context) + self.cost.backward(stage, one, lengths, context)
        return float(seconds.sum())

    @cached_property
    def slowest_stage(self) -> StageSpec:
        """The stage that takes longest, of one stage per rank."""
        return max(stage_specs(self.boundaries()), key=self._sequence_time)

    @cached_property
    def _slowest_links(self) -> int:
        """The pipeline rank with the slowest links to its neighbors."""
        seq_len, ranks = self.request.seq_len, range(self.layout.pp)

        def transfer_time(rank: int) -> float:
            neighbors = [other for other in (rank + 1, rank - 1) if other in ranks]
            return sum(float(self.cost.transfer(rank, other, 1, seq_len)) for other in neighbors)

        return max(ranks, key=transfer_time)

    def seconds(self, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """A slice's forward, backward and transfers on the slowest stage with the slowest links: the paper's t."""
        return self._slice_time(self.cost, size, length, context)

    def seconds_on_device(self, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """The same on a device that never waits for its host. A host that is slow in one slice catches up in others, so
        seconds of many slices are the device's or the host's, not the sum of whichever is longer in each."""
        return self._slice_time(by_side(self.cost)[0], size, length, context)

    @cached_property
    def host_seconds(self) -> float:
        """Seconds in which the host issues forward and backward of any slice on the slowest stage."""
        host = by_side(self.cost)[1]
        return host.of_forward(self.slowest_stage) + host.of_backward(self.slowest_stage)

    def _slice_time(self, cost: Cost, size: Numbers, length: Numbers, context: Numbers) -> Array:
        return slice_time(cost, self.slowest_stage, self._slowest_links, self.layout.pp, size, length, context)

    def equal_share(self, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """A slice's forward and backward through all layers on devices that never wait, divided by the ranks."""
        stage, cost = StageSpec(self.source.layers, first=True, last=True), by_side(self.cost)[0]
        seconds = cost.forward(stage, size, length, context) + cost.backward(stage, size, length, context)
        return np.asarray(seconds / self.layout.pp, dtype=np.float64)

    def grid(self, size: int) -> Grid:
        """The seconds of slices of microbatches of this size. Made once for each size."""
        if size not in self._grids:
            request = self.request
            self._grids[size] = Grid.of(lambda l, c: self.seconds(size, l, c), request.seq_len, self.tile)
        return self._grids[size]

    def plan(self, order: str, size: int, lengths: Lengths, chunks: int = 1) -> Plan:
        """A plan with microbatches of one size, all cut into the same slices, and ranks of equal time.

        Args:
            order: The order of computations.
            size: Sequences per microbatch; the last one takes the remainder.
            lengths: The slices of every sequence.
            chunks: Stages per rank.
        """
        sizes = microbatch_sizes(self.batch_size, size)
        return Plan(sizes, (lengths,) * len(sizes), self.rank_boundaries(order, chunks), order, chunks, self.recompute)

    def evaluate(self, plan: Plan, limit: float = inf) -> PlanEstimate:
        """Simulates one step of the plan, and counts its bytes.

        Args:
            plan: For one replica in this layout. It may mix modes of recomputation.
            limit: Seconds, of a plan that fits. A step that takes longer may be given as infinite, which takes less
                time to find out; its bytes are not counted then.
        """
        if limit == inf:
            return self._simulate(plan, self.needs(plan))
        timed = self._simulate(plan, Needs(0, 0), limit)
        if timed.step_time == inf:
            return timed
        needs = self.needs(plan)
        return replace(timed, peak_bytes=needs.device, host_bytes=needs.host, fits=self.fits(needs))

    def unless_beaten(self, plan: Plan, rival: PlanEstimate | None, limit: float = inf) -> PlanEstimate | None:
        """The plan's estimate, or None if memory alone makes ``rival`` better. Counting bytes is
        cheaper than a simulation, so it comes first.

        Args:
            plan: The plan.
            rival: The best plan so far, if there is one.
            limit: As for ``evaluate``.
        """
        needs = self.needs(plan)
        if rival is not None and not self.fits(needs) and (rival.fits or rival.peak_bytes <= needs.device):
            return None
        return self._simulate(plan, needs, limit)

    def needs(self, plan: Plan) -> "Needs":
        """The memory that a plan needs.

        Args:
            plan: For one replica in this layout.
        """
        return max_needs(self.needs_by_rank(plan))

    def needs_by_rank(self, plan: Plan) -> list["Needs"]:
        """The memory that each pipeline rank needs, of its host also for the optimizer. Where the device is the host,
        what is offloaded stays in the same memory.

        Args:
            plan: For one replica in this layout.
        """
        if counts := shorter_counts(plan):
            ranks = zip(*(self._count_bytes(shorten(plan, count)) for count in counts), strict=True)
            return [
                Needs(*(round(extrapolate(counts, pair, len(plan.sizes))) for pair in zip(low, high, strict=True)))
                for low, high in ranks
            ]
        return self._count_bytes(plan)

    def _count_bytes(self, plan: Plan) -> list["Needs"]:
        compiled = program(plan)
        device = peaks(compiled, plan, self.memory)
        host = host_peaks(compiled, plan, self.memory) if plan.offloads else [0] * len(device)
        shared, specs = self.host_budget is None, stage_specs(plan.boundaries)
        for rank in range(plan.num_ranks):
            host[rank] += int(self.source.host_state(self.layout, [specs[k] for k in plan.stages_of(rank)]))
        return [Needs(peak + away * shared, away * (not shared)) for peak, away in zip(device, host, strict=True)]

    def fits(self, needs: "Needs") -> bool:
        """Whether there is as much memory on the device, and in its host for what is offloaded."""
        has_room = self.host_budget is None or needs.host <= self.host_budget
        return has_room and (self.budget is None or needs.device <= self.budget)

    def confirm(self, estimate: PlanEstimate) -> PlanEstimate:
        """The estimate of a plan that is simulated whole, however long it is. Estimates of long plans are extrapolated
        (see long_plans.py).

        Args:
            estimate: Of a plan in this layout.
        """
        plan = estimate.plan
        if shorter_counts(plan) is None:
            return estimate
        whole = self._estimate(plan, max_needs(self._count_bytes(plan)), *makespan(plan, self.cost))
        return replace(whole, name=estimate.name)

    def _simulate(self, plan: Plan, needs: "Needs", limit: float = inf) -> PlanEstimate:
        counts = shorter_counts(plan)
        if counts is None:
            return self._estimate(plan, needs, *makespan(plan, self.cost, limit - self.per_step(plan)))
        spans, idles = zip(*(makespan(shorten(plan, count), self.cost) for count in counts), strict=True)
        busy = tuple(span * (1 - idle) for span, idle in zip(spans, idles, strict=True))
        seconds, computed = (extrapolate(counts, pair, len(plan.sizes)) for pair in (spans, busy))
        return self._estimate(plan, needs, seconds, 1 - computed / seconds)

    def _estimate(self, plan: Plan, needs: "Needs", seconds: float, idle: float) -> PlanEstimate:
        step = seconds + self.per_step(plan)
        share, fits = idle * seconds / step if seconds < inf else 0.0, self.fits(needs)
        return PlanEstimate(self.layout, plan, step, share, needs.device, fits, needs.host, evaluator=self)

    def per_step(self, plan: Plan) -> float:
        """The work done once per step (gradient all-reduce, optimizer), on the rank where it takes longest."""
        specs = stage_specs(plan.boundaries)
        ranks = {tuple(specs[k] for k in plan.stages_of(rank)) for rank in range(plan.num_ranks)}
        return max(map(self.once, ranks))

    def once(self, stages: tuple[StageSpec, ...]) -> float:
        """The work done once per step on a rank with these stages.

        Args:
            stages: All of the rank's.
        """
        if stages not in self._once:
            self._once[stages] = self.cost.per_step(stages)
        return self._once[stages]


@lru_cache(maxsize=1024)
def _balance(layers: int, stages: int, layer: float, first: float, last: float, bare_ends: bool) -> tuple[int, ...]:
    return balance([layer] * layers, stages, first=first, last=last, bare_ends=bare_ends)


@lru_cache(maxsize=1024)
def _balance_ranks(
    layers: int, ranks: tuple[int, ...], layer: float, first: float, last: float, bare_ends: bool
) -> tuple[int, ...]:
    return balance_ranks(layers, ranks, layer, first=first, last=last, bare_ends=bare_ends)
