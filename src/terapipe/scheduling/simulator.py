"""Simulates a schedule: runs its computations against a cost model instead of a clock."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial

import numpy as np

from terapipe.planning.cost import Array, Cost, LinkBehavior, StageSpec, stage_specs
from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import COMPUTE, Action, Schedule
from terapipe.scheduling.orders import computations
from terapipe.scheduling.program import ENDS, Program, Times, compiled, run
from terapipe.scheduling.timeline import Event, Timeline
from terapipe.scheduling.validated import Shape


def simulate(schedule: Schedule, cost: Cost) -> Timeline:
    """The Timeline of one step, without the work that is done once per step (optimizer, gradient all-reduce)."""
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
    lists = [[a for a in rank if a.op in COMPUTE] for rank in schedule.ranks]
    built = compiled(plan, lists)
    delays = _delays(built, plan, cost)
    times = run(built, _durations(built, plan, cost), delays, _link_behaviors(built, cost))
    return Timeline(plan, tuple(_events(built, times, delays)))


def makespan(plan: Plan, cost: Cost) -> tuple[float, float]:
    """Makespan and idle share, the same as those of ``simulate(schedule(plan), cost)``, but much faster."""
    built = program(plan)
    seconds, delays = _durations(built, plan, cost), _delays(built, plan, cost)
    span = run(built, seconds, delays, _link_behaviors(built, cost)).makespan
    return span, 1.0 - sum(seconds) / (span * plan.num_ranks) if span else 0.0


def program(plan: Plan) -> Program:
    """The program of the plan's order. It depends on the number of slices, not on their lengths, so it is cached."""
    return _program(Shape.of(plan))


@lru_cache(maxsize=32)
def _program(shape: Shape) -> Program:
    plan = shape.plan()
    return compiled(plan, computations(plan))


def _durations(program: Program, plan: Plan, cost: Cost) -> list[float]:
    """The seconds of each computation."""
    specs = stage_specs(plan.boundaries)
    kinds = sorted(set(specs))  # most stages are alike, so ask the cost model once for each kind
    tables = np.stack([_table(plan, stage, cost) for stage in kinds])
    kind = np.array([kinds.index(stage) for stage in specs])
    stages, ops, slices = program.places
    seconds: list[float] = tables[kind[stages], ops, slices].tolist()
    return seconds


def _table(plan: Plan, stage: StageSpec, cost: Cost) -> Array:
    """Seconds by op (as in ``COMPUTATIONS``) and slice."""
    size, length, context = columns(plan)
    forward = cost.forward(stage, size, length, context)
    backward = cost.backward(stage, size, length, context)
    weights = np.minimum(cost.weights(stage, size, length), backward)
    table = np.stack(np.broadcast_arrays(forward, backward, backward - weights, weights))
    if not (np.isfinite(table).all() and (table >= 0).all()):
        raise ValueError(
            f"costs must be finite and at least 0, got {table.min()} to {table.max()} s on a stage of {stage}"
        )
    return table


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
    delays: list[float] = table[links, program.places[2]].tolist()
    return delays


def _link_behaviors(program: Program, cost: Cost) -> list[LinkBehavior]:
    return [cost.link_behavior(*pair) for pair in program.links[0]]


def _events(program: Program, times: Times, delays: list[float]) -> Iterator[Event]:
    """Every computation and both ends of every transfer, sorted by rank and start.

    Events are built as columns and sorted once. Each column has three blocks: all computations, then the sends, then
    the receives of those computations (``sent``) whose result goes to another rank.
    """
    ranks, peers = np.array(program.ranks), np.array(program.peers)
    sent = np.flatnonzero(peers >= 0)
    arrivals = np.array(times.arrivals)[sent]
    departures = arrivals - np.array(delays)[sent]
    event_ranks = np.concatenate([ranks, ranks[sent], peers[sent]])
    starts = np.concatenate([times.starts, departures, departures])
    ends = np.concatenate([times.ends, arrivals, arrivals])
    sends, receives = [], []
    for op, k, s in (program.actions[i] for i in sent.tolist()):
        send, receive, offset = ENDS[op]
        sends.append(Action(send, k, s))
        receives.append(Action(receive, k + offset, s))
    actions = program.actions + sends + receives
    order = np.lexsort((ends, starts, event_ranks))
    ordered = [actions[i] for i in order.tolist()]
    rows = zip(event_ranks[order].tolist(), ordered, starts[order].tolist(), ends[order].tolist(), strict=True)
    return map(partial(tuple.__new__, Event), rows)  # as Event._make, but without a Python call per event
