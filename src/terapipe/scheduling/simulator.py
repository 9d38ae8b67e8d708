"""How long a schedule would take: its computations, run against a cost model instead of a clock."""

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
    """The Timeline of one step, without what happens once per step."""
    with _without_collecting():
        return _simulate(schedule, cost)


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Many small tuples that all stay, none in a circle: looking through them for garbage would double the time."""
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
    times = run(built, _durations(built, plan, cost), delays, _sendings(built, cost))
    return Timeline(plan, tuple(_events(built, times, delays)))


def makespan(plan: Plan, cost: Cost) -> tuple[float, float]:
    """Makespan and idle share, as ``simulate(schedule(plan), cost)`` has them, but without listing a schedule."""
    built = program(plan)
    seconds, delays = _durations(built, plan, cost), _delays(built, plan, cost)
    span = run(built, seconds, delays, _sendings(built, cost)).makespan
    return span, 1.0 - sum(seconds) / (span * plan.num_ranks) if span else 0.0


def program(plan: Plan) -> Program:
    """The program of the plan's own order. It depends on the numbers of slices, not on their lengths."""
    return _program(Shape.of(plan))


@lru_cache(maxsize=32)
def _program(shape: Shape) -> Program:
    plan = shape.plan()
    return compiled(plan, computations(plan))


def _durations(program: Program, plan: Plan, cost: Cost) -> list[float]:
    """The seconds of each computation."""
    held = stage_specs(plan.boundaries)
    kinds = sorted(set(held))
    tables = np.stack([_table(plan, part, cost) for part in kinds])
    kind = np.array([kinds.index(part) for part in held])
    stages, ops, slices = program.places
    seconds: list[float] = tables[kind[stages], ops, slices].tolist()
    return seconds


def _table(plan: Plan, part: StageSpec, cost: Cost) -> Array:
    """Seconds by op, as ``COMPUTATIONS`` lists them, and slice."""
    size, length, context = columns(plan)
    forward = cost.forward(part, size, length, context)
    backward = cost.backward(part, size, length, context)
    weights = np.minimum(cost.weights(part, size, length), backward)
    table = np.stack(np.broadcast_arrays(forward, backward, backward - weights, weights))
    if not (np.isfinite(table).all() and (table >= 0).all()):
        raise ValueError(
            f"costs must be finite and at least 0, got {table.min()} to {table.max()} s on a stage of {part}"
        )
    return table


def columns(plan: Plan) -> tuple[Array, Array, Array]:
    """Size, length and context of every slice."""
    table = np.array([(s.size, s.length, s.context) for s in plan.slices], dtype=np.float64)
    return table[:, 0], table[:, 1], table[:, 2]


def _delays(program: Program, plan: Plan, cost: Cost) -> list[float]:
    """The seconds of each computation's transfer, nothing where there is none."""
    size, length, _ = columns(plan)
    pairs, links = program.links
    rows = [np.broadcast_to(cost.transfer(*pair, size, length), size.shape) for pair in pairs]
    table = np.stack([*rows, np.zeros_like(size)])  # the last row is what -1 finds: no transfer
    delays: list[float] = table[links, program.places[2]].tolist()
    return delays


def _sendings(program: Program, cost: Cost) -> list[LinkBehavior]:
    return [cost.link_behavior(*pair) for pair in program.links[0]]


def _events(program: Program, times: Times, delays: list[float]) -> Iterator[Event]:
    """Every computation, and both ends of every transfer; each rank's in the order in which they begin."""
    ranks, peers = np.array(program.ranks), np.array(program.peers)
    sent = np.flatnonzero(peers >= 0)
    arrivals = np.array(times.arrivals)[sent]
    began = arrivals - np.array(delays)[sent]
    places = np.concatenate([ranks, ranks[sent], peers[sent]])
    starts = np.concatenate([times.starts, began, began])
    ends = np.concatenate([times.ends, arrivals, arrivals])
    sends, receives = [], []
    for op, k, s in (program.actions[i] for i in sent.tolist()):
        send, receive, on = ENDS[op]
        sends.append(Action(send, k, s))
        receives.append(Action(receive, k + on, s))
    actions = program.actions + sends + receives
    order = np.lexsort((ends, starts, places))
    ordered = [actions[i] for i in order.tolist()]
    rows = zip(places[order].tolist(), ordered, starts[order].tolist(), ends[order].tolist(), strict=True)
    return map(partial(tuple.__new__, Event), rows)  # what Event._make does, without a call in Python for each
