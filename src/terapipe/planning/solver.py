"""The exact solver for slices. It minimizes the paper's formula: the sum of all slices + (stages - 1) * the longest.

A cut of a sequence is a path over cut points, and a slice is an edge whose length is its seconds::

    0 ------ 1 ------ 2 ------ 3      cut points, one every ``step`` tokens
    |________|_________________|      the path 0, 1, 3: a slice of one step, then one of two

Let S(t) be the smallest sum of a cut without slices longer than t. It is a shortest path, found in one pass over the
cut points. The answer is the smallest S(t) + (stages - 1) * t over all t that are the seconds of some slice. There are
hundreds of thousands of those, so the solver does not try them all, but whole intervals of them (`_improve`).

`solve` also cuts a batch into microbatches. The longest slice is then the longest of the whole batch, so the bubble is
paid once, and S(t) is the sum over all microbatches.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol, Self

import numpy as np

from terapipe.planning.cost import Array, Ints, Mask
from terapipe.planning.limits import check_whole_number

__all__ = ["Array", "Cuts", "SliceCost", "solve", "solve_table"]

LIMITS = 16  # limits tried per round: enough to amortize numpy's overhead, few enough to stay in the CPU cache
ENTRIES = 2**22  # edges * limits in a round, so that a large graph is first tried with few limits
MOST_UNITS = 4096  # steps in a sequence; the graph would be too large with more
COARSER = 8  # ratio of the steps of one grid and the next
ROUNDING = 1e-12  # relative; smaller improvements may be rounding errors of a sum


class SliceCost(Protocol):
    """Seconds of slices on one stage: forward, backward and transfers. inf where a slice is not allowed.

    The arguments broadcast, and results are element-wise: number of sequences, tokens in the slice and tokens before
    it. They are whole numbers, passed as floats.
    """

    def __call__(self, size: Array | int, length: Array | int, context: Array | int) -> Array: ...


@dataclass(frozen=True)
class Cuts:
    """A batch cut into microbatches, and each of those into slices, as in a ``Plan``."""

    sizes: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]
    time: float  # sum + (stages - 1) * max over all slices


class _Task(NamedTuple):
    """A problem on the cut points 0 to ``units``."""

    seconds: Callable[[int, Ints, Ints], Array]  # of slices by index in ``sizes``, start and end
    units: int
    spans: Ints  # allowed distances between two cut points, ascending
    sizes: tuple[int, ...]
    batch_size: int
    stages: int


class _Solution(NamedTuple):
    time: float
    microbatches: tuple[tuple[int, tuple[int, ...]], ...]  # index in ``sizes`` and cut points of each


def solve(
    cost: SliceCost,
    *,
    seq_len: int,
    stages: int,
    step: int = 8,
    batch_size: int = 1,
    sizes: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
) -> Cuts:
    """Cuts a batch optimally for a pipeline of equal stages.

    Args:
        cost: Seconds of slices on one stage.
        seq_len: Tokens in each sequence.
        stages: Stages of the pipeline.
        step: Slice lengths are multiples of it; the last slice of a sequence also takes the remainder.
        batch_size: Sequences in the batch.
        sizes: The allowed microbatch sizes. None: all.
        lengths: The allowed slice lengths, in place of multiples of ``step``.
    """
    _positive(seq_len=seq_len, stages=stages, step=step, batch_size=batch_size)
    allowed = _sizes(sizes, batch_size)
    if lengths is not None:
        step, spans = _spans(lengths, seq_len)
    else:
        _refuse_long(seq_len, step)
        spans = np.arange(1, -(-seq_len // step) + 1)
    units = -(-seq_len // step)
    points = np.minimum(np.arange(units + 1) * step, seq_len)

    def seconds(i: int, starts: Ints, ends: Ints) -> Array:
        context = points[starts]
        return _seconds_of(cost, allowed[i], (points[ends] - context).astype(np.float64), context.astype(np.float64))

    return _cuts(_Task(seconds, units, spans, allowed, batch_size, stages), points)


def _spans(lengths: Sequence[int], seq_len: int) -> tuple[int, Ints]:
    """The coarsest step such that all cuts into these lengths lie on its grid, and the lengths in steps."""
    _positive(**{f"lengths[{i}]": length for i, length in enumerate(lengths)})
    fitting = [length for length in lengths if length <= seq_len]
    step = math.gcd(*fitting)
    if not step or seq_len % step:
        raise ValueError(f"no slices of {sorted(lengths)} tokens add up to {seq_len}; allow {seq_len} too")
    return step, np.unique(np.array(fitting) // step)


def _refuse_long(seq_len: int, step: int) -> None:
    if seq_len > MOST_UNITS * step:
        raise ValueError(
            f"a sequence can be cut into no more than {MOST_UNITS} steps, got {seq_len} tokens in steps of {step}; "
            f"try step={-(-seq_len // (MOST_UNITS * step)) * step}"
        )


def solve_table(
    table: Array, *, stages: int, batch_size: int = 1, unit: int = 1, sizes: Sequence[int] | None = None
) -> Cuts:
    """As ``solve``, from a table.

    Args:
        table: ``table[s, k, j]`` are the seconds of a slice of ``sizes[s]`` sequences with a length of ``k + 1`` units
            and a context of ``j`` units. inf where a slice is not allowed. Entries beyond the end of the sequence are
            not read.
        stages: Stages of the pipeline.
        batch_size: Sequences in the batch.
        unit: Tokens in a unit.
        sizes: The microbatch size of each row of the table. None: 1, 2, 3 and so on.
    """
    _positive(stages=stages, batch_size=batch_size, unit=unit)
    table = np.asarray(table, dtype=np.float64)
    all_sizes = list(range(1, batch_size + 1) if sizes is None else sizes)
    allowed = _sizes(all_sizes, batch_size)
    if table.ndim != 3 or 0 in table.shape or len(table) != len(all_sizes) or table.shape[1] > table.shape[2]:
        raise ValueError(
            "the table must have the shape (sizes, longest slice in units, units), no slice longer than all units, "
            f"got {table.shape} for sizes {all_sizes}; give it one row for each size and one column for each context"
        )
    row = [all_sizes.index(size) for size in allowed]

    def seconds(i: int, starts: Ints, ends: Ints) -> Array:
        entries: Array = table[row[i], ends - starts - 1, starts]
        return _refuse_negative(entries, allowed[i], (ends - starts) * unit, starts * unit)

    units = table.shape[2]
    task = _Task(seconds, units, np.arange(1, table.shape[1] + 1), allowed, batch_size, stages)
    return _cuts(task, np.arange(units + 1) * unit)


def _cuts(task: _Task, points: Ints) -> Cuts:
    """Solves on finer and finer grids. The solution on a coarse grid is also valid on the next one, and close enough to
    the optimum that most slices of the finer grid can be discarded at once."""
    stride, best = 1, _Solution(math.inf, ())
    while task.units // (stride * COARSER) >= COARSER:
        stride *= COARSER
    while stride:
        best = _improve(_graph(task, stride, best.time), task, best)
        stride //= COARSER
    if not best.microbatches:
        raise ValueError(
            f"no allowed slices add up to {points[-1]} tokens and a batch of {task.batch_size}, with {len(task.spans)} "
            f"lengths and the sizes {list(task.sizes)}; allow others, or make the cost finite for more of them"
        )
    sizes = tuple(task.sizes[i] for i, _ in best.microbatches)
    lengths = tuple(tuple(np.diff(points[list(cut)]).tolist()) for _, cut in best.microbatches)
    return Cuts(sizes, lengths, best.time)


@dataclass(frozen=True)
class _Graph:
    """Slices as edges between the cut points 0 to ``units``. Every microbatch size has a chain of cut points.

    Edges are sorted by end, then chain, then start. So the edges into one cut point are adjacent, one step of
    `_shortest_paths` reads contiguous memory, and the first of equally good edges is the longest slice.
    """

    units: int
    chains: int
    chain: Ints  # these four are parallel, one entry per edge
    start: Ints
    end: Ints
    cost: Array

    @classmethod
    def of(cls, units: int, chains: int, chain: Ints, start: Ints, end: Ints, cost: Array) -> Self:
        """Sorts edges that are already sorted by chain, and by start among those with equal chain and end."""
        # numpy sorts 16-bit keys with radix sort, ten times as fast.
        order = np.argsort(end.astype(np.uint16 if units < 2**16 else np.int64), kind="stable")
        return cls(units, chains, chain[order], start[order], end[order], cost[order])

    def only(self, keep: Mask) -> "_Graph":
        return _Graph(self.units, self.chains, self.chain[keep], self.start[keep], self.end[keep], self.cost[keep])

    @cached_property
    def tail(self) -> Ints:
        """The row of `_shortest_paths` at which each edge starts."""
        return self.start * self.chains + self.chain

    @cached_property
    def groups(self) -> tuple[Ints, Ints]:
        """The rows of `_shortest_paths` that have incoming edges, and the first edge of each, then the edge count."""
        head = self.end * self.chains + self.chain
        first = np.flatnonzero(np.diff(head, prepend=-1))
        return head[first], np.append(first, len(head))

    def into(self, end: int, chain: int) -> slice:
        """The edges into a cut point of a chain."""
        heads, first = self.groups
        at = int(np.searchsorted(heads, end * self.chains + chain))
        return slice(int(first[at]), int(first[at + 1]))


def _shortest_paths(graph: _Graph, limits: Array) -> Array:
    """The distance in seconds from cut point 0 to every other, using no slice longer than the limit.

    One row per (cut point, chain) and one column per limit. Edges lead forwards, so one pass over the cut points is
    enough. Each step of the loop handles one cut point for all chains and limits at once::

        distance[2] = min(distance[0] + cost[0 -> 2], distance[1] + cost[1 -> 2])
    """
    cost = np.where(graph.cost[:, None] <= limits, graph.cost[:, None], np.inf)
    distance = np.full(((graph.units + 1) * graph.chains, len(limits)), np.inf)
    distance[: graph.chains] = 0.0
    heads, first = graph.groups
    points = np.append(np.flatnonzero(np.diff(heads // graph.chains, prepend=-1)), len(heads)).tolist()
    edges = first.tolist()
    for a, b in pairwise(points):
        low, high = edges[a], edges[b]
        through = distance.take(graph.tail[low:high], axis=0)
        through += cost[low:high]
        if b - a == 1:
            distance[heads[a]] = through.min(axis=0)
        else:
            distance[heads[a:b]] = np.minimum.reduceat(through, first[a:b] - low, axis=0)
    return distance


def _graph(task: _Task, stride: int, best: float) -> _Graph:
    """All slices between every ``stride``-th cut point (and the last), except those too long for a better cut. A cut
    takes at least ``stages`` times its longest slice, because the sum is at least that slice."""
    edges: list[tuple[Ints, Ints, Ints, Array]] = []
    pairs = list(_pairs(task.units, task.spans, stride))
    for i in range(len(task.sizes)):
        for start, end in pairs:
            cost = task.seconds(i, start, end)
            keep = np.flatnonzero(cost * task.stages < best)
            edges.append((np.full(len(keep), i), start[keep], end[keep], cost[keep]))
    chain, start, end, cost = (np.concatenate(column) for column in zip(*edges, strict=True))
    return _Graph.of(task.units, len(task.sizes), chain, start, end, cost)


def _pairs(units: int, spans: Ints, stride: int) -> Iterator[tuple[Ints, Ints]]:
    """Starts and ends of slices, the longest first, in blocks, so that the temporaries of the cost model stay small."""
    starts = np.arange(0, units, stride)
    can_end = np.zeros(2 * units + 1, dtype=np.bool_)
    can_end[starts] = can_end[units] = True
    block = max(1, 2**20 // len(starts))
    for high in range(len(spans), 0, -block):
        ends = starts + spans[max(0, high - block) : high][::-1, None]
        row, column = np.nonzero(can_end[ends])
        yield starts[column], ends[row, column]


def _improve(graph: _Graph, task: _Task, best: _Solution) -> _Solution:
    """The best cut in the graph, or ``best`` if none is better.

    Branch and bound over intervals of the longest slice. Take all possible seconds of a slice, in ascending order, and
    an interval of them, from ``first`` to ``last``. S falls with its limit, and (stages - 1) * t rises with t. So every
    cut whose longest slice is in the interval takes at least::

        S(limit) + (stages - 1) * seconds[first]        for any limit that is at least seconds[last]

    An interval is discarded if this bound is not below the best time so far. The others are divided, the one with the
    lowest bound first. With S known at the limits marked |, an interval falls apart into those between the marks::

        first ............................ last      the old limit lies at ``last`` or beyond it
        .......|........|........|.........          each new interval has the limit right after it, the last the old

    A limit itself is settled once S is known there. So the intervals shrink, the loop ends, and ``best`` is optimal.
    """
    seconds = np.unique(graph.cost[np.isfinite(graph.cost)])
    intervals = [_Interval(0.0, 0, len(seconds) - 1, 0.0)] if len(seconds) else []
    count = 1  # the first round only shrinks the graph, which is still large
    while intervals:
        divided, intervals = intervals[:count], intervals[count:]
        marks = [_marks(interval, count // len(divided)) for interval in divided]
        tried = np.unique(np.concatenate(marks))
        sums, candidate = _best_under(graph, seconds[tried], task)
        best = candidate if candidate.time < best.time else best
        sum_under = dict(zip(tried.tolist(), sums.tolist(), strict=True))
        for interval, own in zip(divided, marks, strict=True):
            intervals += _divide(interval, own.tolist(), sum_under)
        bounded = [i._replace(bound=i.sum + (task.stages - 1) * float(seconds[i.first])) for i in intervals]
        intervals = sorted(i for i in bounded if i.bound < best.time * (1 - ROUNDING))
        if intervals:
            graph = graph.only(graph.cost <= seconds[max(interval.last for interval in intervals)])
            count = min(LIMITS, max(1, ENTRIES // len(graph.cost)))
    return best


class _Interval(NamedTuple):
    """Possible seconds of the longest slice, by index in ascending order."""

    bound: float  # every cut whose longest slice is in here takes at least this many seconds
    first: int
    last: int
    sum: float  # S of a limit that is at least the last


def _marks(interval: _Interval, count: int) -> Ints:
    """``count`` indices evenly spread over an interval, its last included if there are several."""
    if count == 1:
        return np.array([(interval.first + interval.last + 1) // 2])
    return np.unique(np.linspace(interval.first, interval.last, count + 1).astype(np.int64)[1:])


def _divide(interval: _Interval, marks: list[int], sum_under: dict[int, float]) -> Iterator[_Interval]:
    """What is left of an interval between the marks, where S is known."""
    first = interval.first
    for mark in marks:
        if first < mark:
            yield interval._replace(first=first, last=mark - 1, sum=sum_under[mark])
        first = mark + 1
    if first <= interval.last:
        yield interval._replace(first=first)


def _best_under(graph: _Graph, limits: Array, task: _Task) -> tuple[Array, _Solution]:
    """S for each limit (ascending), and the best of the cuts behind them."""
    graph = graph.only(graph.cost <= limits[-1])
    distance = _shortest_paths(graph, limits)
    total = _totals(distance[-graph.chains :], task)
    sums: Array = total[task.batch_size]
    at = int(np.argmin(sums + (task.stages - 1) * limits))
    return sums, _trace(graph, distance[:, at], total[:, at], float(limits[at]), task)


def _totals(ends: Array, task: _Task) -> Array:
    """``total[n]`` is the smallest sum of microbatches with n sequences together, from that of one of each size."""
    total = np.full((task.batch_size + 1, ends.shape[1]), np.inf)
    total[0] = 0.0
    sizes = np.array(task.sizes)
    for n in range(min(task.sizes), task.batch_size + 1):
        fitting = int(np.searchsorted(sizes, n, side="right"))
        total[n] = (total[n - sizes[:fitting]] + ends[:fitting]).min(axis=0)
    return total


def _trace(graph: _Graph, from_start: Array, total: Array, limit: float, task: _Task) -> _Solution:
    """The cut that has the smallest sum under one limit.

    Walks back from the whole batch: in each step, takes the microbatch size that ``total`` was the minimum for. Ties go
    to the largest microbatch and the longest last slice.
    """
    left, microbatches = task.batch_size, []
    paths = dict[int, tuple[tuple[int, ...], list[float]]]()  # by chain: all microbatches of one size are cut alike
    if not np.isfinite(total[left]):
        return _Solution(math.inf, ())
    costs: list[float] = []
    while left:
        fitting = [i for i, size in enumerate(task.sizes) if size <= left]
        chain = min(reversed(fitting), key=lambda i: total[left - task.sizes[i]] + from_start[i - len(task.sizes)])
        if chain not in paths:
            paths[chain] = _trace_path(graph, from_start, limit, chain)
        microbatches.append((chain, paths[chain][0]))
        costs += paths[chain][1]
        left -= task.sizes[chain]
    return _Solution(math.fsum(costs) + (task.stages - 1) * max(costs), tuple(microbatches))


def _trace_path(graph: _Graph, from_start: Array, limit: float, chain: int) -> tuple[tuple[int, ...], list[float]]:
    """Walks one microbatch's shortest path backwards. Returns its cut points and the seconds of its slices."""
    points, costs = [graph.units], []
    while points[-1]:
        edges = graph.into(points[-1], chain)
        cost = graph.cost[edges]
        best = int(np.argmin(np.where(cost <= limit, from_start[graph.tail[edges]] + cost, np.inf)))
        costs.append(float(cost[best]))
        points.append(int(graph.start[edges][best]))
    return tuple(reversed(points)), costs


def _seconds_of(cost: SliceCost, size: int, length: Array, context: Array | int) -> Array:
    seconds = np.broadcast_to(np.asarray(cost(size, length, context), dtype=np.float64), length.shape)
    return _refuse_negative(seconds, size, length, context)


def _refuse_negative(seconds: Array, size: int, length: Array | Ints, context: Array | Ints | int) -> Array:
    if not (seconds >= 0).all():
        i = int(np.argmin(seconds >= 0))
        raise ValueError(
            "the cost of a slice must be a number of at least 0, or inf if the slice is not allowed, got "
            f"{seconds[i]} for size {size}, length {int(length[i])} and context "
            f"{int(np.broadcast_to(context, seconds.shape)[i])}; correct the cost model there"
        )
    return seconds


def _positive(**values: int) -> None:
    for name, value in values.items():
        check_whole_number(name, value)


def _sizes(sizes: Sequence[int] | None, batch_size: int) -> tuple[int, ...]:
    """The allowed sizes that fit into the batch, ascending."""
    all_sizes = range(1, batch_size + 1) if sizes is None else sizes
    _positive(**{f"sizes[{i}]": size for i, size in enumerate(all_sizes)})
    fitting = tuple(sorted({int(size) for size in all_sizes if size <= batch_size}))
    sums = {0}
    for n in range(1, batch_size + 1):
        if any(n - size in sums for size in fitting):
            sums.add(n)
    if batch_size not in sums:
        raise ValueError(
            f"the sizes must add up to the batch, got sizes {list(all_sizes)} for a batch of {batch_size}; allow 1"
        )
    return fitting
