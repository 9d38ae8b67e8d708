"""Less recomputation: a plan that recomputes everywhere, with as much as fits the memory budget kept instead."""

from dataclasses import replace

from terapipe.planning.slices import Plan
from terapipe.recompute import MODES, Recompute
from terapipe.scheduling.simulator import peaks, program
from terapipe.search.evaluator import PlanEstimate, PlanEvaluator, preference


def with_less_recompute(evaluator: PlanEvaluator, start: PlanEstimate) -> PlanEstimate:
    """The plan in which slices recompute less, if that is faster and fits. Not if the request fixes the mode.

    On each rank by itself, as many slices as its memory permits take the next mode, which keeps more; those that follow
    the first slices of their microbatches, because full recomputation of slices with more context takes longer.
    """
    if evaluator.budget is None or evaluator.request.recompute is not None or not start.fits:
        return start
    heaviest = MODES.index(start.plan.recompute_modes[-1])
    best, lighter = start, [mode for mode in MODES[:heaviest] if mode in evaluator.request.recompute_modes]
    for count in range(1, len(lighter) + 1):
        plan = start.plan
        for mode in reversed(lighter[:count]):
            plan = _relaxed(evaluator, plan, mode)
            best = min(best, evaluator.evaluate(plan), key=preference)
    return best


def _relaxed(evaluator: PlanEvaluator, plan: Plan, mode: Recompute) -> Plan:
    """As many slices on each rank take this mode as fit. Ranks do not share memory, so all are searched at once."""
    most = max(map(len, plan.lengths))
    low, high = [0] * plan.num_ranks, [most] * plan.num_ranks  # slices at the end of each microbatch
    while any(a < b for a, b in zip(low, high, strict=True)):
        middle = [(a + b + 1) // 2 for a, b in zip(low, high, strict=True)]
        found = peaks(program(plan), _with(plan, mode, middle), evaluator.memory)
        for rank, peak in enumerate(found):
            if peak <= (evaluator.budget or 0):
                low[rank] = middle[rank]
            else:
                high[rank] = min(high[rank], middle[rank] - 1)
    return _with(plan, mode, low)


def _with(plan: Plan, mode: Recompute, counts: list[int]) -> Plan:
    """On each rank, so many slices at the end of each microbatch have the mode."""
    left = [len(plan.grid[s.microbatch]) - s.number for s in plan.slices]  # this slice and those after it
    stages = []
    for k in range(plan.num_stages):
        count = counts[plan.rank_of(k)]
        modes = plan.recompute_of(k)
        stages.append(tuple(mode if n <= count else own for n, own in zip(left, modes, strict=True)))
    return replace(plan, recompute=tuple(stages))
