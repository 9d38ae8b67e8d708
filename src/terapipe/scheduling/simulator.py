"""Simulates a schedule: its time by a cost model instead of a clock. Its bytes are counted in footprint.py."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from math import inf

import numpy as np
from numpy.typing import NDArray

from terapipe.planning.cost import (
    Array,
    Cost,
    HostTime,
    LinkBehavior,
    StageSpec,
    by_side,
    copies_block,
    copy_time,
    stage_specs,
    with_recompute,
)
from terapipe.planning.recompute import Recompute
from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import COMPUTE, COPIES, Action, Schedule
from terapipe.scheduling.copies import with_copies
from terapipe.scheduling.orders import computations
from terapipe.scheduling.program import (
    COMPUTATIONS,
    ENDS,
    Numbering,
    Program,
    Times,
    compile_program,
    latest_starts,
    run,
)
from terapipe.scheduling.timeline import Event, Timeline
from terapipe.scheduling.validation import Shape

Ints = NDArray[np.int64]


def simulate(schedule: Schedule, cost: Cost, slowdown: Sequence[float] = ()) -> Timeline:
    """Simulates one step, without the work that is done once per step (optimizer, gradient all-reduce).

    Args:
        schedule: The actions of every rank.
        cost: Seconds of computations and transfers.
        slowdown: For each rank, by how much its computations take longer than the costs say; empty: all as they say.
    """
    with _gc_disabled():
        return _simulate(schedule, cost, slowdown)


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


def _simulate(schedule: Schedule, cost: Cost, slowdown: Sequence[float]) -> Timeline:
    plan = schedule.plan
    lists = [[a for a in rank if a.op in COMPUTE or a.op in COPIES] for rank in schedule.ranks]
    built = compile_program(plan, lists)
    times, delays = _time(built, plan, cost, slowdown=slowdown)
    return Timeline(plan, tuple(_events(built, times, delays, _copying(built, plan, cost))))


def makespan(plan: Plan, cost: Cost, limit: float = inf) -> tuple[float, float]:
    """Makespan in seconds and idle share, those of ``simulate(schedule(plan), cost)``, but much faster.

    The search asks this for thousands of plans. Programs are cached by shape, and no events are made.

    Args:
        plan: The plan to simulate, in its own order.
        cost: Seconds of computations and transfers.
        limit: A makespan above it may be given as infinite: the simulation ends as soon as that is certain.
    """
    times, _ = _time(program(plan), plan, cost, limit)
    if times.late:
        return inf, 0.0
    span, busy = times.makespan, sum(end - start for start, end in zip(times.starts, times.ends, strict=True))
    return span, 1.0 - busy / (span * plan.num_ranks) if span else 0.0


def _time(
    program: Program, plan: Plan, cost: Cost, limit: float = inf, slowdown: Sequence[float] = ()
) -> tuple[Times, list[float]]:
    """When everything happens, and the seconds of the transfer of each computation's result."""
    delays = _delays(program, plan, cost)
    seconds, host = _durations(program, plan, cost), _host_seconds(program, plan, cost)
    if len(slowdown):
        seconds = (np.asarray(slowdown)[program.ranks] * seconds).tolist()
    links, copying = _link_behaviors(program, cost), _copying(program, plan, cost)
    latest = latest_starts(program, seconds, limit) if limit < inf else ()
    return run(program, seconds, delays, links, host, copying, blocking=copies_block(cost), latest=latest), delays


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
    plain, numbering = _program(shape._replace(offload=False, offload_kv=False)), Numbering(shape.plan())
    return Program(numbering, with_copies(plain.lists, numbering))


def _durations(program: Program, plan: Plan, cost: Cost) -> list[float]:
    """The seconds of each computation on its device."""
    seconds: list[float] = seconds_by_stage(plan, cost)[program.indices].tolist()
    return seconds


def seconds_by_stage(plan: Plan, cost: Cost) -> Array:
    """The seconds of every computation on its device, by stage, op (F, B, I, W, then copies, which take none of the
    device's time) and slice, each slice with its mode of recomputation.

    Args:
        plan: Its stages and slices.
        cost: Seconds of computations.
    """
    return by_stage(plan, lambda spec, mode: _table(plan, spec, by_side(with_recompute(cost, mode))[0]))


def _host_seconds(program: Program, plan: Plan, cost: Cost) -> list[float] | None:
    """The seconds in which the host issues each computation, and posts its messages: one that it receives, one that it
    sends. None where the host takes no time."""
    host = by_side(cost)[1]
    if not host:
        return None
    tables = by_stage(plan, lambda spec, mode: _host_table(plan, spec, by_side(with_recompute(cost, mode))[1]))
    messages = (program.needs >= 0).astype(np.float64) + (program.links[1] >= 0)
    seconds: list[float] = (tables[program.indices] + messages * host.message).tolist()
    return seconds


def _host_table(plan: Plan, stage: StageSpec, host: HostTime) -> Array:
    """As ``_table``; all slices are alike."""
    forward, backward, weights = host.of_forward(stage), host.of_backward(stage), host.of_weights(stage)
    ops = np.array([forward, backward, backward - weights, weights, *[host.message] * 4])
    return np.repeat(ops[:, None], len(plan.slices), axis=1)


def by_stage(plan: Plan, table: Callable[[StageSpec, Recompute], Array]) -> Array:
    """A table for every stage, in which each slice's column is that of its mode of recomputation. Most stages are
    alike: one is made for each kind.

    Args:
        plan: Its stages, slices and modes.
        table: Makes the table of one stage, as if all slices had one mode. Its last dimension is that of slices.
    """
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
    table = np.stack(np.broadcast_arrays(forward, backward, backward - weights, weights, *[0.0] * 4))
    if not (np.isfinite(table).all() and (table >= 0).all()):
        raise ValueError(
            f"costs must be finite and at least 0, got {table.min()} to {table.max()} s on a stage of {stage}"
        )
    return table


def _copying(program: Program, plan: Plan, cost: Cost) -> list[float]:
    """The seconds of each copy, 0 for computations; nothing where the program has no copies."""
    if program.copies is None:
        return []
    size, length, _ = columns(plan)

    def table(spec: StageSpec, mode: Recompute) -> Array:
        own, cache = copy_time(with_recompute(cost, mode), spec, size, length, plan.seq_len)
        nothing = np.zeros_like(own)
        return np.stack([nothing, nothing, nothing, nothing, own, own, cache, cache])

    seconds: list[float] = by_stage(plan, table)[program.indices].tolist()
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
    """When each entry starts and ends: for a copy, when its engine is at work."""
    starts, ends = np.array(times.starts), np.array(times.ends)
    if program.copies is not None:
        at = np.flatnonzero(program.indices.ops >= len(COMPUTATIONS))
        ends[at] = np.array(times.copied)[at]
        starts[at] = ends[at] - np.array(copying)[at]
    return starts, ends
