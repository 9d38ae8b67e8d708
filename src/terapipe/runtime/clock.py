"""When things happened on a device, without making it wait."""

import time
from typing import TypeAlias

import torch

Mark: TypeAlias = float | torch.cuda.Event


class Clock:
    """Marks are cheap to take; their times are read after the step. Seconds since the epoch, so that ranks compare."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._offset = time.time() - time.perf_counter()
        self._anchor: tuple[torch.cuda.Event, float] | None = None

    def start(self) -> None:
        """Ties device time to host time at the beginning of a step."""
        if self._cuda:
            event = self._event()
            event.synchronize()
            self._anchor = (event, time.perf_counter())

    def mark(self) -> Mark:
        return self._event() if self._cuda else time.perf_counter()

    def seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return self._offset + mark
        assert self._anchor is not None
        event, host = self._anchor
        mark.synchronize()
        return self._offset + host + float(event.elapsed_time(mark)) / 1e3

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
