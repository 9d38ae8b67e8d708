"""Gathers what `terapipe doctor` diagnoses: facts of each rank, whether ranks meet, how fast their links are.

Ranks send their facts to rank 0 through the store, because the connections between ranks may be what is broken.
"""

import json
import logging
import os
import platform
import re
import resource
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from importlib import metadata
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

import terapipe
from terapipe.doctor.facts import Facts
from terapipe.launch.processes import launch, take_cores
from terapipe.modeling.kernel_choice import kernel_report
from terapipe.modeling.kernels import Plain
from terapipe.runtime.comm.environment import (
    host_name,
    local_device,
    local_rank,
    local_ranks,
    rank_and_size,
    stay_on_this_host,
)


def facts_of_this_rank(rank: int) -> Facts:
    """Collects what this process can tell of itself and its host without the other ranks.

    Args:
        rank: its number among all.
    """
    kernels, fallbacks = _kernels()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Facts(
        rank=rank,
        host=host_name(),
        addresses=tuple(_addresses(socket.gethostname())),
        local_ranks=local_ranks(),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "terapipe": terapipe.__version__,
        },
        needs=_needs(),
        gloo=dist.is_gloo_available(),
        nccl=dist.is_nccl_available(),
        gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        kernels=tuple(kernels),
        fallbacks=tuple(fallbacks),
        cores=tuple(_cores()),
        all_cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        load=os.getloadavg()[0],
        memory=_free_memory(),
        shared_memory=_shared_memory(),
        files=None if files == resource.RLIM_INFINITY else files,
    )


def _addresses(host: str) -> list[str]:
    """Resolves a host name; returns nothing if it does not resolve, which the diagnosis reports."""
    try:
        return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None)))
    except OSError:
        return []


def _needs() -> dict[str, str]:
    """Reads the versions that this release requires; empty if it is not installed but only on the path."""
    try:
        about, requirements = metadata.metadata("terapipe"), metadata.requires("terapipe") or []
    except metadata.PackageNotFoundError:
        return {}
    needs = {"python": str(about["Requires-Python"] or "")}
    for requirement in requirements:
        if match := re.fullmatch(r"(torch|numpy)\b([^;]*)", requirement):
            needs[match[1]] = match[2].strip()
    return needs


def _kernels() -> tuple[list[str], list[str]]:
    """Returns the dtypes whose fast attention kernel passes its self-test, with its name, and why others fail."""
    passed, fallbacks = [], []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            used = [kernel for kernel, _ in kernel_report(local_device(), dtype, HEAD_SIZE).used]
        if Plain.name not in used:
            passed.append(f"{name} ({', '.join(used)})")
        else:
            why = [str(w.message).partition(". Use a version")[0] for w in caught if w.category is RuntimeWarning]
            fallbacks.append(f"{name}: {why[0] if why else 'the fast kernel is not trusted'}")
    return passed, fallbacks


def _cores() -> list[int]:
    """Returns the cores on which this process may run; all of the machine where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def share_cores() -> None:
    """Pins this rank to cores, as training does; with more ranks than cores, none is pinned."""
    if local_ranks() <= len(_cores()):
        take_cores()
    else:
        torch.set_num_threads(1)


def _free_memory() -> int:
    """Returns the bytes that new processes can have; all of the machine's where there is no /proc."""
    with suppress(OSError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _shared_memory() -> int | None:
    """Returns the size of /dev/shm in bytes; None where there is none."""
    try:
        about = os.statvfs("/dev/shm")
    except OSError:
        return None
    return about.f_blocks * about.f_frsize


HEAD_SIZE = 64  # of the attention kernels that are tried
PINGS = 20
LENGTHS = (2**11, 2**13, 2**15, 2**17, 2**19, 2**19, 2**19)  # numbers of 8 bytes; the last are 4 MiB
CUDA_LENGTHS = (*LENGTHS, 2**21, 2**23, 2**25)  # on fast links 4 MiB show the latency, not the rate
ONE_LINK = 3.0  # seconds at most to measure one link


def links(rank: int, size: int, device: torch.device, budget: float) -> list[dict[str, Any]]:
    """Measures the link from rank 0 to one rank after the other. All ranks call it together. One at a time, because
    several transfers at once would share rank 0's network card, and every link would look slow.

    Args:
        rank: of this process.
        size: number of ranks.
        device: where the messages are.
        budget: seconds that all links may take together.

    Returns:
        The fields of a ``Link`` for each peer, on rank 0; nothing on the others.
    """
    if rank:
        _answer(device)
        return []
    share = min(ONE_LINK, budget / max(1, size - 1))
    return [_link(peer, device, share) for peer in range(1, size)]


def _link(peer: int, device: torch.device, share: float) -> dict[str, Any]:
    try:
        lengths = CUDA_LENGTHS if device.type == "cuda" else LENGTHS
        return {"rank": peer, **measure_link(partial(_echo, peer, device), share, lengths)}
    except RuntimeError as error:
        raise RuntimeError(f"rank {peer} stopped answering: {first_line(error)}") from None


def measure_link(
    echo: Callable[[int, int], tuple[float, float]], share: float, lengths: Sequence[int] = LENGTHS
) -> dict[str, Any]:
    """Measures latency, rate and clock of a link. It sends longer and longer messages until the next would take too
    long, so that a slow link is measured in the same time as a fast one. Every message names the length of the next::

        rank 0   (1, next 1) (1, next 1) ... (1, next n) (n numbers, next 1) ... (1, next 0)
        peer     answers each with its clock; ends after the one whose next is 0

    Args:
        echo: sends a message of so many numbers, with the length of the next, and returns the seconds of one way and
            how far the peer's clock is ahead.
        share: seconds that the measurement may take.
        lengths: of the long messages, in numbers of 8 bytes.
    """
    echo(1, 1)  # the first message opens the connection
    start = time.monotonic()
    pings = [echo(1, 1)]
    while len(pings) < PINGS and time.monotonic() < start + share / 2:
        pings.append(echo(1, 1))
    rate = 0.0
    for length in lengths:
        if rate and time.monotonic() + 2 * 8 * length / rate > start + share:
            break
        pings.append(echo(1, length))
        rate = max(rate, 8 * length / echo(length, 1)[0])
    pings.append(echo(1, 0))
    latency, clock = min(pings)
    return {"latency": latency, "rate": rate, "clock": clock}


def _echo(peer: int, device: torch.device, length: int, following: int) -> tuple[float, float]:
    """Sends a message there and back. Returns seconds of one way, and how far the peer's clock is ahead."""
    message = torch.full((length,), following, dtype=torch.float64, device=device)
    began, start = time.time(), time.perf_counter()
    dist.send(message, peer)
    dist.recv(message, peer)
    there = float(message[0])
    one_way = (time.perf_counter() - start) / 2
    return one_way, there - began - one_way


def _answer(device: torch.device) -> None:
    """Sends every message back, with its first number replaced by the time on this rank, until one announces none."""
    length = 1
    while length:
        message = torch.empty(length, dtype=torch.float64, device=device)
        dist.recv(message, 0)
        length = int(message[0])
        message[0] = time.time()
        dist.send(message, 0)


def first_line(error: Exception) -> str:
    """Returns the first line of a torch error, without source location and failed condition, which help no user."""
    text = re.sub(r"\[enforce fail at [^\]]*\] [^.]*\. ", "", str(error))
    return re.sub(r"\[[^\]]*\.(cc|cpp|h):\d+\]\s*", "", text).partition("\n")[0]


Fields = dict[str, Any]  # the fields of an Examination, as values that become JSON

ALL_LINKS = 10.0  # seconds at most to measure all links


def alone(ranks: int, port: int, timeout: float) -> Fields:
    """Starts ranks on this machine and examines them.

    Args:
        ranks: how many.
        port: the one that torchrun would get; it is tried, not used.
        timeout: seconds that ranks wait for each other.

    Returns:
        The fields of an ``Examination``. If the ranks cannot start, those of this host, with the failure.
    """
    why_not = why_blocked(port)
    logging.disable(logging.ERROR)  # torch logs a traceback of its own when a rank dies, without the reason
    try:
        fields: Fields = launch(examine, ranks, timeout, True)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        fields = _only_this_host("start", f"rank {rank} died with exit code {failure.exitcode}")
    except (RuntimeError, OSError) as error:
        fields = _only_this_host("start", first_line(error))
    finally:
        logging.disable(logging.NOTSET)
    return {**fields, "port": port, "blocked": why_not}


def why_blocked(port: int) -> str:
    """Tells why no process can listen on this port; empty if one can."""
    try:
        if socket.has_dualstack_ipv6():  # as the store of torch does
            socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True).close()
        else:
            socket.create_server(("", port)).close()
    except OSError as error:
        return os.strerror(error.errno).lower() if error.errno else str(error)
    return ""


def examine(timeout: float, pin: bool = False) -> Fields | None:
    """Examines the run that this rank belongs to. Every rank calls it.

    Args:
        timeout: seconds that ranks wait for each other.
        pin: whether to pin this rank to its cores, as ``launch`` leaves that to its ranks.

    Returns:
        On rank 0 the fields of an ``Examination`` of all ranks. On a rank that meets nobody, those of its host alone.
        None on the others: one rank reports.
    """
    with _redirect(1, 2):  # some versions of gloo write to stdout, where the report may be JSON
        if pin:
            share_cores()
        try:
            store, rank, size = _meet(timedelta(seconds=timeout))
        except RuntimeError as error:
            # No other rank reports this host, and one of its ranks is enough.
            return None if local_rank() else _only_this_host("meet", first_line(error))
        store = PrefixStore("terapipe/doctor", store)
        try:
            return _first(store, size, timeout) if rank == 0 else _other(store, rank, size, timeout)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _meet(span: timedelta) -> tuple[Store, int, int]:
    """Opens the store. Returns it with this rank and the number of ranks. It does not wait for the others, so that the
    first rank can name those that are missing.

    The rank that hosts the store would wait in torch's rendezvous for all others, hence a world size of 1.
    """
    stay_on_this_host()
    with open(os.devnull, "w") as nowhere, _redirect(2, nowhere.fileno()):  # torch writes C++ stack traces
        store, _, _ = next(rendezvous("env://?world_size=1", timeout=span))
    return (store, *rank_and_size())


def _first(store: Store, size: int, timeout: float) -> Fields:
    """Collects the facts of all ranks that arrive in time. Only if all did, tells them to go on: a process group that
    waits for a missing rank hangs, and could not say which one is missing."""
    fields: Fields = {"size": size, "where": _address(store), "timeout": timeout}
    store.set("facts/0", json.dumps(asdict(facts_of_this_rank(0))))
    keys = [f"facts/{rank}" for rank in range(size)]
    _wait_for(store, keys, timeout)
    arrived = [key for key in keys if store.check([key])]
    store.set("go", "yes" if len(arrived) == size else "no")
    fields["ranks"] = [json.loads(store.get(key)) for key in arrived]
    return {**fields, **_work_together(store, 0, size, timeout)} if len(arrived) == size else fields


def _other(store: Store, rank: int, size: int, timeout: float) -> Fields | None:
    """Sends this rank's facts to the first and does what that says. If the first never comes, rank 1 reports it."""
    try:
        store.set(f"facts/{rank}", json.dumps(asdict(facts_of_this_rank(rank))))
        if not _wait_for(store, ["facts/0"], timeout):
            return None if rank > 1 else _only_this_host("meet", f"rank 0 did not arrive within {timeout:g} s")
        if _wait_for(store, ["go"], timeout + 1) and store.get("go") == b"yes":
            _work_together(store, rank, size, timeout)
    except RuntimeError:  # the store ended with rank 0, which reports why
        pass
    return None


def _wait_for(store: Store, keys: list[str], timeout: float) -> bool:
    """Tells whether all keys arrive in time. It polls, because a wait that times out in the store writes to stderr."""
    deadline = time.monotonic() + timeout
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _work_together(store: Store, rank: int, size: int, timeout: float) -> Fields:
    """Runs an all-reduce over all ranks and measures the links. Returns the links, or why that failed."""
    device = local_device()
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend, span = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=span)
        total, expected = torch.tensor([rank + 1], device=device), size * (size + 1) // 2
        dist.all_reduce(total)
        if total.item() != expected:
            return {"failure": f"a sum over all ranks gave {total.item()} instead of {expected}"}
        return {"links": links(rank, size, device, min(ALL_LINKS, timeout / 2))}
    except RuntimeError as error:
        store.set(f"failure/{rank}", first_line(error))
        return {"failure": _failures(store, size)}


def _failures(store: Store, size: int) -> str:
    """Gathers the failures of ranks that report within a second: the cause may be on another rank than this one."""
    keys = [f"failure/{rank}" for rank in range(size)]
    _wait_for(store, keys, 1.0)
    ranks: dict[str, list[str]] = {}
    for rank, key in enumerate(keys):
        if store.check([key]):
            ranks.setdefault(store.get(key).decode(), []).append(str(rank))
    return "; ".join(f"rank {' and '.join(those)}: {failure}" for failure, those in ranks.items())


def _only_this_host(failed_at: str, failure: str) -> Fields:
    """Returns the fields of an ``Examination`` that never got beyond this host."""
    return {"size": 0, "ranks": [asdict(facts_of_this_rank(local_rank()))], "failed_at": failed_at, "failure": failure}


def _address(store: Store) -> str:
    """Returns host and port of the store below its prefixes; empty if it has none."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if isinstance(store, TCPStore) else ""


@contextmanager
def _redirect(source: int, target: int) -> Iterator[None]:
    """Redirects a file descriptor to another one, also for C++ code."""
    sys.stdout.flush()
    original = os.dup(source)
    os.dup2(target, source)
    try:
        yield
    finally:
        os.dup2(original, source)
        os.close(original)
