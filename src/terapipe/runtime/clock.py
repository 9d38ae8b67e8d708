"""A clock for what a device does: times of actions, by the device's own time if it is a GPU."""

import time
from collections.abc import Sequence
from typing import TypeAlias

import torch

Mark: TypeAlias = float | torch.cuda.Event


class Clock:
    """Marks are cheap to take; their times are read after the step. Seconds since the epoch, so that ranks compare."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._offset = _offset()
        self._anchor: tuple[torch.cuda.Event, float] | None = None  # the same moment by the device and by the host

    def start(self) -> None:
        """Before the first step the host waits for the device once, to compare their times; later only when times are
        read, which waits anyway."""
        if self._device.type == "cuda" and self._anchor is None:
            self._compare()

    def _compare(self) -> None:
        event = self._event()
        event.synchronize()
        self._anchor = (event, time.perf_counter())

    def mark(self) -> Mark:
        """This moment, by the device's time if it is a GPU."""
        return self._event() if self._device.type == "cuda" else time.perf_counter()

    def read(self, marks: Sequence[Mark]) -> list[float]:
        """Seconds since the epoch. The host waits for a GPU.

        Args:
            marks: what ``mark`` returned.
        """
        if self._device.type != "cuda":
            return [self._offset + mark for mark in marks if isinstance(mark, float)]
        assert self._anchor is not None
        event, host = self._anchor
        torch.cuda.synchronize(self._device)
        times = [self._offset + host + float(event.elapsed_time(m)) / 1e3 for m in marks if not isinstance(m, float)]
        self._compare()  # elapsed times are coarse after hours
        return times

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def _offset() -> float:
    """Seconds from the host's clock to the epoch. A process may lose its core between looking at the two clocks: of
    several tries the shortest counts."""
    tries = []
    for _ in range(8):
        before, now, after = time.perf_counter(), time.time(), time.perf_counter()
        tries.append((after - before, now - (before + after) / 2))
    return min(tries)[1]
