"""What the tokens of a slice see, as data: the same description drives every attention kernel, and no mask is built.

A token sees the tokens of its own document up to itself: all of them, those of its own chunk, or the last ``window``.
Documents and chunks are segments; a window limits each of them. Kernels that take segments and windows as they are need
one call for a slice. For the others ``blocks`` cuts what is seen into rectangles and triangles. Tokens 4 to 7 of a
sequence, once with a document that begins at token 6, once with a window of 3::

    keys     0 1 2 3 4 5 6 7                             0 1 2 3 4 5 6 7
    token 4  f f f f l            f  a full block            u f l            u  an upper triangle
    token 5  f f f f l l          l  a lower triangle          f l l
    token 6              l                                       u f l
    token 7              l l                                       f l l

Windows and chunks also bound how far back any slice sees, whatever its documents are: ``oldest_key``. Keys and
gradients that are older are not needed any more, see key_values.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

EVERY = slice(None)


class Segment(NamedTuple):
    """The tokens of a slice that belong to one document, or to one chunk of it. Positions are those in the sequence.

    Attributes:
        start: Where the document or chunk begins, maybe in an earlier slice.
        first: Its first token in the slice.
        last: The one after its last token in the slice.
        sequences: Those of the microbatch that it is about.
    """

    start: int
    first: int
    last: int
    sequences: slice = EVERY

    def first_key(self, window: int | None) -> int:
        """The first key that any of its tokens sees."""
        return self.start if window is None else max(self.start, self.first - window + 1)


class Bounds(NamedTuple):
    """How far back a slice sees, and the slice after it. They depend on windows and chunks, not on documents, so that
    buffers have the same sizes in every step.

    Attributes:
        oldest: No token of the slice sees an older one.
        oldest_after: No token of later slices does.
        most: Tokens before a slice that it sees at most, in any cut of the sequence; None is all of them.
    """

    oldest: int = 0
    oldest_after: int = 0
    most: int | None = None

    @classmethod
    def of(cls, start: int, end: int, window: int | None, chunk: int | None, has_documents: bool) -> "Bounds":
        """The bounds of one slice.

        Args:
            start: Tokens before the slice.
            end: Where the next slice begins.
            window: How many tokens a token sees at most, itself included.
            chunk: Tokens of a chunk; None if there are none.
            has_documents: Whether chunks may begin anywhere: they count from the start of a document.
        """
        if window is None and chunk is None:
            return cls()
        oldest, oldest_after = (oldest_key(place, window, chunk, has_documents) for place in (start, end))
        return cls(oldest, oldest_after, min(limit for limit in (window, chunk) if limit is not None) - 1)


ALL = Bounds()


def oldest_key(place: int, window: int | None, chunk: int | None, has_documents: bool) -> int:
    """The oldest token that this token, or any after it, may see.

    Args:
        place: The token's.
        window: How many tokens a token sees at most, itself included.
        chunk: Tokens of a chunk; None if there are none.
        has_documents: Whether chunks may begin anywhere.
    """
    by_window = 0 if window is None else place - window + 1
    by_chunk = 0 if chunk is None else (place - chunk + 1 if has_documents else place - place % chunk)
    return max(0, by_window, by_chunk)


@dataclass(frozen=True, eq=False)
class Visibility:
    """What the tokens of one slice see.

    Attributes:
        context: Tokens before the slice.
        length: Tokens of the slice.
        segments: In order; in each sequence they cover the slice without gaps.
        window: How many tokens a token sees at most, itself included; None is all of its segment.
        bounds: How far back it sees, and the slice after it.
        memo: What kernels derive from it (blocks, tensors on the device), once for all layers.
    """

    context: int
    length: int
    segments: tuple[Segment, ...]
    window: int | None = None
    bounds: Bounds = ALL
    memo: dict[Any, Any] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.context + self.length

    @property
    def is_one_segment(self) -> bool:
        """Whether all tokens of the slice, in all sequences of the microbatch, belong to segments alike."""
        return len(self.segments) == 1

    def blocks(self, largest: tuple[int, int] | None = None) -> tuple["Block", ...]:
        """The same as rectangles and triangles, which do not overlap and leave nothing out.

        Args:
            largest: The most rows and the most keys of a block; None for no limit.
        """
        if largest not in self.memo:
            self.memo[largest] = _blocks(self, largest)
        blocks: tuple[Block, ...] = self.memo[largest]
        return blocks


Shape = Literal["full", "lower", "upper"]


class Block(NamedTuple):
    """Some tokens of a slice, and consecutive tokens that they see.

    Attributes:
        rows: Tokens of the slice, counted from its first.
        keys: Tokens of the sequence, counted from its first.
        shape: What row ``i`` sees of the keys: all ("full"), those up to ``i`` ("lower"), or those from ``i`` on
            ("upper"). The last two are squares.
        sequences: Those of the microbatch that it is about.
    """

    rows: slice
    keys: slice
    shape: Shape = "full"
    sequences: slice = EVERY


def _blocks(seen: Visibility, largest: tuple[int, int] | None) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for segment in seen.segments:
        for first, last, oldest in _tiles(segment, seen.window):
            for rows, keys, shape in _of_tile(first, last, oldest, seen.window):
                rows = slice(rows.start - seen.context, rows.stop - seen.context)
                block = Block(rows, keys, shape, segment.sequences)
                blocks.extend([block] if largest is None else _cut_block(block, *largest))
    return tuple(blocks)


def _tiles(segment: Segment, window: int | None) -> Iterator[tuple[int, int, int]]:
    """Cuts a segment into rows whose windows can be written as three blocks.

    Yields first token, the one after the last, and the oldest token that the first one sees. Windows begin and end
    within two tiles if the tiles are as long as the window and counted from the start of the segment::

        window 3   tile 0: tokens 0 1 2     tile 1: tokens 3 4 5     tile 2: tokens 6 7
        token 4 sees 2 3 4: its own tile and the one before, never a third
    """
    if window is None:
        yield segment.first, segment.last, segment.start
        return
    for tile in range((segment.first - segment.start) // window, -(-(segment.last - segment.start) // window)):
        edge = segment.start + tile * window
        first, last = max(segment.first, edge), min(segment.last, edge + window)
        yield first, last, max(segment.start, first - window + 1)


def _of_tile(first: int, last: int, oldest: int, window: int | None) -> Iterator[tuple[slice, slice, Shape]]:
    """The blocks of one tile: a square of the tile with itself; the keys that all its rows see; and those that its
    first rows see alone."""
    yield slice(first, last), slice(first, last), "lower"
    common = oldest if window is None else max(oldest, last - window)
    if common < first:
        yield slice(first, last), slice(common, first), "full"
    if oldest < common:  # row ``first + i`` sees the keys from ``oldest + i`` on
        yield slice(first, first + common - oldest), slice(oldest, common), "upper"


def _cut_block(block: Block, most_rows: int, most_keys: int) -> Iterator[Block]:
    """The same block in smaller ones. Triangles are cut into triangles on the diagonal, and rectangles beside it."""
    rows, keys, shape, sequences = block
    if shape == "full":
        for row in range(rows.start, rows.stop, most_rows):
            for key in range(keys.start, keys.stop, most_keys):
                part = slice(row, min(row + most_rows, rows.stop)), slice(key, min(key + most_keys, keys.stop))
                yield Block(*part, sequences=sequences)
        return
    side = min(most_rows, most_keys)
    for at in range(0, rows.stop - rows.start, side):
        size = min(side, rows.stop - rows.start - at)
        row, key = rows.start + at, keys.start + at
        yield Block(slice(row, row + size), slice(key, key + size), shape, sequences)
        beside = slice(keys.start, key) if shape == "lower" else slice(key + size, keys.stop)
        if beside.start < beside.stop:
            yield from _cut_block(Block(slice(row, row + size), beside, sequences=sequences), most_rows, most_keys)


def segments(starts: Sequence[Sequence[int]], context: int, end: int, chunk: int | None) -> tuple[Segment, ...]:
    """The segments of a slice.

    Args:
        starts: Where documents begin in each sequence; empty if each sequence is one document.
        context: Tokens before the slice.
        end: Where the next slice begins.
        chunk: Tokens of a chunk; None if documents have none.

    Returns:
        Those of all sequences at once if all sequences are cut alike, or else sequence after sequence.
    """
    rows = [tuple(row) for row in starts] or [(0,)]
    alike = len(set(rows)) == 1
    parts = []
    for i, row in enumerate(rows[:1] if alike else rows):
        for start, stop in zip(row, [*row[1:], end], strict=True):
            for first, last, begin in _chunks(start, max(start, context), min(stop, end), chunk):
                parts.append(Segment(begin, first, last, EVERY if alike else slice(i, i + 1)))
    return tuple(parts)


def _chunks(start: int, first: int, last: int, chunk: int | None) -> Iterator[tuple[int, int, int]]:
    """Chunks count from the start of the document, as if it were alone."""
    while first < last:
        begin = start if chunk is None else first - (first - start) % chunk
        stop = last if chunk is None else min(last, begin + chunk)
        yield first, stop, begin
        first = stop
