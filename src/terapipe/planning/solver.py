"""The exact solver for slices. It minimizes the paper's formula: the sum of all slices + (stages - 1) * the longest.

`solve` cuts a batch into microbatches and each of those into slices. The longest slice is the longest of the whole
batch, so the bubble is paid once. For a given limit on the longest slice, the best cut is a shortest path in a graph
of cut points. The solver tries a few limits at a time, and uses the shortest paths as lower bounds to discard slices
and limits that cannot lead to a better cut, until none is left (`_improve`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from terapipe.planning.bounds import Array, Graph, Ints, Solved, in_play, shortest_paths
from terapipe.planning.limits import check_whole_number

__all__ = ["Array", "Cuts", "SliceCost", "solve", "solve_table"]

LIMITS = 16  # limits tried per round: enough to amortize numpy's overhead, few enough to stay in the CPU cache
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
    """A batch cut into microbatches, and each of those into slices."""

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
    """The optimal cuts of ``batch_size`` sequences of ``seq_len`` tokens for a pipeline of ``stages`` equal stages.

    ``sizes`` are the allowed microbatch sizes, by default all. ``lengths`` are the allowed slice lengths, by default
    all multiples of ``step``; the last slice of a sequence then also takes the remainder.
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
        return _checked(cost, allowed[i], (points[ends] - context).astype(np.float64), context.astype(np.float64))

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
    """As ``solve``, from a table. ``table[s, k, j]`` are the seconds of a slice of ``sizes[s]`` sequences with a length
    of ``k + 1`` units and a context of ``j`` units; a unit is ``unit`` tokens. inf where a slice is not allowed.
    Entries beyond the end of the sequence are not read."""
    _positive(stages=stages, batch_size=batch_size, unit=unit)
    table = np.asarray(table, dtype=np.float64)
    given = list(range(1, batch_size + 1) if sizes is None else sizes)
    allowed = _sizes(given, batch_size)
    if table.ndim != 3 or 0 in table.shape or len(table) != len(given) or table.shape[1] > table.shape[2]:
        raise ValueError(
            "the table must have the shape (sizes, longest slice in units, units), no slice longer than all units, "
            f"got {table.shape} for sizes {given}; give it one row for each size and one column for each context"
        )
    row = [given.index(size) for size in allowed]

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


def _graph(task: _Task, stride: int, best: float) -> Graph:
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
    return Graph.sorted(task.units, len(task.sizes), chain, start, end, cost)


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


def _improve(graph: Graph, task: _Task, best: _Solution) -> _Solution:
    """The best cut in the graph, or ``best`` if none is better.

    Branch and bound over the longest slice. ``top`` marks the slices that may be the longest of a better cut. The
    invariant: if a cut is better than ``best``, the graph has all of its slices, and its longest slice is in ``top``.
    Each round
    1. takes a few costs from ``top`` as limits, the largest of them included,
    2. finds the shortest paths under each limit, and updates ``best`` with the best cut among them,
    3. drops the slices from the graph and from ``top`` for which `in_play` gives too high a lower bound.
    The slices at the limits leave ``top`` in every round, so the loop ends, and then ``best`` is optimal.
    """
    top = np.full(len(graph.cost), True)
    count = 1  # the first round only shrinks the graph, which is still large
    while top.any():
        limits = _spread(graph.cost[top], count)
        from_start, to_end = shortest_paths(graph, limits), shortest_paths(graph.mirrored(), limits)
        total = _totals(from_start[-graph.chains :], task)
        at = int(np.argmin(total[task.batch_size] + (task.stages - 1) * limits))
        candidate = _trace(graph, from_start[:, at], total[:, at], float(limits[at]), task)
        best = candidate if candidate.time < best.time else best
        solved = Solved(limits, from_start, to_end, total[[task.batch_size - size for size in task.sizes]])
        keep, top = in_play(graph, top, solved, task.stages, best.time * (1 - ROUNDING))
        graph, top, count = graph.only(keep), top[keep], LIMITS
    return best


def _spread(costs: Array, count: int) -> Array:
    """``count`` of the costs at evenly spaced quantiles, including the largest."""
    indices = np.unique(np.arange(1, count + 1) * len(costs) // count - 1)
    indices = indices[indices >= 0]
    return np.unique(np.partition(costs, indices)[indices])


def _totals(ends: Array, task: _Task) -> Array:
    """``total[n]`` is the smallest sum of microbatches with n sequences together, given that of one of each size."""
    total = np.full((task.batch_size + 1, ends.shape[1]), np.inf)
    total[0] = 0.0
    sizes = np.array(task.sizes)
    for n in range(min(task.sizes), task.batch_size + 1):
        fitting = int(np.searchsorted(sizes, n, side="right"))
        total[n] = (total[n - sizes[:fitting]] + ends[:fitting]).min(axis=0)
    return total


def _trace(graph: Graph, from_start: Array, total: Array, limit: float, task: _Task) -> _Solution:
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


def _trace_path(graph: Graph, from_start: Array, limit: float, chain: int) -> tuple[tuple[int, ...], list[float]]:
    """Walks one microbatch's shortest path backwards. Returns its cut points and the seconds of its slices."""
    points, costs = [graph.units], []
    while points[-1]:
        edges = graph.into(points[-1], chain)
        cost = graph.cost[edges]
        best = int(np.argmin(np.where(cost <= limit, from_start[graph.tail[edges]] + cost, np.inf)))
        costs.append(float(cost[best]))
        points.append(int(graph.start[edges][best]))
    return tuple(reversed(points)), costs


def _checked(cost: SliceCost, size: int, length: Array, context: Array | int) -> Array:
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
    given = range(1, batch_size + 1) if sizes is None else sizes
    _positive(**{f"sizes[{i}]": size for i, size in enumerate(given)})
    fitting = tuple(sorted({int(size) for size in given if size <= batch_size}))
    sums = {0}
    for n in range(1, batch_size + 1):
        if any(n - size in sums for size in fitting):
            sums.add(n)
    if batch_size not in sums:
        raise ValueError(
            f"the sizes must add up to the batch, got sizes {list(given)} for a batch of {batch_size}; allow 1"
        )
    return fitting
