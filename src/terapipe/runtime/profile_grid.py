"""Which slices a profile measures, and in what order."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple


class Point(NamedTuple):
    """A slice to measure. Those that are held out are no part of the fit; they judge it.

    Args:
        size: sequences in its microbatch.
        length: tokens of each.
        context: tokens before the slice.
        held_out: whether it judges the fit.
    """

    size: int
    length: int
    context: int
    held_out: bool = False


class ProfileGrid:
    """The slices that a profile measures, for sequences of one length::

        context
        3/4 |  x  x  x           a few lengths behind three contexts
        1/2 |  x  x  x  x
        1/4 |  x  x  x  x
          0 |  xxxx x x x  x  x  x      x       x    many lengths without context, most of them short
            +-----------------------------------> length

    Args:
        seq_len: tokens of a sequence.
        sizes: of microbatches. Only the first has points that are held out.
        takes: tells whether the model can run this point.
    """

    def __init__(self, seq_len: int, sizes: Sequence[int], takes: Callable[[Point], bool] = lambda point: True) -> None:
        # The lengths at which is measured what grows evenly with the tokens: embedding, head, weight halves.
        self.sparse_lengths = _sparse_lengths(seq_len)
        self.points = [point for point in _candidates(seq_len, sizes) if takes(point)]

    def required(self) -> set[Point]:
        """Points without which there is no profile: of each size the shortest and the longest slice, the shortest one
        of the sparse lengths, and one behind a context."""
        required: set[Point] = set()
        for size in {p.size for p in self.points}:
            fitted = [p for p in self.points if p.size == size and not p.held_out]
            bare, behind = ([p for p in fitted if bool(p.context) == has_context] for has_context in (False, True))
            few = [p for p in bare if p.length in _sparse_lengths(bare[-1].length)]
            required |= {*bare[:1], *bare[-1:], *few[:1], *behind[len(behind) // 2 :][:1]}
        return required

    def measurement_order(self) -> list[Point]:
        """Required points, then every other one, then the rest. If time runs out, what is missing can be
        interpolated."""
        required = self.required()
        order = {p: (p not in required, i % 2, i) for i, p in enumerate(self.points)}
        return sorted(self.points, key=order.__getitem__)


def _sparse_lengths(seq_len: int) -> set[int]:
    return {min(64, seq_len), seq_len // 8 or 1, seq_len // 2 or 1}


def _candidates(seq_len: int, sizes: Sequence[int]) -> Iterator[Point]:
    """Lengths from short to whole without context; a few of them behind some contexts; three that are held out."""
    lengths = {n for n in (16, 32, 64, 128, 192, 256) if n < seq_len}
    lengths |= {seq_len * i // 16 for i in (2, 3, 4, 6, 8, 12, 16) if seq_len * i >= 16} | {min(64, seq_len)}
    for size in sizes:
        yield from (Point(size, length, 0) for length in sorted(lengths))
    behind = [n for n in (seq_len // 32, seq_len // 12, seq_len // 6, seq_len // 3) if n >= 1]
    for size in sizes:
        for context in (seq_len // 4, seq_len // 2, seq_len * 3 // 4):
            yield from (Point(size, n, context) for n in behind if n + context <= seq_len and context)
    for length, context in ((seq_len // 10, seq_len * 3 // 5), (seq_len // 5, seq_len // 3), (seq_len * 7 // 16, 0)):
        if length >= 1:
            yield Point(sizes[0], length, context, True)
