"""Proof, before the first step, that a Schedule is whole and cannot block."""

from collections import Counter
from collections.abc import Sequence

from terapipe.scheduling.actions import SENDS, Action, Op, Schedule, required
from terapipe.scheduling.numbering import OPS, Numbering

Lists = Sequence[Sequence[int]]  # of each rank, its actions by their numbers


def validate(schedule: Schedule) -> None:
    """Raises ValueError unless every rank does its work once, neighbours list their transfers alike, nothing blocks.

    Blocking is judged as if every transfer held up both ends until it is done. A runtime that only posts transfers
    and waits when it needs them can then never deadlock, tags or no tags. The time grows with the number of actions.
    """
    ranks = schedule.plan.num_ranks
    if len(schedule.ranks) != ranks:
        raise ValueError(f"the plan is for {ranks} ranks, the schedule has {len(schedule.ranks)}")
    numbering = Numbering(schedule.plan)
    lists = [_complete(rank, actions, numbering) for rank, actions in enumerate(schedule.ranks)]
    _check_alike(lists, numbering)
    _Walk(lists, numbering).check()


def _complete(rank: int, actions: Sequence[Action], numbering: Numbering) -> list[int]:
    plan, width = numbering.plan, numbering.width
    listed = [numbering.number(action) for action in actions]
    found = Counter(map(numbering.settled, listed))
    firsts = [numbering.first(op, k) for k in plan.stages_of(rank) for op in required(k, plan)]
    wanted = {number for first in firsts for number in range(first, first + width)}
    split = numbering.first(Op.W, 0) - numbering.first(Op.I, 0)
    wanted |= {number + split for number in listed if number != numbering.settled(number)}  # a W for every I
    for number in sorted(wanted - found.keys()):
        action = numbering.action(number)
        raise ValueError(f"rank {rank} never does {action}; every slice is forwarded and backwarded on every stage")
    for action, number in zip(actions, listed, strict=True):
        settled = numbering.settled(number)
        if found[settled] > 1 or settled not in wanted:
            raise ValueError(f"rank {rank} does {action} too often, or it is not that rank's to do")
    return listed


def _check_alike(lists: Lists, numbering: Numbering) -> None:
    shared = [_by_peer(numbers, numbering) for numbers in lists]
    for a, peers in enumerate(shared):
        for b in (peer for peer in peers if peer > a):
            for mine, theirs in zip(peers[b], shared[b][a], strict=True):  # as many: both are complete
                if mine != _other(theirs, numbering):
                    raise ValueError(
                        "neighbours must list their shared transfers in the same order: where rank "
                        f"{a} has {numbering.action(mine)}, rank {b} has {numbering.action(theirs)}"
                    )


def _other(transfer: int, numbering: Numbering) -> int:
    """The other end, -1 of a computation."""
    row, at = divmod(transfer, numbering.width)
    first = numbering.others[row]
    return first if first < 0 else first + at


def _by_peer(numbers: Sequence[int], numbering: Numbering) -> dict[int, list[int]]:
    """One rank's transfers, by the rank at their other end."""
    peers: dict[int, list[int]] = {}
    for number in numbers:
        other = _other(number, numbering)
        if other >= 0:
            peers.setdefault(numbering.ranks[other // numbering.width], []).append(number)
    return peers


class _Walk:
    """Through all lists at once, each transfer a meeting of both ends; whoever cannot go on is part of a cycle."""

    def __init__(self, lists: Lists, numbering: Numbering) -> None:
        self._lists, self._numbering = lists, numbering
        self._done = bytearray(len(OPS) * numbering.plan.num_stages * numbering.width)
        self._at = [0] * len(lists)
        self._sends = [op in SENDS for op in OPS for _ in range(numbering.plan.num_stages)]

    def check(self) -> None:
        lists, at, numbering = self._lists, self._at, self._numbering
        # What is missing, and the ranks that stopped for it. A set: who stops again for the same is not woken twice.
        waiting: dict[int, set[int]] = {}
        runnable = list(range(len(lists)))
        while runnable:
            rank = runnable.pop()
            while at[rank] < len(lists[rank]):
                number = lists[rank][at[rank]]
                missing = self._missing(number)
                if missing >= 0:
                    waiting.setdefault(missing, set()).add(rank)
                    break
                runnable += self._pass(number, waiting)
                other = _other(number, numbering)
                if other >= 0:  # the other end stands at its half of it: both pass
                    runnable += self._pass(other, waiting) | {numbering.ranks[other // numbering.width]}
        if any(i < len(numbers) for i, numbers in zip(at, lists, strict=True)):
            raise ValueError("the schedule cannot go on: " + self._cycle())

    def _pass(self, number: int, waiting: dict[int, set[int]]) -> set[int]:
        """Its rank goes on; who waited for it may."""
        settled = self._numbering.settled(number)
        self._done[settled] = 1
        self._at[self._numbering.ranks[number // self._numbering.width]] += 1
        return waiting.pop(settled, set())

    def _missing(self, number: int) -> int:
        """What keeps this action from running: a need, or the other end of the transfer not being there; else -1."""
        numbering = self._numbering
        other = _other(number, numbering)
        if other < 0:
            return self._need(number)
        rank = numbering.ranks[other // numbering.width]
        send, receive = (number, other) if self._sends[number // numbering.width] else (other, number)
        if send == number and (need := self._need(send)) >= 0:
            return need
        there = self._at[rank] < len(self._lists[rank]) and self._lists[rank][self._at[rank]] == other
        if not there:
            return other
        return -1 if receive == other else self._need(send)  # a receive passes when its send can

    def _need(self, number: int) -> int:
        """The first need that is not done, or -1."""
        row, at = divmod(number, self._numbering.width)
        for first, ahead in self._numbering.needs[row]:
            if ahead:
                before, after = self._numbering.room[at]
                if (ahead < 0 and not before) or (ahead > 0 and not after):
                    continue
            if not self._done[first + at + ahead]:
                return first + at + ahead
        return -1

    def _cycle(self) -> str:
        numbering = self._numbering
        rank = next(r for r, numbers in enumerate(self._lists) if self._at[r] < len(numbers))
        seen: dict[int, str] = {}
        while rank not in seen:
            number = self._lists[rank][self._at[rank]]
            missing = self._missing(number)
            owner = numbering.ranks[missing // numbering.width]
            waits = f"rank {rank} is at {numbering.action(number)} and waits for {numbering.action(missing)}"
            seen[rank] = waits + (", which comes later in its own list" if owner == rank else f" of rank {owner}")
            rank = owner
        steps = list(seen.items())
        start = [r for r, _ in steps].index(rank)
        return "; ".join(text for _, text in steps[start:])
