"""The least seconds of a cut in which no slice takes longer than a limit: exactly, or from below for long sequences.

Both are potentials. A number for every cut point such that no allowed slice costs less than the difference of its two
ends proves that the whole costs no less than the difference of the first and the last. `ways` gives the best potential
there is, the shortest ways themselves; `Rows` a weaker one that needs no graph.
"""

from collections.abc import Callable
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


@dataclass(frozen=True)
class Rows:
    """What the slices of one sequence cost from each of some contexts on, for a sequence too long for a graph.

    ``seconds[j][k - 1]`` is the least that a slice of k units takes from ``contexts[j]`` or any later context: costs
    must not fall as the context grows. It is inf above the greatest limit, and the row ends with the last that is not.
    Cell j is the units from ``contexts[j]`` up to the next.
    """

    units: int
    contexts: Ints  # rising from 0
    seconds: list[Array]

    @cached_property
    def widths(self) -> Ints:
        return np.diff(self.contexts, append=self.units)

    @cached_property
    def last(self) -> Ints:
        """The last unit of each cell."""
        return self.contexts + self.widths - 1

    def entries(self, limit: float = np.inf) -> int:
        return sum(int(np.count_nonzero(row <= limit)) for row in self.seconds)

    def least(self, limits: Array) -> tuple[Array, Ints]:
        """No cut whose slices keep to the limit takes fewer seconds than this; and for each cell a good length.

        The potential is a sum of prices, one for every unit, and proves its last value if no allowed slice costs less
        than the prices of its units. There are two ways to such prices, and the better counts, for each limit:

        A unit of cell k can only be in a slice from a cell j whose longest slices reach it. It costs at least the rate
        of cell j, the least seconds per unit of any slice from there. Rates rise with the context, so the rate of the
        first such j is a price that is never too high; too low, though, where long slices are allowed but dear.

        Or let the price be the cell's own rate, see which slices cost less than their units (`_bargains`), and lower
        the prices of all their units by the factor that makes up for it. Of the slices of one length from one cell,
        only the one from the cell's last unit need be looked at: rates rise, so its units are the dearest, and the
        cells lowered for it hold the units of the others too.
        """
        rate, longest = self._rates(limits)
        reach = np.maximum.accumulate(np.where(longest > 0, self.last + longest, 0), axis=1)
        first = np.stack([np.searchsorted(row, self.contexts, side="right") for row in reach])
        covered = first <= np.arange(len(self.contexts))
        safe = np.take_along_axis(rate, np.minimum(first, len(self.contexts) - 1), axis=1)
        price = np.maximum.accumulate(np.where(np.isfinite(rate), rate, 0.0), axis=1)
        factor, length = self._bargains(price, limits)
        total = np.maximum(np.where(covered, safe, 0.0) @ self.widths, (price * factor) @ self.widths)
        return np.where(covered.all(axis=1), total, np.inf), length

    def _rates(self, limits: Array) -> tuple[Array, Ints]:
        """The least seconds per unit of the allowed slices, and the units of the longest, for each limit and cell."""
        rate = np.full((len(limits), len(self.seconds)), np.inf)
        longest = np.zeros(rate.shape, dtype=np.int64)
        for j, row in enumerate(self.seconds):
            if len(row):
                allowed = row <= limits[:, None]
                rate[:, j] = np.where(allowed, row / np.arange(1, len(row) + 1), np.inf).min(axis=1)
                longest[:, j] = _last(allowed) + 1
        return rate, longest

    def _bargains(self, price: Array, limits: Array) -> tuple[Array, Ints]:
        """For each limit and cell the factor that lowers prices enough, and the length cheapest for its price."""
        cell = np.repeat(np.arange(len(self.contexts)), self.widths)
        cell = np.append(cell, np.full(self.widths[-1], cell[-1]))  # prices go on after the last unit
        factor = np.ones_like(price)
        length, reach = np.zeros(price.shape, dtype=np.int64), np.zeros(price.shape, dtype=np.int64)
        for j, row in enumerate(self.seconds):
            if len(row):
                units = cell[self.last[j] : self.last[j] + len(row)]
                ratio = np.where(row <= limits[:, None], row, np.inf)
                ratio /= np.maximum(np.cumsum(price[:, units], axis=1), 1e-200)
                lowest = ratio.min(axis=1)
                length[:, j] = np.where(lowest < np.inf, ratio.argmin(axis=1) + 1, 0)
                factor[:, j] = np.minimum(lowest, 1.0)
                reach[:, j] = np.where(lowest < 1.0, units[_last(ratio < 1.0)] - j, 0)
        return _spill(factor, reach), length

    def walk(self, length: Ints) -> list[Ints]:
        """For each limit the ends of slices, each as long as is good at the end of its cell, so that few pass the
        limit; without the limits under which that does not get to the end."""
        ahead = np.roll(length, -1, axis=1)
        ahead[:, -1] = length[:, -1]
        length = np.where(ahead > 0, ahead, length)
        at = np.zeros(len(length), dtype=np.int64)
        count = np.zeros_like(length)
        for j, step in enumerate(length.T):
            left = np.maximum(self.last[j] + 1 - at, 0)
            count[:, j] = np.where(step > 0, -(-left // np.maximum(step, 1)), 0)
            at = at + count[:, j] * step
        ends = [np.cumsum(np.repeat(length[i], count[i])) for i in np.flatnonzero(at >= self.units)]
        return [np.append(e[e < self.units], self.units) for e in ends]


def _last(true: Mask) -> Ints:
    """Where each row is last true; -1 if nowhere."""
    return np.where(true.any(axis=1), true.shape[1] - 1 - true[:, ::-1].argmax(axis=1), -1)


def _spill(factor: Array, reach: Ints) -> Array:
    """The least factor of all cells that reach a cell."""
    least = factor.copy()
    for n in range(1, int(reach.max()) + 1):
        np.minimum(least[:, n:], np.where(reach >= n, factor, 1.0)[:, :-n], out=least[:, n:])
    return least


def rows(seconds: Callable[[Ints, int], Array], units: int, cells: int, high: float) -> Rows:
    """Each row only as far as slices were allowed in the row before."""
    contexts = np.unique(np.arange(cells) * units // cells)
    found: list[Array] = []
    before = np.zeros(units)
    for context in contexts.tolist():
        if len(before):
            row = seconds(np.arange(1, min(len(before), units - context) + 1), context)
            row = np.where(row <= high, row, np.inf)
            _refuse_falling(before[: len(row)], row, context)
            before = row[: np.max(np.flatnonzero(np.isfinite(row)), initial=-1) + 1]
        found.append(before)
    return Rows(units, contexts, found)


def _refuse_falling(before: Array, row: Array, context: int) -> None:
    falling = np.flatnonzero(row < before * (1 - 1e-9))
    if len(falling):
        i = int(falling[0])
        raise ValueError(
            "a sequence this long can only be cut if no slice takes less time after a longer context, got "
            f"{row[i]:.6g} s for {i + 1} steps after {context}, but {before[i]:.6g} s after fewer (inf: too long); "
            "use a larger step, or a cost without noise"
        )
