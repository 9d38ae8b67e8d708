"""Seconds that computations take on a device::

host      hold | queue a | queue b | queue c | wait
device    ...held back...                    | a | b | c |       events before and after each give its seconds
"""

import time
from collections.abc import Callable
from itertools import pairwise

import torch

CLOCK = 2e9  # cycles per second that a GPU is taken to have, at most
LONGEST_HOLD = 0.5  # seconds


class Stopwatch:
    """On a GPU, times are taken by the device. In a step the host is ahead of it, so here, too, the device is held back
    until the host has queued everything: else short computations would seem to take as long as it takes to queue them.

    What the host takes is another question, and has another answer: ``queueing``.

    Args:
        device: of the computations.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queueing = 0.0  # seconds that the host took to queue one action

    def __call__(self, *actions: Callable[[], object]) -> list[float]:
        """Runs the actions one after the other.

        Args:
            actions: each queues some work on the device, or on a CPU does it.

        Returns:
            Seconds of each on the device.
        """
        return self._by_events(actions) if self._device.type == "cuda" else [_by_host(action) for action in actions]

    def queueing(self, *actions: Callable[[], object]) -> list[float]:
        """Seconds in which the host queued each. The device is not held back: behind a device that stands still the
        queue would fill, and the host wait for it. On a CPU they are those of the computation itself."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = [_by_host(action) for action in actions]
        self._queueing = max(self._queueing / 2, *seconds)  # the first time, torch also loads kernels
        return seconds

    def _by_events(self, actions: tuple[Callable[[], object], ...]) -> list[float]:
        """Holds the device for as long as the host took to queue so many actions before; the first time it is not
        known, and these actions are timed without."""
        torch.cuda.synchronize(self._device)
        self._hold(self._queueing * len(actions))
        began = time.perf_counter()
        marks = [self._mark()]
        for action in actions:
            action()
            marks.append(self._mark())
        if not self._queueing:  # while the device is held, the host may have waited for room in its queue
            self._queueing = (time.perf_counter() - began) / len(actions)
        torch.cuda.synchronize(self._device)
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]

    def _hold(self, seconds: float) -> None:
        """Makes the device spin. It counts cycles, not seconds: on a slower clock it is held longer, which is no
        harm."""
        torch.cuda._sleep(int(min(seconds, LONGEST_HOLD) * CLOCK))  # type: ignore[no-untyped-call]

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


COPY = 64 << 20  # bytes of a copy that is timed


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second between a device and memory of the host that is pinned, in one direction; on a CPU, from one
    place to another. The median of five copies.

    Args:
        device: Of this process.
    """
    there = torch.empty(COPY, dtype=torch.uint8, device=device)
    here = torch.empty(COPY, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def copy() -> None:
        here.copy_(there, non_blocking=True)

    copy()  # memory that is touched for the first time is slow
    return COPY / sorted(Stopwatch(device)(*[copy] * 5))[2]


def _by_host(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
