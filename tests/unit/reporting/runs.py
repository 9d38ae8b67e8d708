"""Runs to show, by a clock simple enough to check by hand."""

from terapipe import Action, Event, Op, Plan, Timeline, schedule
from terapipe.reporting.view import RunView
from terapipe.scheduling.actions import COMPUTE, completes, dependencies

SECONDS = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.0, Op.W: 1.0}  # a token
DELAY = 0.5  # from the start of a send to the end of its receive


def stepped(plan: Plan, scale: float = 1.0) -> Timeline:
    """Every action as early as what it waits for allows, its transfers recorded too."""
    lists = schedule(plan).ranks
    done: dict[Action, float] = {}
    events: list[Event] = []
    at, clock = [0] * len(lists), [0.0] * len(lists)
    while any(i < len(actions) for i, actions in zip(at, lists, strict=True)):
        for rank, actions in enumerate(lists):
            if at[rank] == len(actions) or not done.keys() >= set(dependencies(actions[at[rank]], plan)):
                continue
            action = actions[at[rank]]
            at[rank] += 1
            start = max([done[need] for need in dependencies(action, plan)], default=0.0)
            if action.op in COMPUTE:
                start = max(start, clock[rank])
                end = clock[rank] = start + SECONDS[action.op] * action.slice.length * scale
                done[completes(action)] = end
            else:
                end = start + DELAY * scale
                done[action] = end if action.op in (Op.RECV_F, Op.RECV_B) else start
            events.append(Event(rank, action, start, end))
    return Timeline.of(plan, events)


def view(name: str, timeline: Timeline) -> RunView:
    """With a byte of memory per token in flight, and all idle time attributed to filling and draining."""
    memory: list[list[tuple[float, float]]] = [[(0.0, 0.0)] for _ in range(timeline.plan.num_ranks)]
    for rank, (op, _, s), start, end in timeline.computations:
        if op is Op.F:
            memory[rank].append((start, memory[rank][-1][1] + s.length))
        elif op is not Op.I:
            memory[rank].append((end, memory[rank][-1][1] - s.length))
    idle = []
    for rank in range(timeline.plan.num_ranks):
        mine = [e for e in timeline.computations if e.rank == rank]
        busy, first = sum(e.end - e.start for e in mine), min(e.start for e in mine)
        idle.append({"fill": first, "drain": timeline.makespan - busy - first})
    return RunView(name, timeline, idle, memory)


def crowd(ranks: int, slices: int) -> Timeline:
    """Forward and backward of one slice after the other, without regard for what waits for what: quick to make."""
    plan = Plan((1,), ((1,) * slices,), stages(ranks))
    pairs = ((Op.F, 0.0, 1.0), (Op.B, 1.0, 2.5))
    return Timeline.of(
        plan,
        (
            Event(rank, Action(op, rank, s), rank + 3.0 * s.number + start, rank + 3.0 * s.number + end)
            for rank in range(ranks)
            for s in plan.slices
            for op, start, end in pairs
        ),
    )


def stages(count: int) -> tuple[int, ...]:
    return tuple(range(count + 1))
