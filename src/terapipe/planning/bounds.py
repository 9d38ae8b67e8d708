"""Shortest paths over cut points under a limit on the longest slice, and lower bounds that follow from them.

A cut of a sequence is a path from cut point 0 to the last one, and a slice is an edge. The shortest path that uses an
edge is a lower bound on every cut with that slice, so edges with too high a bound can be discarded.
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
    """Slices as edges between the cut points 0 to ``units``. Every microbatch size has a chain of cut points.

    Edges are sorted by end, then chain, then start. So the edges into one cut point are adjacent, one step of
    `shortest_paths` reads contiguous memory, and the first of equally good edges is the longest slice.
    """

    units: int
    chains: int
    chain: Ints  # these four are parallel, one entry per edge
    start: Ints
    end: Ints
    cost: Array

    @classmethod
    def sorted(cls, units: int, chains: int, chain: Ints, start: Ints, end: Ints, cost: Array) -> Self:
        """From edges that are sorted by chain, and by start among those with equal chain and end."""
        order = _by(end, units)
        return cls(units, chains, chain[order], start[order], end[order], cost[order])

    def only(self, keep: Mask) -> "Graph":
        return Graph(self.units, self.chains, self.chain[keep], self.start[keep], self.end[keep], self.cost[keep])

    def mirrored(self) -> "Graph":
        """The graph with all edges reversed, so that `shortest_paths` gives the distances to the last cut point."""
        o = _by(self.chain, self.chains)
        start, end = self.units - self.end[o], self.units - self.start[o]
        return Graph.sorted(self.units, self.chains, self.chain[o], start, end, self.cost[o])

    @cached_property
    def tail(self) -> Ints:
        """The row of `shortest_paths` at which each edge starts."""
        return self.start * self.chains + self.chain

    @cached_property
    def mirrored_tail(self) -> Ints:
        """The row at which each edge ends, in the `shortest_paths` of the mirrored graph."""
        return (self.units - self.end) * self.chains + self.chain

    @cached_property
    def groups(self) -> tuple[Ints, Ints]:
        """The rows of `shortest_paths` that have incoming edges, and the first edge of each, then the edge count."""
        head = self.end * self.chains + self.chain
        first = np.flatnonzero(np.diff(head, prepend=-1))
        return head[first], np.append(first, len(head))

    def into(self, end: int, chain: int) -> slice:
        """The edges into a cut point of a chain."""
        heads, first = self.groups
        at = int(np.searchsorted(heads, end * self.chains + chain))
        return slice(int(first[at]), int(first[at + 1]))


def _by(keys: Ints, most: int) -> Ints:
    """A stable argsort. numpy sorts 16-bit keys with radix sort, ten times as fast."""
    return np.argsort(keys.astype(np.uint16 if most < 2**16 else np.int64), kind="stable")


def shortest_paths(graph: Graph, limits: Array) -> Array:
    """The distance in seconds from cut point 0 to every other, using no slice longer than the limit.

    One row per (cut point, chain) and one column per limit. Each step of the loop handles one cut point for all chains
    and limits at once.
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


class Solved(NamedTuple):
    """Shortest paths under some limits, one column per limit."""

    limits: Array  # ascending
    from_start: Array  # seconds from the first cut point
    to_end: Array  # seconds to the last cut point, in the mirrored graph
    others: Array  # for each microbatch size, seconds of the rest of the batch besides one such microbatch

    def through(self, graph: Graph, column: int | Ints) -> Array:
        """For every slice, the smallest sum of all cuts of the batch that contain it."""
        seconds: Array = self.from_start[graph.tail, column] + self.to_end[graph.mirrored_tail, column]
        seconds += self.others[graph.chain, column]
        seconds += graph.cost
        return seconds


def in_play(graph: Graph, top: Mask, solved: Solved, stages: int, goal: float) -> tuple[Mask, Mask]:
    """Which slices may be in a cut that takes less than ``goal``, and which of them may be its longest slice.

    ``top`` are the slices that may still be the longest. If the longest slice of a cut takes t, all its slices obey the
    smallest limit that is at least t. In this picture, limits are | and slices x, by their cost:

        --x---x-|--x--x----|---x---|        column 0, 1, 2: the limit that applies if the slice is the longest

    So the cut takes at least ``through`` of any of its slices under that limit, plus (stages - 1) * t. This gives two
    tests. For the slice as the longest one, t is its own cost. For the slice next to a longer one of column i, t is at
    least the smallest cost in ``top`` within that column.
    """
    limits = solved.limits
    column = np.searchsorted(limits, graph.cost)
    valid = np.minimum(column, len(limits) - 1)
    bound = solved.through(graph, valid) + (stages - 1) * graph.cost
    # A slice exactly at a limit is settled: the best cut under that limit is known.
    top = top & (graph.cost < limits[valid]) & (bound < goal)
    keep = top.copy()
    for i in np.unique(column[top]).tolist():
        shortest = graph.cost[top & (column == i)].min()
        bound = solved.through(graph, i) + (stages - 1) * np.maximum(graph.cost, shortest)
        keep |= (column <= i) & (bound < goal)
    return keep, top
