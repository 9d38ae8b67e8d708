"""Where the search begins: every layout, order, microbatch and number of slices, by a formula that costs nothing."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from terapipe.planning.cost import StageSpec, stage_specs
from terapipe.planning.order import ORDERS, InFlight, Order, order_named
from terapipe.search.evaluator import PlanEvaluator
from terapipe.search.request import Request, layouts
from terapipe.search.source import Source

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class Candidate:
    """``estimate`` is the formula's step time, ``peak`` a rough count of bytes: both only say what to look at first."""

    estimate: float
    peak: float
    evaluator: PlanEvaluator
    order: str
    size: int
    count: int
    chunks: int

    @property
    def hopeless(self) -> bool:
        """Whether it is too large even if the rough count is wrong by a factor of two."""
        budget = self.evaluator.budget
        return budget is not None and self.peak > 2 * budget

    @property
    def work(self) -> int:
        """Computations in one step: what simulating it once costs."""
        microbatches = -(-self.evaluator.batch_size // self.size)
        return 2 * microbatches * self.count * self.evaluator.layout.pp * self.chunks


def candidates(source: Source, request: Request) -> list[Candidate]:
    """All of them, the most promising first."""
    found: list[Candidate] = []
    for layout in layouts(source, request):
        for recompute in _recompute(request):
            found += _of_evaluator(PlanEvaluator(source, request, layout, recompute))
    return sorted(found, key=lambda candidate: (candidate.estimate, candidate.count, candidate.chunks))


def _recompute(request: Request) -> tuple[bool, ...]:
    if request.recompute is not None:
        return (request.recompute,)
    return (False, True) if request.can_recompute else (False,)


def _of_evaluator(evaluator: PlanEvaluator) -> Iterator[Candidate]:
    request, kinds = evaluator.request, set(stage_specs(evaluator.boundaries()))
    per_step = max(evaluator.cost.per_step([part]) for part in kinds)
    static = max(evaluator.memory.model_state(part) for part in kinds)
    for size in _sizes(evaluator):
        microbatches = -(-evaluator.batch_size // size)
        whole = _held(evaluator, size)
        for count in _counts(evaluator):
            lengths = _even(request, count)
            t = evaluator.seconds(size, lengths, np.cumsum(lengths) - lengths)
            work = float(t.sum()) * microbatches
            for order, chunks in _orders(evaluator, count):
                bubble = (evaluator.layout.pp - 1) * float(t.mean()) / chunks * order.bubble
                peak = static + whole * order.in_flight(InFlight(microbatches, count, evaluator.layout.pp, chunks))
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
    """Per rank: what the order takes, what is asked for, or else what is worth a try."""
    if order.chunks is not None:
        return (order.chunks,) if request.chunks in (None, order.chunks) else ()
    return order.tried_chunks if request.chunks is None else (request.chunks,)


def _held(evaluator: PlanEvaluator, size: int) -> float:
    """Bytes of one whole microbatch on one rank."""
    part = StageSpec(-(-evaluator.source.layers // evaluator.layout.pp))
    seq_len = evaluator.request.seq_len
    kept = evaluator.memory.activations(part, float(size), float(seq_len)) + evaluator.memory.kv_cache(
        part, float(size), seq_len
    )
    return float(kept)
