"""The least seconds of a cut whose slices all keep to a limit, and which slices may be part of a better cut.

`ways` computes shortest paths over cut points. They are potentials: no allowed slice costs less than the difference of
its two ends, so no cut costs less than the difference of the first and the last.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Graph:
    """Slices as edges between cut points, in a chain of cut points 0 to ``units`` for every microbatch size.

    Sorted by end, then chain, then start: the edges into one cut point are neighbours, so that one step of `ways` reads
    contiguous memory, and the first of equally good edges is the longest slice.
    """

    units: int
    chains: int
    chain: Ints
    start: Ints
    end: Ints
    cost: Array

    @classmethod
    def sorted(cls, units: int, chains: int, chain: Ints, start: Ints, end: Ints, cost: Array) -> Self:
        """From edges already sorted by chain, and by start among those with the same chain and end."""
        order = _by(end, units)
        return cls(units, chains, chain[order], start[order], end[order], cost[order])

    def only(self, keep: Mask) -> "Graph":
        return Graph(self.units, self.chains, self.chain[keep], self.start[keep], self.end[keep], self.cost[keep])

    def mirrored(self) -> "Graph":
        """The same slices seen from the last cut point, so that `ways` also finds the ways to the end."""
        o = _by(self.chain, self.chains)
        start, end = self.units - self.end[o], self.units - self.start[o]
        return Graph.sorted(self.units, self.chains, self.chain[o], start, end, self.cost[o])

    @cached_property
    def tail(self) -> Ints:
        """The row of `ways` that each edge starts from."""
        return self.start * self.chains + self.chain

    @cached_property
    def mirrored_tail(self) -> Ints:
        return (self.units - self.end) * self.chains + self.chain

    @cached_property
    def groups(self) -> tuple[Ints, Ints]:
        """The rows of `ways` with edges into them, and the first edge of each, closed by the number of edges."""
        head = self.end * self.chains + self.chain
        first = np.flatnonzero(np.diff(head, prepend=-1))
        return head[first], np.append(first, len(head))

    def into(self, end: int, chain: int) -> slice:
        heads, first = self.groups
        at = int(np.searchsorted(heads, end * self.chains + chain))
        return slice(int(first[at]), int(first[at + 1]))


def _by(keys: Ints, most: int) -> Ints:
    """A stable order; numpy sorts 16-bit keys by radix, ten times as fast."""
    return np.argsort(keys.astype(np.uint16 if most < 2**16 else np.int64), kind="stable")


def ways(graph: Graph, limits: Array) -> Array:
    """The least seconds from cut point 0 to every other under each limit: one row for each (cut point, chain).

    One step for each cut point, all chains and all limits at once.
    """
    cost = np.where(graph.cost[:, None] <= limits, graph.cost[:, None], np.inf)
    least = np.full(((graph.units + 1) * graph.chains, len(limits)), np.inf)
    least[: graph.chains] = 0.0
    heads, first = graph.groups
    points = np.append(np.flatnonzero(np.diff(heads // graph.chains, prepend=-1)), len(heads)).tolist()
    edges = first.tolist()
    for a, b in pairwise(points):
        low, high = edges[a], edges[b]
        through = least.take(graph.tail[low:high], axis=0)
        through += cost[low:high]
        if b - a == 1:
            least[heads[a]] = through.min(axis=0)
        else:
            least[heads[a:b]] = np.minimum.reduceat(through, first[a:b] - low, axis=0)
    return least


class Solved(NamedTuple):
    """The best cuts under some limits, one column for each."""

    limits: Array
    there: Array  # seconds from the first cut point
    back: Array  # seconds to the last
    rest: Array  # seconds of the rest of the batch, next to one microbatch of each size

    def through(self, graph: Graph, column: int | Ints) -> Array:
        """For every slice the least sum of all cuts that have it."""
        seconds: Array = self.there[graph.tail, column] + self.back[graph.mirrored_tail, column]
        seconds += self.rest[graph.chain, column]
        seconds += graph.cost
        return seconds


def in_play(graph: Graph, top: Mask, solved: Solved, stages: int, goal: float) -> tuple[Mask, Mask]:
    """Which slices may be part of a cut that takes less than ``goal``, and which of them its longest.

    If the longest slice of such a cut takes t, the cut obeys the smallest limit of at least t. So its sum is no less
    than `through` any of its slices under that limit, and its time no less than that plus (stages - 1) * t, where t is
    the slice's own cost if it is the longest, and otherwise at least the least cost in ``top`` under that same limit.
    """
    limits = solved.limits
    column = np.searchsorted(limits, graph.cost)
    known = np.minimum(column, len(limits) - 1)
    time = solved.through(graph, known) + (stages - 1) * graph.cost
    top = top & (graph.cost < limits[known]) & (time < goal)
    keep = top.copy()
    for i in np.unique(column[top]).tolist():
        least = graph.cost[top & (column == i)].min()
        time = solved.through(graph, i) + (stages - 1) * np.maximum(graph.cost, least)
        keep |= (column <= i) & (time < goal)
    return keep, top
