"""The memory of a step: bytes of every rank, on its device and in its host, by the order of its list."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from terapipe.planning.cost import Array, GradientBytes, Memory, StageSpec, stage_specs, with_recompute
from terapipe.planning.recompute import Recompute
from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import Action, Op
from terapipe.scheduling.program import COMPUTATIONS, ENTRIES, Indices, Program
from terapipe.scheduling.simulator import by_stage, columns, program
from terapipe.scheduling.timeline import Event, Timeline

Ints = NDArray[np.int64]


def peaks(program: Program, plan: Plan, memory: Memory) -> list[int]:
    """Peak bytes of each rank.

    Memory depends on the order of a rank's list alone, not on times. So it is a running sum over that list: each
    computation has a change that stays, and an extra while it runs::

        list      F0     F1     B1     B0
        change    +4     +4     -4     -4       activations and KV cache; what is copied goes in OUT, comes in BACK
        extra      5      5      2      2       workspace, and in a forward already what it will keep
        before     0      4      8      4       sum of the changes so far
        sum        5      9     10      6       the peak is 10, in B1

    Args:
        program: The computations of every rank.
        plan: The plan, for the lengths of its slices and its modes of recomputation.
        memory: The bytes of slices and stages.
    """
    during, change = _tables(plan, memory)
    places, starts = program.listed_indices, program.starts[:-1]
    others = _gradient_changes(places, plan, memory) + _output_changes(places, plan, memory)
    changes = change[places] + others
    extras = during[places] + np.maximum(others, 0.0)
    before = np.cumsum(changes) - changes
    lengths = np.diff(program.starts)
    before -= np.repeat(before[starts], lengths)  # every rank starts at 0
    most = np.maximum(np.maximum.reduceat(before + extras, starts), 0.0)
    return [round(state + peak) for state, peak in zip(_model_state(plan, memory), most.tolist(), strict=True)]


def host_peaks(program: Program, plan: Plan, memory: Memory) -> list[int]:
    """Peak bytes that each rank's slices, and keys and values, take of the memory of its host: from the forward behind
    which a copy begins to the backward that waits for its return.

    Args:
        program: The computations of every rank, with copies.
        plan: The plan, for the lengths of its slices and its modes of recomputation.
        memory: The bytes of slices.
    """
    places, starts = program.listed_indices, program.starts
    size, length, _ = columns(plan)

    def table(spec: StageSpec, mode: Recompute) -> Array:
        own = with_recompute(memory, mode)
        return np.stack([own.offloaded(spec, size, length), own.kv_cache(spec, size, plan.seq_len)])

    nbytes, away = by_stage(plan, table), np.zeros((plan.num_stages, len(plan.slices)))
    for kind, op in enumerate((Op.OUT, Op.KV_OUT)):
        at = places.ops == ENTRIES.index(op)
        away[places.stages[at], places.slices[at]] += nbytes[places.stages[at], kind, places.slices[at]]
    sign = np.array([1.0, -1.0, -1.0] + [0.0] * (len(ENTRIES) - 3))[places.ops]  # F, B, I
    changes = sign * away[places.stages, places.slices]
    totals = np.cumsum(changes)
    before = np.concatenate(([0.0], totals))[starts[:-1]]
    return [round(float(totals[a:b].max() - zero)) for a, b, zero in zip(starts, starts[1:], before, strict=False)]


def _output_changes(places: Indices, plan: Plan, memory: Memory) -> Array:
    """What OUT does not free: the output of a slice whose next stage is on the same rank, and has not taken it yet. It
    stays until that stage's forward.

    Args:
        places: Of the entries of one rank's list, or of several lists one after the other.
        plan: For the placement of stages.
        memory: What a slice keeps, and what of it is offloaded.
    """
    stages, ops, slices = places
    changes = np.zeros(len(stages))
    if plan.chunks == 1 or not plan.offloads:
        return changes
    size, length, _ = columns(plan)

    def table(spec: StageSpec, mode: Recompute) -> Array:
        own = with_recompute(memory, mode)
        return (own.activations(spec, size, length) - own.offloaded(spec, size, length))[None]

    outputs, forward = by_stage(plan, table)[:, 0], np.full((plan.num_stages, len(plan.slices)), -1)
    at = np.flatnonzero(ops == ENTRIES.index(Op.F))
    forward[stages[at], slices[at]] = at
    ranks = np.array([plan.rank_of(k) for k in range(plan.num_stages)])
    for i in np.flatnonzero(ops == ENTRIES.index(Op.OUT)).tolist():
        k, s = stages[i], slices[i]
        if k + 1 < plan.num_stages and ranks[k + 1] == ranks[k] and forward[k + 1, s] > i:
            changes[i] += outputs[k, s]
            changes[forward[k + 1, s]] -= outputs[k, s]
    return changes


def _gradient_changes(places: Indices, plan: Plan, memory: Memory) -> Array:
    """By how much the gradients of weights grow in each computation: at a stage's first B or W (on the last stage at
    the first F, which computes the head's), and at its last computation."""
    stages, ops, _ = places
    specs, changes = stage_specs(plan.boundaries), np.zeros(len(stages))
    adding = (ops == COMPUTATIONS.index(Op.B)) | (ops == COMPUTATIONS.index(Op.W))
    adding |= np.array([spec.last for spec in specs])[stages]
    grown = np.flatnonzero(adding)  # nothing if there are forwards only
    for indices, grow in ((grown[::-1], _first_growth), (grown, _last_growth)):
        at = np.full(len(specs), -1)
        at[stages[indices]] = indices  # of several, the last one stays
        sizes = {spec: grow(memory.gradients(spec)) for spec in set(specs)}
        for k in np.flatnonzero(at >= 0).tolist():
            changes[at[k]] += sizes[specs[k]]
    return changes


def _first_growth(gradients: GradientBytes) -> float:
    return gradients.during - gradients.before


def _last_growth(gradients: GradientBytes) -> float:
    return gradients.after - gradients.during


def curves(timeline: Timeline, memory: Memory) -> list[list[tuple[float, float]]]:
    """Bytes of each rank over time, as a step function: (second, bytes from then on).

    Args:
        timeline: A step, simulated or measured.
        memory: The bytes of slices and stages.
    """
    plan = timeline.plan
    during, change = _tables(plan, memory)
    index = {s: i for i, s in enumerate(plan.slices)}
    out: list[list[tuple[float, float]]] = []
    for events, level in zip(_in_list_order(timeline), _model_state(plan, memory), strict=True):
        keys = [(e.action.stage, ENTRIES.index(e.action.op), index[e.action.slice]) for e in events]
        places = Indices(*np.array(keys, dtype=np.int64).reshape(-1, 3).T)
        others = _gradient_changes(places, plan, memory) + _output_changes(places, plan, memory)
        steps = [(0.0, level)]
        for event, key, other in zip(events, keys, others, strict=True):
            steps.append((event.start, level + float(during[key] + max(other, 0.0))))
            level += float(change[key] + other)
            steps.append((event.end, level))
        out.append(steps)
    return out


def _in_list_order(timeline: Timeline) -> Sequence[Sequence[Event]]:
    """The events that change a rank's memory. Copies do so where they are listed, between two computations, whenever
    their engine is at work."""
    if not timeline.copies:
        return timeline.by_rank
    compiled, ordered = program(timeline.plan), []
    for numbers, events in zip(compiled.lists, timeline.by_rank, strict=True):
        times, listed = {e.action: e for e in events}, list[Event]()
        now = timeline.makespan
        for action in reversed(_of_plan(compiled.numbering.actions(numbers), timeline.plan)):
            event = times.get(action) or Event(events[0].rank, action, now, now)
            listed.append(event)
            now = event.start
        ordered.append(listed[::-1])
    return ordered


def _of_plan(actions: Sequence[Action], plan: Plan) -> list[Action]:
    """Actions of a plan of the same shape, with this plan's slices."""
    return [Action(op, k, plan.grid[s.microbatch][s.number]) for op, k, s in actions]


def _model_state(plan: Plan, memory: Memory) -> list[float]:
    stages = stage_specs(plan.boundaries)
    state = {stage: memory.model_state(stage) + memory.gradients(stage).before for stage in set(stages)}
    per_rank = memory.per_rank()
    return [per_rank + sum(state[stages[k]] for k in plan.stages_of(rank)) for rank in range(plan.num_ranks)]


def _tables(plan: Plan, memory: Memory) -> tuple[Array, Array]:
    """Two tables by stage, op and slice: extra bytes while a computation runs, and the change once it has ended."""
    tables = by_stage(plan, lambda spec, mode: _stage_tables(plan, spec, with_recompute(memory, mode)))
    return tables[:, 0], tables[:, 1]


def _stage_tables(plan: Plan, stage: StageSpec, memory: Memory) -> Array:
    size, length, context = columns(plan)
    kept, deferred = memory.activations(stage, size, length), memory.deferred_grads(stage, size, length)
    in_forward, in_backward = memory.workspace(stage, size, length, context)
    # The KV cache of a microbatch lives from the forward of its first slice to the backward of that slice, its last;
    # its gradients from the backward of its last slice on.
    is_whole = length == plan.seq_len
    sliced, whole = (memory.kv_cache(stage, size, plan.seq_len, is_sliced) for is_sliced in (True, False))
    cache = np.where(context == 0, np.where(is_whole, whole, sliced), 0.0)
    summed = np.where(is_whole, 0.0, memory.kv_gradients(stage, size, plan.seq_len))
    come, go = np.where(context + length == plan.seq_len, summed, 0.0), np.where(context == 0, summed, 0.0)
    # Where nothing of a whole sequence waits, one cache serves all microbatches, each while it is computed.
    shared = np.where(is_whole, with_recompute(memory, "none").kv_cache(stage, size, plan.seq_len, False) - whole, 0.0)
    nothing = np.zeros_like(kept)
    # Of the last slice, keys and values of all slices, which may be away until its backward.
    pairs = np.where((context + length == plan.seq_len) & ~is_whole, sliced, 0.0)
    # The rows are F, B, I, W, OUT, BACK, KV_OUT and KV_BACK, as in ENTRIES.
    during = np.stack([kept + cache + in_forward, come + in_backward, come + in_backward + deferred])
    during = np.concatenate([during + shared, [nothing, nothing, kept, nothing, pairs]])
    backward = come - go - kept - cache
    change = np.stack([kept + cache, backward, deferred + backward, -deferred, -kept, kept, -pairs, pairs])
    return np.stack([during, change])
