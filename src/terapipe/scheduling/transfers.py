"""Adds sends and receives to lists of computations, following one global order of transfers; and copies."""

from collections.abc import Sequence

import numpy as np

from terapipe.planning.cost import LinkBehavior
from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import COMPUTE, RECEIVES, Action, Op, Schedule
from terapipe.scheduling.copies import with_copies
from terapipe.scheduling.program import CODE, COMPUTATIONS, ENDS, Ints, Program, compile_program, run

AHEAD = 2  # computations between a receive and the one that needs it, if the order of transfers permits
EARLY = 3  # additional computations, in `with_early_receives`


def with_transfers(plan: Plan, computations: Sequence[Sequence[Action]]) -> Schedule:
    """The Schedule in which each rank performs its computations in the given order."""
    program = compile_program(plan, computations)
    return Schedule(plan, tuple(tuple(program.numbering.actions(numbers)) for numbers in list_actions(program)))


def list_actions(program: Program) -> list[Ints]:
    """The numbers of all that each rank does: computations, transfers, and copies of what the plan offloads."""
    lists, numbering = list_transfers(program), program.numbering
    return with_copies(lists, numbering) if numbering.plan.offloads else lists


def list_transfers(program: Program) -> list[Ints]:
    """The numbers of each rank's actions: its computations in the given order, and its sends and receives.

    All transfers are put into one global order: that of an ideal run. Each rank lists its sends and receives in this
    order, a send right after its producer, a receive about ``AHEAD`` computations before its consumer. So neighbors
    list their shared transfers in the same order, and there is no deadlock even if every transfer blocks both ends.
    """
    producers, consumers = _transfers(program)
    sends, receives = _numbers(program, producers)
    listed = program.listed
    after, due = listed[producers] + 1, listed[consumers]
    # Both ends of every transfer: first all sends, then all receives.
    ranks = np.concatenate((program.ranks[producers], program.ranks[consumers]))
    ends = np.concatenate((sends, receives))
    latest, preferred = np.concatenate((after, due)), np.concatenate((after, due - AHEAD))
    turn = np.tile(np.arange(len(producers)), 2)
    order = np.lexsort((turn, ranks))
    parts = np.split(order, np.searchsorted(ranks[order], np.arange(1, program.num_ranks)))
    lists = zip(program.lists, parts, strict=True)
    return [_merge(numbers, ends[part], latest[part], preferred[part]) for numbers, part in lists]


def _transfers(program: Program) -> tuple[Ints, Ints]:
    """The producer and the consumer of every transfer, ordered as in an ideal run: a forward takes one unit of time, a
    backward two, a transfer none. Slice lengths play no part, so plans that differ only in them have equal schedules.
    """
    stages, ops, slices = program.indices
    seconds = _DURATIONS[ops].tolist()
    ends = run(program, seconds, [0.0] * len(seconds), [LinkBehavior()] * len(program.links[0])).ends
    consumers = np.flatnonzero(program.needs >= 0)
    producers = program.needs[consumers]
    is_forward = ops[producers] == COMPUTATIONS.index(Op.F)  # backwards before forwards that end at the same time
    order = np.lexsort((slices[producers], stages[producers], is_forward, np.array(ends)[producers]))
    return producers[order], consumers[order]


_DURATIONS = np.array([{Op.F: 1.0, Op.B: 2.0, Op.I: 1.0, Op.W: 1.0}[op] for op in COMPUTATIONS])
_SENDS, _RECEIVES, _OFFSETS = np.array(
    [(CODE[ENDS[op][0]], CODE[ENDS[op][1]], ENDS[op][2]) if op in ENDS else (0, 0, 0) for op in COMPUTATIONS]
).T  # by column of the producer; a weight half sends nothing


def _numbers(program: Program, producers: Ints) -> tuple[Ints, Ints]:
    """The sends of these computations' results, and the receives."""
    stages, ops, slices = (column[producers] for column in program.indices)
    number = program.numbering.number
    return number(_SENDS[ops], stages, slices), number(_RECEIVES[ops], stages + _OFFSETS[ops], slices)


def _merge(computations: Ints, transfers: Ints, latest: Ints, preferred: Ints) -> Ints:
    """Merges one rank's computations and transfers. Both keep their order.

    ``latest`` says how many computations may come before a transfer at most, ``preferred`` how many should. A transfer
    must not delay those that come later in the order of transfers. So its latest position is the minimum of its own and
    of all that follow. Example with the computations a b c d e, and two transfers in this order: a receive for e
    (latest 4, preferred 2), and the send of a's result (latest 1):

        a recv send b c d e     The receive moves from position 2 to 1, so that it does not delay the send.
    """
    bound = np.minimum.accumulate(latest[::-1])[::-1]
    before = np.maximum.accumulate(np.clip(np.minimum(bound, preferred), 0, None))  # computations before each transfer
    merged = np.empty(len(computations) + len(transfers), dtype=np.int64)
    places = before + np.arange(len(transfers))
    merged[places] = transfers
    rest = np.full(len(merged), True)
    rest[places] = False
    merged[rest] = computations
    return merged


def with_early_receives(actions: Sequence[Action]) -> tuple[Action, ...]:
    """One rank's list with every receive ``EARLY`` computations earlier, also ahead of sends. Receives stay in order.

    For gloo. It sends nothing before the peer has announced the receive, and the announcement queues behind the peer's
    own sends. So over a slow link a receive must be posted long before it is needed. NCCL does not permit this: both
    ends must issue their transfers in the same order.
    """
    keys, done = [], 0  # sort keys: computations before the action, and receives before the rest
    for action in actions:
        receive = action.op in RECEIVES
        keys.append((max(0, done - EARLY), 0) if receive else (done, 1))
        done += action.op in COMPUTE
    order = sorted(range(len(actions)), key=keys.__getitem__)
    return tuple(actions[i] for i in order)
