"""How many bytes a rank holds, and when. Only the order of its computations matters for the peak, not their times."""

import numpy as np

from terapipe.planning.cost import Array, Memory, StageSpec, stage_specs
from terapipe.planning.slices import Plan
from terapipe.scheduling.program import COMPUTATIONS, Program
from terapipe.scheduling.simulator import columns
from terapipe.scheduling.timeline import Timeline


def peaks(program: Program, plan: Plan, memory: Memory) -> list[int]:
    """The most that each rank ever holds."""
    during, change = _tables(plan, memory)
    static = _static(plan, memory)
    stages, ops, slices = program.places
    changes, extras = change[stages, ops, slices], during[stages, ops, slices]
    ranks = np.array(program.ranks)
    found = []
    for rank in range(program.num_ranks):
        mine = np.flatnonzero(ranks == rank)
        before = np.cumsum(changes[mine]) - changes[mine]
        found.append(round(static[rank] + float(np.max(before + extras[mine], initial=0.0))))
    return found


def curves(timeline: Timeline, memory: Memory) -> list[list[tuple[float, float]]]:
    """Each rank's bytes over time as steps: (second, bytes from then on)."""
    plan = timeline.plan
    during, change = _tables(plan, memory)
    place = {s: i for i, s in enumerate(plan.slices)}
    out: list[list[tuple[float, float]]] = []
    for events, level in zip(timeline.by_rank, _static(plan, memory), strict=True):
        steps = [(0.0, level)]
        for event in events:
            op, stage, s = event.action
            key = (stage, COMPUTATIONS.index(op), place[s])
            steps.append((event.start, level + float(during[key])))
            level += float(change[key])
            steps.append((event.end, level))
        out.append(steps)
    return out


def _static(plan: Plan, memory: Memory) -> list[float]:
    held = stage_specs(plan.boundaries)
    return [sum(memory.model_state(held[k]) for k in plan.stages_of(rank)) for rank in range(plan.num_ranks)]


def _tables(plan: Plan, memory: Memory) -> tuple[Array, Array]:
    """By stage, op and slice: bytes that are there during a computation beside what was, and the change it leaves."""
    held = stage_specs(plan.boundaries)
    kinds = {part: _of_part(plan, part, memory) for part in set(held)}
    return np.stack([kinds[part][0] for part in held]), np.stack([kinds[part][1] for part in held])


def _of_part(plan: Plan, part: StageSpec, memory: Memory) -> tuple[Array, Array]:
    size, length, context = columns(plan)
    kept, owed = memory.activations(part, size, length), memory.deferred_grads(part, size, length)
    in_forward, in_backward = memory.workspace(part, size, length)
    # The first slice's forward makes the microbatch's cache, and its backward, the last one, gives it back.
    cache = np.where(context == 0, memory.kv_cache(part, size, plan.seq_len), 0.0)
    nothing = np.zeros_like(kept)
    during = np.stack([kept + cache + in_forward, in_backward, in_backward + owed, nothing])
    change = np.stack([kept + cache, -kept - cache, owed - kept - cache, -owed])
    return during, change
