"""The terminal that a run is watched on, left as it was found however the run ends."""

import os
import sys
import termios
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

SHOW_CURSOR = b"\x1b[?25h"
_NONE = (termios.error, OSError, ValueError, AttributeError)  # where standard input or output is no terminal


class Terminal:
    """While it is entered, Ctrl-C does not print ^C, which would push the panel out of its place. Nothing is done where
    there is no terminal, or in the background."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def __enter__(self) -> Self:
        with suppress(*_NONE):
            before = termios.tcgetattr(sys.stdin.fileno())
            quiet = [*before]
            quiet[3] &= ~termios.ECHOCTL
            if _set(quiet):
                self._before = before
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.restore()

    def restore(self) -> None:
        """Also from a signal handler: a panel that is cut off has hidden the cursor."""
        with suppress(*_NONE):
            if self._before is not None and _set(self._before):
                self._before = None
        with suppress(*_NONE):
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), SHOW_CURSOR)


def _set(attributes: list[Any]) -> bool:
    """Only in the foreground: the kernel stops a background process that changes its terminal."""
    terminal = sys.stdin.fileno()
    if os.tcgetpgrp(terminal) != os.getpgrp():
        return False
    termios.tcsetattr(terminal, termios.TCSADRAIN, attributes)
    return True
