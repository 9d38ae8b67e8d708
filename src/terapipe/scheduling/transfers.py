"""Adds sends and receives to lists of computations, all drawn from one global order of transfers."""

from collections.abc import Callable, Iterator, Sequence

from terapipe.planning.cost import Sending
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
from terapipe.scheduling.program import compiled, run

AHEAD = 2  # a receive is posted this many computations before the one that needs it, if its turn has come

EARLY = 3  # and by so many earlier still where the order of transfers binds nobody

Lists = Sequence[Sequence[Action]]


def with_transfers(plan: Plan, computations: Lists) -> Schedule:
    """The Schedule in which each rank does its computations in the given order.

    Transfers happen in the order in which an ideal run would produce them. Each rank lists its own in that order: a
    send right after what produces it, a receive as early as ``AHEAD`` permits. So neighbours list what they share
    alike, and a run in which every transfer blocks both ends still gets through.
    """
    finish = _ideal_finish(plan, computations)
    sends = sorted(_sends(plan, computations), key=lambda send: (finish[_producer(send, plan)], send))
    ends: list[list[Action]] = [[] for _ in computations]
    for send in sends:
        for end in (send, counterpart(send)):
            ends[plan.rank_of(end.stage)].append(end)
    return Schedule(plan, tuple(_merge(plan, list(c), e) for c, e in zip(computations, ends, strict=True)))


def _ideal_finish(plan: Plan, computations: Lists) -> dict[Action, float]:
    """When each computation ends if a forward takes its number of tokens, a backward twice that, a transfer nothing."""
    program = compiled(plan, computations)
    seconds = [float(_DURATION[op] * s.size * s.length) for op, _, s in program.actions]
    times = run(program, seconds, [0.0] * len(seconds), [Sending()] * len(program.links[0]))
    return {settles(action): end for action, end in zip(program.actions, times.ends, strict=True)}


_DURATION = {Op.F: 1, Op.B: 2, Op.I: 1, Op.W: 1}


def _producer(send: Action, plan: Plan) -> Action:
    (need,) = dependencies(send, plan)
    return need


def _sends(plan: Plan, computations: Lists) -> Iterator[Action]:
    """One send for every transfer that these computations call for."""
    done = {settles(action) for actions in computations for action in actions}
    for k in range(plan.num_stages):
        for s in plan.slices:
            for action in required(k, plan, s):
                if action.op in SENDS and _producer(action, plan) in done:
                    yield action


def _merge(plan: Plan, computations: list[Action], mine: list[Action]) -> tuple[Action, ...]:
    """One rank's list: its computations and its ends of the transfers, both in their given order."""
    place = {settles(action): i for i, action in enumerate(computations)}
    consumer = _consumers(plan, computations)
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


def with_early_receives(actions: Sequence[Action]) -> tuple[Action, ...]:
    """A rank's list with its receives ``EARLY`` computations earlier, past sends that come before them in the order of
    transfers; their own order stays.

    For gloo, which sends nothing before it has heard of the receive, and that word queues behind what its rank is
    sending. Over a slow link a receive must be posted long before it is needed; gloo permits it, NCCL does not.
    """
    place, done = [], 0  # before which computation each action comes
    for action in actions:
        receive = action.op not in COMPUTE and action.op not in SENDS
        place.append((max(0, done - EARLY), 0) if receive else (done, 1))
        done += action.op in COMPUTE
    order = sorted(range(len(actions)), key=place.__getitem__)
    return tuple(actions[i] for i in order)
