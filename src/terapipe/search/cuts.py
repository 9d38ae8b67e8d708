"""Ways to cut a sequence: slices of equal time, and cuts moved as long as the simulated step gets shorter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np

from terapipe.planning.cost import Array

Lengths = tuple[int, ...]
Seconds = Callable[[Array, Array], Array]  # of slices by length and context
UNITS = 256  # places at which equal-time cuts may fall, at most


def uniform(seq_len: int, count: int, tile: int) -> Lengths:
    """As even as multiples of the tile allow; the last slice takes what is left over."""
    units = -(-seq_len // tile)
    count = min(count, units)
    short, longer = divmod(units, count)
    lengths = [(short + (i < longer)) * tile for i in range(count)]
    lengths[-1] -= units * tile - seq_len
    return tuple(lengths)


@dataclass(frozen=True)
class Grid:
    """Seconds of every slice between two of at most ``UNITS`` evenly spaced places."""

    ends: list[int]  # where slices may end, in tokens
    rows: list[Array]  # for each start, the seconds of the slices that begin there, by their end; rising

    @classmethod
    def of(cls, seconds: Seconds, seq_len: int, tile: int) -> Self:
        tile *= -(-seq_len // (tile * UNITS))
        ends = np.minimum(np.arange(1, -(-seq_len // tile) + 1) * tile, seq_len).astype(np.float64)
        starts = np.concatenate(([0.0], ends[:-1]))
        table = seconds(np.maximum(ends - starts[:, None], 1.0), np.broadcast_to(starts[:, None], (len(ends),) * 2))
        rows = [np.maximum.accumulate(row[i:]) for i, row in enumerate(table)]
        return cls([int(end) for end in ends], rows)

    def equal_time(self, count: int) -> Lengths:
        """At most ``count`` slices of about the same time."""
        return self.shaped((1,) * count)

    def shaped(self, shares: Sequence[float]) -> Lengths:
        """At most so many slices, their times about in these proportions: the shortest that reach the end."""
        low, high = 0.0, float(self.rows[0][-1])
        best: Lengths = (self.ends[-1],)
        for _ in range(24):
            middle = (low + high) / 2
            if found := self._greedy([middle * share for share in shares]):
                best, high = found, middle
            else:
                low = middle
        return best

    def _greedy(self, limits: Sequence[float]) -> Lengths | None:
        """Slices as long as their limits permit, or None if they do not reach the end."""
        cuts = [0]
        for limit in limits:
            if cuts[-1] == len(self.ends):
                break
            reach = int(self.rows[cuts[-1]].searchsorted(limit, side="right"))
            if not reach:
                return None
            cuts.append(cuts[-1] + reach)
        if cuts[-1] < len(self.ends):
            return None
        edges = [0, *self.ends]
        return tuple(edges[b] - edges[a] for a, b in pairwise(cuts))


def ramped(count: int, growth: float, most: float) -> tuple[float, ...]:
    """Shares that grow from either end until they are ``most``."""
    return tuple(min(growth ** min(i, count - 1 - i), most) for i in range(count))


def improve(lengths: Lengths, objective: Callable[[Lengths], float], tile: int, tries: int) -> Lengths:
    """Moves cuts, in ever smaller steps, as long as the objective falls and there are tries left."""
    best = objective(lengths)
    stride = max(tile, max(lengths) // 4 // tile * tile)
    while tries > 0 and len(lengths) > 1:
        better = None
        for changed in _moves(lengths, stride)[:tries]:
            tries -= 1
            value = objective(changed)
            if value < best * (1 - 1e-9):
                better, best = changed, value
                break
        if better is not None:
            lengths = better
        elif stride == tile:
            break
        else:
            stride = max(tile, stride // 2 // tile * tile)
    return lengths


def _moves(lengths: Sequence[int], stride: int) -> list[Lengths]:
    """Every slice a little shorter, its neighbour on either side a little longer."""
    found = []
    for i in range(len(lengths)):
        for j in (i - 1, i + 1):
            if 0 <= j < len(lengths) and lengths[i] > stride:
                changed = list(lengths)
                changed[i] -= stride
                changed[j] += stride
                found.append(tuple(changed))
    return found
