"""Counts where the host would wait for the device: each such wait leaves a GPU without work while it catches up.

Operators and copies are noted by the device, in any thread; calls that say it, such as ``torch.cuda.synchronize``, note
it themselves.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

_OURS = re.compile(r".*/(?:src|site-packages)/((?:terapipe|transformers)/.*)")
_library: list[torch.library.Library] = []  # what it registers is gone with it
_pretend: Any = torch.ops.pretend


class Wait(NamedTuple):
    """What made the host wait, and the line of terapipe or transformers that did it, or "elsewhere"."""

    kind: str
    where: str


_counting: list[list[Wait]] = []


def install() -> None:
    library = torch.library.Library("pretend", "IMPL")
    library.impl("note_wait", note)
    _library.append(library)


@contextmanager
def counting_waits() -> Iterator[list[Wait]]:
    """The waits of this process while the block runs, also those of other threads."""
    found: list[Wait] = []
    _counting.append(found)
    _pretend.listen(True)
    try:
        yield found
    finally:
        _pretend.listen(False)
        _counting[:] = [other for other in _counting if other is not found]


def note(kind: str) -> None:
    for found in _counting:
        found.append(Wait(kind, _where()))


def _where() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        if match := _OURS.fullmatch(frame.f_code.co_filename):
            return f"{match[1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"
