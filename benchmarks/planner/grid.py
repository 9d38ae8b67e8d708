"""Plans as a person would write them down, for any request: a wide grid, of which none may beat the planner's.

    layouts x recomputation x sequences per microbatch x numbers of slices x (equal lengths, equal FLOPs)
            x orders x stages per rank x (layers spread evenly, stages balanced by time)

That are up to a million plans for a request. A lower bound on their step time leaves those to simulate that may be
faster than a limit, so the best of the grid below that limit is exact, not sampled.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import inf
from typing import get_args

import numpy as np

from terapipe import ORDERS, Layout, Plan
from terapipe.planning import Order, Recompute
from terapipe.search import ClusterSource, PlanEstimate, PlanEvaluator, Request, Work, layouts

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
        plans = list(self._plans(limit))
        if limit == inf:
            plans = sorted(plans, key=lambda row: row[0])[:SMALLEST]
        else:  # plans of one shape one after the other: their program is compiled once
            plans.sort(key=lambda row: (row[2].order, row[2].num_stages, len(row[2].slices), row[2].sizes, row[0]))
        best: PlanEstimate | None = None
        for bound, evaluator, plan in plans:
            fastest = best.step_time if best else limit
            if bound >= fastest < inf:
                continue
            rival = PlanEstimate(evaluator.layout, plan, fastest, 0.0, 0, True)
            estimate = evaluator.unless_beaten(plan, rival, fastest)
            self.simulated += 1
            if estimate and estimate.step_time < fastest:
                best = estimate
        return best

    def _plans(self, limit: float) -> Iterator[tuple[float, PlanEvaluator, Plan]]:
        """All plans whose lower bound is below the limit, with that bound; without a limit, with that of bytes."""
        request, layers = self.request, self.source.layers
        modes = [request.recompute] if request.recompute else get_args(Recompute)
        sizes = [request.microbatch_size] if request.microbatch_size else [2**i for i in range(7)]
        for layout, mode in product(layouts(self.source, request), modes):
            evaluator = PlanEvaluator(self.source, request, layout, mode)
            for size, lengths in product((size for size in sizes if size <= evaluator.batch_size), self._cuts):
                work = Work(evaluator, size, lengths)
                if work.floor >= limit:
                    continue
                for order, chunks in _orders(request, layout, layers, len(lengths)):
                    if work.least_bytes(order) > (evaluator.budget or inf):
                        continue
                    for boundaries in self._boundaries(evaluator, order, chunks):
                        bound = work.least_bytes(order) if limit == inf else work.step_time(order, boundaries, limit)
                        if bound < limit:
                            plan = evaluator.plan(order.name, size, lengths, chunks)
                            yield bound, evaluator, replace(plan, boundaries=boundaries)

    @cached_property
    def _cuts(self) -> list[tuple[int, ...]]:
        """Equal lengths, and equal FLOPs of a layer: tokens x weights + attention, which grows with the square."""
        seq_len, tile, config = self.request.seq_len, self.source.tile, self.source.config
        ends = np.arange(tile, seq_len + tile, tile).clip(max=seq_len)
        flops = ends * config.layer_parameters + ends * (ends * float(config.hidden))
        cuts = set()
        for count in (n for n in COUNTS if n * tile <= seq_len):
            for amount in (ends * 1.0, flops):
                at = ends[np.searchsorted(amount, amount[-1] * np.arange(1, count + 1) / count * (1 - 1e-12))]
                cuts.add(tuple(int(n) for n in np.diff(at, prepend=0) if n))
        return sorted(cuts, key=len)

    @staticmethod
    def _boundaries(evaluator: PlanEvaluator, order: Order, chunks: int) -> set[tuple[int, ...]]:
        return {evaluator.even_boundaries(chunks), evaluator.rank_boundaries(order.name, chunks)}


def _orders(request: Request, layout: Layout, layers: int, slices: int) -> Iterator[tuple[Order, int]]:
    """Orders and stages per rank that a plan with this layout and so many slices may have."""
    for order, chunks in product(ORDERS.values(), CHUNKS):
        legal = order.chunks in (None, chunks) and layout.pp * chunks <= layers and (order.sliced or slices == 1)
        alone = layout.pp == 1 and (chunks > 1 or not order.one_rank)  # on one rank all orders are the same
        fixed = request.order in (None, order.name) and request.chunks in (None, chunks)
        if legal and fixed and not alone:
            yield order, chunks
