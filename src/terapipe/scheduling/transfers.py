"""Adds sends and receives to lists of computations, following one global order of transfers."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from terapipe.planning.cost import LinkBehavior
from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import COMPUTE, SENDS, Action, Op, Schedule
from terapipe.scheduling.program import ENDS, Program, compiled, run

AHEAD = 2  # computations between a receive and the one that needs it, if the order of transfers permits
EARLY = 3  # additional computations, in `with_early_receives`

Lists = Sequence[Sequence[Action]]


def with_transfers(plan: Plan, computations: Lists) -> Schedule:
    """The Schedule in which each rank performs its computations in the given order.

    All transfers are put into one global order: that of an ideal run. Each rank lists its sends and receives in this
    order, a send right after its producer, a receive about ``AHEAD`` computations before its consumer. So neighbors
    list their shared transfers in the same order, and there is no deadlock even if every transfer blocks both ends.
    """
    program = compiled(plan, computations)
    places = _places(program)
    ends_of: list[list[End]] = [[] for _ in computations]  # by rank
    for producer, consumer in _transfers(program):
        op, k, s = program.actions[producer]
        send, receive, offset = ENDS[op]
        ends_of[program.ranks[producer]].append(End(Action(send, k, s), places[producer] + 1, places[producer] + 1))
        due = places[consumer]
        ends_of[program.ranks[consumer]].append(End(Action(receive, k + offset, s), due, due - AHEAD))
    return Schedule(plan, tuple(_merge(c, ends) for c, ends in zip(computations, ends_of, strict=True)))


class End(NamedTuple):
    """A send or receive, and how many of its rank's computations should come before it."""

    action: Action
    latest: int  # at most
    preferred: int  # if the order of transfers permits


def _places(program: Program) -> list[int]:
    """The index of each computation in the list of its rank."""
    counts = [0] * program.num_ranks
    places = []
    for rank in program.ranks:
        places.append(counts[rank])
        counts[rank] += 1
    return places


def _transfers(program: Program) -> list[tuple[int, int]]:
    """The (producer, consumer) of every transfer, ordered as in an ideal run: a forward takes one unit of time, a
    backward two, a transfer none. Slice lengths play no part, so plans that differ only in them have equal schedules.
    """
    seconds = [_DURATION[action.op] for action in program.actions]
    ends = run(program, seconds, [0.0] * len(seconds), [LinkBehavior()] * len(program.links[0])).ends
    pairs = [(need, consumer) for consumer, need in enumerate(program.needs) if need >= 0]
    stages, ops, slices = program.places
    producers = np.array([producer for producer, _ in pairs], dtype=np.int64)
    keys = slices[producers], stages[producers], ops[producers] == 0, np.array(ends)[producers]
    return [pairs[i] for i in np.lexsort(keys).tolist()]  # backwards before forwards that end at the same time


_DURATION = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.0, Op.W: 1.0}


def _merge(computations: Sequence[Action], ends: Sequence[End]) -> tuple[Action, ...]:
    """Merges one rank's computations and transfers. Both keep their order.

    A receive comes before its consumer, and before every transfer that follows it in the order of transfers. So its
    latest position is the minimum of its own and of all that follow. Example with the computations a b c d e, and two
    transfers in this order: a receive for e (latest 4, preferred 2), and the send of a's result (latest 1):

        a recv send b c d e     The receive moves from position 2 to 1, so that it does not delay the send.
    """
    latest = list(accumulate((end.latest for end in reversed(ends)), min))[::-1]
    merged: list[Action] = []
    emitted = 0
    for end, last in zip(ends, latest, strict=True):
        upto = min(last, end.preferred)
        if upto > emitted:
            merged += computations[emitted:upto]
            emitted = upto
        merged.append(end.action)
    return tuple(merged) + tuple(computations[emitted:])


def with_early_receives(actions: Sequence[Action]) -> tuple[Action, ...]:
    """One rank's list with every receive ``EARLY`` computations earlier, also ahead of sends. Receives stay in order.

    For gloo. It sends nothing before the peer has announced the receive, and the announcement queues behind the peer's
    own sends. So over a slow link a receive must be posted long before it is needed. NCCL does not permit this: both
    ends must issue their transfers in the same order.
    """
    keys, done = [], 0  # sort keys: computations before the action, and receives before the rest
    for action in actions:
        receive = action.op not in COMPUTE and action.op not in SENDS
        keys.append((max(0, done - EARLY), 0) if receive else (done, 1))
        done += action.op in COMPUTE
    order = sorted(range(len(actions)), key=keys.__getitem__)
    return tuple(actions[i] for i in order)
