"""Latency and bandwidth between rank 0 and each other rank."""

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

PINGS = 20
LENGTHS = (2**11, 2**13, 2**15, 2**17, 2**19, 2**19, 2**19)  # numbers of 8 bytes; the last are 4 MiB
ONE_LINK = 3.0  # seconds at most to measure one link


def links(rank: int, size: int, device: torch.device, budget: float) -> list[dict[str, Any]]:
    """Rank 0 measures its link to one rank after the other; the other ranks return nothing."""
    if rank:
        _answer(device)
        return []
    share = min(ONE_LINK, budget / max(1, size - 1))
    return [_link(peer, device, share) for peer in range(1, size)]


def _link(peer: int, device: torch.device, share: float) -> dict[str, Any]:
    try:
        return {"rank": peer, **measure_link(partial(_echo, peer, device), share)}
    except RuntimeError as error:
        raise RuntimeError(f"rank {peer} stopped answering: {first_line(error)}") from None


def measure_link(echo: Callable[[int, int], tuple[float, float]], share: float) -> dict[str, Any]:
    """Sends longer and longer messages until the next would exceed the time ``share``."""
    echo(1, 1)  # the first message opens the connection
    start = time.monotonic()
    pings = [echo(1, 1)]
    while len(pings) < PINGS and time.monotonic() < start + share / 2:
        pings.append(echo(1, 1))
    rate = 0.0
    for length in LENGTHS:
        if rate and time.monotonic() + 2 * 8 * length / rate > start + share:
            break
        pings.append(echo(1, length))
        rate = max(rate, 8 * length / echo(length, 1)[0])
    pings.append(echo(1, 0))
    latency, clock = min(pings)
    return {"latency": latency, "rate": rate, "clock": clock}


def _echo(peer: int, device: torch.device, length: int, following: int) -> tuple[float, float]:
    """Seconds of one way, and how far the peer's clock is ahead. A message starts with the length of the next."""
    message = torch.full((length,), following, dtype=torch.float64, device=device)
    began, start = time.time(), time.perf_counter()
    dist.send(message, peer)
    dist.recv(message, peer)
    there = float(message[0])
    one_way = (time.perf_counter() - start) / 2
    return one_way, there - began - one_way


def _answer(device: torch.device) -> None:
    """Returns every message, with its first number replaced by the time on this rank."""
    length = 1
    while length:
        message = torch.empty(length, dtype=torch.float64, device=device)
        dist.recv(message, 0)
        length = int(message[0])
        message[0] = time.time()
        dist.send(message, 0)


def first_line(error: Exception) -> str:
    """The first line of a torch error, without source location and failed condition."""
    text = re.sub(r"\[enforce fail at [^\]]*\] [^.]*\. ", "", str(error))
    return re.sub(r"\[[^\]]*\.(cc|cpp|h):\d+\]\s*", "", text).partition("\n")[0]
