"""Checks before the first step that a Schedule is complete and cannot deadlock, once for all plans of one shape."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np

from terapipe.planning.by_slice import BySlice
from terapipe.planning.recompute import Recompute
from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import COPIES, Action, Op, Schedule, required_ops
from terapipe.scheduling.orders import computations
from terapipe.scheduling.program import CODE, Ints, Numbering, compile_program, ends_of_caches, offloaded_slices
from terapipe.scheduling.transfers import list_actions

Lists = Sequence[Ints]  # the actions of each rank, as numbers (see Numbering)


def validate(schedule: Schedule) -> None:
    """Raises ValueError unless every rank does all of its work exactly once, neighbors list their shared transfers in
    the same order, and there is no deadlock.

    The deadlock check assumes that every transfer blocks both ends until it is done. So a runtime with asynchronous
    transfers cannot deadlock either, with or without message tags. Run time is linear in the number of actions.

    Args:
        schedule: The actions of every rank.
    """
    ranks = schedule.plan.num_ranks
    if len(schedule.ranks) != ranks:
        raise ValueError(f"the plan is for {ranks} ranks, the schedule has {len(schedule.ranks)}")
    numbering = Numbering(schedule.plan)
    lists = [numbering.numbers(actions) for actions in schedule.ranks]
    for rank, (actions, numbers) in enumerate(zip(schedule.ranks, lists, strict=True)):
        if numbers.min(initial=0) < 0:
            action = actions[int(np.argmin(numbers))]
            raise ValueError(f"rank {rank} does {action}, which is not in the plan; take slices of its own plan")
    validate_numbers(lists, numbering)


def validate_numbers(lists: Lists, numbering: Numbering) -> None:
    """As ``validate``, of lists of numbers."""
    for rank, numbers in enumerate(lists):
        _check_complete(rank, _without_copies(rank, numbers, numbering), numbering)
    _check_same_order(lists, numbering)
    _BlockingRun(lists, numbering).check()


def _without_copies(rank: int, numbers: Ints, numbering: Numbering) -> Ints:
    """The list without copies, once these are known to be right: what goes out was computed, comes back, and is used
    only then, all once, and only of what the plan offloads."""
    stages, ops, slices = numbering.indices(numbers)
    copies = np.isin(ops, [CODE[op] for op in COPIES])
    if not copies.any():
        return numbers
    plan, places = numbering.plan, dict[Op, Ints]()  # of each op, by stage and slice
    completed = numbering.indices(numbering.completes(numbers)).ops
    for op in (Op.F, Op.B, *COPIES):
        at = np.flatnonzero(completed == CODE[op])
        places[op] = np.full((plan.num_stages, numbering.width), -1)
        places[op][stages[at], slices[at]] = at
        if op in COPIES and (places[op] >= 0).sum() < len(at):
            raise ValueError(f"rank {rank} does an {op} of a slice twice; a slice goes out once, and comes back once")
    kinds = ((Op.OUT, Op.BACK, offloaded_slices(plan)), (Op.KV_OUT, Op.KV_BACK, ends_of_caches(plan)))
    for out, back, offloaded in kinds:
        forward, gone, here, backward = (places[op] for op in (Op.F, out, back, Op.B))
        right = (forward >= 0) & (forward < gone) & (gone < here) & (here < backward) & offloaded
        wrong = ((gone >= 0) | (here >= 0)) & ~right
        if wrong.any():
            k, i = np.argwhere(wrong)[0].tolist()
            raise ValueError(
                f"rank {rank} must do forward, {out}, {back} and backward in this order with an offloaded slice, and "
                f"copy no other, which it does not with slice {plan.slices[i]} of stage {k}"
            )
    return numbers[~copies]


def _check_complete(rank: int, numbers: Ints, numbering: Numbering) -> None:
    """Refuses a rank's list in which an action is missing, repeated or another rank's."""
    plan, completed = numbering.plan, numbering.completes(numbers)
    firsts = [numbering.first(op, k) for k in plan.stages_of(rank) for op in required_ops(k, plan)]
    from_i_to_w = numbering.first(Op.W, 0) - numbering.first(Op.I, 0)
    weight_halves = numbers[numbers != completed] + from_i_to_w  # one for every input half
    expected = np.concatenate((*(first + np.arange(numbering.width) for first in firsts), weight_halves))
    if np.array_equal(np.sort(expected), np.sort(completed)):
        return
    missing = np.setdiff1d(expected, completed)
    if len(missing):
        action = numbering.action(missing[0])
        raise ValueError(f"rank {rank} never does {action}; every slice needs a forward and a backward on every stage")
    _, place, counts = np.unique(completed, return_inverse=True, return_counts=True)
    wrong = (counts[place] > 1) | ~np.isin(completed, expected)
    action = numbering.action(numbers[np.argmax(wrong)])
    raise ValueError(f"rank {rank} does {action} too often, or it is not that rank's to do")


def _check_same_order(lists: Lists, numbering: Numbering) -> None:
    shared = [_by_peer(numbers, numbering) for numbers in lists]
    for a, peers in enumerate(shared):
        for b in (peer for peer in peers if peer > a):
            ours, theirs = peers[b], shared[b][a]  # equally many: both are complete
            wrong = np.flatnonzero(ours != numbering.counterparts(theirs))
            if len(wrong):
                first, second = (numbering.action(numbers[wrong[0]]) for numbers in (ours, theirs))
                raise ValueError(
                    "neighbors must list their shared transfers in the same order: where rank "
                    f"{a} has {first}, rank {b} has {second}"
                )


def _by_peer(numbers: Ints, numbering: Numbering) -> dict[int, Ints]:
    """One rank's transfers, by the rank at their other end."""
    others = numbering.counterparts(numbers)
    transfers = numbers[others >= 0]
    peers = numbering.ranks(others[others >= 0])
    return {peer: transfers[peers == peer] for peer in np.unique(peers).tolist()}


class _BlockingRun:
    """Runs all lists symbolically. A transfer needs both ranks at its two ends at once (rendezvous).

    Everything else depends on actions of its own rank only: it is enough that they come earlier in its list. If a rank
    cannot finish its list, ranks wait for each other in a cycle: a deadlock. An entry is an index into the concatenated
    lists.
    """

    def __init__(self, lists: Lists, numbering: Numbering) -> None:
        self._numbering, self._numbers = numbering, np.concatenate(lists)
        self._ends = np.cumsum([len(numbers) for numbers in lists])
        self._ranks = np.repeat(np.arange(len(lists)), [len(numbers) for numbers in lists])
        entries = np.full(numbering.count, -1)  # by number; of complete lists only copies may be missing
        entries[numbering.completes(self._numbers)] = np.arange(len(self._numbers))
        self._others = self._entries_of(numbering.counterparts(self._numbers), entries)
        self._unmet = self._unmet_dependencies(entries)

    @staticmethod
    def _entries_of(numbers: Ints, entries: Ints) -> Ints:
        return np.where(numbers < 0, -1, entries[numbers])

    def _unmet_dependencies(self, entries: Ints) -> Ints:
        """For each entry a dependency that comes later in the list of the same rank, or -1."""
        unmet = np.full(len(self._numbers), -1)
        for needed in self._numbering.dependencies(self._numbers):
            at = self._entries_of(needed, entries)
            later = (at > np.arange(len(at))) & (self._ranks[at] == self._ranks)
            unmet[later] = at[later]
        return unmet

    def check(self) -> None:
        """Refuses a schedule in which some rank does not reach the end of its list."""
        stops = np.flatnonzero((self._others >= 0) | (self._unmet >= 0))  # a rank passes all other entries at once
        place = np.full(len(self._numbers), -1)
        place[stops] = np.arange(len(stops))
        partners = np.where(self._unmet[stops] < 0, place[self._others[stops]], -1)
        ends = np.searchsorted(stops, self._ends)
        reached = _rendezvous(partners.tolist(), self._ranks[stops].tolist(), ends.tolist())
        stuck = {rank: int(stops[i]) for rank, i in enumerate(reached) if i < ends[rank]}
        if stuck:
            raise ValueError("the schedule deadlocks: " + self._cycle(stuck))

    def _cycle(self, stuck: dict[int, int]) -> str:
        """Follows the waits from a stuck rank until one repeats. ``stuck`` has the entry where each rank is."""
        action = self._numbering.action
        rank = min(stuck)
        seen: dict[int, str] = {}
        while rank not in seen:
            entry = stuck[rank]
            missing = self._unmet[entry] if self._unmet[entry] >= 0 else self._others[entry]
            owner = int(self._ranks[missing])
            waits = f"rank {rank} is at {action(self._numbers[entry])} and waits for {action(self._numbers[missing])}"
            seen[rank] = waits + (", which comes later in its own list" if owner == rank else f" of rank {owner}")
            rank = owner
        steps = list(seen.items())
        start = [r for r, _ in steps].index(rank)
        return "; ".join(text for _, text in steps[start:])


def _rendezvous(partners: list[int], ranks: list[int], ends: list[int]) -> list[int]:
    """How far each rank gets. Ranks pass the two ends of a transfer together; nobody passes an end without partner.

    The lists are parallel: the partner of each end, or -1, and its rank. Those of a rank follow each other, up to the
    rank's entry in ``ends``.
    """
    reached = [0, *ends[:-1]]
    runnable = list(range(len(ends)))
    while runnable:
        rank = runnable.pop()
        i = reached[rank]
        while i < ends[rank]:
            j = partners[i]
            if j < 0 or reached[ranks[j]] != j or partners[j] != i:
                break  # if the peer is not there yet, it will pass both when it comes
            i += 1
            reached[rank], reached[ranks[j]] = i, j + 1
            runnable.append(ranks[j])
    return reached


class Shape(NamedTuple):
    """What a schedule depends on: the number of slices, not their lengths."""

    order: str
    counts: tuple[int, ...]  # slices of each microbatch
    num_stages: int
    chunks: int
    recomputes: bool
    offload: BySlice[bool] = False
    offload_kv: bool = False

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """The shape of a plan."""
        counts = tuple(map(len, plan.lengths))
        return cls(plan.order, counts, plan.num_stages, plan.chunks, plan.recomputes, plan.offload, plan.offload_kv)

    def plan(self) -> Plan:
        """A plan of this shape. All slices of a microbatch but the last have one token."""
        most = max(self.counts)
        lengths = tuple((1,) * (count - 1) + (most - count + 1,) for count in self.counts)
        edges = tuple(range(self.num_stages + 1))
        mode: Recompute = "full" if self.recomputes else "none"
        moved = self.offload, self.offload_kv
        return Plan((1,) * len(self.counts), lengths, edges, self.order, self.chunks, mode, *moved)


def validated_actions(plan: Plan, rank: int) -> tuple[Action, ...]:
    """The actions of one rank, by the plan's order. Raises ValueError if the schedule is incomplete or could deadlock.

    Args:
        plan: The plan. Plans that differ in lengths only are validated once.
        rank: The pipeline rank.
    """
    grid = plan.grid
    return tuple(Action(op, k, grid[s.microbatch][s.number]) for op, k, s in _of_shape(Shape.of(plan), rank))


@lru_cache(maxsize=64)  # holds only the lists of one rank, the process's own
def _of_shape(shape: Shape, rank: int) -> tuple[Action, ...]:
    """The lists of other ranks are numbers, and become actions for none of them."""
    plan = shape.plan()
    program = compile_program(plan, computations(plan))
    lists = list_actions(program)
    validate_numbers(lists, program.numbering)
    return tuple(program.numbering.actions(lists[rank]))


def forwards_come_first(plan: Plan) -> bool:
    """Whether all forwards come before the first backward, on every stage. It is so if it is on the last one: the first
    backward of any stage waits for that of the last, whose forwards wait for all others."""
    return _forwards_come_first(Shape.of(plan))


@lru_cache(maxsize=64)  # asked before every step
def _forwards_come_first(shape: Shape) -> bool:
    plan, last = shape.plan(), shape.num_stages - 1
    ops = [action.op for action in computations(plan)[plan.rank_of(last)] if action.stage == last]
    return Op.F not in ops[len(plan.slices) :]
