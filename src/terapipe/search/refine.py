"""Refines the slices of a good plan: other numbers of slices, the solver's cuts, and cuts shifted one by one."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf

import numpy as np

from terapipe.planning.order import order_named
from terapipe.planning.slices import Plan
from terapipe.planning.solver import Cuts, solve
from terapipe.search.cuts import Lengths, improve, ramped, uniform
from terapipe.search.evaluator import PlanEstimate, PlanEvaluator, preference

WORK = 250_000  # computations to simulate while cuts are shifted
SOLVED = 512  # cut points for the solver; for longer sequences its step is a multiple of the tile
LOOKS = 8  # plans to simulate in `with_few_lengths`, the best by the formula
TRIES = 60  # sets of lengths that `_few` gives to the solver


def refine(evaluator: PlanEvaluator, start: PlanEstimate) -> PlanEstimate:
    """The best of several refinements of a plan, all simulated."""
    plan, request = start.plan, evaluator.request
    size, count = plan.sizes[0], len(plan.lengths[0])
    grid = evaluator.grid(size)

    def evaluated(lengths: Lengths) -> PlanEstimate:
        return evaluator.evaluate(evaluator.plan(plan.order, size, lengths, plan.chunks))

    most = request.seq_len // evaluator.tile
    estimates = [start, hill_climb(lambda n: evaluated(grid.equal_time(n)), count, most)]
    estimates.append(hill_climb(lambda n: evaluated(uniform(request.seq_len, n, evaluator.tile)), count, most))
    if order_named(plan.order).placement == "v":
        estimates += [hill_climb(partial(_ramped, evaluator, start, widest), count, most) for widest in (2, 4, 8)]
    for cuts in _solutions(evaluator, size):
        estimates.append(evaluator.evaluate(replace(plan, sizes=cuts.sizes, lengths=cuts.lengths)))
    alike = [e for e in estimates if len(set(e.plan.lengths)) == 1]  # `shift_cuts` cuts all microbatches alike
    return min([*estimates, shift_cuts(evaluator, min(alike, key=preference))], key=preference)


def _ramped(evaluator: PlanEvaluator, start: PlanEstimate, widest: float, count: int) -> PlanEstimate:
    """For V-shaped orders: short slices first and last, where ranks idle, and long ones between.

    Slice times grow by a constant factor up to ``widest`` times the first one, then shrink again. With two ranks
    (growth 2) and ``widest`` 4, six slices have the times 1 2 4 4 2 1. With several microbatches, the first one rises,
    the last one falls, and those between have equal slices that are about one step longer still:

        1 2 4 | 7 | ... | 7 | 4 2 1
    """
    plan, grid = start.plan, evaluator.grid(start.plan.sizes[0])
    # The last rank has two stages. While it works on the slices ahead, the next one passes the other ranks: it may take
    # K / (K - 1) times as long as the slice before it without keeping the last rank waiting.
    growth = plan.num_ranks / max(1, plan.num_ranks - 1)
    if len(plan.sizes) == 1:
        return evaluator.evaluate(replace(plan, lengths=(grid.shaped(ramped(count, growth, widest)),)))
    rising = ramped(2 * count, growth, widest)[:count]
    plateau = grid.equal_time(max(1, round(sum(rising) / rising[-1] / growth)))
    rows = (grid.shaped(rising), *(plateau,) * (len(plan.sizes) - 2), grid.shaped(rising[::-1]))
    return evaluator.evaluate(replace(plan, lengths=rows))


def hill_climb(evaluated: Callable[[int], PlanEstimate], start: int, most: int) -> PlanEstimate:
    """A locally optimal number of slices between 1 and ``most``, searched from ``start`` with shrinking steps."""
    seen: dict[int, PlanEstimate] = {}

    def key(n: int) -> tuple[bool, float]:
        if n not in seen:
            seen[n] = evaluated(n)
        return preference(seen[n])

    best, stride = min(start, most), max(1, start // 3)
    key(best)
    while stride:
        neighbors = [n for n in (best - stride, best + stride) if 1 <= n <= most]
        better = min([best, *neighbors], key=key)
        if better == best:
            stride //= 2
        best = better
    return seen[best]


def formula(evaluator: PlanEvaluator, plan: Plan, lengths: Lengths) -> float:
    """The paper's formula, sum + (stages - 1) * longest, with the bubble divided by the chunks per rank."""
    array = np.array(lengths, dtype=np.float64)
    t = evaluator.seconds(plan.sizes[0], array, np.cumsum(array) - array)
    return (
        float(t.sum()) * evaluator.batch_size / plan.sizes[0] + (evaluator.layout.pp - 1) * float(t.max()) / plan.chunks
    )


def _solutions(evaluator: PlanEvaluator, size: int) -> list[Cuts]:
    """The solver's cuts with microbatches of this size, and for small batches also with any sizes."""
    solutions = [solved(evaluator, [size, evaluator.batch_size % size or size])]
    if evaluator.request.microbatch_size is None and 1 < evaluator.batch_size <= 96:
        solutions.append(
            solved(evaluator, [n for n in range(1, evaluator.batch_size + 1) if n <= 8 or n & (n - 1) == 0])
        )
    return solutions


def solved(evaluator: PlanEvaluator, sizes: list[int], lengths: Lengths | None = None) -> Cuts:
    return solve(
        evaluator.seconds,
        seq_len=evaluator.request.seq_len,
        stages=evaluator.layout.pp,
        step=_step(evaluator),
        batch_size=evaluator.batch_size,
        sizes=sorted(set(sizes)),
        lengths=lengths,
    )


def _step(evaluator: PlanEvaluator) -> int:
    return evaluator.tile * -(-evaluator.request.seq_len // (evaluator.tile * SOLVED))


def shift_cuts(evaluator: PlanEvaluator, start: PlanEstimate) -> PlanEstimate:
    """Shifts single cuts as long as the simulated step gets faster, in the same way in all microbatches."""
    plan = start.plan
    if len(plan.lengths[0]) == 1:
        return start

    def evaluated(lengths: Lengths) -> PlanEstimate:
        return evaluator.evaluate(replace(plan, lengths=(lengths,) * len(plan.sizes)))

    def seconds(lengths: Lengths) -> float:
        estimate = evaluated(lengths)
        return estimate.step_time if estimate.fits or not start.fits else inf

    tries = WORK // (2 * len(plan.slices) * plan.num_stages)
    return min(start, evaluated(improve(plan.lengths[0], seconds, evaluator.tile, tries)), key=preference)


def with_few_lengths(evaluator: PlanEvaluator, start: PlanEstimate, distinct: int) -> PlanEstimate:
    """A plan with at most ``distinct`` slice lengths: equal slices, or lengths close to those of ``start``."""
    plan, request = start.plan, evaluator.request
    free = [length for row in plan.lengths for length in row]
    if len(set(free)) <= distinct:
        return start
    size = max(plan.sizes)
    equal = [n for n in range(1, request.seq_len // evaluator.tile + 1) if request.seq_len % n == 0]
    equal = [n for n in equal if (request.seq_len // n) % evaluator.tile == 0 or n == 1]
    plans = [evaluator.plan(plan.order, size, uniform(request.seq_len, n, 1), plan.chunks) for n in equal]
    if distinct > 1 and (cuts := _few(evaluator, size, free, distinct)):
        plans.append(replace(plan, sizes=cuts.sizes, lengths=cuts.lengths))
    plans.sort(key=lambda p: formula(evaluator, p, p.lengths[0]))
    return min(map(evaluator.evaluate, plans[:LOOKS]), key=preference)


def _few(evaluator: PlanEvaluator, size: int, free: list[int], distinct: int) -> Cuts | None:
    """The solver's best cuts with ``distinct`` allowed lengths. Which lengths to allow is a local search.

    It starts from the mean lengths of ``distinct`` equal groups of the ``free`` lengths, sorted. For instance, free
    lengths of 96 104 200 216 and ``distinct`` 2 give the set {100, 208}, before rounding. It also starts from sets
    that contain a divisor of the sequence, because some sum of the lengths must be a whole sequence. Whenever a set is
    the best so far, the sets that differ from it in one length are tried next.
    """
    step = _step(evaluator)
    groups = np.array_split(np.sort(free), distinct)
    start = tuple(max(step, round(float(group.mean()) / step) * step) for group in groups if len(group))
    sizes = [size, evaluator.batch_size % size or size]
    best: Cuts | None = None
    seen: set[Lengths] = set()
    queue = [
        start,
        *((*start[:-1], evaluator.request.seq_len // n) for n in range(2, 40) if evaluator.request.seq_len % n == 0),
    ]
    while queue and len(seen) < TRIES:
        lengths = tuple(sorted(set(queue.pop(0))))
        if lengths in seen or min(lengths) < 1:
            continue
        seen.add(lengths)
        try:
            cuts = solved(evaluator, sizes, lengths)
        except ValueError:  # these lengths do not add up to a sequence
            continue
        if best is None or cuts.time < best.time:
            best = cuts
            changes = [(i, by * step) for i in range(len(lengths)) for by in (-1, 1, -2, 2, -4, 4)]
            queue = [_changed(lengths, i, by) for i, by in changes] + queue
    return best


def _changed(lengths: Lengths, place: int, by: int) -> Lengths:
    return tuple(length + by if i == place else length for i, length in enumerate(lengths))
