"""Which slices a profile measures, and in what order."""

from collections.abc import Sequence
from typing import NamedTuple


class Point(NamedTuple):
    """A slice to measure; ``held_out`` ones only judge the fit."""

    size: int
    length: int
    context: int
    held_out: bool = False


def grid(seq_len: int, sizes: Sequence[int]) -> list[Point]:
    """Lengths from short to whole without context; a few of them behind some contexts; two that are held out."""
    lengths = {n for n in (16, 32, 64, 128, 192, 256) if n < seq_len}
    lengths |= {seq_len * i // 16 for i in (2, 3, 4, 6, 8, 12, 16) if seq_len * i >= 16} | {min(64, seq_len)}
    points = [Point(size, length, 0) for size in sizes for length in sorted(lengths)]
    behind = [n for n in (seq_len // 32, seq_len // 12, seq_len // 6, seq_len // 3) if n >= 1]
    for size in sizes:
        for context in (seq_len // 4, seq_len // 2, seq_len * 3 // 4):
            points += [Point(size, n, context) for n in behind if n + context <= seq_len and context]
    size = sizes[0]
    held_out = [(seq_len // 10, seq_len * 3 // 5), (seq_len // 5, seq_len // 3), (seq_len * 7 // 16, 0)]
    return points + [Point(size, n, c, True) for n, c in held_out if n >= 1]


def sparse(seq_len: int) -> set[int]:
    """The lengths at which is measured what grows evenly with the tokens: embedding, head, weight halves."""
    return {min(64, seq_len), seq_len // 8 or 1, seq_len // 2 or 1}


def needed(points: Sequence[Point]) -> set[Point]:
    """Without which there is no profile: of each size the shortest and the longest slice, the shortest ``sparse`` one,
    and one behind a context."""
    found: set[Point] = set()
    for size in {p.size for p in points}:
        bare, behind = ([p for p in points if p[0] == size and bool(p.context) == c and not p.held_out] for c in (0, 1))
        few = [p for p in bare if p.length in sparse(bare[-1].length)]
        found |= {*bare[:1], *bare[-1:], *few[:1], *behind[len(behind) // 2 :][:1]}
    return found


def far_apart_first(points: Sequence[Point]) -> list[Point]:
    """What is needed, then every second of the others, then those between: what is left out can be interpolated."""
    first = needed(points)
    order = {p: (p not in first, i % 2, i) for i, p in enumerate(points)}
    return sorted(points, key=order.__getitem__)
