"""The search: ranks all candidates by a cheap formula, simulates promising ones, refines the best, chooses the fastest
that fits; and compares the best of every order."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from terapipe.planning.cost import StageSpec, stage_specs
from terapipe.planning.order import ORDERS, InFlight, Order, order_named
from terapipe.planning.slices import Plan
from terapipe.recompute import Recompute, recompute_title
from terapipe.search.cuts import uniform
from terapipe.search.evaluator import PlanEstimate, PlanEvaluator, preference
from terapipe.search.less_recompute import with_less_recompute
from terapipe.search.refine import hill_climb, refine, with_few_lengths
from terapipe.search.request import Request, layouts
from terapipe.search.result import PlanResult
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


def _recompute(request: Request) -> tuple[Recompute, ...]:
    if request.recompute is not None:
        return (request.recompute,)
    return request.recompute_modes


def _of_evaluator(evaluator: PlanEvaluator) -> Iterator[Candidate]:
    request, kinds = evaluator.request, set(stage_specs(evaluator.boundaries()))
    per_step = max(evaluator.cost.per_step([stage]) for stage in kinds)
    memory = evaluator.memory
    model_state = max(memory.model_state(stage) + memory.gradients(stage).during for stage in kinds)
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


WORK = 250_000  # computations to simulate for each order
FINALISTS = 4  # refinement is slow, so only the best few plans are refined
WORTH = 1.005  # slicing must gain more than this factor over whole sequences


def choose(source: Source, request: Request) -> PlanResult:
    """The plan with the shortest simulated step that fits the memory budget, and the best of every other order."""
    pool = candidates(source, request)
    fitting = best_by_order(pool, source, request)
    finished = sorted([finish(pool, e) for e in fitting[:FINALISTS]] + fitting[FINALISTS:], key=preference)
    # Whole sequences are simpler, so they win unless slicing gains more than WORTH.
    chosen = next((e for e in finished if not e.sliced and e.step_time <= WORTH * finished[0].step_time), finished[0])
    runners_up: dict[str, PlanEstimate] = {}
    for estimate in finished:
        if estimate.plan.order != chosen.plan.order:
            runners_up.setdefault(estimate.plan.order, estimate)
    if request.distinct is None or request.fixed_slices:
        return PlanResult(chosen, tuple(runners_up.values()), request, source)
    limited = with_few_lengths(evaluator_of(pool, chosen), chosen, request.distinct)
    if not limited.fits:
        raise ValueError(
            f"with at most {request.distinct} different slice lengths the smallest plan found needs "
            f"{limited.peak_bytes / 2**30:.2f} GiB per device, more than there is; raise distinct or the memory budget"
        )
    return PlanResult(limited, tuple(runners_up.values()), request, source, limited.step_time / chosen.step_time)


def best_by_order(pool: list[Candidate], source: Source, request: Request) -> list[PlanEstimate]:
    """The best plan of each order and number of chunks that fits, fastest first, before refinement."""
    kinds = sorted({candidate.chunks for candidate in pool})
    best = [
        estimate
        for order in ORDERS
        for chunks in kinds
        if (estimate := best_of([candidate for candidate in pool if candidate.chunks == chunks], order))
    ]
    if not best:
        _refuse_orders(source, request)
    fitting = sorted((e for e in best if e.fits), key=preference)
    if not fitting:
        _refuse_budget(pool, best)
    return fitting


def best_of(pool: Iterable[Candidate], order: str, *, even: bool = False) -> PlanEstimate | None:
    """The best simulated plan of one order: the fastest that fits, or if none does, the one with the smallest peak.

    Candidates are simulated in order of promise. The loop ends when a plan fits and the next candidate's formula, which
    is nearly a lower bound, is already above its time; or when the simulation budget ``WORK`` is spent. As long as
    nothing fits, it may spend four times that budget, but none on candidates that are hopelessly large.
    """
    best: PlanEstimate | None = None
    work = WORK
    for candidate in _by_promise([candidate for candidate in pool if candidate.order == order]):
        done = best is not None and best.fits and (work < 0 or candidate.estimate > best.step_time)
        if done or work < -3 * WORK or (best is not None and candidate.hopeless):
            break
        work -= candidate.work
        best = candidate.evaluator.better(best, first_plan(candidate, even=even))
    return best


def _by_promise(pool: list[Candidate]) -> list[Candidate]:
    """Candidates that probably fit, fastest first, then the others, smallest first."""
    budget = pool[0].evaluator.budget if pool else None
    if budget is None:
        return pool
    fitting = [candidate for candidate in pool if candidate.peak <= budget]
    return fitting + sorted(
        (candidate for candidate in pool if candidate.peak > budget), key=lambda candidate: candidate.peak
    )


def first_plan(candidate: Candidate, *, even: bool = False) -> Plan:
    """The plan to simulate first: with the slices of the request, else even ones, else slices of equal time."""
    request, evaluator = candidate.evaluator.request, candidate.evaluator
    if request.slice_lengths is not None:
        lengths = request.slice_lengths
    elif request.num_slices is not None:
        lengths = uniform(request.seq_len, candidate.count, 1)
    elif even or candidate.count == 1:
        lengths = uniform(request.seq_len, candidate.count, evaluator.tile)
    else:
        lengths = evaluator.grid(candidate.size).equal_time(candidate.count)
    return evaluator.plan(candidate.order, candidate.size, lengths, candidate.chunks)


def finish(pool: Iterable[Candidate], estimate: PlanEstimate) -> PlanEstimate:
    """Refines the slices, unless order or request fix them, and tries the other way to balance several stages per
    rank: equal ranks usually are the fastest, equal stages sometimes."""
    evaluator = evaluator_of(pool, estimate)
    fixed = not order_named(estimate.plan.order).sliced or evaluator.request.fixed_slices
    estimate = estimate if fixed else refine(evaluator, estimate)
    by_stage = replace(estimate.plan, boundaries=evaluator.boundaries(estimate.plan.chunks))
    if by_stage != estimate.plan:
        estimate = min(estimate, evaluator.evaluate(by_stage), key=preference)
    return with_less_recompute(evaluator, estimate)


def evaluator_of(pool: Iterable[Candidate], estimate: PlanEstimate) -> PlanEvaluator:
    evaluators, mode = (candidate.evaluator for candidate in pool), estimate.plan.recompute_modes[-1]
    return next(e for e in evaluators if e.layout == estimate.layout and e.recompute == mode)


def _refuse_orders(source: Source, request: Request) -> NoReturn:
    limited = ", ".join(f"{order.name} {order.chunks}" for order in ORDERS.values() if order.chunks)
    raise ValueError(
        f"order {request.order!r} with {request.chunks or 'any'} chunks per rank has no plan on {source.name}: every "
        f"chunk needs a layer of the {source.layers}, several chunks need several ranks, and some orders take only so "
        f"many ({limited}); change order, chunks or pp"
    )


def _refuse_budget(pool: list[Candidate], best: list[PlanEstimate]) -> NoReturn:
    least = min(best, key=lambda c: c.peak_bytes)
    raise ValueError(
        f"no plan fits into {(pool[0].evaluator.budget or 0) / 2**30:.2f} GiB per device: the smallest found needs "
        f"{least.peak_bytes / 2**30:.2f} GiB ({least.layout}, order {least.plan.order}, "
        f"recomputation {recompute_title(least.plan.recompute)}); take more devices, a smaller batch or "
        "shorter sequences, shard the model state over replicas (shard), fix less, or raise the budget"
    )


def compare(source: Source, request: Request) -> list[PlanEstimate]:
    """The best plan of every order, all in the layout that is fixed or that the planner would choose.

    If no plan of an order fits the memory budget, the one with the smallest peak is returned, with ``fits`` False.
    """
    if request.order or request.fixed_slices or request.chunks or request.distinct:
        raise ValueError(
            "a comparison tries all orders and slicings; leave out order, num_slices, slice_lengths, chunks "
            "and distinct"
        )
    layout = best_by_order(candidates(source, request), source, request)[0].layout
    pool = candidates(source, request.fixed(dp=layout.dp, pp=layout.pp, tp=layout.tp))
    rows = [(name, estimate) for order in ORDERS.values() for name, estimate in _rows(pool, order) if estimate]
    if layout.pp == 1:  # all orders are the same then, and refinement may have merged the slices: one row per title
        return list({estimate.title: estimate for _, estimate in reversed(rows)}.values())[::-1]
    return [replace(estimate, name=name) for name, estimate in rows]


def _rows(pool: list[Candidate], order: Order) -> Iterator[tuple[str, PlanEstimate | None]]:
    """The order by its name, with one stage per rank if it supports that, and for some orders a variant of it."""
    own = [c for c in pool if c.order == order.name]
    plain = [c for c in own if c.chunks == 1] or own
    if order.name == "terapipe":
        even = best_of(plain, order.name, even=True)
        yield "terapipe, equal slices", even and _refine_even(plain, even)
    whole = [c for c in own if c.count == 1]
    if order.sliced and order.chunks is None and 1 not in order.tried_chunks:
        yield f"{order.name}, whole sequences", best_of(whole, order.name)
        plain = [c for c in own if c.count > 1]
    best = best_of(plain, order.name)
    yield order.name, finish(plain, best) if best else None


def _refine_even(pool: Iterable[Candidate], start: PlanEstimate) -> PlanEstimate:
    """The best number of equal slices."""
    evaluator = next(c.evaluator for c in pool if c.evaluator.recompute == start.plan.recompute_modes[-1])
    request, plan = evaluator.request, start.plan

    def evaluated(count: int) -> PlanEstimate:
        lengths = uniform(request.seq_len, count, evaluator.tile)
        return evaluator.evaluate(evaluator.plan(plan.order, plan.sizes[0], lengths))

    return hill_climb(evaluated, len(plan.lengths[0]), request.seq_len // evaluator.tile)
