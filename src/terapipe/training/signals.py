"""Stop requests: SIGINT and SIGTERM. All ranks stop together at the end of a step."""

import os
import signal
from collections.abc import Callable
from types import FrameType


class StopSignal:
    """The first signal asks the run to stop, the second ends this process at once."""

    def __init__(self, before_exit: Callable[[], None] = lambda: None) -> None:
        """``before_exit`` is called before the second signal ends the process."""
        self.received = ""  # the name of the signal
        self._before_exit = before_exit
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            self._before_exit()
            os._exit(128 + number)
        self.received = signal.Signals(number).name
