"""Adds sends and receives to lists of computations, all drawn from one global order of transfers."""

from collections.abc import Callable, Iterator, Sequence

from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import (
    COMPUTE,
    SENDS,
    Action,
    Op,
    Schedule,
    counterpart,
    dependencies,
    required,
    settles,
)

AHEAD = 2  # a receive is posted this many computations before the one that needs it, if its turn has come

Lists = Sequence[Sequence[Action]]


def with_transfers(plan: Plan, computations: Lists) -> Schedule:
    """The Schedule in which each rank does its computations in the given order.

    Transfers happen in the order in which an ideal run would produce them. Each rank lists its own in that order: a
    send right after what produces it, a receive as early as ``AHEAD`` permits. So neighbours list what they share
    alike, and a run in which every transfer blocks both ends still gets through.
    """
    finish = ideal_finish(plan, computations)
    transfers = sorted(_transfers(plan, computations), key=lambda send: (finish[_producer(send, plan)], send))
    return Schedule(plan, tuple(_merge(plan, rank, list(c), transfers) for rank, c in enumerate(computations)))


def ideal_finish(plan: Plan, computations: Lists) -> dict[Action, int]:
    """When each computation ends if a forward takes its number of tokens, a backward twice that, a transfer nothing."""
    finish: dict[Action, int] = {}
    clock, at = [0] * len(computations), [0] * len(computations)
    waiting: dict[Action, list[int]] = {}
    runnable = list(range(len(computations)))
    while runnable:
        rank = runnable.pop()
        while at[rank] < len(computations[rank]):
            action = computations[rank][at[rank]]
            needs = list(_computed_needs(action, plan))
            missing = next((need for need in needs if need not in finish), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            start = max([clock[rank]] + [finish[need] for need in needs])
            clock[rank] = finish[settles(action)] = (
                start + _DURATION[action.op] * action.slice.size * action.slice.length
            )
            at[rank] += 1
            runnable += waiting.pop(settles(action), [])
    stuck = [f"rank {r} at {c[i]}" for r, (c, i) in enumerate(zip(computations, at, strict=True)) if i < len(c)]
    if stuck:
        raise ValueError("these computations wait for each other in a circle: " + "; ".join(stuck))
    return finish


_DURATION = {Op.F: 1, Op.B: 2, Op.I: 1, Op.W: 1}


def _computed_needs(action: Action, plan: Plan) -> Iterator[Action]:
    """Its dependencies, with each transfer replaced by the computation that produces what is sent."""
    for need in dependencies(action, plan):
        while need.op not in COMPUTE:
            (need,) = dependencies(need, plan)
        yield need


def _producer(send: Action, plan: Plan) -> Action:
    (need,) = dependencies(send, plan)
    return need


def _transfers(plan: Plan, computations: Lists) -> Iterator[Action]:
    """One send for every transfer that these computations call for."""
    done = {settles(action) for actions in computations for action in actions}
    for k in range(plan.num_stages):
        for s in plan.slices:
            for action in required(k, plan, s):
                if action.op in SENDS and _producer(action, plan) in done:
                    yield action


def _merge(plan: Plan, rank: int, computations: list[Action], transfers: Sequence[Action]) -> tuple[Action, ...]:
    """One rank's list: its computations and its ends of the transfers, both in their given order."""
    place = {settles(action): i for i, action in enumerate(computations)}
    consumer = _consumers(plan, computations)
    mine = [end for send in transfers for end in (send, counterpart(send)) if plan.rank_of(end.stage) == rank]
    # A receive must come before what needs it, and must not hold up a send that follows it in the order of transfers.
    latest = [len(computations)] * (len(mine) + 1)
    for j in range(len(mine) - 1, -1, -1):
        last = place[_producer(mine[j], plan)] + 1 if mine[j].op in SENDS else place[consumer(mine[j])]
        latest[j] = min(latest[j + 1], last)
    merged: list[Action] = []
    emitted = 0
    for j, end in enumerate(mine):
        upto = latest[j] if end.op in SENDS else min(latest[j], place[consumer(end)] - AHEAD)
        if upto > emitted:
            merged += computations[emitted:upto]
            emitted = upto
        merged.append(end)
    return tuple(merged + computations[emitted:])


def _consumers(plan: Plan, computations: Sequence[Action]) -> Callable[[Action], Action]:
    consumer = {need: settles(action) for action in computations for need in dependencies(action, plan)}
    return consumer.__getitem__
