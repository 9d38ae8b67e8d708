"""Cuts for sequences of several documents: a token costs by its place in its own document, not in the sequence."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from terapipe.planning.cost import Cost, StageSpec


def document_lengths(
    cost: Cost, stage: StageSpec, starts: Sequence[int], seq_len: int, slices: int, *, tile: int = 1
) -> tuple[int, ...]:
    """Lengths of at most so many slices of about equal time, forward and backward, of one sequence.

    ``starts`` are the places where documents begin. Lengths are multiples of ``tile``, but for the last one.
    """
    if not starts or starts[0] != 0 or any(b <= a for a, b in zip(starts, [*starts[1:], seq_len], strict=True)):
        raise ValueError(f"documents begin at 0 and at rising places below {seq_len}, got {list(starts)}")
    if slices < 1 or tile < 1:
        raise ValueError(f"slices and tile must be at least 1, got {slices} and {tile}")
    edges = [*range(0, seq_len, tile), seq_len]
    sums = np.cumsum([0.0, *(_seconds(cost, stage, starts, a, b, seq_len) for a, b in pairwise(edges))])
    wanted = sums[-1] * np.arange(1, slices) / slices
    inner = {edges[int(np.abs(sums - seconds).argmin())] for seconds in wanted}
    cuts = sorted({0, seq_len, *inner})
    return tuple(b - a for a, b in pairwise(cuts))


def _seconds(cost: Cost, stage: StageSpec, starts: Sequence[int], first: int, last: int, seq_len: int) -> float:
    """What some tokens add to the documents they belong to."""
    total = 0.0
    for start, stop in zip(starts, [*starts[1:], seq_len], strict=True):
        a, b = max(first, start), min(last, stop)
        if a < b:  # the difference of two prefixes: short slices' fixed costs would drown what matters here
            total += _prefix(cost, stage, b - start) - _prefix(cost, stage, a - start)
    return total


def _prefix(cost: Cost, stage: StageSpec, length: int) -> float:
    if not length:
        return 0.0
    return float(cost.forward(stage, 1, length, 0)) + float(cost.backward(stage, 1, length, 0))
