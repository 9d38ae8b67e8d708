"""The search: simulates the promising candidates of every order, refines the best of each, and chooses the fastest
that fits."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NoReturn

from terapipe.planning.order import ORDERS, order_named
from terapipe.planning.recompute import recompute_title
from terapipe.planning.slices import Plan, even_lengths
from terapipe.search.bounds import Work
from terapipe.search.candidates import Candidate, candidates
from terapipe.search.evaluator import PlanEstimate, PlanEvaluator, preference
from terapipe.search.offload import least_offload, may_offload, may_offload_to_fit, with_offload
from terapipe.search.refine import hill_climb, refine, with_few_lengths, with_less_recompute
from terapipe.search.request import Request
from terapipe.search.result import PlanResult
from terapipe.search.smallest import NEAR, Smallest, smallest
from terapipe.search.source import Source

WORK = 60_000  # computations to simulate for each row
TRIES = 8  # candidates of a row to count the bytes of, although they probably do not fit
OPTIMISM = 0.9  # of the formula's step time: what is hoped for before anything similar was simulated
OFFLOAD_TRIES = 12  # candidates to try with slices offloaded that do not fit without
ABANDON = 1.25  # times the best so far: simulations that take longer for certain are not completed
SWEEP = 600_000  # computations to simulate of candidates that a lower bound does not rule out
FAR = 1.15  # times the fastest row: those that begin slower are not refined if only one plan is wanted
ERROR = 1.15  # of the formula's step time: what is slower by more than this factor is not looked at again
GAIN = 0.005  # relative; what a candidate must gain over the best plan to be simulated after all
WORTH = 1.005  # slicing must gain more than this factor over whole sequences

Progress = Callable[[float], None]  # takes the share that is done


def silent(share: float) -> None:
    """The default progress."""


def choose(source: Source, request: Request, progress: Progress = silent) -> PlanResult:
    """Chooses the plan with the shortest simulated step that fits the memory budget.

    Args:
        source: Model and devices: what computations and transfers cost.
        request: The batch, and what the user has fixed.
        progress: Is called with the share of the work that is done.

    Returns:
        The chosen plan, with the best of every other row of a comparison as runners-up. Rows that are far behind are
        not refined, so a comparison may show them somewhat faster.
    """
    pool = candidates(source, request)
    if not pool:
        refuse_orders(source, request)
    if (least := smallest(pool)).excess > NEAR:
        refuse_budget([least.estimate()])
    estimates = best_rows(pool, source, request, progress, far=FAR)
    rows = _confirm([e for e in estimates if not e.name.endswith(EQUAL)]) or _confirm([_from_smallest(least)])
    if not rows:  # also where it was too long to count whole, and is a little larger than a part of it said
        refuse_budget([least.evaluator.confirm(least.estimate())])
    picked = pick(rows)
    runners_up = tuple(sorted((e for e in rows if e is not picked), key=preference))
    chosen = _without_shards(picked)
    if request.distinct is None or request.fixed_slices:
        return PlanResult(chosen, runners_up, request, source)
    limited = with_few_lengths(evaluator_of(chosen), chosen, request.distinct)
    limited = evaluator_of(limited).confirm(limited)
    if not limited.fits:
        raise ValueError(
            f"with at most {request.distinct} different slice lengths the smallest plan found needs "
            f"{limited.peak_bytes / 2**30:.2f} GiB per device, more than there is; raise distinct or the memory budget"
        )
    limited = replace(limited, name=chosen.name)
    return PlanResult(limited, runners_up, request, source, limited.step_time / chosen.step_time)


def _from_smallest(least: Smallest) -> PlanEstimate:
    """The row of the smallest plan, for requests that leave so little memory that the search finds nothing else."""
    start = finished = least.estimate()
    if not start.plan.offloads:
        finished = finish(start)
    elif may_offload_to_fit(least.evaluator):
        finished = least_offload(least.evaluator, start)
    return replace(finished if finished.fits and finished.sliced == start.sliced else start, name=_row_name(start))


def pick(rows: Sequence[PlanEstimate]) -> PlanEstimate:
    """The row to run: the fastest that fits. Whole sequences are simpler, so they win unless slicing gains more than
    ``WORTH``."""
    best = min(rows, key=preference)
    whole = [e for e in rows if e.fits and not e.sliced and e.step_time <= WORTH * best.step_time]
    return min(whole, key=preference, default=best)


def _confirm(rows: Sequence[PlanEstimate]) -> list[PlanEstimate]:
    """The rows that fit, with the one to run simulated whole. Estimates of long plans were extrapolated; where one is
    wrong, so that it does not fit or another is faster, that is looked at, too, until the row that is picked is one
    that was simulated whole."""
    rows, confirmed = [e for e in rows if e.fits], list[PlanEstimate]()
    while rows and (picked := pick(rows)) not in confirmed:
        confirmed.append(evaluator_of(picked).confirm(picked))
        rows = [confirmed[-1] if e is picked else e for e in rows]
        rows = [e for e in rows if e.fits]
    return rows


def _without_shards(chosen: PlanEstimate) -> PlanEstimate:
    """The same plan with whole copies of the model state, which are simpler, if the request leaves that open, they fit,
    and a step takes at most ``WORTH`` times as long."""
    evaluator = evaluator_of(chosen)
    if not chosen.layout.shard or evaluator.request.shard is not None:
        return chosen
    layout = replace(chosen.layout, shard=False)
    simple = PlanEvaluator(evaluator.source, evaluator.request, layout, evaluator.recompute)
    whole = simple.confirm(simple.evaluate(chosen.plan))
    simpler = whole.fits and whole.step_time <= WORTH * chosen.step_time
    return replace(whole, name=chosen.name) if simpler else chosen


def compare(
    source: Source, request: Request, *, same_layout: bool = False, progress: Progress = silent
) -> list[PlanEstimate]:
    """Finds the best plan of every order, with whole sequences and with slices.

    If no plan of an order fits the memory budget, the one with the smallest peak is returned, with ``fits`` False.

    Args:
        source: Model and devices: what computations and transfers cost.
        request: The batch, and what the user has fixed. Orders and slices must be free.
        same_layout: Whether all plans are in the layout that the planner would choose, instead of each in its own best.
        progress: Is called with the share of the work that is done.
    """
    if request.order or request.fixed_slices or request.chunks or request.distinct:
        raise ValueError(
            "a comparison tries all orders and slicings; leave out order, num_slices, slice_lengths, chunks "
            "and distinct"
        )
    pool = candidates(source, request)
    if not same_layout:
        return _with_confirmed(best_rows(pool, source, request, progress))
    best = min(best_rows(pool, source, request, lambda share: progress(share / 2)), key=preference)
    pool = [candidate for candidate in pool if candidate.evaluator.layout == best.layout]
    return _with_confirmed(best_rows(pool, source, request, lambda share: progress((1 + share) / 2)))


def _with_confirmed(rows: list[PlanEstimate]) -> list[PlanEstimate]:
    """All rows, the fastest simulated whole."""
    confirmed = {e.title: e for e in _confirm(rows)}
    return [confirmed.get(e.title, e) for e in rows]


# Rows


@dataclass(frozen=True)
class Row:
    """The candidates that compete for one row of a comparison."""

    name: str  # empty without a pipeline: the estimate is then named after its kind of parallelism
    pool: list[Candidate]
    sliced: bool
    even: bool = False  # whether all slices are equal


WHOLE, EQUAL = ", whole sequences", ", equal slices"


def rows_of(pool: Iterable[Candidate]) -> Iterator[Row]:
    """The rows of each order, as its ``variants`` say, as far as there are candidates for them.

    Without a pipeline all orders are the same; such plans have rows of their own.
    """
    groups: dict[tuple[str, bool], list[Candidate]] = {}
    for c in pool:
        name = c.order if c.evaluator.layout.pp > 1 else ""
        groups.setdefault((name, c.count > 1), []).append(c)
    for name in (*ORDERS, ""):
        variants = order_named(name).variants if name else ("whole", "sliced")
        whole, sliced = groups.get((name, False)), groups.get((name, True))
        if whole and "whole" in variants:
            yield Row(name + WHOLE if name and order_named(name).sliced else name, whole, False)
        if sliced and "equal" in variants and not sliced[0].evaluator.request.fixed_slices:
            yield Row(name + EQUAL, sliced, True, even=True)
        if sliced and "sliced" in variants:
            yield Row(name, sliced, True)


def best_rows(
    pool: list[Candidate], source: Source, request: Request, progress: Progress = silent, *, far: float = inf
) -> list[PlanEstimate]:
    """The best plan of every row; of one whose plans do not fit the memory budget, the smallest.

    First every row is searched, then the best of each is refined, and at last all candidates are held against the best
    of all rows (``sweep``).

    Args:
        pool: All candidates, the most promising first.
        source: Model and devices, for messages.
        request: What was asked for, for messages.
        progress: Is called with the share of the work that is done.
        far: Rows that are slower than the fastest one by this factor are not refined, which takes as long as searching
            them. A comparison refines all.
    """
    rows, starts = list(rows_of(pool)), list[tuple[Row, PlanEstimate]]()
    for i, row in enumerate(rows):
        progress(i / len(rows) / 2)
        if start := best_of(row.pool, even=row.even):
            starts.append((row, start))
    limit = far * min((start.step_time for _, start in starts if start.fits), default=inf)
    best_by_title: dict[str, PlanEstimate] = {}
    for i, (row, start) in enumerate(starts):
        progress((1 + i / len(starts)) / 2)
        best = start if start.step_time > limit else _refine_even(start) if row.even else finish(start)
        if equal := best_by_title.get(row.name + EQUAL):
            best = min(best, equal, key=preference)
        # Refinement may have merged the slices. Whole sequences have their own row.
        best = replace(best if best.sliced == row.sliced else start, name=row.name)
        best_by_title[best.title] = best
        if best.fits:
            limit = min(limit, far * best.step_time)
    if not best_by_title:
        refuse_orders(source, request)
    if request.offload is None and not source.knows_host and not any(e.fits for e in best_by_title.values()):
        for title, e in best_by_title.items():
            best_by_title[title] = replace(least_offload(evaluator_of(e), e), name=e.name)
    for look_again in (sweep, sweep_offload):
        if better := look_again(pool, min(best_by_title.values(), key=preference)):
            best_by_title[better.title] = better
    progress(1.0)
    return list(best_by_title.values())


def sweep(pool: list[Candidate], best: PlanEstimate) -> PlanEstimate | None:
    """Simulates every candidate that may be faster than the best plan of all rows, by its lower bound.

    Rows are searched by a formula, which errs by several percent, differently for every kind of plan. Bounds do not
    err: what they rule out is not faster. Only plans that would gain more than ``GAIN`` are looked for.

    Args:
        pool: All candidates.
        best: The best plan so far.

    Returns:
        The fastest plan, refined and named as its row, or None if the best so far stays the best.
    """
    if not best.fits:
        return None
    spent, start = 0, best
    for bound, candidate in sorted(_not_ruled_out(pool, best), key=lambda pair: pair[0]):
        if spent > SWEEP or bound > start.step_time * (1 - GAIN):
            break
        spent += candidate.work
        start = _better(start, _first_estimate(candidate, start, limit=start.step_time)) or start
    if start is best:
        return None
    finished = finish(start)
    return replace(finished if finished.sliced == start.sliced else start, name=_row_name(start))


def _row_name(estimate: PlanEstimate) -> str:
    """The name of the row that a plan belongs to."""
    order = order_named(estimate.plan.order)
    whole = WHOLE if order.sliced and not estimate.sliced else ""
    return estimate.plan.order + whole if estimate.layout.pp > 1 else ""


def sweep_offload(pool: list[Candidate], best: PlanEstimate) -> PlanEstimate | None:
    """Tries candidates that are too large as they are, with slices offloaded, if they may be the fastest then.

    Rows are searched within the memory of the devices, so their plans recompute and have the layouts that need least.
    With what the host has beside, others may be faster. They are held against the best plan without copies first,
    which is cheap, and only what is faster so is tried with them.

    Args:
        pool: All candidates.
        best: The best plan so far, whether it fits or not.

    Returns:
        The fastest plan, named as its row, or None if the best so far stays the best.
    """
    evaluator, start = pool[0].evaluator, best
    budget, beside = evaluator.budget, evaluator.host_budget
    if not may_offload(evaluator) or budget is None or beside is None:
        return None
    slowest = ERROR * best.step_time if best.fits else inf  # by the formula, as in ``sweep``
    larger = (c for c in pool if budget < c.peak < budget + beside and c.estimate <= slowest)
    promising = sorted(_bounds(larger, _limit(best)), key=lambda pair: pair[0])
    for bound, candidate in promising[:OFFLOAD_TRIES]:
        if bound > _limit(start):
            break
        free = candidate.evaluator.evaluate(first_plan(candidate), _limit(start))
        if free.step_time < _limit(start):
            moved = least_offload(candidate.evaluator, replace(free, fits=False))
            start = _better(start, moved) or start
    return None if start is best else replace(start, name=_row_name(start))


def _limit(best: PlanEstimate) -> float:
    """Seconds below which a plan is worth to be looked at."""
    return best.step_time * (1 - GAIN) if best.fits else inf


def _not_ruled_out(pool: list[Candidate], best: PlanEstimate) -> Iterator[tuple[float, Candidate]]:
    """Candidates that may fit and be faster than the best plan, by their lower bounds, and these bounds."""
    budget = pool[0].evaluator.budget
    near = (c for c in pool if budget is None or c.peak <= NEAR * budget)
    return _bounds((c for c in near if c.estimate <= ERROR * best.step_time), _limit(best))


def _bounds(pool: Iterable[Candidate], limit: float) -> Iterator[tuple[float, Candidate]]:
    """Lower bounds on step times, and the candidates that have them, of those that are below a limit."""
    works: dict[tuple[PlanEvaluator, int, int], Work] = {}
    for c in pool:
        evaluator = c.evaluator
        if c.floor >= limit:
            continue
        key = evaluator, c.size, c.count
        if key not in works:
            works[key] = Work(evaluator, c.size, first_plan(c).lengths[0])
        bound = works[key].step_time(order_named(c.order), evaluator.rank_boundaries(c.order, c.chunks), limit)
        if bound < limit:
            yield bound, c


def best_of(pool: list[Candidate], *, even: bool = False) -> PlanEstimate | None:
    """The best simulated plan of a row: the fastest that fits, or if none does, the one with the smallest peak.

    Args:
        pool: The candidates of the row, the most promising first.
        even: Whether all slices must be equal.
    """
    budget = pool[0].evaluator.budget if pool else None
    fitting = _groups(c for c in pool if budget is None or c.peak <= budget)
    best = _best_of_groups(fitting, even)
    # The count of bytes so far was rough. Some candidates that are too large by it may fit after all.
    for candidate in _too_large(pool, budget, best):
        best = _better(best, _first_estimate(candidate, best, even=even))
    return best


def _best_of_groups(groups: list["Group"], even: bool) -> PlanEstimate | None:
    """Simulates the candidate with the lowest hope, again and again, until a plan fits and no other hope is below its
    time, or until ``WORK`` is spent::

        hope = promise by the formula * smallest factor by which a simulation in the same group differed from it

    So the first simulation of a group corrects the hope for all of that group. And what needs more than a plan of the
    group that did not fit is left out: where memory is short, most of the time would go to counting its bytes.
    """
    best: PlanEstimate | None = None
    spent = 0
    while groups:
        group = min(groups, key=lambda group: group.hope)
        if best is not None and best.fits and (spent > WORK or group.hope > best.step_time):
            break
        candidate = group.pool.pop()
        groups = [group for group in groups if group.pool]
        if group.is_too_large(candidate):
            continue
        spent += candidate.work
        limit = inf if best is None or not best.fits else ABANDON * best.step_time
        limit *= candidate.estimate / candidate.promise  # what it may gain by less recomputation
        own = _simulate(candidate, best, even, limit)
        if own is not None:
            group.factors.append(min(own.step_time, limit) / candidate.promise)
            best = _better(best, own)
        if own is None or not own.fits:
            group.too_large.append(candidate)
    return best


def _better(a: PlanEstimate | None, b: PlanEstimate | None) -> PlanEstimate | None:
    """The preferable one of those that there are; the first if they are equal."""
    return min((estimate for estimate in (a, b) if estimate), key=preference, default=None)


@dataclass
class Group:
    """Candidates of one layout, mode of recomputation and number of chunks, for which the formula errs alike."""

    pool: list[Candidate]  # the most promising last
    factors: list[float] = field(default_factory=list)  # simulated step times relative to the promise
    too_large: list[Candidate] = field(default_factory=list)  # that did not fit

    @property
    def hope(self) -> float:
        """The step time to expect of the next candidate."""
        return self.pool[-1].promise * min(self.factors, default=OPTIMISM)

    def is_too_large(self, candidate: Candidate) -> bool:
        """Whether one that needed no more did not fit: by the rough count, and for the workspace of its slices, which
        that leaves out and which grows with their tokens."""
        tokens = candidate.size / candidate.count
        return any(c.peak <= candidate.peak and c.size / c.count <= tokens for c in self.too_large)


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
    # Short slices need less workspace, which the rough count leaves out.
    return sorted(over, key=lambda candidate: (candidate.peak, -candidate.count))[:TRIES]


def _simulate(candidate: Candidate, best: PlanEstimate | None, even: bool, limit: float) -> PlanEstimate | None:
    """None if memory rules it out. If the candidate leaves memory and recomputation slows it down, and it may be the
    best then, it recomputes less."""
    evaluator = candidate.evaluator
    own = _first_estimate(candidate, best, even=even, limit=limit)
    if own is None or candidate.promise == candidate.estimate:
        return own
    hoped = own.step_time * candidate.promise / candidate.estimate
    if best is not None and best.fits and hoped * OPTIMISM > best.step_time:
        return own
    return with_less_recompute(evaluator, own)


def _first_estimate(
    candidate: Candidate, rival: PlanEstimate | None, *, even: bool = False, limit: float = inf
) -> PlanEstimate | None:
    """The first plan of a candidate, or None if memory alone makes ``rival`` better. If it takes longer than ``limit``,
    its time may be infinite.

    If it does not fit, a second one may: slices of equal length and equally many layers on every rank need less memory
    than slices and ranks of equal time, because no rank then makes up with layers for the head of the last::

        by time   17 layers + embedding | 15 layers + head      the first rank needs most memory
        evenly    16 layers + embedding | 16 layers + head
    """
    evaluator = candidate.evaluator
    own = evaluator.unless_beaten(first_plan(candidate, even=even), rival, limit)
    if own is not None and own.fits:
        return own
    light = replace(first_plan(candidate, even=True), boundaries=evaluator.even_boundaries(candidate.chunks))
    return _better(own, evaluator.unless_beaten(light, rival, limit))


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


def finish(start: PlanEstimate) -> PlanEstimate:
    """Refines the slices, unless order or request fix them, and tries other ways to spread the layers: ranks of equal
    time usually are the fastest, sometimes stages of equal time, or with equally many layers."""
    evaluator = evaluator_of(start)
    if _is_far_too_large(start):
        return _with_less_memory(evaluator, start)
    estimate = _uniform_recompute(evaluator, start)
    if start.sliced and not evaluator.request.fixed_slices:
        estimate = refine(evaluator, estimate)
    plan, chunks = estimate.plan, estimate.plan.chunks
    others = {evaluator.boundaries(chunks), evaluator.even_boundaries(chunks)} - {plan.boundaries}
    for boundaries in sorted(others):
        estimate = min(estimate, evaluator.evaluate(replace(plan, boundaries=boundaries)), key=preference)
    return _with_less_memory(evaluator, min(start, with_less_recompute(evaluator, estimate), key=preference))


def _is_far_too_large(start: PlanEstimate) -> bool:
    """Whether no refinement makes it fit, so that only offload may."""
    return not start.fits and start.peak_bytes > NEAR * (evaluator_of(start).budget or 0)


def _with_less_memory(evaluator: PlanEvaluator, estimate: PlanEstimate) -> PlanEstimate:
    """The plan with slices offloaded, if the request wants it. Memory that is left is spent on less recomputation."""
    moved = with_offload(evaluator_of(estimate), estimate)
    return estimate if moved is estimate else with_less_recompute(evaluator_of(moved), moved)


def _refine_even(start: PlanEstimate) -> PlanEstimate:
    """The best number of equal slices."""
    evaluator = evaluator_of(start)
    if _is_far_too_large(start):
        return _with_less_memory(evaluator, start)
    request, plan = evaluator.request, start.plan

    def evaluate(count: int, limit: float) -> PlanEstimate:
        lengths = even_lengths(request.seq_len, count, evaluator.tile)
        cut = replace(plan, lengths=(lengths,) * len(plan.sizes), recompute=evaluator.recompute)
        return evaluator.evaluate(cut, limit)

    best = hill_climb(evaluate, len(plan.lengths[0]), request.seq_len // evaluator.tile)
    return _with_less_memory(evaluator, min(start, with_less_recompute(evaluator, best), key=preference))


def _uniform_recompute(evaluator: PlanEvaluator, estimate: PlanEstimate) -> PlanEstimate:
    """The same plan with one mode of recomputation everywhere."""
    if len(estimate.plan.recompute_modes) == 1:
        return estimate
    return evaluator.evaluate(replace(estimate.plan, recompute=evaluator.recompute))


def evaluator_of(estimate: PlanEstimate) -> PlanEvaluator:
    """The evaluator of an estimate, with the mode of recomputation that keeps least of those in its plan. It is another
    one than made the estimate if all slices could be given a lighter mode than they began with."""
    assert estimate.evaluator is not None
    return estimate.evaluator.with_recompute(estimate.plan.recompute_modes[-1])


def refuse_orders(source: Source, request: Request) -> NoReturn:
    """Says that no order has a plan at all, and why.

    Args:
        source: Model and devices.
        request: Which may have fixed an order, chunks or ranks.
    """
    limited = ", ".join(f"{order.name} {order.chunks}" for order in ORDERS.values() if order.chunks)
    raise ValueError(
        f"order {request.order!r} with {request.chunks or 'any'} chunks per rank has no plan on {source.name}: every "
        f"chunk needs a layer of the {source.layers}, several chunks need several ranks, and some orders take only so "
        f"many ({limited}); change order, chunks or pp"
    )


def refuse_budget(rows: Sequence[PlanEstimate]) -> NoReturn:
    """Says that no plan fits, and which one is the smallest.

    Args:
        rows: The smallest plan of every row.
    """
    least = min(rows, key=lambda c: c.peak_bytes)
    evaluator = evaluator_of(least)
    if least.peak_bytes <= (evaluator.budget or 0):
        raise ValueError(
            f"no plan fits into {(evaluator.host_budget or 0) / 2**30:.2f} GiB of the host's memory per device: the "
            f"smallest found needs {least.host_bytes / 2**30:.2f} GiB there ({least.layout}, order "
            f"{least.plan.order}, recomputation {recompute_title(least.plan.recompute)}); take more devices, a smaller "
            "batch or shorter sequences, or raise host_memory if the host has more"
        )
    hint = "; offload='auto' keeps what slices need in the host's memory" if evaluator.request.offload == "none" else ""
    raise ValueError(
        f"no plan fits into {(evaluator.budget or 0) / 2**30:.2f} GiB per device: the smallest found needs "
        f"{least.peak_bytes / 2**30:.2f} GiB ({least.layout}, order {least.plan.order}, "
        f"recomputation {recompute_title(least.plan.recompute)}); take more devices, a smaller batch or "
        "shorter sequences, shard the model state over replicas (shard), fix less, or raise the budget" + hint
    )
