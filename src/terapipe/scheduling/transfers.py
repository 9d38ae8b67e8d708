"""Adds sends and receives to lists of computations, all drawn from one global order of transfers."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from terapipe.planning.cost import LinkBehavior
from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import COMPUTE, SENDS, Action, Op, Schedule
from terapipe.scheduling.program import ENDS, Program, compiled, run

AHEAD = 2  # a receive is posted this many computations before the one that needs it, if its turn has come

EARLY = 3  # and by so many earlier still where the order of transfers binds nobody

Lists = Sequence[Sequence[Action]]


def with_transfers(plan: Plan, computations: Lists) -> Schedule:
    """The Schedule in which each rank does its computations in the given order.

    Transfers happen in the order in which an ideal run would produce them. Each rank lists its own in that order: a
    send right after what produces it, a receive as early as ``AHEAD`` permits. So neighbours list what they share
    alike, and a run in which every transfer blocks both ends still gets through.
    """
    program = compiled(plan, computations)
    places = _places(program)
    mine: list[list[End]] = [[] for _ in computations]
    for producer, consumer in _transfers(program):
        op, k, s = program.actions[producer]
        send, receive, on = ENDS[op]
        mine[program.ranks[producer]].append(End(Action(send, k, s), places[producer] + 1, places[producer] + 1))
        due = places[consumer]
        mine[program.ranks[consumer]].append(End(Action(receive, k + on, s), due, due - AHEAD))
    return Schedule(plan, tuple(_merge(c, ends) for c, ends in zip(computations, mine, strict=True)))


class End(NamedTuple):
    """One rank's end of a transfer: how many of the rank's computations come before it, at most and if all is well."""

    action: Action
    latest: int
    wanted: int


def _places(program: Program) -> list[int]:
    """Of each computation its place in the list of its rank."""
    counts = [0] * program.num_ranks
    places = []
    for rank in program.ranks:
        places.append(counts[rank])
        counts[rank] += 1
    return places


def _transfers(program: Program) -> list[tuple[int, int]]:
    """What produces and what consumes each, in the order of an ideal run: a forward takes one unit of time, a backward
    two, a transfer none. Lengths of slices have no part in it, so plans that differ only in them run alike."""
    seconds = [_DURATION[action.op] for action in program.actions]
    ends = run(program, seconds, [0.0] * len(seconds), [LinkBehavior()] * len(program.links[0])).ends
    pairs = [(need, consumer) for consumer, need in enumerate(program.needs) if need >= 0]
    stages, ops, slices = program.places
    producers = np.array([producer for producer, _ in pairs], dtype=np.int64)
    keys = slices[producers], stages[producers], ops[producers] == 0, np.array(ends)[producers]
    return [pairs[i] for i in np.lexsort(keys).tolist()]  # backwards before forwards that end at the same time


_DURATION = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.0, Op.W: 1.0}


def _merge(computations: Sequence[Action], ends: Sequence[End]) -> tuple[Action, ...]:
    """One rank's list: its computations and its ends of the transfers, both in their given order."""
    # A receive must come before what needs it, and must not hold up a send that follows it in the order of transfers.
    latest = list(accumulate((end.latest for end in reversed(ends)), min))[::-1]
    merged: list[Action] = []
    emitted = 0
    for end, last in zip(ends, latest, strict=True):
        upto = min(last, end.wanted)
        if upto > emitted:
            merged += computations[emitted:upto]
            emitted = upto
        merged.append(end.action)
    return tuple(merged) + tuple(computations[emitted:])


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
