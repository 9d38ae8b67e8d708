"""Chooses which slices of a plan wait in the host's memory between their forward and their backward.

On each rank it is the same question: how many slices. Which ones follows: spread evenly over the rank's forwards, so
that the engine that copies them has the same time for each::

    forwards    F0 F1 F2 F3 F4 F5 F6 F7 F8
    3 of 9      .  .  x  .  .  x  .  .  x

As few as make the plan fit: each copy that is spared is a chance less to wait for one. Fewer slices to recompute are
the other way to use the memory that offloading frees; so lighter modes of recomputation are tried with as many slices
offloaded as they need.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from terapipe.planning.recompute import MODES
from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import Op
from terapipe.scheduling.program import ENTRIES
from terapipe.scheduling.simulator import program
from terapipe.search.evaluator import PlanEstimate, PlanEvaluator, preference
from terapipe.search.long_plans import shorten, shorter_counts

Keys = list[tuple[int, int]]  # stages and slices
WORTH = 1.005  # copies must gain more than this factor over computing again


def with_offload(evaluator: PlanEvaluator, start: PlanEstimate) -> PlanEstimate:
    """The plan in which slices are offloaded as the request wants it, if that is better.

    Args:
        evaluator: For the layout of the plan.
        start: The plan without offload.
    """
    wish = evaluator.request.offload
    if isinstance(wish, float):
        plan = replace(start.plan, offload_kv=bool(evaluator.request.offload_kv))
        return evaluator.evaluate(offload_share(plan, wish))
    needless = start.fits and start.plan.recompute_modes == ("none",)
    if needless or not may_offload(evaluator):
        return start
    moved = least_offload(evaluator, start)
    return moved if not start.fits or moved.step_time * WORTH < start.step_time else start


def may_offload(evaluator: PlanEvaluator) -> bool:
    """Whether slices may be offloaded where that is faster: if the request says so, or says nothing, and memory and
    link of the host are known.

    Args:
        evaluator: For its request and source.
    """
    wish = evaluator.request.offload
    return wish == "auto" or (wish is None and evaluator.source.knows_host)


def may_offload_to_fit(evaluator: PlanEvaluator) -> bool:
    """Whether slices may be offloaded where nothing fits without: unless the request says no.

    Args:
        evaluator: For its request and source.
    """
    wish = evaluator.request.offload
    return wish in (None, "auto") and evaluator.budget is not None and evaluator.host_budget is not None


def least_offload(evaluator: PlanEvaluator, start: PlanEstimate) -> PlanEstimate:
    """The fastest of the plan itself and the same with other modes of recomputation, each with as few slices offloaded
    as it takes to fit; and if nothing fits so, with keys and values offloaded.

    Args:
        evaluator: For the layout of the plan.
        start: The plan without offload, whether it fits or not.
    """
    if evaluator.budget is None or evaluator.host_budget is None:
        return start
    plan, fixed = replace(start.plan, offload=False, offload_kv=False), evaluator.request.recompute is not None
    heaviest = MODES.index(plan.recompute_modes[-1])
    lighter = [mode for mode in MODES[: heaviest + 1] if mode in evaluator.request.recompute_modes and not fixed]
    plans = [*(replace(plan, recompute=mode) for mode in lighter if plan.recompute != mode), plan]
    best = start
    for variants in with_keys_and_values(evaluator, plans):
        for each in variants:  # the one that computes least again first: others are slower even without copies
            if not best.fits or _without_copies(evaluator, each, best.step_time) < best.step_time:
                own = evaluator.unless_beaten(offload_few(evaluator, each), best)
                best = best if own is None else min(best, own, key=preference)
        if best.fits:
            break
    return best


def _without_copies(evaluator: PlanEvaluator, plan: Plan, limit: float) -> float:
    """Seconds of the same plan if nothing had to be copied: copies only make it slower."""
    return evaluator.evaluate(replace(plan, offload=False, offload_kv=False), limit).step_time


def with_keys_and_values(evaluator: PlanEvaluator, plans: list[Plan]) -> Iterator[list[Plan]]:
    """The plans, then those with keys and values offloaded, then the same in more stages, as the request permits it.

    On a rank alone, keys and values of one stage never wait. With several stages, and all forwards of one before those
    of the next, those of all but one do::

        stages     one of 32 layers            4 of 8 layers, forwards of one stage after the other
        on device  keys and values of 32       of 8, and of 8 on their way

    Args:
        evaluator: For request and layout.
        plans: The same plan with several modes of recomputation, without offload.
    """
    wish = evaluator.request.offload_kv
    if not wish:
        yield plans
    if wish is False:
        return
    away = [replace(plan, offload_kv=True) for plan in plans]
    yield away
    request, layers = evaluator.request, evaluator.source.layers
    if evaluator.layout.pp == 1 and request.chunks is None and request.order in (None, "terapipe"):
        for chunks in (2, 4, 8, 16, 32, 64):
            if chunks <= layers and all(len(plan.recompute_modes) == 1 for plan in away):
                edges = evaluator.even_boundaries(chunks)
                yield [
                    replace(plan, boundaries=edges, chunks=chunks, order="terapipe", recompute=plan.recompute_modes[0])
                    for plan in away
                ]


def offload_few(evaluator: PlanEvaluator, plan: Plan) -> Plan:
    """The plan with as few slices offloaded on each rank as it takes to fit there; with all, if it never does.

    Ranks do not share memory, so all are searched at once, by bisection. If one never fits, the others need not be
    searched.

    Args:
        evaluator: For memory and budget.
        plan: The plan, without offload.
    """
    keys = _movable(plan)
    low, high = [0] * plan.num_ranks, list(map(len, keys))
    everything = _with(plan, keys, high)
    if evaluator.budget is not None and evaluator.needs(everything).device > evaluator.budget:
        return everything
    while any(a < b for a, b in zip(low, high, strict=True)):
        middle = [(a + b) // 2 for a, b in zip(low, high, strict=True)]
        for rank, needs in enumerate(evaluator.needs_by_rank(_with(plan, keys, middle))):
            if low[rank] == high[rank]:
                continue
            if evaluator.budget is None or needs.device <= evaluator.budget:
                high[rank] = middle[rank]
            else:
                low[rank] = middle[rank] + 1
    return _with(plan, keys, low)


def offload_share(plan: Plan, share: float) -> Plan:
    """The plan with a share of the slices of each rank offloaded, of those that are worth it.

    Args:
        plan: The plan, without offload.
        share: Between 0 and 1.
    """
    keys = _movable(plan)
    return _with(plan, keys, [round(share * len(each)) for each in keys])


def _movable(plan: Plan) -> list[Keys]:
    """For each rank, what could be offloaded, in the order of its forwards. Of a long plan, of which all microbatches
    are alike, that of the second one stands for all."""
    counts, slices = shorter_counts(plan), len(plan.lengths[0])
    if counts:
        short = _movable(shorten(replace(plan, offload=False), counts[0]))
        return [[(k, s % slices) for k, s in own if s // slices == 1] for own in short]
    compiled = program(replace(plan, offload=True))
    stages, ops, places = compiled.listed_indices
    out = ops == ENTRIES.index(Op.OUT)
    ranges = pairwise(compiled.starts.tolist())
    return [list(zip(stages[a:b][out[a:b]].tolist(), places[a:b][out[a:b]].tolist(), strict=True)) for a, b in ranges]


def _with(plan: Plan, keys: Sequence[Keys], counts: Sequence[int]) -> Plan:
    """On each rank, so many of its slices are offloaded, spread evenly; of a long plan, in all microbatches alike."""
    period = len(plan.lengths[0]) if shorter_counts(replace(plan, offload=False)) else len(plan.slices)
    offload = [[False] * period for _ in range(plan.num_stages)]
    for own, count in zip(keys, counts, strict=True):
        for i, (k, s) in enumerate(own):
            offload[k][s] = (i + 1) * count // len(own) > i * count // len(own)
    repeated = len(plan.slices) // period
    return replace(plan, offload=tuple(tuple(row) * repeated for row in offload))  # keys and values as they are
