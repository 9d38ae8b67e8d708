"""Where to cut: the exact minimum of the sum of all slices' seconds plus (stages - 1) times those of the longest slice.

`solve` cuts a batch into microbatches and each of them into slices; one longest slice is shared by all, so that the
bubble is paid once. The search runs over the limit on the longest slice. Under a limit, the best cut is a shortest way
in a graph of cut points; over all limits, whatever provably cannot lie on a better cut is thrown away, until nothing is
left (`_improve`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from terapipe.planning.bounds import Array, Graph, Ints, Solved, in_play, ways

__all__ = ["Array", "Cuts", "SliceCost", "solve", "solve_table"]

LIMITS = 16  # tried at once: enough to share the steps' overhead, few enough to stay in the cache
MOST_UNITS = 4096  # steps in a sequence; a table of more is too large
COARSER = 8  # from one grid to the next
ROUNDING = 1e-12  # relative; what is better by less than the rounding of a sum is not better


class SliceCost(Protocol):
    """Seconds of slices on one stage, forward and backward and transfer; inf where a slice is not allowed.

    Element-wise over whole numbers, as floats, that broadcast against each other: sequences, their tokens in the slice,
    and their tokens before it.
    """

    def __call__(self, size: Array | int, length: Array | int, context: Array | int) -> Array: ...


@dataclass(frozen=True)
class Cuts:
    """A batch cut into microbatches, and each of those into slices."""

    sizes: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]
    time: float  # sum + (stages - 1) * max of exactly these slices


class _Task(NamedTuple):
    """``seconds(i, starts, ends)`` of microbatches of ``sizes[i]`` sequences between two cut points out of 0..units."""

    seconds: Callable[[int, Ints, Ints], Array]
    units: int
    spans: Ints  # allowed distances between two cut points, rising
    sizes: tuple[int, ...]
    batch_size: int
    stages: int


class _Found(NamedTuple):
    time: float
    parts: tuple[tuple[int, tuple[int, ...]], ...]  # the size's index and the cut points of each microbatch


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
    """The best way to cut ``batch`` sequences of ``tokens`` tokens for that many equal stages.

    Microbatches have ``sizes`` (any, unless given) and slices ``lengths`` (all multiples of ``step`` unless given; the
    last slice of a microbatch then also takes the tokens that are no multiple). Exact.
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
    """The widest grid on which all cuts into these lengths lie, and the lengths in its steps."""
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
    """The same, from a table: ``table[s, k, j]`` are the seconds of a slice of ``sizes[s]`` sequences, ``k + 1`` units
    of ``unit`` tokens long, after ``j`` units. inf where a slice is not allowed; what passes the end is not read."""
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
        found: Array = table[row[i], ends - starts - 1, starts]
        return _refuse_negative(found, allowed[i], (ends - starts) * unit, starts * unit)

    units = table.shape[2]
    task = _Task(seconds, units, np.arange(1, table.shape[1] + 1), allowed, batch_size, stages)
    return _cuts(task, np.arange(units + 1) * unit)


def _cuts(task: _Task, points: Ints) -> Cuts:
    """Solves on ever finer grids: what the coarse one finds is allowed on the fine one, and so good that there only
    few slices are left to look at."""
    stride, best = 1, _Found(math.inf, ())
    while task.units // (stride * COARSER) >= COARSER:
        stride *= COARSER
    while stride:
        best = _improve(_graph(task, stride, best.time), task, best)
        stride //= COARSER
    if not best.parts:
        raise ValueError(
            f"no allowed slices add up to {points[-1]} tokens and a batch of {task.batch_size}, with {len(task.spans)} "
            f"lengths and the sizes {list(task.sizes)}; allow others, or make the cost finite for more of them"
        )
    sizes = tuple(task.sizes[i] for i, _ in best.parts)
    lengths = tuple(tuple(np.diff(points[list(cut)]).tolist()) for _, cut in best.parts)
    return Cuts(sizes, lengths, best.time)


def _graph(task: _Task, stride: int, best: float) -> Graph:
    """All slices between every ``stride``-th cut point and the last, without those too long for any better cut: the sum
    is at least the longest slice, so that a cut takes at least ``stages`` times that one."""
    found: list[tuple[Ints, Ints, Ints, Array]] = []
    pairs = list(_pairs(task.units, task.spans, stride))
    for i in range(len(task.sizes)):
        for start, end in pairs:
            cost = task.seconds(i, start, end)
            keep = np.flatnonzero(cost * task.stages < best)
            found.append((np.full(len(keep), i), start[keep], end[keep], cost[keep]))
    chain, start, end, cost = (np.concatenate(column) for column in zip(*found, strict=True))
    return Graph.sorted(task.units, len(task.sizes), chain, start, end, cost)


def _pairs(units: int, spans: Ints, stride: int) -> Iterator[tuple[Ints, Ints]]:
    """Starts and ends of slices, the longest first, in parts small enough to keep their costs' temporaries small."""
    starts = np.arange(0, units, stride)
    can_end = np.zeros(2 * units + 1, dtype=np.bool_)
    can_end[starts] = can_end[units] = True
    part = max(1, 2**20 // len(starts))
    for high in range(len(spans), 0, -part):
        ends = starts + spans[max(0, high - part) : high][::-1, None]
        row, column = np.nonzero(can_end[ends])
        yield starts[column], ends[row, column]


def _improve(graph: Graph, task: _Task, best: _Found) -> _Found:
    """The best cut in the graph, or ``best`` if none is better.

    Kept throughout: of any cut better than ``best``, all slices are in the graph and the longest is in ``top``. Each
    round solves under a few limits out of the costs in ``top``, the greatest among them, and then drops what `in_play`
    proves useless. The limits themselves are settled and leave ``top``, so the rounds come to an end.
    """
    top = np.full(len(graph.cost), True)
    count = 1  # at first, on a graph still large, only to make it smaller
    while top.any():
        limits = _spread(graph.cost[top], count)
        there, back = ways(graph, limits), ways(graph.mirrored(), limits)
        total = _totals(there[-graph.chains :], task)
        at = int(np.argmin(total[task.batch_size] + (task.stages - 1) * limits))
        found = _trace(graph, there[:, at], total[:, at], float(limits[at]), task)
        best = found if found.time < best.time else best
        solved = Solved(limits, there, back, total[[task.batch_size - size for size in task.sizes]])
        keep, top = in_play(graph, top, solved, task.stages, best.time * (1 - ROUNDING))
        graph, top, count = graph.only(keep), top[keep], LIMITS
    return best


def _spread(costs: Array, count: int) -> Array:
    """So many of the costs, evenly spread by rank, the greatest among them."""
    ranks = np.unique(np.arange(1, count + 1) * len(costs) // count - 1)
    ranks = ranks[ranks >= 0]
    return np.unique(np.partition(costs, ranks)[ranks])


def _totals(ends: Array, task: _Task) -> Array:
    """The least seconds of microbatches of 0, 1, .. ``batch`` sequences altogether, from those of one of each size."""
    total = np.full((task.batch_size + 1, ends.shape[1]), np.inf)
    total[0] = 0.0
    sizes = np.array(task.sizes)
    for n in range(min(task.sizes), task.batch_size + 1):
        some = int(np.searchsorted(sizes, n, side="right"))
        total[n] = (total[n - sizes[:some]] + ends[:some]).min(axis=0)
    return total


def _trace(graph: Graph, there: Array, total: Array, limit: float, task: _Task) -> _Found:
    """The cut behind the sums under one limit; of equals, the largest microbatches and the longest last slices."""
    left, parts, ways_of = task.batch_size, [], dict[int, tuple[tuple[int, ...], list[float]]]()
    if not np.isfinite(total[left]):
        return _Found(math.inf, ())
    costs: list[float] = []
    while left:
        fitting = [i for i, size in enumerate(task.sizes) if size <= left]
        chain = min(reversed(fitting), key=lambda i: total[left - task.sizes[i]] + there[i - len(task.sizes)])
        if chain not in ways_of:
            ways_of[chain] = _trace_one(graph, there, limit, chain)
        parts.append((chain, ways_of[chain][0]))
        costs += ways_of[chain][1]
        left -= task.sizes[chain]
    return _Found(math.fsum(costs) + (task.stages - 1) * max(costs), tuple(parts))


def _trace_one(graph: Graph, there: Array, limit: float, chain: int) -> tuple[tuple[int, ...], list[float]]:
    """The cut points of one microbatch and the seconds of its slices."""
    points, costs = [graph.units], []
    while points[-1]:
        edges = graph.into(points[-1], chain)
        cost = graph.cost[edges]
        best = int(np.argmin(np.where(cost <= limit, there[graph.tail[edges]] + cost, np.inf)))
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
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def _sizes(sizes: Sequence[int] | None, batch_size: int) -> tuple[int, ...]:
    """Those that fit the batch, rising."""
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
