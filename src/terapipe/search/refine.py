"""Refines a good plan: other numbers of slices, the solver's cuts, cuts shifted one by one, less recomputation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from math import inf

import numpy as np

from terapipe.planning.order import order_named
from terapipe.planning.recompute import MODES, Recompute
from terapipe.planning.slices import Plan, even_lengths
from terapipe.planning.solver import Cuts, solve
from terapipe.search.evaluator import Lengths, PlanEstimate, PlanEvaluator, preference
from terapipe.search.long_plans import shorter_counts

WORK = 250_000  # computations to simulate while cuts are shifted
SOLVED = 512  # cut points for the solver; for longer sequences its step is a multiple of the tile
LOOKS = 8  # plans to simulate in `with_few_lengths`, the best by the formula
TRIES = 60  # sets of lengths that `_few` gives to the solver


def refine(evaluator: PlanEvaluator, start: PlanEstimate) -> PlanEstimate:
    """The best of several refinements of a plan, all simulated."""
    plan, request = start.plan, evaluator.request
    size, count = plan.sizes[0], len(plan.lengths[0])
    grid = evaluator.grid(size)

    def evaluate(lengths: Lengths, limit: float) -> PlanEstimate:
        return evaluator.evaluate(replace(plan, lengths=(lengths,) * len(plan.sizes)), limit)

    def evaluate_even(count: int, limit: float) -> PlanEstimate:
        return evaluate(even_lengths(request.seq_len, count, evaluator.tile), limit)

    most = request.seq_len // evaluator.tile
    estimates = [start, hill_climb(lambda n, limit: evaluate(grid.equal_time(n), limit), count, most)]
    estimates.append(hill_climb(evaluate_even, count, most))
    if order_named(plan.order).placement == "v":
        estimates += [
            hill_climb(partial(_evaluate_ramp, evaluator, start, widest), count, most) for widest in (2, 4, 8)
        ]
    for cuts in _solutions(evaluator, size):
        limit = min((e.step_time for e in estimates if e.fits), default=inf)
        estimates.append(evaluator.evaluate(replace(plan, sizes=cuts.sizes, lengths=cuts.lengths), limit))
    alike = [e for e in estimates if len(set(e.plan.lengths)) == 1]  # `shift_cuts` cuts all microbatches alike
    return min([*estimates, shift_cuts(evaluator, min(alike, key=preference))], key=preference)


def _evaluate_ramp(
    evaluator: PlanEvaluator, start: PlanEstimate, widest: float, count: int, limit: float
) -> PlanEstimate:
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
        return evaluator.evaluate(replace(plan, lengths=(grid.cut_by_shares(ramp(count, growth, widest)),)), limit)
    rising = ramp(2 * count, growth, widest)[:count]
    plateau = grid.equal_time(max(1, round(sum(rising) / rising[-1] / growth)))
    rows = (grid.cut_by_shares(rising), *(plateau,) * (len(plan.sizes) - 2), grid.cut_by_shares(rising[::-1]))
    return evaluator.evaluate(replace(plan, lengths=rows), limit)


def hill_climb(evaluate: Callable[[int, float], PlanEstimate], start: int, most: int) -> PlanEstimate:
    """A locally optimal number of slices between 1 and ``most``, searched from ``start`` with shrinking steps.

    Args:
        evaluate: Takes a number of slices, and seconds: what takes longer is not looked for.
        start: Number of slices.
        most: Number of slices.
    """
    seen: dict[int, PlanEstimate] = {}

    def key(n: int) -> tuple[bool, float]:
        if n not in seen:
            seen[n] = evaluate(n, min((e.step_time for e in seen.values() if e.fits), default=inf))
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
    solutions = [solve_for(evaluator, [size, evaluator.batch_size % size or size])]
    if evaluator.request.microbatch_size is None and 1 < evaluator.batch_size <= 96:
        solutions.append(
            solve_for(evaluator, [n for n in range(1, evaluator.batch_size + 1) if n <= 8 or n & (n - 1) == 0])
        )
    return solutions


def solve_for(evaluator: PlanEvaluator, sizes: list[int], lengths: Lengths | None = None) -> Cuts:
    """The solver's cuts for this evaluator's costs.

    Args:
        evaluator: For costs, batch and tile.
        sizes: The allowed microbatch sizes.
        lengths: The allowed slice lengths. None: multiples of a step.
    """
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
    plan, lowest = start.plan, start.step_time
    if len(plan.lengths[0]) == 1:
        return start

    def evaluate(lengths: Lengths) -> PlanEstimate:
        return evaluator.evaluate(replace(plan, lengths=(lengths,) * len(plan.sizes)), lowest)

    def seconds(lengths: Lengths) -> float:
        nonlocal lowest
        estimate = evaluate(lengths)
        time = estimate.step_time if estimate.fits or not start.fits else inf
        lowest = min(lowest, time)
        return time

    tries = WORK // (2 * len(plan.slices) * plan.num_stages)
    return min(start, evaluate(improve(plan.lengths[0], seconds, evaluator.tile, tries)), key=preference)


def with_few_lengths(evaluator: PlanEvaluator, start: PlanEstimate, distinct: int) -> PlanEstimate:
    """A plan with at most ``distinct`` slice lengths: equal slices, or lengths close to those of ``start``."""
    plan, request = start.plan, evaluator.request
    free = [length for row in plan.lengths for length in row]
    if len(set(free)) <= distinct:
        return start
    size = max(plan.sizes)
    equal = [n for n in range(1, request.seq_len // evaluator.tile + 1) if request.seq_len % n == 0]
    equal = [n for n in equal if (request.seq_len // n) % evaluator.tile == 0 or n == 1]
    plans = [evaluator.plan(plan.order, size, even_lengths(request.seq_len, n, 1), plan.chunks) for n in equal]
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
            cuts = solve_for(evaluator, sizes, lengths)
        except ValueError:  # these lengths do not add up to a sequence
            continue
        if best is None or cuts.time < best.time:
            best = cuts
            changes = [(i, by * step) for i in range(len(lengths)) for by in (-1, 1, -2, 2, -4, 4)]
            queue = [_change(lengths, i, by) for i, by in changes] + queue
    return best


def _change(lengths: Lengths, place: int, by: int) -> Lengths:
    return tuple(length + by if i == place else length for i, length in enumerate(lengths))


def ramp(count: int, growth: float, most: float) -> tuple[float, ...]:
    """Shares that grow by a factor from both ends, up to ``most``: ``ramp(6, 2, 4)`` is 1 2 4 4 2 1."""
    return tuple(min(growth ** min(i, count - 1 - i), most) for i in range(count))


def improve(lengths: Lengths, objective: Callable[[Lengths], float], tile: int, tries: int) -> Lengths:
    """Local search: moves single cuts, in smaller and smaller steps, while the objective falls and tries are left.

    With a stride of 8, each cut moves both ways::

        32 32 32  ->  24 40 32    40 24 32    32 24 40    32 40 24

    Args:
        lengths: The slices to begin with.
        objective: What is to be small, for example the seconds of a simulated step.
        tile: The smallest stride.
        tries: How often the objective may be asked.
    """
    best = objective(lengths)
    stride = max(tile, max(lengths) // 4 // tile * tile)
    while tries > 0 and len(lengths) > 1:
        better = None
        for changed in islice(_moves(lengths, stride), tries):
            tries -= 1
            value = objective(changed)
            if value < best * (1 - 1e-9):
                better, best = changed, value
                break
        if better is not None:
            lengths = better
        elif stride == tile:
            break
        else:
            stride = max(tile, stride // 2 // tile * tile)
    return lengths


def _moves(lengths: Sequence[int], stride: int) -> Iterator[Lengths]:
    """All ways to move ``stride`` tokens from one slice to a neighbor."""
    for i in range(len(lengths)):
        for j in (i - 1, i + 1):
            if 0 <= j < len(lengths) and lengths[i] > stride:
                changed = list(lengths)
                changed[i] -= stride
                changed[j] += stride
                yield tuple(changed)


def with_less_recompute(evaluator: PlanEvaluator, start: PlanEstimate) -> PlanEstimate:
    """The plan in which slices recompute less, if that is faster and fits. Not if the request fixes the mode.

    On each rank, as many slices as fit are moved to the lighter mode, starting from the last slice of each microbatch
    (`_by_gain`): it has the longest context, so its recomputation takes longest. Steps are tried from "full" to
    "block", and on from there to "light" and to "none". With memory for three of six slices, of two microbatches::

        before    full full full | full full full
        after     full full none | full none none

    Args:
        evaluator: For the layout of the plan, with the mode that it begins with.
        start: The plan, with one mode everywhere or several.
    """
    if evaluator.budget is None or evaluator.request.recompute is not None or not start.fits:
        return start
    heaviest = MODES.index(start.plan.recompute_modes[-1])
    best, lighter = start, [mode for mode in MODES[:heaviest] if mode in evaluator.request.recompute_modes]
    for count in range(1, len(lighter) + 1):
        plan = start.plan
        for mode in reversed(lighter[:count]):
            plan = _relax(evaluator, plan, mode)
            best = min(best, evaluator.evaluate(plan), key=preference)
    return best


def _relax(evaluator: PlanEvaluator, plan: Plan, mode: Recompute) -> Plan:
    """As many slices on each rank take this mode as fit. Ranks do not share memory, so all are searched at once."""
    places = _by_gain(plan)
    low, high = [0] * plan.num_ranks, [max(places) + 1] * plan.num_ranks
    while any(a < b for a, b in zip(low, high, strict=True)):
        middle = [(a + b + 1) // 2 for a, b in zip(low, high, strict=True)]
        for rank, needs in enumerate(evaluator.needs_by_rank(_with(plan, mode, places, middle))):
            if needs.device <= (evaluator.budget or 0):
                low[rank] = middle[rank]
            else:
                high[rank] = min(high[rank], middle[rank] - 1)
    return _with(plan, mode, places, low)


def _by_gain(plan: Plan) -> list[int]:
    """For each slice, its place in the order in which slices stop to recompute.

    Last slices of microbatches come first: they have the longest context, so their recomputation takes longest. Among
    these the last microbatch is first, because the step ends with its way back through all stages. The others follow
    spread evenly, so that no few consecutive ones, which 1F1B holds at a time, take all the memory: of 8 microbatches
    7, 3, 5, 1, 6, 2, 4, 0.

    In long plans all microbatches are alike, so that they can be extrapolated, and slices of one number share a place.
    """
    if shorter_counts(plan):
        return [len(plan.grid[s.microbatch]) - 1 - s.number for s in plan.slices]
    bits = (len(plan.sizes) - 1).bit_length()

    def key(index: int) -> tuple[int, int]:
        s = plan.slices[index]
        from_end = len(plan.sizes) - 1 - s.microbatch
        return len(plan.grid[s.microbatch]) - s.number, int(f"{from_end:0{bits}b}"[::-1], 2)

    ranking = sorted(range(len(plan.slices)), key=key)
    places = [0] * len(ranking)
    for place, index in enumerate(ranking):
        places[index] = place
    return places


def _with(plan: Plan, mode: Recompute, places: list[int], counts: list[int]) -> Plan:
    """On each rank, so many slices by their places have the mode."""
    stages = []
    for k in range(plan.num_stages):
        count = counts[plan.rank_of(k)]
        modes = plan.recompute_of(k)
        stages.append(tuple(mode if place < count else own for place, own in zip(places, modes, strict=True)))
    return replace(plan, recompute=tuple(stages))
