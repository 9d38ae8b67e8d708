"""How long a schedule would take: its computations, run against a cost model instead of a clock."""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from terapipe.planning.cost import Array, Cost, Part, parts
from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import COMPUTE, Action, Op, Schedule, counterpart
from terapipe.scheduling.orders import computations
from terapipe.scheduling.program import Program, Times, compiled, run
from terapipe.scheduling.timeline import Event, Timeline


def simulate(schedule: Schedule, cost: Cost) -> Timeline:
    """The Timeline of one step, without what happens once per step."""
    plan = schedule.plan
    lists = [[a for a in rank if a.op in COMPUTE] for rank in schedule.ranks]
    built = compiled(plan, lists)
    delays = _delays(built, plan, cost)
    times = run(built, _durations(built, plan, cost), delays, overlapped=cost.overlapped)
    return Timeline(plan, tuple(sorted(_events(built, plan, times, delays), key=lambda e: (e.rank, e.start, e.end))))


def makespan(plan: Plan, cost: Cost) -> float:
    """Seconds of one step, as ``simulate(schedule(plan), cost)`` says, but without listing a schedule."""
    built = program(plan)
    seconds, delays = _durations(built, plan, cost), _delays(built, plan, cost)
    return run(built, seconds, delays, overlapped=cost.overlapped).makespan


def program(plan: Plan) -> Program:
    """The program of the plan's own order. It depends on the numbers of slices, not on their lengths."""
    return _program(plan.order, tuple(map(len, plan.lengths)), plan.num_stages, plan.chunks)


@lru_cache(maxsize=32)
def _program(order: str, counts: tuple[int, ...], num_stages: int, chunks: int) -> Program:
    tokens = np.lcm.reduce(counts)
    lengths = tuple((int(tokens) // count,) * count for count in counts)
    plan = Plan((1,) * len(counts), lengths, tuple(range(num_stages + 1)), order, chunks)
    return compiled(plan, computations(plan))


_COLUMN = {Op.F: 0, Op.B: 1, Op.I: 2, Op.W: 3}


def _durations(program: Program, plan: Plan, cost: Cost) -> list[float]:
    """The seconds of each computation."""
    held = parts(plan.boundaries)
    kinds = sorted(set(held))
    tables = np.stack([_table(plan, part, cost) for part in kinds])
    kind = np.array([kinds.index(part) for part in held])
    ops = [_COLUMN[op] for op in program.ops]
    seconds: list[float] = tables[kind[program.stages], ops, program.slices].tolist()
    return seconds


def _table(plan: Plan, part: Part, cost: Cost) -> Array:
    """Seconds by op and slice."""
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
    ends = list(zip(program.ranks, program.peers, strict=True))
    seconds = {
        pair: np.broadcast_to(cost.transfer(*pair, size, length), size.shape).tolist()
        for pair in set(ends)
        if pair[1] >= 0
    }
    return [seconds[pair][flat] if pair in seconds else 0.0 for pair, flat in zip(ends, program.slices, strict=True)]


def _events(program: Program, plan: Plan, times: Times, delays: list[float]) -> Iterable[Event]:
    slices = plan.slices
    for i, (rank, op, stage, flat) in enumerate(
        zip(program.ranks, program.ops, program.stages, program.slices, strict=True)
    ):
        yield Event(rank, Action(op, stage, slices[flat]), times.starts[i], times.ends[i])
        if program.peers[i] >= 0:
            send = Action(Op.SEND_F if op is Op.F else Op.SEND_B, stage, slices[flat])
            began = times.arrivals[i] - delays[i]
            yield Event(rank, send, began, times.arrivals[i])
            yield Event(program.peers[i], counterpart(send), began, times.arrivals[i])
