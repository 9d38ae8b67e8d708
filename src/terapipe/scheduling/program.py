"""Programs: the computations of all ranks as numbers, in topological order, timed in one pass for any durations.

Where slices are offloaded, lists have their copies between the computations (see copies.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise, product
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from terapipe.planning.cost import LinkBehavior
from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import COMPUTE, COPIES, NEEDS, Action, Op, counterpart, dependencies

Ints = NDArray[np.int64]
OPS = tuple(Op)
CODE = {op: code for code, op in enumerate(OPS)}


class Indices(NamedTuple):
    """The indices of actions in tables by stage, op and slice: three parallel arrays."""

    stages: Ints
    ops: Ints  # as in ``OPS``
    slices: Ints  # as in ``Plan.slices``


def offloaded_slices(plan: Plan) -> NDArray[np.bool_]:
    """Whether each slice of each stage is offloaded, by the plan: (stages, slices)."""
    return np.array([plan.offload_of(k) for k in range(plan.num_stages)])


def ends_of_caches(plan: Plan) -> NDArray[np.bool_]:
    """Whether keys and values leave the device after each slice (``Plan.offloads_cache_after``)."""
    return np.array([plan.offloads_cache_after(s) for s in plan.slices])


class Numbering:
    """Numbers the actions of a plan, so that lists of hundreds of thousands of actions are handled as arrays.

    An action's number is ``(op * num_stages + stage) * width + slice``, with ``width`` slices in the plan. For two
    stages and three slices::

        op F:  stage 0   0  1  2       row 0      A *row* is all actions of one op on one stage. A number divided by
               stage 1   3  4  5       row 1      ``width`` is its row. Tables "by row" are indexed so: what holds for
        op B:  stage 0   6  7  8       row 2      one slice of a row holds for all, shifted by the slice.
               stage 1   9 10 11       row 3
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.width = plan, len(plan.slices)

    @property
    def count(self) -> int:
        """One more than the largest number."""
        return len(OPS) * self.plan.num_stages * self.width

    def numbers(self, actions: Sequence[Action]) -> Ints:
        """The number of each action, or -1 if it is not in the plan."""
        stages, width = self.plan.num_stages, self.width
        base = {op: code * stages for op, code in CODE.items()}
        index = self._index
        numbers = ((base[op] + k) * width + index[s] if 0 <= k < stages and s in index else -1 for op, k, s in actions)
        return np.fromiter(numbers, np.int64, len(actions))

    def actions(self, numbers: Ints) -> list[Action]:
        stages, ops, slices = (column.tolist() for column in self.indices(numbers))
        all_slices = self.plan.slices
        rows = zip([OPS[op] for op in ops], stages, [all_slices[i] for i in slices], strict=True)
        return list(map(partial(tuple.__new__, Action), rows))  # as Action._make, but without a Python call for each

    def action(self, number: int) -> Action:
        return self.actions(np.array([number]))[0]

    def number(self, ops: Ints, stages: Ints, slices: Ints) -> Ints:
        """The numbers of the actions at these places."""
        return (ops * self.plan.num_stages + stages) * self.width + slices

    def first(self, op: Op, stage: int) -> int:
        """The number of the first slice's action. Those of the other slices follow."""
        return (CODE[op] * self.plan.num_stages + stage) * self.width

    def same_slices(self, op: Op, numbers: Ints) -> Ints:
        """The numbers of another op of the same slices on the same stages."""
        stages, _, slices = self.indices(numbers)
        return self.number(np.array(CODE[op]), stages, slices)

    def indices(self, numbers: Ints) -> Indices:
        rows, slices = np.divmod(numbers, self.width)
        ops, stages = np.divmod(rows, self.plan.num_stages)
        return Indices(stages, ops, slices)

    def completes(self, numbers: Ints) -> Ints:
        """As ``actions.completes``: the ``B`` for an ``I``, else the number itself."""
        first = self.first(Op.I, 0)
        is_input_half = (numbers >= first) & (numbers < first + self.plan.num_stages * self.width)
        return np.where(is_input_half, numbers - (first - self.first(Op.B, 0)), numbers)

    def ranks(self, numbers: Ints) -> Ints:
        """The rank that performs each action."""
        return self._rank_by_stage[self.indices(numbers).stages]

    def counterparts(self, numbers: Ints) -> Ints:
        """The other end of each transfer, -1 for computations and copies."""
        rows, slices = np.divmod(numbers, self.width)
        firsts = self._counterpart_by_row[rows]
        return np.where(firsts < 0, -1, firsts + slices)

    def dependencies(self, numbers: Ints) -> list[Ints]:
        """What each action depends on, as ``actions.dependencies``: arrays with one dependency of each, or -1."""
        needed = self._look_up(self._needs_by_row, numbers)
        return [self._without_copies(each) for each in needed] if self.plan.offloads else needed

    def _without_copies(self, numbers: Ints) -> Ints:
        """The numbers, with -1 for copies of slices that are not offloaded. What holds for a row of actions holds for
        all of its slices, but for this."""
        stages, ops, slices = self.indices(numbers)
        stays = np.isin(ops, [CODE[Op.OUT], CODE[Op.BACK]]) & ~self._offloaded[stages, slices]
        stays |= np.isin(ops, [CODE[Op.KV_OUT], CODE[Op.KV_BACK]]) & ~ends_of_caches(self.plan)[slices]
        return np.where((numbers >= 0) & stays, -1, numbers)

    @cached_property
    def _offloaded(self) -> NDArray[np.bool_]:
        return offloaded_slices(self.plan)

    def computations_needed(self, numbers: Ints) -> list[Ints]:
        """As ``dependencies``, with the computation whose result is transferred in place of a transfer."""
        return self._look_up(self._computations_by_row, numbers)

    def _look_up(self, table: list[tuple[Ints, Ints]], numbers: Ints) -> list[Ints]:
        rows, slices = np.divmod(numbers, self.width)
        first_of_microbatch, last_of_microbatch = self._edges
        numbers_needed = []
        for firsts, offsets in table:
            first, offset = firsts[rows], offsets[rows]
            outside = (offset < 0) & first_of_microbatch[slices] | (offset > 0) & last_of_microbatch[slices]
            numbers_needed.append(np.where((first < 0) | outside, -1, first + slices + offset))
        return numbers_needed

    @cached_property
    def _index(self) -> dict[tuple[int, ...], int]:
        return {s: i for i, s in enumerate(self.plan.slices)}

    @cached_property
    def _edges(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """For each slice, whether it is the first, and whether it is the last, of its microbatch."""
        grid = self.plan.grid
        return (
            np.array([s is row[0] for row in grid for s in row]),
            np.array([s is row[-1] for row in grid for s in row]),
        )

    @cached_property
    def _rank_by_stage(self) -> Ints:
        return np.array([self.plan.rank_of(k) for k in range(self.plan.num_stages)])

    @cached_property
    def _counterpart_by_row(self) -> Ints:
        return np.array([self._first_counterpart(op, k) for op in OPS for k in range(self.plan.num_stages)])

    def _first_counterpart(self, op: Op, stage: int) -> int:
        if op in COMPUTE or op in COPIES:
            return -1
        other = counterpart(Action(op, stage, self.plan.slices[0]))
        return self.first(other.op, other.stage) if 0 <= other.stage < self.plan.num_stages else -1

    @cached_property
    def _needs_by_row(self) -> list[tuple[Ints, Ints]]:
        return self._table(dependencies)

    @cached_property
    def _computations_by_row(self) -> list[tuple[Ints, Ints]]:
        return self._table(_computations_needed)

    def _table(self, needed: Callable[[Action, Plan], Sequence[Action]]) -> list[tuple[Ints, Ints]]:
        """By row: for each dependency the number of its first slice's action, or -1, and its offset in slices.

        Looked up in a plan with the same stages and one microbatch of three slices. The middle one has every kind of
        dependency but that on keys and values that were away, which the last one has.
        """
        plan = self.plan
        cuts = (1,), ((1, 1, 1),), plan.boundaries
        small = Plan(*cuts, plan.order, plan.chunks, "none", plan.offload is not False, plan.offload_kv)
        rows = []
        for op, k in product(OPS, range(plan.num_stages)):
            middle, last = (needed(Action(op, k, s), small) for s in small.slices[1:])
            away = [(n, 0) for n in last if n.op in (Op.KV_OUT, Op.KV_BACK)]
            rows.append([*((n, n.slice.number - 1) for n in middle), *away])
        shape = max(map(len, rows)), len(rows)
        firsts, offsets = np.full(shape, -1), np.zeros(shape, dtype=np.int64)
        for row, needs in enumerate(rows):
            for i, (need, offset) in enumerate(needs):
                firsts[i, row], offsets[i, row] = self.first(need.op, need.stage), offset
        return list(zip(firsts, offsets, strict=True))


def _computations_needed(action: Action, plan: Plan) -> list[Action]:
    """The dependencies, with the computation whose result is transferred in place of a transfer."""
    computations = []
    for need in dependencies(action, plan):
        while need.op not in COMPUTE:  # a receive depends on its send, a send on what it sends
            (need,) = dependencies(need, plan)
        computations.append(need)
    return computations


COMPUTATIONS = (Op.F, Op.B, Op.I, Op.W)
ENTRIES = (*COMPUTATIONS, Op.OUT, Op.BACK, Op.KV_OUT, Op.KV_BACK)  # of a program's lists
_COLUMN = np.array([ENTRIES.index(op) if op in ENTRIES else -1 for op in OPS])


# For each computation: the send of its result, the receive, and the offset to the receiving stage.
ENDS = {
    op: (send, receive, -NEEDS[receive][0].stage)
    for op, send, receive in (
        (Op.F, Op.SEND_F, Op.RECV_F),
        (Op.B, Op.SEND_B, Op.RECV_B),
        (Op.I, Op.SEND_B, Op.RECV_B),
    )
}


class Program:
    """An order's computations: the list of each rank, and all of them in one topological order.

    Memory depends on the lists only. Times need the topological order, in which each computation comes after everything
    it depends on. It is found when first asked for; if there is none, because the lists deadlock, ValueError is raised.
    The arrays that follow it are parallel, with one entry per computation. Only a dependency on another rank is
    recorded, and there is at most one: the same slice on the neighboring stage. The order of a rank's list meets
    dependencies on that rank.
    """

    def __init__(self, numbering: Numbering, lists: Sequence[Ints]) -> None:
        """``lists`` are the numbers of each rank's computations, and of copies if there are some."""
        self.numbering, self.lists = numbering, tuple(lists)
        self._starts = np.cumsum([0, *map(len, lists)])

    @property
    def num_ranks(self) -> int:
        return len(self.lists)

    @property
    def starts(self) -> Ints:
        """The index of each rank's first computation in the concatenated lists, then the number of computations."""
        return self._starts

    @cached_property
    def listed_indices(self) -> Indices:
        """Indices of all computations, one rank's list after the other, for tables by stage, op (as in ``ENTRIES``)
        and slice."""
        return _indices(self.numbering, np.concatenate(self.lists))

    # In topological order

    @cached_property
    def _merged(self) -> tuple[Ints, Ints]:
        """The topological order, and what each computation needs. Both are indices into the concatenated lists."""
        ranks = np.repeat(np.arange(self.num_ranks), np.diff(self._starts))
        needs = _needs(self.numbering, np.concatenate(self.lists), ranks)
        sequence = np.array(_sequence(needs.tolist(), self._starts.tolist()), dtype=np.int64)
        if len(sequence) < len(needs):
            raise ValueError("these computations wait for each other in a cycle: " + self._stuck(ranks[sequence]))
        return sequence, needs

    def _stuck(self, emitted: Ints) -> str:
        """The next computation of every rank that is not at its end. ``emitted`` are the ranks of those emitted."""
        done = np.bincount(emitted, minlength=self.num_ranks).tolist()
        ahead = [(rank, numbers[i : i + 1]) for rank, (numbers, i) in enumerate(zip(self.lists, done, strict=True))]
        return "; ".join(f"rank {rank} at {self.numbering.actions(at)[0]}" for rank, at in ahead if len(at))

    @property
    def numbers(self) -> Ints:
        return np.concatenate(self.lists)[self._merged[0]]

    @property
    def actions(self) -> list[Action]:
        return self.numbering.actions(self.numbers)

    @cached_property
    def indices(self) -> Indices:
        """Indices for tables by stage, op (as in ``ENTRIES``) and slice."""
        return _indices(self.numbering, self.numbers)

    @cached_property
    def ranks(self) -> Ints:
        return np.searchsorted(self._starts, self._merged[0], side="right") - 1

    @property
    def places(self) -> Ints:
        """The index of each computation in the concatenated lists."""
        return self._merged[0]

    @property
    def listed(self) -> Ints:
        """The index of each computation in the list of its rank."""
        listed: Ints = self._merged[0] - self._starts[self.ranks]
        return listed

    @cached_property
    def needs(self) -> Ints:
        """The computation on another rank whose result it receives, or -1."""
        sequence, needs = self._merged
        place = np.empty_like(sequence)
        place[sequence] = np.arange(len(sequence))
        return np.where(needs < 0, -1, place[needs])[sequence]

    @property
    def peers(self) -> Ints:
        """The rank that the result is sent to, or -1."""
        peers = np.full(len(self.needs), -1)
        receiving = self.needs >= 0
        peers[self.needs[receiving]] = self.ranks[receiving]
        return peers

    @cached_property
    def links(self) -> tuple[list[tuple[int, int]], Ints]:
        """The links as (sender, receiver), and for each computation the index of the link it sends over, or -1."""
        peers = self.peers
        sent = peers >= 0
        used, index = np.unique(self.ranks[sent] * self.num_ranks + peers[sent], return_inverse=True)
        links = np.full(len(sent), -1)
        links[sent] = index
        return [divmod(pair, self.num_ranks) for pair in used.tolist()], links

    @cached_property
    def columns(self) -> tuple[list[int], list[int], list[int]]:
        """Ranks, needs and links as lists, which Python reads faster than arrays."""
        return self.ranks.tolist(), self.needs.tolist(), self.links[1].tolist()

    @cached_property
    def copies(self) -> "Copies | None":
        """What copies wait for, and what waits for them; None if nothing is offloaded."""
        ops, numbers, numbering = self.indices.ops, self.numbers, self.numbering
        if not (ops >= len(COMPUTATIONS)).any():
            return None
        place = np.full(numbering.count, -1)  # of each computation and copy, by number
        place[numbering.completes(numbers)] = np.arange(len(numbers))
        behind, waits = np.full(len(ops), -1), list[tuple[int, ...]]([()] * len(ops))
        for out, back in ((Op.OUT, Op.BACK), (Op.KV_OUT, Op.KV_BACK)):
            outs, backs = (np.flatnonzero(ops == ENTRIES.index(op)) for op in (out, back))
            behind[outs] = place[numbering.same_slices(Op.F, numbers[outs])]
            users = place[numbering.same_slices(Op.B, numbers[backs])]
            for user, copy in zip(users.tolist(), backs.tolist(), strict=True):
                waits[user] += (copy,)
        engines = np.array([0] * len(COMPUTATIONS) + [OUTWARD, HOMEWARD] * 2)[ops]
        return Copies(engines.tolist(), behind.tolist(), waits)


OUTWARD, HOMEWARD = 1, 2  # engines of a device; 0 is none


class Copies(NamedTuple):
    """How copies and computations wait for each other, with an entry for each of a program's.

    A copy out can begin when its forward has ended, and OUT waits until it is over. A copy back begins at BACK, and its
    backward waits for it.
    """

    engines: list[int]  # that the entry uses, or 0 for a computation
    behind: list[int]  # of an OUT, its forward; else -1
    waits: list[tuple[int, ...]]  # entries whose copies must have ended


def compile_program(plan: Plan, lists: Sequence[Sequence[Action]]) -> Program:
    """The program of lists of computations.

    Args:
        plan: The plan whose slices and stages the computations are of.
        lists: The computations of each rank, in order; with copies or without.
    """
    numbering = Numbering(plan)
    numbers = [numbering.numbers(actions) for actions in lists]
    for actions, own in zip(lists, numbers, strict=True):
        if own.min(initial=0) < 0:
            raise ValueError(
                f"{actions[int(np.argmin(own))]} is not in the plan; list the plan's own slices and stages"
            )
    return Program(numbering, numbers)


def _indices(numbering: Numbering, numbers: Ints) -> Indices:
    stages, ops, slices = numbering.indices(numbers)
    return Indices(stages, _COLUMN[ops], slices)


def _needs(numbering: Numbering, numbers: Ints, ranks: Ints) -> Ints:
    """The index of the computation on another rank that each depends on, or -1. ``numbers`` are those of all lists, one
    rank after the other. The index is beyond the last for a computation that can never start: because nobody computes
    what it depends on, or its own rank does so later."""
    own, never = np.arange(len(numbers)), len(numbers)
    index = np.full(numbering.count, never)  # by number
    index[numbering.completes(numbers)] = own
    needs = np.full(len(numbers), -1)
    for needed in numbering.computations_needed(numbers):
        at = np.where(needed < 0, -1, index[needed])
        local = ranks[np.minimum(at, never - 1)] == ranks
        at = np.where(local & (at < own), -1, np.where(local, never, at))
        needs = np.maximum(needs, at)  # at most one is on another rank
    return needs


def _sequence(needs: list[int], starts: list[int]) -> list[int]:
    """The indices of all computations in topological order, or as many as can start.

    A rank emits the computations of its list until one depends on something not emitted yet. It is then parked under
    that dependency and runs again once the dependency is emitted. Two ranks, one stage each, one slice:

        rank 1: F1 needs F0, parked     rank 0: emits F0, which wakes rank 1; B0 needs B1, parked
        rank 1: emits F1 and B1, which wakes rank 0     rank 0: emits B0     result: F0 F1 B1 B0
    """
    sequence: list[int] = []
    emitted = bytearray(len(needs) + 1)  # the last one is that of a dependency that never comes
    positions, ends = starts[:-1], starts[1:]
    parked: dict[int, list[int]] = {}  # ranks, by the computation they wait for
    runnable = list(range(len(positions)))
    while runnable:
        rank = runnable.pop()
        for i in range(positions[rank], ends[rank]):
            need = needs[i]
            if need >= 0 and not emitted[need]:
                parked.setdefault(need, []).append(rank)
                positions[rank] = i
                break
            emitted[i] = 1
            sequence.append(i)
            if i in parked:
                runnable += parked.pop(i)
    return sequence


@dataclass(frozen=True)
class Times:
    """When each computation of a program starts and ends, when its result arrives where it is sent, and when the copy
    that it begins has ended."""

    starts: list[float]
    ends: list[float]
    arrivals: list[float]
    copied: list[float]  # empty without copies
    late: bool = False  # whether it was given up, because something started too late

    @property
    def makespan(self) -> float:
        return inf if self.late else max(self.ends)


# A GPU's queue takes about 1024 kernels; then the host waits. It takes an eager host about so many seconds to fill it.
QUEUE = 5e-3


def run(
    program: Program,
    seconds: Sequence[float],
    delays: Sequence[float],
    links: Sequence[LinkBehavior],
    host: Sequence[float] | None = None,
    copying: Sequence[float] = (),
    *,
    blocking: bool = False,
    latest: Sequence[float] = (),
) -> Times:
    """Times a program in one pass.

    A computation starts when its rank is free and its input has arrived, and takes its ``seconds``. The transfer of its
    result takes its ``delays``. ``links`` says how each of ``program.links`` behaves. A link is first in, first out,
    and every transfer occupies it for its delay less the latency. A rank that cannot overlap transfers with
    computation is blocked while it sends.

    ``host`` are the seconds in which a host issues the kernels of each computation. It issues one computation after the
    other in the order of the rank's list, and waits neither for the device nor for messages, unless the queue is full.
    The device begins a computation with its first kernel, and cannot end it before its last has been issued:

        long kernels                                    short kernels
        host    F1 F2 F3 B3 B2 B1                       host    F1---F2---F3---B3---B2---B1---
        device  F1-----F2-----   F3-----B3----- ...     device  F1.  F2.  F3.  B3.  B2.  B1.
                              ^ waits for a message

    On the left the host is ahead, and its time does not show; what it gained while the device waited is used up when
    short computations follow. On the right the device runs dry within every computation, and the step is as long as the
    host needs for all of it, whatever overlaps.

    ``copying`` are the seconds of the copy that each entry begins, if the program has copies. The two engines of a
    device work beside it, each on one copy after the other; with ``blocking`` the device does the copies itself.

    With ``latest`` (see ``latest_starts``) it is given up as soon as a computation starts later than it may.
    """
    overlapped, latency = [link.overlapped for link in links], [link.latency for link in links]
    clock = [0.0] * program.num_ranks
    issued = [0.0] * program.num_ranks  # when each host has issued all that came before
    behind = None if host is None else _room(program, host)
    free = [0.0] * len(links)  # when each link is free again
    copies = program.copies if len(copying) else None
    engines = [[0.0] * program.num_ranks for _ in range(HOMEWARD + 1)]  # when each engine is free again
    copied = [0.0] * len(copying)
    starts, ends = list[float](), list[float]()
    arrivals = [0.0] * (len(seconds) + 1)  # the last one is that of need -1: no input
    entries = zip(*program.columns, seconds, delays, latest or [inf] * len(seconds), strict=True)
    for i, (rank, need, link, duration, delay, last) in enumerate(entries):
        start, arrived = clock[rank], arrivals[need]
        if arrived > start:
            start = arrived
        if start > last:
            return Times(starts, ends, arrivals, copied, late=True)
        if copies is not None:
            for wait in copies.waits[i]:
                if copied[wait] > start:
                    start = copied[wait]
            if engine := copies.engines[i]:
                can_begin = ends[copies.behind[i]] if engine == OUTWARD and not blocking else start
                copied[i] = engines[engine][rank] = max(can_begin, engines[engine][rank]) + copying[i]
                if engine == OUTWARD or blocking:
                    start = max(start, copied[i])
        end = start + duration
        if host is not None and behind is not None:
            issue = issued[rank]
            if behind[i] >= 0 and ends[behind[i]] > issue:
                issue = ends[behind[i]]
            issue += host[i]
            issued[rank] = issue
            if issue > end:
                end = issue
        starts.append(start)
        ends.append(end)
        if link >= 0:
            if overlapped[link]:
                busy = free[link]
                arrived = (busy if busy > end else end) + delay
                free[link] = arrived - latency[link]
                arrivals[i] = arrived
            else:
                end = arrivals[i] = end + delay
        clock[rank] = end
    arrivals.pop()
    return Times(starts, ends, arrivals, copied)


def latest_starts(program: Program, seconds: Sequence[float], limit: float) -> list[float]:
    """When each computation must have started if the step is to take no longer than ``limit``, at the latest.

    What its rank still has to compute is certain, and so is the way back of the last gradient that the rank sends::

        rank 0                            I          rank 1 must start its last I so early that it, the W behind it, and
        rank 1    ...  F  I  F  I  W  I W            the I of rank 0 can end in time, whichever takes longer

    So a plan that idles too much is often given up while its pipeline fills.

    Args:
        program: The computations of all ranks.
        seconds: Of each computation on its device, in the program's order.
        limit: Seconds.
    """
    places = program.places
    own = np.empty(len(places))
    own[places] = seconds
    left = np.cumsum(own[::-1])[::-1]  # from each computation of the concatenated lists on, to the end of all lists
    ends = np.append(left, 0.0)[program.starts[1:]]
    left -= np.repeat(ends, np.diff(program.starts))
    stages, ops, slices = program.listed_indices
    is_backward = (ops == COMPUTATIONS.index(Op.B)) | (ops == COMPUTATIONS.index(Op.I))
    table = np.zeros((program.numbering.plan.num_stages, program.numbering.width))
    table[stages[is_backward], slices[is_backward]] = own[is_backward]
    before = np.cumsum(table, axis=0) - table  # backwards of the same slice on the stages before
    for a, b in pairwise(program.starts.tolist()):
        at = np.flatnonzero(is_backward[a:b])
        if len(at):
            last = a + int(at[-1])
            back = before[stages[last], slices[last]] - (left[last] - own[last])
            left[a : last + 1] += max(0.0, back)
    # Sums of many numbers are rounded, differently from the clock.
    latest: list[float] = (limit * (1 + 1e-9) - left[places]).tolist()
    return latest


def _room(program: Program, host: Sequence[float]) -> list[int]:
    """For each computation the last one of its rank that must have ended before it can be issued, or -1.

    The queue holds ``QUEUE`` seconds of the host's work. So the host is never further ahead of the device than that::

        host     |--1--|--2--|--3--|--4--|
                     <--- QUEUE -->            1 began earlier than that before 4, so 4 waits until 1 has ended
    """
    room, taken = np.full(len(host), -1), np.asarray(host, dtype=np.float64)
    for rank in range(program.num_ranks):
        own = np.flatnonzero(program.ranks == rank)  # in the order of its list
        began = np.cumsum(taken[own]) - taken[own]  # by a host that never waits
        last = np.searchsorted(began, began - QUEUE, side="left") - 1
        room[own] = np.where(last >= 0, own[last], -1)
    rooms: list[int] = room.tolist()
    return rooms
