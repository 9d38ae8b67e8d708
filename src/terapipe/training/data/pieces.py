"""Documents in pieces, cut where that leaves their tokens as they are."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

PIECE = 2**18  # characters
LONE = re.compile("[\ud800-\udfff]")  # halves of a character: JSON can hold them, UTF-8 cannot


class Piece(NamedTuple):
    """A part of a document, and whether it is the last one: no document need be held whole."""

    text: str
    ends: bool


def document(text: Any, field: str, where: str) -> Iterator[Piece]:
    """Nothing, if there is no text."""
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{where}: {field!r} must hold text, got {text!r:.50}; set data.field")
    if text:
        *before, last = cut(LONE.sub("\ufffd", text))
        yield from (Piece(part, False) for part in before)
        yield Piece(last, True)


def cut(text: str, longest: int = PIECE) -> Iterator[str]:
    """Parts of at most so many characters, which together are the text; the last one is not empty."""
    start = 0
    while len(text) - start > longest:
        stop = _border(text, start, start + longest)
        yield text[start:stop]
        start = stop
    yield text[start:]


def _border(text: str, start: int, stop: int) -> int:
    """The best place to cut, after ``start`` and not after ``stop``.

    Before a single space that follows a word: tokens may begin with a space, but none ends with one, so the tokens are
    those of the whole text. Failing that, after a line; failing that, anywhere.
    """
    middle = (start + stop) // 2
    space = text.rfind(" ", middle + 1, stop + 1)
    while space > 0 and text[space - 1].isspace():
        space = text.rfind(" ", middle + 1, space)
    return space if space > 0 else text.rfind("\n", middle, stop) + 1 or stop
