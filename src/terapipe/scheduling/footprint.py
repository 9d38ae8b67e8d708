"""Bytes that a rank holds over a step. The peak depends on the order of its computations, not on their times."""

import numpy as np

from terapipe.planning.cost import Array, Memory, StageSpec, stage_specs
from terapipe.planning.slices import Plan
from terapipe.scheduling.program import COMPUTATIONS, Program
from terapipe.scheduling.simulator import columns
from terapipe.scheduling.timeline import Timeline


def peaks(program: Program, plan: Plan, memory: Memory) -> list[int]:
    """Peak bytes of each rank."""
    during, change = _tables(plan, memory)
    model_state = _model_state(plan, memory)
    stages, ops, slices = program.places
    changes, extras = change[stages, ops, slices], during[stages, ops, slices]
    ranks = np.array(program.ranks)
    peak_bytes = []
    for rank in range(program.num_ranks):
        own = np.flatnonzero(ranks == rank)
        before = np.cumsum(changes[own]) - changes[own]
        peak_bytes.append(round(model_state[rank] + float(np.max(before + extras[own], initial=0.0))))
    return peak_bytes


def curves(timeline: Timeline, memory: Memory) -> list[list[tuple[float, float]]]:
    """Bytes of each rank over time, as a step function: (second, bytes from then on)."""
    plan = timeline.plan
    during, change = _tables(plan, memory)
    index = {s: i for i, s in enumerate(plan.slices)}
    out: list[list[tuple[float, float]]] = []
    for events, level in zip(timeline.by_rank, _model_state(plan, memory), strict=True):
        steps = [(0.0, level)]
        for event in events:
            op, stage, s = event.action
            key = (stage, COMPUTATIONS.index(op), index[s])
            steps.append((event.start, level + float(during[key])))
            level += float(change[key])
            steps.append((event.end, level))
        out.append(steps)
    return out


def _model_state(plan: Plan, memory: Memory) -> list[float]:
    stages = stage_specs(plan.boundaries)
    return [sum(memory.model_state(stages[k]) for k in plan.stages_of(rank)) for rank in range(plan.num_ranks)]


def _tables(plan: Plan, memory: Memory) -> tuple[Array, Array]:
    """Two tables by stage, op and slice: extra bytes while a computation runs, and the change once it has ended."""
    stages = stage_specs(plan.boundaries)
    kinds = {stage: _stage_tables(plan, stage, memory) for stage in set(stages)}  # most stages are alike
    return np.stack([kinds[stage][0] for stage in stages]), np.stack([kinds[stage][1] for stage in stages])


def _stage_tables(plan: Plan, stage: StageSpec, memory: Memory) -> tuple[Array, Array]:
    size, length, context = columns(plan)
    kept, deferred = memory.activations(stage, size, length), memory.deferred_grads(stage, size, length)
    in_forward, in_backward = memory.workspace(stage, size, length)
    # The KV cache of a microbatch lives from the forward of its first slice to the backward of that slice, its last.
    cache = np.where(context == 0, memory.kv_cache(stage, size, plan.seq_len), 0.0)
    nothing = np.zeros_like(kept)
    # The rows are F, B, I and W, as in COMPUTATIONS.
    during = np.stack([kept + cache + in_forward, in_backward, in_backward + deferred, nothing])
    change = np.stack([kept + cache, -kept - cache, deferred - kept - cache, -deferred])
    return during, change
