"""The search: simulates promising candidates, refines the best of them, and chooses the fastest that fits."""

from collections.abc import Iterable
from typing import NoReturn

from terapipe.planning.order import ORDERS, order_named
from terapipe.planning.slices import Plan
from terapipe.search.candidates import Candidate, candidates
from terapipe.search.cuts import uniform
from terapipe.search.evaluator import PlanEstimate, PlanEvaluator
from terapipe.search.refine import preference, refine, with_few_lengths
from terapipe.search.request import Request
from terapipe.search.result import PlanResult
from terapipe.search.source import Source

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
        estimate = candidate.evaluator.evaluate(first_plan(candidate, even=even))
        best = estimate if best is None else min(best, estimate, key=preference)
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
    """Refines the slices, unless order or request fix them."""
    evaluator = evaluator_of(pool, estimate)
    fixed = not order_named(estimate.plan.order).sliced or evaluator.request.fixed_slices
    return estimate if fixed else refine(evaluator, estimate)


def evaluator_of(pool: Iterable[Candidate], estimate: PlanEstimate) -> PlanEvaluator:
    evaluators = (candidate.evaluator for candidate in pool)
    return next(e for e in evaluators if e.layout == estimate.layout and e.recompute == estimate.plan.recompute)


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
        f"{'with' if least.plan.recompute else 'without'} recomputation); take more devices, a smaller batch or "
        "shorter sequences, shard the model state over replicas (shard), fix less, or raise the budget"
    )
