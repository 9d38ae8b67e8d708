"""The search: promising seeds are simulated, the best of them refined, and the fastest that fits is chosen."""

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
FINALISTS = 4  # refining costs time, so only the best few are refined
WORTH = 1.005


def choose(source: Source, request: Request) -> PlanResult:
    """The fastest plan that fits, by the simulated makespan of the order that will run."""
    found = candidates(source, request)
    fitting = best_by_order(found, source, request)
    finished = sorted([finish(found, c) for c in fitting[:FINALISTS]] + fitting[FINALISTS:], key=preference)
    # What is not worth its trouble is left: whole sequences win if slices gain next to nothing.
    chosen = next((c for c in finished if not c.sliced and c.step_time <= WORTH * finished[0].step_time), finished[0])
    rest: dict[str, PlanEstimate] = {}
    for choice in finished:
        if choice.plan.order != chosen.plan.order:
            rest.setdefault(choice.plan.order, choice)
    if request.distinct is None or request.fixed_slices:
        return PlanResult(chosen, tuple(rest.values()), request, source)
    limited = with_few_lengths(evaluator_of(found, chosen), chosen, request.distinct)
    if not limited.fits:
        raise ValueError(
            f"with at most {request.distinct} different slice lengths the smallest plan found needs "
            f"{limited.peak_bytes / 2**30:.2f} GiB per device, more than there is; raise distinct or the memory budget"
        )
    return PlanResult(limited, tuple(rest.values()), request, source, limited.step_time / chosen.step_time)


def best_by_order(found: list[Candidate], source: Source, request: Request) -> list[PlanEstimate]:
    """The best of each order and number of chunks before any refinement, of those that fit, fastest first."""
    kinds = sorted({candidate.chunks for candidate in found})
    best = [
        choice
        for order in ORDERS
        for chunks in kinds
        if (choice := best_of([candidate for candidate in found if candidate.chunks == chunks], order))
    ]
    if not best:
        _refuse_orders(source, request)
    fitting = sorted((c for c in best if c.fits), key=preference)
    if not fitting:
        _refuse_budget(found, best)
    return fitting


def best_of(found: Iterable[Candidate], order: str, *, even: bool = False) -> PlanEstimate | None:
    """The best simulated plan of one order; one that fits if any does, else the one with the smallest peak."""
    best: PlanEstimate | None = None
    work = WORK
    for candidate in _likely([candidate for candidate in found if candidate.order == order]):
        done = best is not None and best.fits and (work < 0 or candidate.estimate > best.step_time)
        if (
            done or work < -3 * WORK or (best is not None and candidate.hopeless)
        ):  # the estimate is nearly a lower bound
            break
        work -= candidate.work
        choice = candidate.evaluator.evaluate(first_plan(candidate, even=even))
        best = choice if best is None else min(best, choice, key=preference)
    return best


def _likely(mine: list[Candidate]) -> list[Candidate]:
    """Those that by the rough count will fit, fastest first; then the others, smallest first."""
    budget = mine[0].evaluator.budget if mine else None
    if budget is None:
        return mine
    fit = [candidate for candidate in mine if candidate.peak <= budget]
    return fit + sorted(
        (candidate for candidate in mine if candidate.peak > budget), key=lambda candidate: candidate.peak
    )


def first_plan(candidate: Candidate, *, even: bool = False) -> Plan:
    """The seed's plan, with slices of equal time unless they are given or to be even."""
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


def finish(found: Iterable[Candidate], choice: PlanEstimate) -> PlanEstimate:
    evaluator = evaluator_of(found, choice)
    fixed = not order_named(choice.plan.order).sliced or evaluator.request.fixed_slices
    return choice if fixed else refine(evaluator, choice)


def evaluator_of(found: Iterable[Candidate], choice: PlanEstimate) -> PlanEvaluator:
    evaluators = (candidate.evaluator for candidate in found)
    return next(b for b in evaluators if b.layout == choice.layout and b.recompute == choice.plan.recompute)


def _refuse_orders(source: Source, request: Request) -> NoReturn:
    limited = ", ".join(f"{order.name} {order.chunks}" for order in ORDERS.values() if order.chunks)
    raise ValueError(
        f"order {request.order!r} with {request.chunks or 'any'} chunks per rank has no plan on {source.name}: every "
        f"chunk needs a layer of the {source.layers}, several chunks need several ranks, and some orders take only so "
        f"many ({limited}); change order, chunks or pp"
    )


def _refuse_budget(found: list[Candidate], best: list[PlanEstimate]) -> NoReturn:
    least = min(best, key=lambda c: c.peak_bytes)
    raise ValueError(
        f"no plan fits into {(found[0].evaluator.budget or 0) / 2**30:.2f} GiB per device: the smallest found needs "
        f"{least.peak_bytes / 2**30:.2f} GiB ({least.layout}, order {least.plan.order}, "
        f"{'with' if least.plan.recompute else 'without'} recomputation); take more devices, a smaller batch or "
        "shorter sequences, shard the model state over replicas (shard), fix less, or raise the budget"
    )
