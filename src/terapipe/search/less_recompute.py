"""Less recomputation: a plan that recomputes everywhere, with as much as fits the memory budget kept instead."""

from dataclasses import replace

from terapipe.planning.recompute import MODES, Recompute
from terapipe.planning.slices import Plan
from terapipe.scheduling.simulator import peaks, program
from terapipe.search.evaluator import PlanEstimate, PlanEvaluator, preference


def with_less_recompute(evaluator: PlanEvaluator, start: PlanEstimate) -> PlanEstimate:
    """The plan in which slices recompute less, if that is faster and fits. Not if the request fixes the mode.

    On each rank by itself, as many slices as its memory permits take the next mode, which keeps more. The order in
    which slices are asked is the same for all ranks, see ``_by_gain``.
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
    places = _by_gain(plan)
    low, high = [0] * plan.num_ranks, [len(places)] * plan.num_ranks
    while any(a < b for a, b in zip(low, high, strict=True)):
        middle = [(a + b + 1) // 2 for a, b in zip(low, high, strict=True)]
        for rank, peak in enumerate(peaks(program(plan), _with(plan, mode, places, middle), evaluator.memory)):
            if peak <= (evaluator.budget or 0):
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
    """
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
