"""Ways to cut a sequence: equal lengths, equal times, given proportions of time, and local search."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np

from terapipe.planning.cost import Array

Lengths = tuple[int, ...]
Seconds = Callable[[Array, Array], Array]  # from lengths and contexts of slices
UNITS = 256  # maximum number of cut points for equal-time cuts


def uniform(seq_len: int, count: int, tile: int) -> Lengths:
    """Slices as equal as multiples of the tile permit. The last one is shorter if the tile does not divide evenly."""
    units = -(-seq_len // tile)
    count = min(count, units)
    short, longer = divmod(units, count)
    lengths = [(short + (i < longer)) * tile for i in range(count)]
    lengths[-1] -= units * tile - seq_len
    return tuple(lengths)


@dataclass(frozen=True)
class Grid:
    """Seconds of all slices between at most ``UNITS`` evenly spaced cut points."""

    ends: list[int]  # tokens at which slices may end
    rows: list[Array]  # for each start, the seconds of slices by their end; made monotonic for binary search

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
        """At most ``len(shares)`` slices with times in about these proportions. Bisects over the scale of the times."""
        low, high = 0.0, float(self.rows[0][-1])
        best: Lengths = (self.ends[-1],)
        for _ in range(24):
            middle = (low + high) / 2
            if lengths := self._greedy([middle * share for share in shares]):
                best, high = lengths, middle
            else:
                low = middle
        return best

    def _greedy(self, limits: Sequence[float]) -> Lengths | None:
        """The longest slices within these limits on their times, or None if they do not reach the end."""
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
    """Shares that grow by a factor from both ends, up to ``most``: ``ramped(6, 2, 4)`` is 1 2 4 4 2 1."""
    return tuple(min(growth ** min(i, count - 1 - i), most) for i in range(count))


def improve(lengths: Lengths, objective: Callable[[Lengths], float], tile: int, tries: int) -> Lengths:
    """Local search: moves single cuts, in smaller and smaller steps, while the objective falls and tries are left."""
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
    """All ways to move ``stride`` tokens from one slice to a neighbor."""
    moves = []
    for i in range(len(lengths)):
        for j in (i - 1, i + 1):
            if 0 <= j < len(lengths) and lengths[i] > stride:
                changed = list(lengths)
                changed[i] -= stride
                changed[j] += stride
                moves.append(tuple(changed))
    return moves
