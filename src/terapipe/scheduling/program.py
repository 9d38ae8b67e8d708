"""An order's computations as numbers: compiled once, run in one pass with any durations."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import COMPUTE, NEEDS, Action, Op

_CODE = {op: code for code, op in enumerate(Op)} | {Op.I: list(Op).index(Op.B)}  # who waits for B is content with I
_NEEDS = {op: [(_CODE[n.op], n.stage, n.slice) for n in NEEDS[op]] for op in COMPUTE}


@dataclass(frozen=True)
class Program:
    """An order's computations as numbers, so listed that each comes after all that it waits for.

    Only a need that another rank computes is noted: what comes from the same rank was done before by the order of its
    list. The lists are parallel, one entry for each computation.
    """

    num_ranks: int
    ranks: list[int]
    ops: list[Op]
    stages: list[int]
    slices: list[int]  # places in Plan.slices
    needs: list[int]  # the computation whose result must have arrived, or -1
    peers: list[int]  # the rank to which the result is sent, or -1


def compiled(plan: Plan, lists: Sequence[Sequence[Action]]) -> Program:
    out = Program(len(lists), [], [], [], [], [], [])
    place = {s: i for i, s in enumerate(plan.slices)}
    number: dict[tuple[int, int, int], int] = {}  # computations done: by op, stage and slice
    at = [0] * len(lists)
    waiting: dict[tuple[int, int, int], list[int]] = {}
    runnable = list(range(len(lists)))
    while runnable:
        rank = runnable.pop()
        actions = lists[rank]
        while at[rank] < len(actions):
            op, k, s = actions[at[rank]]
            flat, far = place[s], -1
            for need in _keys(plan, op, k, s.number, len(plan.lengths[s.microbatch]), flat):
                found = number.get(need)
                if found is None:
                    waiting.setdefault(need, []).append(rank)
                    break
                if out.ranks[found] != rank:
                    far = found
            else:
                key = (_CODE[op], k, flat)
                number[key] = len(out.ops)
                _append(out, rank, op, k, flat, far)
                at[rank] += 1
                runnable += waiting.pop(key, ())
                continue
            break
    stuck = [f"rank {r} at {a[i]}" for r, (a, i) in enumerate(zip(lists, at, strict=True)) if i < len(a)]
    if stuck:
        raise ValueError("these computations wait for each other in a circle: " + "; ".join(stuck))
    return out


def _keys(plan: Plan, op: Op, k: int, i: int, count: int, flat: int) -> Iterator[tuple[int, int, int]]:
    """What ``NEEDS`` says, as keys."""
    for code, stage, ahead in _NEEDS[op]:
        if 0 <= k + stage < plan.num_stages and 0 <= i + ahead < count:
            yield code, k + stage, flat + ahead


def _append(out: Program, rank: int, op: Op, stage: int, flat: int, far: int) -> None:
    out.ranks.append(rank)
    out.ops.append(op)
    out.stages.append(stage)
    out.slices.append(flat)
    out.needs.append(far)
    out.peers.append(-1)
    if far >= 0:
        out.peers[far] = rank


@dataclass(frozen=True)
class Times:
    """When each computation of a program starts and ends, and when its result is with the rank that it is sent to."""

    starts: list[float]
    ends: list[float]
    arrivals: list[float]

    @property
    def makespan(self) -> float:
        return max(self.ends)


def run(program: Program, seconds: Sequence[float], delays: Sequence[float], *, overlapped: bool) -> Times:
    """Every computation takes its seconds, and its result, where it is sent, its delay.

    Transfers over one link happen one by one in the order in which they are produced. Where they are not overlapped,
    the rank that sends goes on when it has sent.
    """
    clock = [0.0] * program.num_ranks
    links: dict[tuple[int, int], float] = {}  # when each is free again
    starts, ends, arrivals = [], [], [0.0] * len(seconds)
    lists = zip(program.ranks, program.needs, program.peers, seconds, delays, strict=True)
    for i, (rank, need, peer, duration, delay) in enumerate(lists):
        start = clock[rank]
        if need >= 0 and arrivals[need] > start:
            start = arrivals[need]
        end = start + duration
        starts.append(start)
        ends.append(end)
        if peer >= 0:
            if overlapped:
                link = (rank, peer)
                arrivals[i] = links[link] = max(end, links.get(link, 0.0)) + delay
            else:
                end = arrivals[i] = end + delay
        clock[rank] = end
    return Times(starts, ends, arrivals)
