"""The start of the search: all layouts, orders, microbatch sizes and numbers of slices, ranked by a cheap formula."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from terapipe.planning.cost import StageSpec, stage_specs
from terapipe.planning.order import ORDERS, InFlight, Order, order_named
from terapipe.search.evaluator import PlanEvaluator
from terapipe.search.request import Request, layouts
from terapipe.search.source import Source

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # numbers of slices to start from


@dataclass(frozen=True)
class Candidate:
    """A kind of plan to simulate. ``estimate`` and ``peak`` only decide what is simulated first."""

    estimate: float  # step time by the formula
    peak: float  # rough number of bytes
    evaluator: PlanEvaluator
    order: str
    size: int  # sequences per microbatch
    count: int  # slices per sequence
    chunks: int  # stages per rank

    @property
    def hopeless(self) -> bool:
        """Whether it is too large for memory even if the rough estimate is twice too high."""
        budget = self.evaluator.budget
        return budget is not None and self.peak > 2 * budget

    @property
    def work(self) -> int:
        """Computations in one step, to which the time of a simulation is proportional."""
        microbatches = -(-self.evaluator.batch_size // self.size)
        return 2 * microbatches * self.count * self.evaluator.layout.pp * self.chunks


def candidates(source: Source, request: Request) -> list[Candidate]:
    """All candidates, the most promising first."""
    pool: list[Candidate] = []
    for layout in layouts(source, request):
        for recompute in _recompute(request):
            pool += _of_evaluator(PlanEvaluator(source, request, layout, recompute))
    return sorted(pool, key=lambda candidate: (candidate.estimate, candidate.count, candidate.chunks))


def _recompute(request: Request) -> tuple[bool, ...]:
    if request.recompute is not None:
        return (request.recompute,)
    return (False, True) if request.can_recompute else (False,)


def _of_evaluator(evaluator: PlanEvaluator) -> Iterator[Candidate]:
    request, kinds = evaluator.request, set(stage_specs(evaluator.boundaries()))
    per_step = max(evaluator.cost.per_step([stage]) for stage in kinds)
    model_state = max(evaluator.memory.model_state(stage) for stage in kinds)
    for size in _sizes(evaluator):
        microbatches = -(-evaluator.batch_size // size)
        per_microbatch = _microbatch_bytes(evaluator, size)
        for count in _counts(evaluator):
            lengths = _even(request, count)
            t = evaluator.seconds(size, lengths, np.cumsum(lengths) - lengths)
            work = float(t.sum()) * microbatches
            for order, chunks in _orders(evaluator, count):
                bubble = (evaluator.layout.pp - 1) * float(t.mean()) / chunks * order.bubble
                in_flight = order.in_flight(InFlight(microbatches, count, evaluator.layout.pp, chunks))
                peak = model_state + per_microbatch * in_flight
                yield Candidate(work + bubble + per_step, peak, evaluator, order.name, size, count, chunks)


def _even(request: Request, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    if request.slice_lengths is not None:
        return np.array(request.slice_lengths, dtype=np.float64)
    return np.full(count, request.seq_len / count)


def _sizes(evaluator: PlanEvaluator) -> list[int]:
    fixed = evaluator.request.microbatch_size
    if fixed is not None:
        if fixed > evaluator.batch_size:
            raise ValueError(
                f"a microbatch of {fixed} sequences does not fit into a replica's batch of {evaluator.batch_size}; "
                "lower microbatch_size or dp"
            )
        return [fixed]
    return [size for size in (2**i for i in range(20)) if size <= evaluator.batch_size]


def _counts(evaluator: PlanEvaluator) -> list[int]:
    request, tile = evaluator.request, evaluator.tile
    if request.slice_lengths is not None:
        return [len(request.slice_lengths)]
    if request.num_slices is not None:
        return [request.num_slices]
    return [n for n in COUNTS if n * tile <= max(request.seq_len, tile)]


def _orders(evaluator: PlanEvaluator, count: int) -> Iterator[tuple[Order, int]]:
    request, pp = evaluator.request, evaluator.layout.pp
    for order in [order_named(request.order)] if request.order else ORDERS.values():
        if not order.sliced and count > 1:
            continue
        if request.order is None and ((order.unsliced_twin and count == 1) or (pp == 1 and not order.one_rank)):
            continue
        for chunks in _chunks(order, request):
            if pp * chunks <= evaluator.source.layers and (chunks == 1 or pp > 1):
                yield order, chunks


def _chunks(order: Order, request: Request) -> tuple[int, ...]:
    """Stages per rank to try: those that the order requires or the request fixes, else the order's default."""
    if order.chunks is not None:
        return (order.chunks,) if request.chunks in (None, order.chunks) else ()
    return order.tried_chunks if request.chunks is None else (request.chunks,)


def _microbatch_bytes(evaluator: PlanEvaluator, size: int) -> float:
    """Activations and KV cache of one microbatch on one rank."""
    stage, seq_len = StageSpec(-(-evaluator.source.layers // evaluator.layout.pp)), evaluator.request.seq_len
    activations = evaluator.memory.activations(stage, float(size), float(seq_len))
    return float(activations + evaluator.memory.kv_cache(stage, float(size), seq_len))
