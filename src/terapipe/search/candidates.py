"""Candidates: every kind of plan that the search may simulate, with its step time and bytes by cheap formulas."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from terapipe.planning.cost import Array, StageSpec, stage_specs
from terapipe.planning.layout import Layout
from terapipe.planning.order import ORDERS, InFlight, Order, all_microbatches, order_named
from terapipe.planning.recompute import MODES, Recompute
from terapipe.search.evaluator import PlanEvaluator
from terapipe.search.request import Request, layouts
from terapipe.search.source import Source

ROOMY = 0.5  # of the memory: with so much left for activations, shards of the model state matter for time only
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # numbers of slices to start from


@dataclass(frozen=True)
class Candidate:
    """A kind of plan to simulate. ``estimate``, ``peak`` and ``promise`` decide what is simulated first; ``floor`` is a
    lower bound, which rules out."""

    estimate: float  # step time by the formula
    peak: float  # rough number of bytes
    promise: float  # step time by the formula if memory to spare is spent on less recomputation
    floor: float  # step time if ranks had equal shares of the work and nobody waited
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
    """All kinds of plans that may be simulated, the most promising first.

    The space is the product of layouts, modes of recomputation, sizes of microbatches, numbers of slices, orders and
    chunks: too many to simulate. Formulas give each a step time and bytes; choose.py simulates the promising ones.

    Args:
        source: Model and devices: what computations and transfers cost.
        request: The batch, and what the user has fixed. What is fixed is not varied.
    """
    pool: list[Candidate] = []
    for layout in _worthwhile(source, request):
        lighter: dict[tuple[object, ...], Candidate] = {}  # the same with less recomputation
        for recompute in _recompute(request):
            own = list(_of_evaluator(PlanEvaluator(source, request, layout, recompute)))
            keys = [(c.order, c.size, c.count, c.chunks) for c in own]
            own = [_promising(c, lighter.get(key)) for c, key in zip(own, keys, strict=True)]
            lighter = dict(zip(keys, own, strict=True))
            pool += own
    return sorted(pool, key=lambda candidate: (candidate.promise, candidate.count, candidate.chunks))


def _worthwhile(source: Source, request: Request) -> Iterator[Layout]:
    """All layouts; of one with replicas, where the request leaves open whether they shard the model state, the faster
    of both, or both if memory is short. Shards take less memory, but not always: gradients are there from the start.

    Plans of one layout take the same time with shards and without, but for what comes once per step. So there is no
    need to search both.
    """
    options = layouts(source, request)
    budget = request.budget or source.budget
    for layout in options:
        other = replace(layout, shard=not layout.shard)
        stage = StageSpec(-(-source.layers // layout.pp), first=True)
        if other in options and not _short_of_memory(source, replace(layout, shard=False), stage, budget):
            own, others = (source.cost(each).per_step([stage]) for each in (layout, other))
            if own > others or (own == others and layout.shard):
                continue
        yield layout


def _short_of_memory(source: Source, layout: Layout, stage: StageSpec, budget: int | None) -> bool:
    """Whether less than ``ROOMY`` of the memory is left for activations."""
    memory = source.memory(layout)
    return budget is not None and memory.model_state(stage) + memory.gradients(stage).during > (1 - ROOMY) * budget


def _recompute(request: Request) -> tuple[Recompute, ...]:
    """The modes to try, the one that recomputes least first."""
    if request.recompute is not None:
        return (request.recompute,)
    return tuple(mode for mode in MODES if mode in request.recompute_modes)


def _promising(candidate: Candidate, lighter: Candidate | None) -> Candidate:
    """Slices that recompute less share the memory that is left, so time falls in proportion."""
    budget = candidate.evaluator.budget
    if lighter is None or budget is None or not candidate.peak <= budget < lighter.peak:
        return candidate
    share = (budget - candidate.peak) / (lighter.peak - candidate.peak)
    return replace(candidate, promise=candidate.estimate - share * (candidate.estimate - lighter.estimate))


def _of_evaluator(evaluator: PlanEvaluator) -> Iterator[Candidate]:
    """The candidates of one layout with one mode of recomputation, by the formula::

    step = batch / size * seconds of one microbatch + bubble + work once per step
    bubble = (ranks - 1) * seconds of one slice / chunks * what the order has of a flush's bubble
    """
    kinds = set(stage_specs(evaluator.boundaries()))
    per_step = max(evaluator.cost.per_step([stage]) for stage in kinds)
    memory, pp = evaluator.memory, evaluator.layout.pp
    state = max(map(memory.model_state, kinds))
    gradients = max(memory.gradients(stage).during for stage in kinds)
    counts = _counts(evaluator)
    choices = [list(_orders(evaluator, count)) for count in counts]
    for size in _sizes(evaluator):
        microbatches = -(-evaluator.batch_size // size)
        share = evaluator.batch_size / size  # a last microbatch with fewer sequences takes less time
        kept, deferred, summed = _microbatch_bytes(evaluator, size)
        for count, chosen, total, floor in zip(counts, choices, *_totals(evaluator, size, counts), strict=True):
            for order, chunks in chosen:
                bubble = (pp - 1) * total / count / chunks * order.bubble
                in_flight = order.in_flight(InFlight(microbatches, count, pp, chunks))
                live = (max(kept, deferred) if order.deferred else kept) * in_flight + summed / chunks
                # After a flush the stages of a rank have their backwards one after the other: gradients come and
                # activations go, and the peak is at the first or at the last stage.
                stages = chunks if order.in_flight is all_microbatches else 1
                peak = state + max(gradients / stages + live, gradients + live / stages)
                seconds = total * share + bubble + per_step
                yield Candidate(seconds, peak, seconds, floor * share, evaluator, order.name, size, count, chunks)


def _totals(evaluator: PlanEvaluator, size: int, counts: list[int]) -> tuple[list[float], list[float]]:
    """For every number of equal slices, the seconds of a microbatch: on the slowest stage, and if all ranks had equal
    shares of the model and only devices took time. All slices of all numbers are computed at once."""
    lengths = [_even(evaluator.request, count) for count in counts]
    length = np.concatenate(lengths)
    context = np.concatenate([np.cumsum(each) - each for each in lengths])
    starts = np.cumsum([0, *(len(each) for each in lengths[:-1])])
    device = np.add.reduceat(evaluator.seconds_on_device(size, length, context), starts)
    totals: list[float] = np.maximum(device, evaluator.host_seconds * np.array(counts)).tolist()
    shares: list[float] = np.add.reduceat(evaluator.equal_share(size, length, context), starts).tolist()
    return totals, shares


def _even(request: Request, count: int) -> Array:
    """The lengths of the slices: those of the request, or equal ones, which need not be whole numbers here."""
    if request.slice_lengths is not None:
        return np.array(request.slice_lengths, dtype=np.float64)
    return np.full(count, request.seq_len / count)


def _sizes(evaluator: PlanEvaluator) -> list[int]:
    """Microbatch sizes to try: the fixed one, else powers of two."""
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
    """Numbers of slices to try: the fixed one, else those of ``COUNTS`` whose slices are at least a tile."""
    request, tile = evaluator.request, evaluator.tile
    if request.slice_lengths is not None:
        return [len(request.slice_lengths)]
    if request.num_slices is not None:
        return [request.num_slices]
    return [n for n in COUNTS if n * tile <= max(request.seq_len, tile)]


def _orders(evaluator: PlanEvaluator, count: int) -> Iterator[tuple[Order, int]]:
    """Orders and chunks to try with so many slices. Without a pipeline one order stands for all."""
    request, pp = evaluator.request, evaluator.layout.pp
    for order in [order_named(request.order)] if request.order else ORDERS.values():
        if not order.sliced and count > 1:
            continue
        if request.order is None and ((order.unsliced_twin and count == 1) or (pp == 1 and not order.one_rank)):
            continue
        for chunks in _chunks(order, request):
            if pp * chunks <= evaluator.source.layers + 2 * request.bare_ends and (chunks == 1 or pp > 1):
                yield order, chunks


def _chunks(order: Order, request: Request) -> tuple[int, ...]:
    """Stages per rank to try: those that the order requires or the request fixes, else the order's default."""
    if order.chunks is not None:
        return (order.chunks,) if request.chunks in (None, order.chunks) else ()
    return order.tried_chunks if request.chunks is None else (request.chunks,)


def _microbatch_bytes(evaluator: PlanEvaluator, size: int) -> tuple[float, float, float]:
    """Of one microbatch on one rank: activations and KV cache; what the weight halves of its backwards keep; gradients
    of keys and values."""
    stage, seq_len = StageSpec(-(-evaluator.source.layers // evaluator.layout.pp)), evaluator.request.seq_len
    tokens = float(size), float(seq_len)
    memory = evaluator.memory
    kept = memory.activations(stage, *tokens) + memory.kv_cache(stage, tokens[0], seq_len)
    summed = memory.kv_gradients(stage, tokens[0], seq_len)
    return float(kept), float(memory.deferred_grads(stage, *tokens)), float(summed)
