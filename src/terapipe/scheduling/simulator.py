"""Simulates a schedule: its time by a cost model instead of a clock, and its bytes by a memory model."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from terapipe.planning.cost import (
    Array,
    Cost,
    GradientBytes,
    HostTime,
    LinkBehavior,
    Memory,
    StageSpec,
    by_side,
    copies_block,
    copy_time,
    stage_specs,
    with_recompute,
)
from terapipe.planning.recompute import Recompute
from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import COMPUTE, COPIES, Action, Op, Schedule
from terapipe.scheduling.copies import offloaded_slices, with_copies
from terapipe.scheduling.orders import computations
from terapipe.scheduling.program import COMPUTATIONS, ENDS, ENTRIES, Numbering, Program, Times, compile_program, run
from terapipe.scheduling.timeline import Event, Timeline
from terapipe.scheduling.validation import Shape

Ints = NDArray[np.int64]


def simulate(schedule: Schedule, cost: Cost) -> Timeline:
    """Simulates one step, without the work that is done once per step (optimizer, gradient all-reduce).

    Args:
        schedule: The actions of every rank.
        cost: Seconds of computations and transfers.
    """
    with _gc_disabled():
        return _simulate(schedule, cost)


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """We allocate many small acyclic tuples. Scanning them for garbage would double the run time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _simulate(schedule: Schedule, cost: Cost) -> Timeline:
    plan = schedule.plan
    lists = [[a for a in rank if a.op in COMPUTE or a.op in COPIES] for rank in schedule.ranks]
    built = compile_program(plan, lists)
    times, delays = _time(built, plan, cost)
    return Timeline(plan, tuple(_events(built, times, delays, _copying(built, plan, cost))))


def makespan(plan: Plan, cost: Cost) -> tuple[float, float]:
    """Makespan in seconds and idle share, those of ``simulate(schedule(plan), cost)``, but much faster.

    The search asks this for thousands of plans. Programs are cached by shape, and no events are made.

    Args:
        plan: The plan to simulate, in its own order.
        cost: Seconds of computations and transfers.
    """
    times, _ = _time(program(plan), plan, cost)
    span, busy = times.makespan, sum(end - start for start, end in zip(times.starts, times.ends, strict=True))
    return span, 1.0 - busy / (span * plan.num_ranks) if span else 0.0


def _time(program: Program, plan: Plan, cost: Cost) -> tuple[Times, list[float]]:
    """When everything happens, and the seconds of the transfer of each computation's result."""
    delays = _delays(program, plan, cost)
    seconds, host = _durations(program, plan, cost), _host_seconds(program, plan, cost)
    links, copying = _link_behaviors(program, cost), _copying(program, plan, cost)
    return run(program, seconds, delays, links, host, copying, blocking=copies_block(cost)), delays


def program(plan: Plan) -> Program:
    """The program of the plan's order. It depends on the number of slices, not on their lengths, so it is cached."""
    shape = Shape.of(plan)
    return _program_with_copies(shape) if plan.offloads else _program(shape)


@lru_cache(maxsize=64)  # the search asks for the same shapes again, with other lengths, modes of recomputation, layouts
def _program(shape: Shape) -> Program:
    plan = shape.plan()
    with _gc_disabled():
        return compile_program(plan, computations(plan))


@lru_cache(maxsize=16)
def _program_with_copies(shape: Shape) -> Program:
    plain, plan = _program(shape._replace(offload=False)), shape.plan()
    numbering = Numbering(plan)
    return Program(numbering, with_copies(plain.lists, numbering, offloaded_slices(plan)))


def _durations(program: Program, plan: Plan, cost: Cost) -> list[float]:
    """The seconds of each computation on its device."""
    tables = _by_stage(plan, lambda spec, mode: _table(plan, spec, by_side(with_recompute(cost, mode))[0]))
    seconds: list[float] = tables[program.indices].tolist()
    return seconds


def _host_seconds(program: Program, plan: Plan, cost: Cost) -> list[float] | None:
    """The seconds in which the host issues each computation, and posts its messages: one that it receives, one that it
    sends. None where the host takes no time."""
    host = by_side(cost)[1]
    if not host:
        return None
    tables = _by_stage(plan, lambda spec, mode: _host_table(plan, spec, by_side(with_recompute(cost, mode))[1]))
    messages = (program.needs >= 0).astype(np.float64) + (program.links[1] >= 0)
    seconds: list[float] = (tables[program.indices] + messages * host.message).tolist()
    return seconds


def _host_table(plan: Plan, stage: StageSpec, host: HostTime) -> Array:
    """As ``_table``; all slices are alike."""
    forward, backward, weights = host.of_forward(stage), host.of_backward(stage), host.of_weights(stage)
    ops = np.array([forward, backward, backward - weights, weights, host.message, host.message])
    return np.repeat(ops[:, None], len(plan.slices), axis=1)


def _by_stage(plan: Plan, table: Callable[[StageSpec, Recompute], Array]) -> Array:
    """A table for every stage, in which each slice's column is that of its mode of recomputation. Most stages are
    alike: one is made for each kind."""
    kinds: dict[tuple[StageSpec, tuple[Recompute, ...]], Array] = {}
    keys = [(spec, plan.recompute_of(k)) for k, spec in enumerate(stage_specs(plan.boundaries))]
    for spec, modes in set(keys):
        first, *others = plan.recompute_modes
        chosen = table(spec, first)
        for mode in others:
            chosen = np.where(np.array(modes) == mode, table(spec, mode), chosen)
        kinds[spec, modes] = chosen
    return np.stack([kinds[key] for key in keys])


def _table(plan: Plan, stage: StageSpec, cost: Cost) -> Array:
    """Seconds by op (as in ``ENTRIES``) and slice. Copies take none of the device's time."""
    size, length, context = columns(plan)
    forward = cost.forward(stage, size, length, context)
    backward = cost.backward(stage, size, length, context)
    weights = np.minimum(cost.weights(stage, size, length), backward)
    table = np.stack(np.broadcast_arrays(forward, backward, backward - weights, weights, 0.0, 0.0))
    if not (np.isfinite(table).all() and (table >= 0).all()):
        raise ValueError(
            f"costs must be finite and at least 0, got {table.min()} to {table.max()} s on a stage of {stage}"
        )
    return table


def _copying(program: Program, plan: Plan, cost: Cost) -> list[float]:
    """The seconds of the copy that each entry begins; nothing where the program has no copies."""
    if program.copies is None:
        return []
    size, length, _ = columns(plan)
    tables = _by_stage(plan, lambda spec, mode: copy_time(with_recompute(cost, mode), spec, size, length)[None])
    stages, _, slices = program.indices
    begins = np.array(program.copies.engines) > 0
    seconds: list[float] = np.where(begins, tables[stages, 0, slices], 0.0).tolist()
    return seconds


def columns(plan: Plan) -> tuple[Array, Array, Array]:
    """Size, length and context of every slice."""
    table = np.array([(s.size, s.length, s.context) for s in plan.slices], dtype=np.float64)
    return table[:, 0], table[:, 1], table[:, 2]


def _delays(program: Program, plan: Plan, cost: Cost) -> list[float]:
    """The seconds of the transfer of each computation's result, 0 where there is none."""
    size, length, _ = columns(plan)
    pairs, links = program.links
    rows = [np.broadcast_to(cost.transfer(*pair, size, length), size.shape) for pair in pairs]
    table = np.stack([*rows, np.zeros_like(size)])  # links are -1 without a transfer: the last row
    delays: list[float] = table[links, program.indices[2]].tolist()
    return delays


def _link_behaviors(program: Program, cost: Cost) -> list[LinkBehavior]:
    return [cost.link_behavior(*pair) for pair in program.links[0]]


def _events(program: Program, times: Times, delays: list[float], copying: list[float]) -> Iterator[Event]:
    """Every computation and copy and both ends of every transfer, sorted by rank and start.

    Events are built as columns and sorted once. Each column has three blocks: all computations, then the sends, then
    the receives of those computations (``sent``) whose result goes to another rank.
    """
    ranks, peers, computed = program.ranks, program.peers, program.actions
    sent = np.flatnonzero(peers >= 0)
    arrivals = np.array(times.arrivals)[sent]
    departures = arrivals - np.array(delays)[sent]
    event_ranks = np.concatenate([ranks, ranks[sent], peers[sent]])
    began, ended = _with_copies(program, times, copying)
    starts = np.concatenate([began, departures, departures])
    ends = np.concatenate([ended, arrivals, arrivals])
    sends, receives = [], []
    for op, k, s in (computed[i] for i in sent.tolist()):
        send, receive, offset = ENDS[op]
        sends.append(Action(send, k, s))
        receives.append(Action(receive, k + offset, s))
    actions = computed + sends + receives
    order = np.lexsort((ends, starts, event_ranks))
    ordered = [actions[i] for i in order.tolist()]
    rows = zip(event_ranks[order].tolist(), ordered, starts[order].tolist(), ends[order].tolist(), strict=True)
    return map(partial(tuple.__new__, Event), rows)  # as Event._make, but without a Python call per event


def _with_copies(program: Program, times: Times, copying: list[float]) -> tuple[Array, Array]:
    """When each entry starts and ends: for OUT and BACK, when its engine is at work."""
    starts, ends = np.array(times.starts), np.array(times.ends)
    if program.copies is not None:
        waits, copied = np.array(program.copies.waits), np.array(times.copied)
        ops, everything = program.indices.ops, np.arange(len(waits))
        begun = np.where(ops == ENTRIES.index(Op.OUT), waits, everything)  # by the forward, or by BACK itself
        at = np.flatnonzero(ops >= len(COMPUTATIONS))
        ends[at] = copied[begun[at]]
        starts[at] = ends[at] - np.array(copying)[begun[at]]
    return starts, ends


def peaks(program: Program, plan: Plan, memory: Memory) -> list[int]:
    """Peak bytes of each rank.

    Memory depends on the order of a rank's list alone, not on times. So it is a running sum over that list: each
    computation has a change that stays, and an extra while it runs::

        list      F0     F1     B1     B0
        change    +4     +4     -4     -4       activations and KV cache; -4 in an OUT, +4 in a BACK
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
    gradients = _gradient_changes(places.stages, places.ops, plan, memory)
    changes = change[places] + gradients
    extras = during[places] + np.maximum(gradients, 0.0)
    before = np.cumsum(changes) - changes
    lengths = np.diff(program.starts)
    before -= np.repeat(before[starts], lengths)  # every rank starts at 0
    most = np.maximum(np.maximum.reduceat(before + extras, starts), 0.0)
    return [round(state + peak) for state, peak in zip(_model_state(plan, memory), most.tolist(), strict=True)]


def host_peaks(program: Program, plan: Plan, memory: Memory) -> list[int]:
    """Peak bytes that each rank's slices take of the memory of its host: each from its forward, behind which its copy
    begins, to its backward, by which it has ended.

    Args:
        program: The computations of every rank, with copies.
        plan: The plan, for the lengths of its slices and its modes of recomputation.
        memory: The bytes of slices.
    """
    places, starts = program.listed_indices, program.starts
    size, length, _ = columns(plan)
    tables = _by_stage(plan, lambda spec, mode: with_recompute(memory, mode).offloaded(spec, size, length)[None])
    is_offloaded = np.zeros((plan.num_stages, len(plan.slices)))
    at_out = places.ops == ENTRIES.index(Op.OUT)
    is_offloaded[places.stages[at_out], places.slices[at_out]] = 1.0
    sign = np.array([1.0, -1.0, -1.0, 0.0, 0.0, 0.0])[places.ops]  # F, B, I, W, OUT, BACK
    changes = sign * (tables[:, 0] * is_offloaded)[places.stages, places.slices]
    totals = np.cumsum(changes)
    before = np.concatenate(([0.0], totals))[starts[:-1]]
    return [round(float(totals[a:b].max() - zero)) for a, b, zero in zip(starts, starts[1:], before, strict=False)]


def _gradient_changes(stages: Ints, ops: Ints, plan: Plan, memory: Memory) -> Array:
    """By how much the gradients of weights grow in each computation: at a stage's first B or W (on the last stage at
    the first F, which computes the head's), and at its last computation."""
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
        stages, ops, _ = np.array(keys, dtype=np.int64).reshape(-1, 3).T
        steps = [(0.0, level)]
        for event, key, gradients in zip(events, keys, _gradient_changes(stages, ops, plan, memory), strict=True):
            steps.append((event.start, level + float(during[key] + max(gradients, 0.0))))
            level += float(change[key] + gradients)
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
    tables = _by_stage(plan, lambda spec, mode: _stage_tables(plan, spec, with_recompute(memory, mode)))
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
    # The rows are F, B, I, W, OUT and BACK, as in ENTRIES.
    during = np.stack([kept + cache + in_forward, come + in_backward, come + in_backward + deferred])
    during = np.concatenate([during + shared, [nothing, nothing, kept]])
    backward = come - go - kept - cache
    change = np.stack([kept + cache, backward, deferred + backward, -deferred, -kept, kept])
    return np.stack([during, change])
