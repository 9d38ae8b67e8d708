"""Checks before the first step that a Schedule is complete and cannot deadlock, once for all plans of one shape."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple, Self

from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import COMPUTE, SENDS, Action, Op, Schedule, counterpart, dependencies, required
from terapipe.scheduling.orders import schedule

OPS = tuple(Op)
_PLACE = {op: i for i, op in enumerate(OPS)}


class Numbering:
    """Numbers the actions of a plan: ``(op * num_stages + stage) * width + slice``, ``width`` being the slices.

    A number divided by ``width`` is the row: all actions of one op on one stage. Properties "by row" are indexed so.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.width = plan, len(plan.slices)
        self._firsts = list(accumulate(map(len, plan.lengths), initial=0))
        self._first_i = self.first(Op.I, 0)
        self._from_b_to_i = self._first_i - self.first(Op.B, 0)  # also the count of all I: ops have equal ranges

    def number(self, action: Action) -> int:
        """The number of an action, or -1 if it is not in the plan."""
        op, k, s = action
        if not (0 <= k < self.plan.num_stages and 0 <= s.microbatch < len(self.plan.sizes)):
            return -1
        index = self._firsts[s.microbatch] + s.number
        known = 0 <= index < self.width and self.plan.slices[index] == s
        return self.first(op, k) + index if known else -1

    def action(self, number: int) -> Action:
        row, index = divmod(number, self.width)
        op, k = divmod(row, self.plan.num_stages)
        return Action(OPS[op], k, self.plan.slices[index])

    def first(self, op: Op, stage: int) -> int:
        """The number of the first slice's action. Those of the other slices follow."""
        return (_PLACE[op] * self.plan.num_stages + stage) * self.width

    def completed(self, number: int) -> int:
        """As ``actions.completes``: the ``B`` for an ``I``, else the number itself."""
        is_i = self._first_i <= number < self._first_i + self._from_b_to_i
        return number - self._from_b_to_i if is_i else number

    @cached_property
    def around(self) -> list[tuple[int, int]]:
        """For each slice, how many slices of its microbatch come before and after it."""
        return [(i, len(row) - 1 - i) for row in self.plan.grid for i in range(len(row))]

    @cached_property
    def ranks(self) -> list[int]:
        """The rank that performs the actions, by row."""
        stages = self.plan.num_stages
        return [self.plan.rank_of(k) for k in range(stages)] * len(OPS)

    @cached_property
    def needs(self) -> list[list[tuple[int, int]]]:
        """By row: for each dependency the number of its first slice's action, and its offset in slices."""
        return [self._needs(op, k) for op in OPS for k in range(self.plan.num_stages)]

    def _needs(self, op: Op, stage: int) -> list[tuple[int, int]]:
        middle = self._three_slices.slices[1]
        needed = dependencies(Action(op, stage, middle), self._three_slices)
        return [(self.first(need.op, need.stage), need.slice.number - 1) for need in needed]

    @cached_property
    def _three_slices(self) -> Plan:
        """The same stages with one microbatch of three slices. The middle one has every kind of dependency."""
        return replace(self.plan, sizes=(1,), lengths=((1, 1, 1),))

    @cached_property
    def _counterparts(self) -> list[int]:
        """By row: the number of the first slice's action at the other end of the transfer, -1 for computations."""
        return [self._first_counterpart(op, k) for op in OPS for k in range(self.plan.num_stages)]

    def counterpart(self, transfer: int) -> int:
        """The other end of a transfer, -1 for a computation."""
        row, index = divmod(transfer, self.width)
        first = self._counterparts[row]
        return first if first < 0 else first + index

    def rank(self, number: int) -> int:
        return self.ranks[number // self.width]

    def _first_counterpart(self, op: Op, stage: int) -> int:
        if op in COMPUTE:
            return -1
        other = counterpart(Action(op, stage, self.plan.slices[0]))
        return self.first(other.op, other.stage) if 0 <= other.stage < self.plan.num_stages else -1


Lists = Sequence[Sequence[int]]  # the actions of each rank, as numbers (see Numbering)


def validate(schedule: Schedule) -> None:
    """Raises ValueError unless every rank does all of its work exactly once, neighbors list their shared transfers in
    the same order, and there is no deadlock.

    The deadlock check assumes that every transfer blocks both ends until it is done. So a runtime with asynchronous
    transfers cannot deadlock either, with or without message tags. Run time is linear in the number of actions.
    """
    ranks = schedule.plan.num_ranks
    if len(schedule.ranks) != ranks:
        raise ValueError(f"the plan is for {ranks} ranks, the schedule has {len(schedule.ranks)}")
    numbering = Numbering(schedule.plan)
    lists = [_complete(rank, actions, numbering) for rank, actions in enumerate(schedule.ranks)]
    _check_same_order(lists, numbering)
    _BlockingRun(lists, numbering).check()


def _complete(rank: int, actions: Sequence[Action], numbering: Numbering) -> list[int]:
    """The numbers of one rank's actions, after a check that none is missing, repeated or another rank's."""
    plan, width = numbering.plan, numbering.width
    listed = [numbering.number(action) for action in actions]
    counts = Counter(map(numbering.completed, listed))
    firsts = [numbering.first(op, k) for k in plan.stages_of(rank) for op in required(k, plan)]
    expected = {number for first in firsts for number in range(first, first + width)}
    from_i_to_w = numbering.first(Op.W, 0) - numbering.first(Op.I, 0)
    expected |= {number + from_i_to_w for number in listed if number != numbering.completed(number)}  # a W for every I
    for number in sorted(expected - counts.keys()):
        action = numbering.action(number)
        raise ValueError(f"rank {rank} never does {action}; every slice needs a forward and a backward on every stage")
    for action, number in zip(actions, listed, strict=True):
        completed = numbering.completed(number)
        if counts[completed] > 1 or completed not in expected:
            raise ValueError(f"rank {rank} does {action} too often, or it is not that rank's to do")
    return listed


def _check_same_order(lists: Lists, numbering: Numbering) -> None:
    shared = [_by_peer(numbers, numbering) for numbers in lists]
    for a, peers in enumerate(shared):
        for b in (peer for peer in peers if peer > a):
            for number_a, number_b in zip(peers[b], shared[b][a], strict=True):  # equally many: both are complete
                if number_a != numbering.counterpart(number_b):
                    raise ValueError(
                        "neighbors must list their shared transfers in the same order: where rank "
                        f"{a} has {numbering.action(number_a)}, rank {b} has {numbering.action(number_b)}"
                    )


def _by_peer(numbers: Sequence[int], numbering: Numbering) -> dict[int, list[int]]:
    """One rank's transfers, by the rank at their other end."""
    peers: dict[int, list[int]] = {}
    for number in numbers:
        other = numbering.counterpart(number)
        if other >= 0:
            peers.setdefault(numbering.rank(other), []).append(number)
    return peers


class _BlockingRun:
    """Runs all lists symbolically. A transfer needs both ranks at its two ends at once (rendezvous).

    If a rank cannot finish its list, ranks wait for each other in a cycle: a deadlock.
    """

    def __init__(self, lists: Lists, numbering: Numbering) -> None:
        self._lists, self._numbering = lists, numbering
        self._done = bytearray(len(OPS) * numbering.plan.num_stages * numbering.width)
        self._positions = [0] * len(lists)  # of each rank, in its list
        self._sends = [op in SENDS for op in OPS for _ in range(numbering.plan.num_stages)]  # by row

    def check(self) -> None:
        lists, positions, numbering = self._lists, self._positions, self._numbering
        # Ranks by the action they wait for. In a set, so that a rank that stops twice for one action is woken once.
        waiting: dict[int, set[int]] = {}
        runnable = list(range(len(lists)))
        while runnable:
            rank = runnable.pop()
            while positions[rank] < len(lists[rank]):
                number = lists[rank][positions[rank]]
                missing = self._missing(number)
                if missing >= 0:
                    waiting.setdefault(missing, set()).add(rank)
                    break
                runnable += self._finish(number, waiting)
                other = numbering.counterpart(number)
                if other >= 0:  # the peer is at the other end of this transfer: both advance
                    runnable += self._finish(other, waiting) | {numbering.rank(other)}
        if any(i < len(numbers) for i, numbers in zip(positions, lists, strict=True)):
            raise ValueError("the schedule deadlocks: " + self._cycle())

    def _finish(self, number: int, waiting: dict[int, set[int]]) -> set[int]:
        """Marks an action as done and advances its rank. Returns the ranks that waited for it."""
        completed = self._numbering.completed(number)
        self._done[completed] = 1
        self._positions[self._numbering.rank(number)] += 1
        return waiting.pop(completed, set())

    def _missing(self, number: int) -> int:
        """The action that must come first: a dependency, or the other end of the transfer. -1 if there is none."""
        numbering = self._numbering
        other = numbering.counterpart(number)
        if other < 0:
            return self._dependency(number)
        rank = numbering.rank(other)
        send, receive = (number, other) if self._sends[number // numbering.width] else (other, number)
        if send == number and (need := self._dependency(send)) >= 0:
            return need
        position = self._positions[rank]
        peer_is_there = position < len(self._lists[rank]) and self._lists[rank][position] == other
        if not peer_is_there:
            return other
        return -1 if receive == other else self._dependency(send)  # a receive can finish when its send can

    def _dependency(self, number: int) -> int:
        """The first dependency that is not done, or -1."""
        row, index = divmod(number, self._numbering.width)
        for first, ahead in self._numbering.needs[row]:
            if ahead:
                before, after = self._numbering.around[index]
                if (ahead < 0 and not before) or (ahead > 0 and not after):
                    continue
            if not self._done[first + index + ahead]:
                return first + index + ahead
        return -1

    def _cycle(self) -> str:
        """Follows the waits from a stuck rank until one repeats."""
        numbering = self._numbering
        rank = next(r for r, numbers in enumerate(self._lists) if self._positions[r] < len(numbers))
        seen: dict[int, str] = {}
        while rank not in seen:
            number = self._lists[rank][self._positions[rank]]
            missing = self._missing(number)
            owner = numbering.rank(missing)
            waits = f"rank {rank} is at {numbering.action(number)} and waits for {numbering.action(missing)}"
            seen[rank] = waits + (", which comes later in its own list" if owner == rank else f" of rank {owner}")
            rank = owner
        steps = list(seen.items())
        start = [r for r, _ in steps].index(rank)
        return "; ".join(text for _, text in steps[start:])


class Shape(NamedTuple):
    """What a schedule depends on: the number of slices, not their lengths."""

    order: str
    counts: tuple[int, ...]  # slices of each microbatch
    num_stages: int
    chunks: int
    recompute: bool

    @classmethod
    def of(cls, plan: Plan) -> Self:
        return cls(plan.order, tuple(map(len, plan.lengths)), plan.num_stages, plan.chunks, plan.recompute)

    def plan(self) -> Plan:
        """A plan of this shape. All slices of a microbatch but the last have one token."""
        most = max(self.counts)
        lengths = tuple((1,) * (count - 1) + (most - count + 1,) for count in self.counts)
        edges = tuple(range(self.num_stages + 1))
        return Plan((1,) * len(self.counts), lengths, edges, self.order, self.chunks, self.recompute)


def validated_actions(plan: Plan, rank: int) -> tuple[Action, ...]:
    """The actions of ``rank``. Raises ValueError if the schedule is incomplete or could deadlock."""
    grid = plan.grid
    return tuple(Action(op, k, grid[s.microbatch][s.number]) for op, k, s in _of_shape(Shape.of(plan), rank))


@lru_cache(maxsize=64)  # holds only the lists of one rank, the process's own
def _of_shape(shape: Shape, rank: int) -> tuple[Action, ...]:
    built = schedule(shape.plan())
    validate(built)
    return built.ranks[rank]
