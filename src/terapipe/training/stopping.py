"""The wish to stop: noticed at once, fulfilled at the end of a step, on all ranks alike."""

import os
import signal
from collections.abc import Callable
from types import FrameType


class Stop:
    """The first SIGINT or SIGTERM is a wish, the second ends this process at once."""

    def __init__(self, leave: Callable[[], None] = lambda: None) -> None:
        """``leave`` is called before this process ends at once."""
        self.asked = ""
        self._leave = leave
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self._leave()
            os._exit(128 + number)
        self.asked = signal.Signals(number).name
