"""A wire between hosts of one machine, slow and far: packets wait for their turn, then travel, or are lost.

Not every kernel has tc's netem, and tbf knows no delay; every kernel has tun devices.
"""

import fcntl
import heapq
import os
import select
import socket
import struct
import time
from contextlib import suppress
from itertools import count
from threading import Thread

TUN = "/dev/net/tun"
MTU = 65000  # large packets, as a real card takes them from its host: a wire in Python should cost others little time
_ATTACH, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001


class Wire:
    """Carries packets between the devices that are plugged in, by the address they are for.

    Each device sends ``rate`` bytes per second, one packet after the other, and each packet then takes ``delay``.
    """

    def __init__(self, rate: float, delay: float) -> None:
        self.rate, self.delay = rate, delay
        self.lost: set[str] = set()  # addresses from which and to which nothing gets through
        self._ends: dict[bytes, int] = {}
        self._end, self._ended = os.pipe()
        self._thread = Thread(target=self._run, daemon=True)

    def plug(self, device: str, address: str) -> None:
        """Makes the device, here; it stays plugged in when it moves to another network namespace."""
        end = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        self._ends[socket.inet_aton(address)] = end
        fcntl.ioctl(end, _ATTACH, struct.pack("16sH22x", device.encode(), _TUN_WITHOUT_HEADER))

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Takes the devices with it."""
        os.close(self._ended)
        if self._thread.is_alive():
            self._thread.join()
        for end in (self._end, *self._ends.values()):
            os.close(end)

    def _run(self) -> None:
        with suppress(PermissionError):  # like a network card, it does not wait for whoever computes
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        sources = {end: address for address, end in self._ends.items()}
        free = dict.fromkeys(sources, 0.0)  # when each device may send again
        numbers, under_way = count(), list[tuple[float, int, int, bytes]]()
        while True:
            wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            ready, _, _ = select.select([self._end, *sources], [], [], wait)
            if self._end in ready:
                return
            for end in ready:
                packet = os.read(end, 1 << 16)
                target = self._target(packet, sources[end])
                if target is not None:
                    free[end] = max(time.monotonic(), free[end]) + len(packet) / self.rate
                    heapq.heappush(under_way, (free[end] + self.delay, next(numbers), target, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                with suppress(OSError):  # a device that is down loses what it is sent
                    os.write(under_way[0][2], under_way[0][3])
                heapq.heappop(under_way)

    def _target(self, packet: bytes, source: bytes) -> int | None:
        address = packet[16:20]
        if packet[0] >> 4 != 4 or {socket.inet_ntoa(a) for a in (source, address)} & self.lost:
            return None
        return self._ends.get(address)
