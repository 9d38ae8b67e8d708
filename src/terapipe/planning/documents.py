"""Slice lengths for packed sequences, where the cost of a token depends on its position in its own document."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from terapipe.planning.cost import Cost, StageSpec


def document_lengths(
    cost: Cost, stage: StageSpec, starts: Sequence[int], seq_len: int, slices: int, *, tile: int = 1
) -> tuple[int, ...]:
    """Cuts one sequence into at most ``slices`` slices of about equal time, forward plus backward.

    ``starts`` are the positions at which documents begin. Lengths are multiples of ``tile``, except the last one.
    """
    if not starts or starts[0] != 0 or any(b <= a for a, b in zip(starts, [*starts[1:], seq_len], strict=True)):
        raise ValueError(f"documents begin at 0 and at rising places below {seq_len}, got {list(starts)}")
    if slices < 1 or tile < 1:
        raise ValueError(f"slices and tile must be at least 1, got {slices} and {tile}")
    edges = [*range(0, seq_len, tile), seq_len]
    sums = np.cumsum([0.0, *(_seconds(cost, stage, starts, a, b, seq_len) for a, b in pairwise(edges))])
    targets = sums[-1] * np.arange(1, slices) / slices  # seconds before each cut
    inner = {edges[int(np.abs(sums - seconds).argmin())] for seconds in targets}
    cuts = sorted({0, seq_len, *inner})
    return tuple(b - a for a, b in pairwise(cuts))


def _seconds(cost: Cost, stage: StageSpec, starts: Sequence[int], first: int, last: int, seq_len: int) -> float:
    """The time that the tokens ``first`` to ``last`` add to their documents."""
    total = 0.0
    for start, stop in zip(starts, [*starts[1:], seq_len], strict=True):
        a, b = max(first, start), min(last, stop)
        if a < b:  # a difference of prefixes, because the fixed cost of such short slices would dominate
            total += _prefix(cost, stage, b - start) - _prefix(cost, stage, a - start)
    return total


def _prefix(cost: Cost, stage: StageSpec, length: int) -> float:
    if not length:
        return 0.0
    return float(cost.forward(stage, 1, length, 0)) + float(cost.backward(stage, 1, length, 0))
