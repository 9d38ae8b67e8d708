"""The search: simulates the promising candidates of every order, refines the best of each, and chooses the fastest
that fits."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from terapipe.planning.order import ORDERS, order_named
from terapipe.planning.recompute import recompute_title
from terapipe.planning.slices import Plan, even_lengths
from terapipe.search.candidates import Candidate, candidates
from terapipe.search.evaluator import PlanEstimate, PlanEvaluator, preference
from terapipe.search.refine import hill_climb, refine, with_few_lengths, with_less_recompute
from terapipe.search.request import Request
from terapipe.search.result import PlanResult
from terapipe.search.source import Source

WORK = 250_000  # computations to simulate for each row
TRIES = 8  # candidates of a row to count the bytes of, although they probably do not fit
NEAR = 1.2  # times the budget: larger ones are not tried if there is a plan that fits
OPTIMISM = 0.9  # of the formula's step time: what is hoped for before anything similar was simulated
WORTH = 1.005  # slicing must gain more than this factor over whole sequences

Progress = Callable[[float], None]  # takes the share that is done


def silent(share: float) -> None:
    """The default progress."""


def choose(source: Source, request: Request, progress: Progress = silent) -> PlanResult:
    """The plan with the shortest simulated step that fits the memory budget, and the best of every other row."""
    pool = candidates(source, request)
    rows = [e for e in best_rows(pool, source, request, progress) if e.fits and e.name != EQUAL]
    chosen = pick(rows)
    runners_up = tuple(sorted((e for e in rows if e is not chosen), key=preference))
    if request.distinct is None or request.fixed_slices:
        return PlanResult(chosen, runners_up, request, source)
    limited = with_few_lengths(evaluator_of(pool, chosen), chosen, request.distinct)
    if not limited.fits:
        raise ValueError(
            f"with at most {request.distinct} different slice lengths the smallest plan found needs "
            f"{limited.peak_bytes / 2**30:.2f} GiB per device, more than there is; raise distinct or the memory budget"
        )
    limited = replace(limited, name=chosen.name)
    return PlanResult(limited, runners_up, request, source, limited.step_time / chosen.step_time)


def pick(rows: Sequence[PlanEstimate]) -> PlanEstimate:
    """The row to run: the fastest that fits. Whole sequences are simpler, so they win unless slicing gains more than
    ``WORTH``."""
    best = min(rows, key=preference)
    whole = [e for e in rows if e.fits and not e.sliced and e.step_time <= WORTH * best.step_time]
    return min(whole, key=preference, default=best)


def compare(
    source: Source, request: Request, *, same_layout: bool = False, progress: Progress = silent
) -> list[PlanEstimate]:
    """The best plan of every order, with whole sequences and with slices, each in the layout that suits it best; or
    with ``same_layout`` all in the layout that the planner would choose.

    If no plan of an order fits the memory budget, the one with the smallest peak is returned, with ``fits`` False.
    """
    if request.order or request.fixed_slices or request.chunks or request.distinct:
        raise ValueError(
            "a comparison tries all orders and slicings; leave out order, num_slices, slice_lengths, chunks "
            "and distinct"
        )
    pool = candidates(source, request)
    if not same_layout:
        return best_rows(pool, source, request, progress)
    best = min(best_rows(pool, source, request, lambda share: progress(share / 2)), key=preference)
    pool = [candidate for candidate in pool if candidate.evaluator.layout == best.layout]
    return best_rows(pool, source, request, lambda share: progress((1 + share) / 2))


# Rows


@dataclass(frozen=True)
class Row:
    """The candidates that compete for one row of a comparison."""

    name: str  # empty without a pipeline: the estimate is then named after its kind of parallelism
    pool: list[Candidate]
    sliced: bool
    even: bool = False  # whether all slices are equal


PAPER, EQUAL = "terapipe", "terapipe, equal slices"


def rows_of(pool: Iterable[Candidate]) -> Iterator[Row]:
    """An order that can be sliced has a row for whole sequences, unless another order is the same with those. The
    paper's order has a row with equal slices, too.

    Without a pipeline all orders are the same; such plans have rows of their own.
    """
    groups: dict[tuple[str, bool], list[Candidate]] = {}
    for c in pool:
        name = c.order if c.evaluator.layout.pp > 1 else ""
        groups.setdefault((name, c.count > 1), []).append(c)
    for name in (*ORDERS, ""):
        whole, sliced = groups.get((name, False)), groups.get((name, True))
        if whole:
            title = f"{name}, whole sequences" if name and order_named(name).sliced else name
            yield Row(title, whole, False)
        if sliced and name == PAPER and not sliced[0].evaluator.request.fixed_slices:
            yield Row(EQUAL, sliced, True, even=True)
        if sliced:
            yield Row(name, sliced, True)


def best_rows(
    pool: list[Candidate], source: Source, request: Request, progress: Progress = silent
) -> list[PlanEstimate]:
    """The best plan of every row. Raises ValueError if none of them fits the memory budget."""
    rows, found = list(rows_of(pool)), dict[str, PlanEstimate]()
    for i, row in enumerate(rows):
        progress(i / len(rows))
        if (start := best_of(row.pool, even=row.even)) is None:
            continue
        best = _refine_even(pool, start) if row.even else finish(pool, start)
        if row.name == PAPER and EQUAL in found:
            best = min(best, found[EQUAL], key=preference)
        # Refinement may have merged the slices. Whole sequences have their own row.
        best = replace(best if best.sliced == row.sliced else start, name=row.name)
        found[best.title] = best
    progress(1.0)
    if not found:
        _refuse_orders(source, request)
    if not any(estimate.fits for estimate in found.values()):
        _refuse_budget(pool, list(found.values()))
    return list(found.values())


def best_of(pool: list[Candidate], *, even: bool = False) -> PlanEstimate | None:
    """The best simulated plan: the fastest that fits, or if none does, the one with the smallest peak.

    The most promising candidate is simulated next, until a plan fits and what is hoped for is already above its time,
    or until ``WORK`` is spent. By how much the formula erred corrects the hope for similar candidates. Of those that by
    the rough count of bytes do not fit, only a few are looked at, the smallest first.
    """
    budget = pool[0].evaluator.budget if pool else None
    groups = _groups(c for c in pool if budget is None or c.peak <= budget)
    best: PlanEstimate | None = None
    work = WORK
    while groups:
        group = min(groups, key=lambda group: group.hope)
        if best is not None and best.fits and (work < 0 or group.hope > best.step_time):
            break
        candidate = group.pool.pop()
        groups = [group for group in groups if group.pool]
        work -= candidate.work
        if own := _simulated(candidate, best, even):
            group.factors.append(own.step_time / candidate.promise)
            best = own if best is None else min(best, own, key=preference)
    for candidate in _too_large(pool, budget, best):
        if own := candidate.evaluator.unless_beaten(first_plan(candidate, even=even), best):
            best = own if best is None else min(best, own, key=preference)
    return best


@dataclass
class Group:
    """Candidates of one layout, mode of recomputation and number of chunks, for which the formula errs alike."""

    pool: list[Candidate]  # the most promising last
    factors: list[float] = field(default_factory=list)  # simulated step times relative to the promise

    @property
    def hope(self) -> float:
        """The step time to expect of the next candidate."""
        return self.pool[-1].promise * min(self.factors, default=OPTIMISM)


def _groups(pool: Iterable[Candidate]) -> list[Group]:
    groups: dict[tuple[object, ...], Group] = {}
    for c in pool:
        key = (c.evaluator.layout, c.evaluator.recompute, c.chunks)
        groups.setdefault(key, Group([])).pool.append(c)
    for group in groups.values():
        group.pool.reverse()
    return list(groups.values())


def _too_large(pool: list[Candidate], budget: int | None, best: PlanEstimate | None) -> list[Candidate]:
    """Candidates that probably do not fit, but may: those that are faster than the best so far and not much too large;
    or, if there is no best one, any."""
    over = [c for c in pool if budget is not None and c.peak > budget]
    if best is not None and best.fits:
        over = [c for c in over if c.peak < NEAR * (budget or 0) and c.promise < best.step_time]
    return sorted(over, key=lambda candidate: candidate.peak)[:TRIES]


def _simulated(candidate: Candidate, best: PlanEstimate | None, even: bool) -> PlanEstimate | None:
    """None if memory rules it out. If the candidate leaves memory and recomputation slows it down, and it may be the
    best then, it recomputes less."""
    evaluator = candidate.evaluator
    own = evaluator.unless_beaten(first_plan(candidate, even=even), best)
    if own is None or candidate.promise == candidate.estimate:
        return own
    hoped = own.step_time * candidate.promise / candidate.estimate
    if best is not None and best.fits and hoped * OPTIMISM > best.step_time:
        return own
    return with_less_recompute(evaluator, own)


def first_plan(candidate: Candidate, *, even: bool = False) -> Plan:
    """The plan to simulate first: with the slices of the request, else even ones, else slices of equal time. Where
    short slices take as long as long ones, because of their host, there are not so many of equal time: then even ones,
    which need less memory."""
    request, evaluator = candidate.evaluator.request, candidate.evaluator
    if request.slice_lengths is not None:
        lengths = tuple(request.slice_lengths)
    elif request.num_slices is not None:
        lengths = even_lengths(request.seq_len, candidate.count, 1)
    elif even or candidate.count == 1:
        lengths = even_lengths(request.seq_len, candidate.count, evaluator.tile)
    else:
        lengths = evaluator.grid(candidate.size).equal_time(candidate.count)
        if len(lengths) < candidate.count:
            lengths = even_lengths(request.seq_len, candidate.count, evaluator.tile)
    return evaluator.plan(candidate.order, candidate.size, lengths, candidate.chunks)


def finish(pool: Iterable[Candidate], start: PlanEstimate) -> PlanEstimate:
    """Refines the slices, unless order or request fix them, and tries the other way to balance several stages per
    rank: equal ranks usually are the fastest, equal stages sometimes."""
    evaluator = evaluator_of(pool, start)
    if not start.fits and start.peak_bytes > NEAR * (evaluator.budget or 0):
        return start
    estimate = _uniform_recompute(evaluator, start)
    if start.sliced and not evaluator.request.fixed_slices:
        estimate = refine(evaluator, estimate)
    by_stage = replace(estimate.plan, boundaries=evaluator.boundaries(estimate.plan.chunks))
    if by_stage != estimate.plan:
        estimate = min(estimate, evaluator.evaluate(by_stage), key=preference)
    return min(start, with_less_recompute(evaluator, estimate), key=preference)


def _refine_even(pool: Iterable[Candidate], start: PlanEstimate) -> PlanEstimate:
    """The best number of equal slices."""
    evaluator = evaluator_of(pool, start)
    request, plan = evaluator.request, start.plan

    def evaluated(count: int) -> PlanEstimate:
        lengths = even_lengths(request.seq_len, count, evaluator.tile)
        return evaluator.evaluate(evaluator.plan(plan.order, plan.sizes[0], lengths, plan.chunks))

    best = hill_climb(evaluated, len(plan.lengths[0]), request.seq_len // evaluator.tile)
    return min(start, with_less_recompute(evaluator, best), key=preference)


def _uniform_recompute(evaluator: PlanEvaluator, estimate: PlanEstimate) -> PlanEstimate:
    """The same plan with one mode of recomputation everywhere."""
    if len(estimate.plan.recompute_modes) == 1:
        return estimate
    return evaluator.evaluate(replace(estimate.plan, recompute=evaluator.recompute))


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
