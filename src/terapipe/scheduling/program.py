"""An order's computations as numbers: compiled once, run in one pass with any durations."""

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
_CODE = {op: code for code, op in enumerate(Op)} | {Op.I: list(Op).index(Op.B)}  # who waits for B is content with I


# What a computation's result is sent as, received as, and how many stages on.
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
    """An order's computations as numbers, so listed that each comes after all that it waits for.

    Only a need that another rank computes is noted: what comes from the same rank was done before by the order of its
    list. The lists are parallel, one entry for each computation.
    """

    num_ranks: int
    ranks: list[int]
    actions: list[Action]
    firsts: list[int]  # the place in ``Plan.slices`` of each microbatch's first slice
    needs: list[int]  # the computation whose result must have arrived, or -1
    peers: list[int]  # the rank to which the result is sent, or -1

    @cached_property
    def places(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Stages, ops by their place in ``COMPUTATIONS``, and slices, to look up tables with."""
        rows = [(k, _COLUMN[op], self.firsts[s.microbatch] + s.number) for op, k, s in self.actions]
        stages, ops, slices = np.array(rows, dtype=np.int64).T
        return stages, ops, slices

    @cached_property
    def links(self) -> tuple[list[tuple[int, int]], NDArray[np.int64]]:
        """All pairs of ranks of which one sends to the other, and each computation's place among them, or -1."""
        pairs = list(zip(self.ranks, self.peers, strict=True))
        known = sorted({pair for pair in pairs if pair[1] >= 0})
        place = {pair: i for i, pair in enumerate(known)}
        return known, np.array([place.get(pair, -1) for pair in pairs])


def compiled(plan: Plan, lists: Sequence[Sequence[Action]]) -> Program:
    """Walks all lists at once; a rank stops where a need is not computed yet and goes on when it is."""
    counts = [len(row) for row in plan.lengths]
    firsts = list(accumulate(counts, initial=0))  # the place of each microbatch's first slice
    stages, width = plan.num_stages, firsts[-1]
    number = [-1] * (len(Op) * stages * width)  # which computation it is: by op, stage and slice
    own = {op: _CODE[op] * stages * width for op in COMPUTATIONS}
    needed = {op: [(own[n.op] + n.stage * width + n.slice, n.stage, n.slice) for n in NEEDS[op]] for op in COMPUTATIONS}
    ranks: list[int] = []
    needs: list[int] = []
    peers: list[int] = []
    at = [0] * len(lists)
    waiting: dict[int, list[int]] = {}
    runnable = list(range(len(lists)))
    while runnable:
        rank = runnable.pop()
        actions, here = lists[rank], at[rank]
        while here < len(actions):
            op, k, s = actions[here]
            microbatch, i = s[0], s[1]
            place, far = k * width + firsts[microbatch] + i, -1
            for offset, stage, ahead in needed[op]:
                if 0 <= k + stage < stages and 0 <= i + ahead < counts[microbatch]:
                    key = place + offset
                    found = number[key]
                    if found < 0:
                        break
                    if ranks[found] != rank:
                        far = found
            else:
                key = place + own[op]
                number[key] = len(ranks)
                ranks.append(rank)
                needs.append(far)
                peers.append(-1)
                if far >= 0:
                    peers[far] = rank
                here += 1
                if key in waiting:
                    runnable += waiting.pop(key)
                continue
            waiting.setdefault(key, []).append(rank)
            break
        at[rank] = here
    stuck = [f"rank {r} at {a[i]}" for r, (a, i) in enumerate(zip(lists, at, strict=True)) if i < len(a)]
    if stuck:
        raise ValueError("these computations wait for each other in a circle: " + "; ".join(stuck))
    turns = [iter(actions) for actions in lists]
    return Program(len(lists), ranks, [next(turns[rank]) for rank in ranks], firsts, needs, peers)


@dataclass(frozen=True)
class Times:
    """When each computation of a program starts and ends, and when its result is with the rank that it is sent to."""

    starts: list[float]
    ends: list[float]
    arrivals: list[float]

    @property
    def makespan(self) -> float:
        return max(self.ends)


def run(program: Program, seconds: Sequence[float], delays: Sequence[float], sendings: Sequence[LinkBehavior]) -> Times:
    """Every computation takes its seconds, and its result, where it is sent, its delay.

    Transfers over one link, ``sendings`` has one entry for each of ``program.links``, begin one by one in the order in
    which they are produced, each when the one before is through but for its latency. Where they are not overlapped, the
    rank that sends goes on when it has sent.
    """
    clock = [0.0] * program.num_ranks
    free = [0.0] * len(sendings)  # when each link is free again
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
            overlapped, latency = sendings[link]
            if overlapped:
                arrivals[i] = max(end, free[link]) + delay
                free[link] = arrivals[i] - latency
            else:
                end = arrivals[i] = end + delay
        clock[rank] = end
    return Times(starts, ends, arrivals)
