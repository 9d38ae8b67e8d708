"""Plans as a person would write them down, for any request: a wide grid, of which none may beat the planner's.

    layouts x recomputation x sequences per microbatch x numbers of slices x (equal lengths, equal FLOPs)
            x orders x stages per rank x (layers spread evenly, stages balanced by time)

That are up to a million plans for a request. A lower bound on their step time leaves those to simulate that may be
faster than a limit, so the best of the grid below that limit is exact, not sampled.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf

import numpy as np

from terapipe import ORDERS, Layout, Plan
from terapipe.planning.cost import Array, StageSpec, by_side, stage_specs
from terapipe.planning.order import Order
from terapipe.planning.recompute import MODES
from terapipe.planning.slices import even_lengths, microbatch_sizes
from terapipe.search import ClusterSource, PlanEstimate, PlanEvaluator, Request
from terapipe.search.request import layouts

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
CHUNKS = (1, 2, 3, 4, 6, 8)
SMALLEST = 200  # plans whose bytes are counted where the planner says that none fits


@dataclass
class Grid:
    """The grid of one request.

    Args:
        source: Model and devices.
        request: The batch and what is fixed, which the grid keeps fixed too.
    """

    source: ClusterSource
    request: Request
    simulated: int = 0

    def best(self, limit: float) -> PlanEstimate | None:
        """The fastest plan of the grid that fits into memory and takes less than ``limit`` seconds, if there is one.

        Without a limit, because the planner says that nothing fits: any that fits, of the ``SMALLEST`` ones.
        """
        plans = sorted(self._plans(limit), key=lambda row: row[0])
        best: PlanEstimate | None = None
        for bound, evaluator, plan in plans[:SMALLEST] if limit == inf else plans:
            fastest = best.step_time if best else limit
            if bound >= fastest < inf:
                break
            estimate = evaluator.unless_beaten(plan, PlanEstimate(evaluator.layout, plan, fastest, 0.0, 0, True))
            self.simulated += 1
            if estimate and estimate.step_time < fastest:
                best = estimate
        return best

    def _plans(self, limit: float) -> Iterator[tuple[float, PlanEvaluator, Plan]]:
        """All plans whose lower bound is below the limit, with that bound; without a limit, the lower bound of bytes."""
        request, layers = self.request, self.source.layers
        modes = [request.recompute] if request.recompute else MODES
        sizes = [request.microbatch_size] if request.microbatch_size else [2**i for i in range(7)]
        for layout, mode in product(layouts(self.source, request), modes):
            evaluator = PlanEvaluator(self.source, request, layout, mode)
            for size, lengths in product((size for size in sizes if size <= evaluator.batch_size), self._cuts):
                work = Work(evaluator, size, lengths)
                if work.at_least >= limit or work.least_bytes > (evaluator.budget or inf):
                    continue
                for order, chunks in _orders(request, layout, layers, len(lengths)):
                    for boundaries in self._boundaries(evaluator, order, chunks):
                        bound = work.least_bytes if limit == inf else work.lower_bound(order, boundaries, limit)
                        if bound < limit:
                            rows = microbatch_sizes(evaluator.batch_size, size)
                            cuts = (lengths,) * len(rows)
                            yield bound, evaluator, Plan(rows, cuts, boundaries, order.name, chunks, mode)

    @cached_property
    def _cuts(self) -> list[tuple[int, ...]]:
        """Equal lengths, and equal FLOPs of a layer: tokens x weights + attention, which grows with the square."""
        seq_len, tile, config = self.request.seq_len, self.source.tile, self.source.config
        ends = np.arange(tile, seq_len + tile, tile).clip(max=seq_len)
        flops = ends * config.layer_parameters + ends * (ends * float(config.hidden))
        cuts = set()
        for count in (n for n in COUNTS if n * tile <= seq_len):
            cuts.add(even_lengths(seq_len, count, tile))
            at = ends[np.searchsorted(flops, flops[-1] * np.arange(1, count + 1) / count * (1 - 1e-12))]
            cuts.add(tuple(int(n) for n in np.diff(at, prepend=0) if n))
        return sorted(cuts, key=len)

    @staticmethod
    def _boundaries(evaluator: PlanEvaluator, order: Order, chunks: int) -> set[tuple[int, ...]]:
        layers, stages = evaluator.source.layers, evaluator.layout.pp * chunks
        evenly = tuple(layers * k // stages for k in range(stages + 1))
        return {evenly, evaluator.rank_boundaries(order.name, chunks)}


def _orders(request: Request, layout: Layout, layers: int, slices: int) -> Iterator[tuple[Order, int]]:
    """Orders and stages per rank that a plan with this layout and so many slices may have."""
    for order, chunks in product(ORDERS.values(), CHUNKS):
        legal = order.chunks in (None, chunks) and layout.pp * chunks <= layers and (order.sliced or slices == 1)
        alone = layout.pp == 1 and (chunks > 1 or not order.one_rank)  # on one rank all orders are the same
        fixed = request.order in (None, order.name) and request.chunks in (None, chunks)
        if legal and fixed and not alone:
            yield order, chunks


class Work:
    """The computations of a batch in microbatches of one size, all cut alike, and how long they take at least.

    Args:
        evaluator: For costs in a layout, with a mode of recomputation.
        size: Sequences per microbatch. The last one may have fewer.
        lengths: The slices of every microbatch.
    """

    def __init__(self, evaluator: PlanEvaluator, size: int, lengths: tuple[int, ...]) -> None:
        self._evaluator, self._pp = evaluator, evaluator.layout.pp
        self._cost, self._host = by_side(evaluator.cost)
        whole, rest = divmod(evaluator.batch_size, size)
        self._times = np.repeat([whole, 1], len(lengths)) * (np.repeat([1, rest], len(lengths)) > 0)  # of each column
        ends = np.cumsum(lengths)
        self._columns = (
            np.repeat([float(size), float(rest or size)], len(lengths)),
            np.tile(np.array(lengths, dtype=np.float64), 2),
            np.tile((ends - lengths).astype(np.float64), 2),
        )
        self._count = len(microbatch_sizes(evaluator.batch_size, size)) * len(lengths)
        self._kinds: dict[StageSpec, tuple[Array, Array, Array, float]] = {}

    @property
    def at_least(self) -> float:
        """Seconds of the layers, if all ranks had equally many and nobody ever waited."""
        forward, backward, _, _ = self._of(StageSpec(1))
        return float(((forward + backward) * self._times).sum()) * self._evaluator.source.layers / self._pp

    @cached_property
    def least_bytes(self) -> float:
        """Bytes of a rank at least: an equal share of the layers with one slice, and its microbatch's KV cache."""
        memory, (size, length, _) = self._evaluator.memory, self._columns
        stage = StageSpec(max(1, self._evaluator.source.layers // self._pp))
        state = memory.model_state(stage) + memory.gradients(stage).during
        cache = memory.kv_cache(stage, float(size[0]), self._evaluator.request.seq_len)
        return float(state + cache + memory.activations(stage, size[:1], length[:1])[0])

    def lower_bound(self, order: Order, boundaries: tuple[int, ...], limit: float) -> float:
        """Seconds that a step takes at least: the busiest rank's computations, or those of the last rank and the way
        there and back::

            rank 0   F                                   I    the first slice must get to the last rank,
            rank 1     F                             I        which then has all of its computations to do,
            rank 2       F F F ... all it does ... I          and the last gradient must get back

        Args:
            order: Whether backwards are split, and where stages are placed.
            boundaries: The layers of the stages.
            limit: If the busiest rank alone takes longer, the rest is not computed.
        """
        specs, pp = stage_specs(boundaries), self._pp
        turn = [k % pp if order.placement == "loop" or k < pp else 2 * pp - 1 - k for k in range(len(specs))]
        seconds = np.array([self._of(spec)[3] for spec in specs])
        busiest = float(np.bincount(turn, seconds).max())
        once = max(
            self._evaluator.cost.per_step([s for s, r in zip(specs, turn, strict=True) if r == rank])
            for rank in {0, pp - 1}
        )
        if busiest + once >= limit:
            return busiest + once
        last, way = 0.0, 0.0
        for k, spec in enumerate(specs):
            forward, backward, weights, _ = self._of(spec)
            halves = weights if order.deferred else 0.0 * weights
            if k < pp - 1:
                way += float(forward[0] + (backward - halves).min())
            elif turn[k] == pp - 1:
                last += float(((forward + backward - halves) * self._times).sum())
        return max(busiest, way + last) + once

    def _of(self, spec: StageSpec) -> tuple[Array, Array, Array, float]:
        """Of a stage: seconds of forwards, backwards and weight halves by slice, and of all together."""
        if spec not in self._kinds:
            size, length, context = self._columns
            forward = self._cost.forward(spec, size, length, context)
            backward = self._cost.backward(spec, size, length, context)
            weights = np.minimum(self._cost.weights(spec, size, length), backward)
            device = float(((forward + backward) * self._times).sum())
            host = self._count * (self._host.of_forward(spec) + self._host.of_backward(spec))
            self._kinds[spec] = forward, backward, weights, max(device, host)
        return self._kinds[spec]
