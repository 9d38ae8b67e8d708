"""Better cuts for a plan that is already good: the solver's, even ones, other numbers of slices, cuts moved by hand."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf

import numpy as np

from terapipe.planning.order import order_named
from terapipe.planning.slices import Plan
from terapipe.planning.solver import Cuts, solve
from terapipe.search.cuts import Lengths, improve, ramped, uniform
from terapipe.search.evaluator import PlanEstimate, PlanEvaluator

WORK = 250_000  # computations to simulate while cuts are moved
SOLVED = 512  # places at which the solver may cut; for longer sequences its step is a multiple of the tile
LOOKS = 8  # cuts of one kind to simulate, the best by the formula
TRIES = 60  # sets of lengths, where their number is limited


def preference(choice: PlanEstimate) -> tuple[bool, float]:
    """What fits is preferred to what does not; then the faster, or else the smaller."""
    return (False, choice.step_time) if choice.fits else (True, float(choice.peak_bytes))


def refine(evaluator: PlanEvaluator, choice: PlanEstimate) -> PlanEstimate:
    plan, request = choice.plan, evaluator.request
    size, count = plan.sizes[0], len(plan.lengths[0])
    grid = evaluator.grid(size)

    def evaluated(lengths: Lengths) -> PlanEstimate:
        return evaluator.evaluate(evaluator.plan(plan.order, size, lengths, plan.chunks))

    most = request.seq_len // evaluator.tile
    found = [choice, hill_climb(lambda n: evaluated(grid.equal_time(n)), count, most)]
    found.append(hill_climb(lambda n: evaluated(uniform(request.seq_len, n, evaluator.tile)), count, most))
    if order_named(plan.order).placement == "v":
        found += [hill_climb(partial(_ramped, evaluator, choice, widest), count, most) for widest in (2, 4, 8)]
    for cuts in _solutions(evaluator, size):
        found.append(evaluator.evaluate(replace(plan, sizes=cuts.sizes, lengths=cuts.lengths)))
    alike = [c for c in found if len(set(c.plan.lengths)) == 1]
    return min([*found, shift_cuts(evaluator, min(alike, key=preference))], key=preference)


def _ramped(evaluator: PlanEvaluator, choice: PlanEstimate, widest: float, count: int) -> PlanEstimate:
    """For folded orders: slices that grow to so many times the first one, then shrink again, over all microbatches."""
    plan, grid = choice.plan, evaluator.grid(choice.plan.sizes[0])
    # A slice that passes all ranks while the last one turns those before it may be by so much longer than they.
    growth = plan.num_ranks / max(1, plan.num_ranks - 1)
    if len(plan.sizes) == 1:
        return evaluator.evaluate(replace(plan, lengths=(grid.shaped(ramped(count, growth, widest)),)))
    rising = ramped(2 * count, growth, widest)[:count]
    between = grid.equal_time(max(1, round(sum(rising) / rising[-1] / growth)))
    rows = (grid.shaped(rising), *(between,) * (len(plan.sizes) - 2), grid.shaped(rising[::-1]))
    return evaluator.evaluate(replace(plan, lengths=rows))


def hill_climb(evaluated: Callable[[int], PlanEstimate], start: int, most: int) -> PlanEstimate:
    """The best number of slices on the way from ``start``, in large steps first."""
    seen: dict[int, PlanEstimate] = {}

    def look(n: int) -> tuple[bool, float]:
        if n not in seen:
            seen[n] = evaluated(n)
        return preference(seen[n])

    best, stride = min(start, most), max(1, start // 3)
    look(best)
    while stride:
        near = [n for n in (best - stride, best + stride) if 1 <= n <= most]
        better = min([best, *near], key=look)
        if better == best:
            stride //= 2
        best = better
    return seen[best]


def estimate(evaluator: PlanEvaluator, plan: Plan, lengths: Lengths) -> float:
    """The formula: all work, and the wait for the dearest slice, which chunks divide."""
    array = np.array(lengths, dtype=np.float64)
    t = evaluator.seconds(plan.sizes[0], array, np.cumsum(array) - array)
    return (
        float(t.sum()) * evaluator.batch_size / plan.sizes[0] + (evaluator.layout.pp - 1) * float(t.max()) / plan.chunks
    )


def _solutions(evaluator: PlanEvaluator, size: int) -> list[Cuts]:
    """The solver's cuts with microbatches of this size, and with any where there are not too many to choose from."""
    found = [solved(evaluator, [size, evaluator.batch_size % size or size])]
    if evaluator.request.microbatch_size is None and 1 < evaluator.batch_size <= 96:
        found.append(solved(evaluator, [n for n in range(1, evaluator.batch_size + 1) if n <= 8 or n & (n - 1) == 0]))
    return found


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


def shift_cuts(evaluator: PlanEvaluator, choice: PlanEstimate) -> PlanEstimate:
    """Cuts moved by simulation, the same way in all microbatches."""
    plan = choice.plan
    if len(plan.lengths[0]) == 1:
        return choice

    def evaluated(lengths: Lengths) -> PlanEstimate:
        return evaluator.evaluate(replace(plan, lengths=(lengths,) * len(plan.sizes)))

    def seconds(lengths: Lengths) -> float:
        found = evaluated(lengths)
        return found.step_time if found.fits or not choice.fits else inf

    tries = WORK // (2 * len(plan.slices) * plan.num_stages)
    return min(choice, evaluated(improve(plan.lengths[0], seconds, evaluator.tile, tries)), key=preference)


def with_few_lengths(evaluator: PlanEvaluator, choice: PlanEstimate, distinct: int) -> PlanEstimate:
    """The best found with at most so many different lengths: equal slices, and sets near the lengths chosen freely."""
    plan, request = choice.plan, evaluator.request
    free = [length for row in plan.lengths for length in row]
    if len(set(free)) <= distinct:
        return choice
    size = max(plan.sizes)
    equal = [n for n in range(1, request.seq_len // evaluator.tile + 1) if request.seq_len % n == 0]
    equal = [n for n in equal if (request.seq_len // n) % evaluator.tile == 0 or n == 1]
    plans = [evaluator.plan(plan.order, size, uniform(request.seq_len, n, 1), plan.chunks) for n in equal]
    if distinct > 1 and (cuts := _few(evaluator, size, free, distinct)):
        plans.append(replace(plan, sizes=cuts.sizes, lengths=cuts.lengths))
    plans.sort(key=lambda p: estimate(evaluator, p, p.lengths[0]))
    return min(map(evaluator.evaluate, plans[:LOOKS]), key=preference)


def _few(evaluator: PlanEvaluator, size: int, free: list[int], distinct: int) -> Cuts | None:
    """Sets of allowed lengths, changed one by one as long as the solver finds better cuts with them."""
    step = _step(evaluator)
    groups = np.array_split(np.sort(free), distinct)
    start = tuple(max(step, round(float(group.mean()) / step) * step) for group in groups if len(group))
    sizes = [size, evaluator.batch_size % size or size]
    best: Cuts | None = None
    seen: set[Lengths] = set()
    todo = [
        start,
        *((*start[:-1], evaluator.request.seq_len // n) for n in range(2, 40) if evaluator.request.seq_len % n == 0),
    ]
    while todo and len(seen) < TRIES:
        lengths = tuple(sorted(set(todo.pop(0))))
        if lengths in seen or min(lengths) < 1:
            continue
        seen.add(lengths)
        try:
            cuts = solved(evaluator, sizes, lengths)
        except ValueError:  # no sum of these lengths is a whole sequence
            continue
        if best is None or cuts.time < best.time:
            best = cuts
            todo = [_changed(lengths, i, by * step) for i in range(len(lengths)) for by in (-1, 1, -2, 2, -4, 4)] + todo
    return best


def _changed(lengths: Lengths, place: int, by: int) -> Lengths:
    return tuple(length + by if i == place else length for i, length in enumerate(lengths))
