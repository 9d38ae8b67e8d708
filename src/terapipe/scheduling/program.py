"""An order's computations in topological order: compiled once, then timed in one pass for any durations."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from terapipe.planning.cost import LinkBehavior
from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import NEEDS, Action, Op

COMPUTATIONS = (Op.F, Op.B, Op.I, Op.W)
_COLUMN = {op: i for i, op in enumerate(COMPUTATIONS)}
_CODE = {op: code for code, op in enumerate(Op)} | {Op.I: list(Op).index(Op.B)}  # an I counts as the B it completes


# For each computation: the send of its result, the receive, and the offset to the receiving stage.
ENDS = {
    op: (send, receive, -NEEDS[receive][0].stage)
    for op, send, receive in (
        (Op.F, Op.SEND_F, Op.RECV_F),
        (Op.B, Op.SEND_B, Op.RECV_B),
        (Op.I, Op.SEND_B, Op.RECV_B),
    )
}


@dataclass(frozen=True)
class Program:
    """An order's computations in topological order: each comes after everything it depends on.

    The lists are parallel, with one entry per computation. Only a dependency on another rank is recorded, and there is
    at most one: the same slice on the neighboring stage. The order of a rank's list meets dependencies on that rank.
    """

    num_ranks: int
    ranks: list[int]
    actions: list[Action]
    firsts: list[int]  # index in ``Plan.slices`` of each microbatch's first slice
    needs: list[int]  # the computation on another rank whose result it receives, or -1
    peers: list[int]  # the rank that the result is sent to, or -1

    @cached_property
    def places(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Indices for tables by stage, op (as in ``COMPUTATIONS``) and slice."""
        rows = [(k, _COLUMN[op], self.firsts[s.microbatch] + s.number) for op, k, s in self.actions]
        stages, ops, slices = np.array(rows, dtype=np.int64).T
        return stages, ops, slices

    @cached_property
    def links(self) -> tuple[list[tuple[int, int]], NDArray[np.int64]]:
        """The links as (sender, receiver), and for each computation the index of the link it sends over, or -1."""
        pairs = list(zip(self.ranks, self.peers, strict=True))
        used = sorted({pair for pair in pairs if pair[1] >= 0})
        index = {pair: i for i, pair in enumerate(used)}
        return used, np.array([index.get(pair, -1) for pair in pairs])


def compiled(plan: Plan, lists: Sequence[Sequence[Action]]) -> Program:
    """Merges the ranks' lists into one topological order. Raises ValueError if they deadlock.

    A rank emits the computations of its list until one depends on something not emitted yet. It is then parked under
    that dependency and runs again once the dependency is emitted. Two ranks, one stage each, one slice:

        rank 1: F1 needs F0, parked     rank 0: emits F0, which wakes rank 1; B0 needs B1, parked
        rank 1: emits F1 and B1, which wakes rank 0     rank 0: emits B0     result: F0 F1 B1 B0

    An action is addressed by ``(op * stages + stage) * width + slice``, ``width`` being the number of slices. So a
    dependency is a fixed offset from its action, and the loop gets by without a dict of actions.
    """
    counts = [len(row) for row in plan.lengths]
    firsts = list(accumulate(counts, initial=0))
    stages, width = plan.num_stages, firsts[-1]
    emitted_as = [-1] * (len(Op) * stages * width)  # position in the result, by address
    base = {op: _CODE[op] * stages * width for op in COMPUTATIONS}  # address of an op's first action
    needed = {
        op: [(base[n.op] + n.stage * width + n.slice, n.stage, n.slice) for n in NEEDS[op]] for op in COMPUTATIONS
    }
    ranks: list[int] = []
    needs: list[int] = []
    peers: list[int] = []
    positions = [0] * len(lists)  # of each rank, in its list
    parked: dict[int, list[int]] = {}  # ranks, by the address they wait for
    runnable = list(range(len(lists)))
    while runnable:
        rank = runnable.pop()
        actions, position = lists[rank], positions[rank]
        while position < len(actions):
            op, k, s = actions[position]
            microbatch, i = s[0], s[1]
            place, remote = k * width + firsts[microbatch] + i, -1
            for offset, stage, ahead in needed[op]:
                if 0 <= k + stage < stages and 0 <= i + ahead < counts[microbatch]:
                    address = place + offset
                    producer = emitted_as[address]
                    if producer < 0:
                        break
                    if ranks[producer] != rank:
                        remote = producer
            else:
                address = place + base[op]
                emitted_as[address] = len(ranks)
                ranks.append(rank)
                needs.append(remote)
                peers.append(-1)
                if remote >= 0:
                    peers[remote] = rank
                position += 1
                if address in parked:
                    runnable += parked.pop(address)
                continue
            parked.setdefault(address, []).append(rank)
            break
        positions[rank] = position
    stuck = [f"rank {r} at {a[i]}" for r, (a, i) in enumerate(zip(lists, positions, strict=True)) if i < len(a)]
    if stuck:
        raise ValueError("these computations wait for each other in a cycle: " + "; ".join(stuck))
    remaining = [iter(actions) for actions in lists]
    return Program(len(lists), ranks, [next(remaining[rank]) for rank in ranks], firsts, needs, peers)


@dataclass(frozen=True)
class Times:
    """When each computation of a program starts and ends, and when its result arrives where it is sent."""

    starts: list[float]
    ends: list[float]
    arrivals: list[float]

    @property
    def makespan(self) -> float:
        return max(self.ends)


def run(program: Program, seconds: Sequence[float], delays: Sequence[float], links: Sequence[LinkBehavior]) -> Times:
    """Times a program in one pass.

    A computation starts when its rank is free and its input has arrived, and takes its ``seconds``. The transfer of its
    result takes its ``delays``. ``links`` says how each of ``program.links`` behaves. A link is first in, first out,
    and every transfer occupies it for its delay less the latency. A rank that cannot overlap transfers with
    computation is blocked while it sends.
    """
    clock = [0.0] * program.num_ranks
    free = [0.0] * len(links)  # when each link is free again
    starts, ends, arrivals = [], [], [0.0] * len(seconds)
    lists = zip(program.ranks, program.needs, program.links[1].tolist(), seconds, delays, strict=True)
    for i, (rank, need, link, duration, delay) in enumerate(lists):
        start = clock[rank]
        if need >= 0 and arrivals[need] > start:
            start = arrivals[need]
        end = start + duration
        starts.append(start)
        ends.append(end)
        if link >= 0:
            overlapped, latency = links[link]
            if overlapped:
                arrivals[i] = max(end, free[link]) + delay
                free[link] = arrivals[i] - latency
            else:
                end = arrivals[i] = end + delay
        clock[rank] = end
    return Times(starts, ends, arrivals)
