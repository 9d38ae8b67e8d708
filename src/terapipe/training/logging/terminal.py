"""The settings of the terminal that shows a run. They are restored however the run ends."""

import os
import sys
import termios
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

SHOW_CURSOR = b"\x1b[?25h"
_NO_TERMINAL = (termios.error, OSError, ValueError, AttributeError)  # errors if there is no terminal


class Terminal:
    """While it is entered, Ctrl-C does not print ^C, which would move the panel. Does nothing without a terminal or in
    the background."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def __enter__(self) -> Self:
        with suppress(*_NO_TERMINAL):
            before = termios.tcgetattr(sys.stdin.fileno())
            settings = [*before]
            settings[3] &= ~termios.ECHOCTL
            if _set(settings):
                self._before = before
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.restore()

    def restore(self) -> None:
        """Also called from a signal handler: an interrupted panel leaves the cursor hidden."""
        with suppress(*_NO_TERMINAL):
            if self._before is not None and _set(self._before):
                self._before = None
        with suppress(*_NO_TERMINAL):
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), SHOW_CURSOR)


def _set(attributes: list[Any]) -> bool:
    """Only in the foreground: the kernel suspends a background process that changes its terminal."""
    terminal = sys.stdin.fileno()
    if os.tcgetpgrp(terminal) != os.getpgrp():
        return False
    termios.tcsetattr(terminal, termios.TCSADRAIN, attributes)
    return True
