"""Gathers what `terapipe doctor` diagnoses: facts of each rank, whether ranks meet, how fast their links are.

Two ways in, one result, an ``Examination``::

    terapipe doctor                 alone(2, 29500, 30.0): starts two ranks here, each calls examine
    torchrun ... -m terapipe doctor                        every rank of every host calls examine

    rank 0   opens the store   facts/0 ----+   all there?  go = yes   all-reduce   measures link after link   reports
    rank k   finds the store   facts/k ----+-> waits for   go         all-reduce   answers rank 0             ends

Ranks send their facts to rank 0 through the store, because the connections between ranks may be what is broken: a
store needs one TCP connection to rank 0, a process group needs all of them. Only when all facts are there do ranks make
a process group, so that a rank that is missing is named instead of waited for.

This module loads torch. ``diagnosis`` does not: it must be able to report that torch does not load.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
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

HEAD_SIZE = 64  # of the attention kernels that are tried
PINGS = 20  # messages of 8 bytes per link, of which the fastest tells the latency
LENGTHS = (2**11, 2**13, 2**15, 2**17, 2**19, 2**19, 2**19)  # numbers of 8 bytes; the last are 4 MiB
CUDA_LENGTHS = (*LENGTHS, 2**21, 2**23, 2**25)  # on fast links 4 MiB show the latency, not the rate
ONE_LINK, ALL_LINKS = 3.0, 10.0  # seconds at most to measure one link, and all of them


@dataclass(frozen=True)
class Facts:
    """What one rank can tell of itself and its host without the other ranks.

    A rank sends its facts as JSON to rank 0, which may have another release: a new field needs a default, and rank 0
    ignores fields that it does not know.

    Args:
        rank: its number among all ranks of the run.
        host: the host's name, followed by " (node 1)" under torchrun, because containers often share a name.
        addresses: the IP addresses that the host's own name resolves to; gloo gives the first to other ranks.
        local_ranks: how many ranks of the run are on this host.
        versions: of python, torch, numpy and terapipe.
        needs: the versions that this release requires, for example ``{"torch": "<3,>=2.9"}``.
        gloo: whether torch was built with gloo.
        nccl: whether torch was built with NCCL.
        gpus: how many GPUs torch sees.
        kernels: dtypes whose fast attention kernel passed its self-test, with the kernel's name.
        fallbacks: why the other dtypes use plain attention.
        cores: the cores on which this rank may run (its CPU affinity).
        all_cores: how many cores the host has.
        threads: how many threads torch uses for one operation.
        load: the host's load average over the last minute.
        memory: bytes that new processes of this host can have.
        shared_memory: bytes of /dev/shm, None where there is none.
        files: limit on open files, None if there is no limit.
    """

    rank: int
    host: str
    addresses: tuple[str, ...]
    local_ranks: int
    versions: Mapping[str, str]
    needs: Mapping[str, str]
    gloo: bool
    nccl: bool
    gpus: int
    kernels: tuple[str, ...]
    fallbacks: tuple[str, ...]
    cores: tuple[int, ...]
    all_cores: int
    threads: int
    load: float
    memory: int
    shared_memory: int | None
    files: int | None

    @classmethod
    def of_this_rank(cls, rank: int) -> "Facts":
        """Collects the facts of this process. It tries the attention kernels, which takes a second.

        Args:
            rank: its number among all.
        """
        kernels, fallbacks = _kernels()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return cls(
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

    @classmethod
    def from_json(cls, text: str | bytes) -> "Facts":
        """Reads what another rank sent. Lists become tuples, unknown fields are dropped.

        Args:
            text: ``json.dumps(asdict(facts))`` of that rank.
        """
        names, sent = {f.name for f in fields(cls)}, json.loads(text)
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in sent.items() if k in names}
        return cls(**values)


@dataclass(frozen=True)
class Link:
    """The connection between rank 0 and another rank, as measured.

    Args:
        rank: the other one.
        latency: seconds that the shortest message takes one way.
        rate: bytes per second of the message that was fastest for its length.
        clock: seconds by which the other rank's clock is ahead of rank 0's.
    """

    rank: int
    latency: float
    rate: float
    clock: float


@dataclass(frozen=True)
class Examination:
    """The facts of all ranks, and what happened when they worked together: all that ``diagnose`` looks at.

    Args:
        size: expected number of ranks; 0 if this rank never learned it.
        ranks: the facts of those that arrived.
        links: from rank 0 to the others; none if ranks could not work together.
        where: the address of the rendezvous, such as "10.0.0.1:29500".
        failure: why the ranks could not work together; empty if they could.
        failed_at: when that was: "start" (a process died), "meet" (the store was out of reach) or "work".
        timeout: seconds that ranks waited for each other.
        port: the port that the user will give torchrun; None under torchrun, which has it already.
        blocked: why that port cannot be bound; empty if it can.
    """

    size: int
    ranks: tuple[Facts, ...]
    links: tuple[Link, ...] = ()
    where: str = ""
    failure: str = ""
    failed_at: str = "work"
    timeout: float = 30.0
    port: int | None = None
    blocked: str = ""

    @property
    def hosts(self) -> dict[str, list[Facts]]:
        """The facts of the ranks that arrived, by host."""
        by_host: dict[str, list[Facts]] = {}
        for facts in self.ranks:
            by_host.setdefault(facts.host, []).append(facts)
        return by_host

    @property
    def absent(self) -> list[int]:
        """The ranks that did not arrive."""
        return sorted(set(range(self.size)) - {facts.rank for facts in self.ranks})

    @property
    def met(self) -> bool:
        """Whether all ranks arrived and worked together."""
        return not self.absent and not self.failure

    @property
    def several_hosts(self) -> bool:
        """Whether the run has more than one host, also if only ranks of one arrived."""
        return len(self.hosts) > 1 or any(self.size > facts.local_ranks for facts in self.ranks)


# Facts of one rank


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


# Links


def links(rank: int, size: int, device: torch.device, budget: float) -> list[Link]:
    """Measures the link from rank 0 to one rank after the other. All ranks call it together. One at a time, because
    several transfers at once would share rank 0's network card, and every link would look slow.

    Args:
        rank: of this process.
        size: number of ranks.
        device: where the messages are.
        budget: seconds that all links may take together.

    Returns:
        A ``Link`` for each peer, on rank 0; nothing on the others.
    """
    if rank:
        _answer(device)
        return []
    share = min(ONE_LINK, budget / max(1, size - 1))
    return [_link(peer, device, share) for peer in range(1, size)]


def _link(peer: int, device: torch.device, share: float) -> Link:
    """Measures one link, and names the peer if it fails: torch's message has an address at best."""
    try:
        lengths = CUDA_LENGTHS if device.type == "cuda" else LENGTHS
        return measure_link(peer, partial(_echo, peer, device), share, lengths)
    except RuntimeError as error:
        raise RuntimeError(f"rank {peer} stopped answering: {first_line(error)}") from None


def measure_link(
    peer: int, echo: Callable[[int, int], tuple[float, float]], share: float, lengths: Sequence[int] = LENGTHS
) -> Link:
    """Measures latency, rate and clock of a link. It sends longer and longer messages until the next would take too
    long, so that a slow link is measured in the same time as a fast one. Every message names the length of the next::

        rank 0   (1, next 1) (1, next 1) ... (1, next n) (n numbers, next 1) ... (1, next 0)
        peer     answers each with its clock; ends after the one whose next is 0

    The peer receives into a buffer of the announced length, so neither side needs a second message about sizes. The
    fastest ping tells latency and clock: a ping that was delayed on one way only would shift the clock by half of it.

    Args:
        peer: the rank at the other end.
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
    return Link(peer, latency, rate, clock)


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
    """Returns the first line of a torch error, without source location and failed condition, which help no user.

    Args:
        error: Such as "[enforce fail at .../device.cc:84] ifa != nullptr. No address for: eth9".
    """
    text = re.sub(r"\[enforce fail at [^\]]*\] [^.]*\. ", "", str(error))
    return re.sub(r"\[[^\]]*\.(cc|cpp|h):\d+\]\s*", "", text).partition("\n")[0]


# Ranks that meet


def alone(ranks: int, port: int, timeout: float) -> Examination:
    """Starts ranks on this machine and examines them.

    Args:
        ranks: how many.
        port: the one that torchrun would get; it is tried, not used.
        timeout: seconds that ranks wait for each other.

    Returns:
        The examination of all ranks. If they cannot start, that of this host, with the failure.
    """
    why_not = why_blocked(port)
    logging.disable(logging.ERROR)  # torch logs a traceback of its own when a rank dies, without the reason
    try:
        examination: Examination = launch(examine, ranks, timeout, True)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        examination = _only_this_host("start", f"rank {rank} died with exit code {failure.exitcode}")
    except (RuntimeError, OSError) as error:
        examination = _only_this_host("start", first_line(error))
    finally:
        logging.disable(logging.NOTSET)
    return replace(examination, port=port, blocked=why_not)


def why_blocked(port: int) -> str:
    """Tells why no process can listen on this port; empty if one can.

    Args:
        port: is bound as torch's store would bind it, on all addresses of IPv6 and IPv4, and let go at once. A port
            that is taken on 127.0.0.1 alone would otherwise pass.
    """
    try:
        if socket.has_dualstack_ipv6():  # as the store of torch does
            socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True).close()
        else:
            socket.create_server(("", port)).close()
    except OSError as error:
        return os.strerror(error.errno).lower() if error.errno else str(error)
    return ""


def examine(timeout: float, pin: bool = False) -> Examination | None:
    """Examines the run that this rank belongs to. Every rank calls it.

    Args:
        timeout: seconds that ranks wait for each other.
        pin: whether to pin this rank to its cores, as ``launch`` leaves that to its ranks.

    Returns:
        On rank 0 the examination of all ranks. On the first rank of a host that meets nobody, that of its host alone.
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


def _first(store: Store, size: int, timeout: float) -> Examination:
    """Collects the facts of all ranks that arrive in time. Only if all did, tells them to go on: a process group that
    waits for a missing rank hangs, and could not say which one is missing."""
    store.set("facts/0", json.dumps(asdict(Facts.of_this_rank(0))))
    keys = [f"facts/{rank}" for rank in range(size)]
    _wait_for(store, keys, timeout)
    arrived = [key for key in keys if store.check([key])]
    store.set("go", "yes" if len(arrived) == size else "no")
    ranks = _short_host_names([Facts.from_json(store.get(key)) for key in arrived])
    examination = Examination(size, ranks, where=_address(store), timeout=timeout)
    if examination.absent:
        return examination
    links, failure = _work_together(store, 0, size, timeout)
    return replace(examination, links=tuple(links), failure=failure)


def _short_host_names(ranks: Sequence[Facts]) -> tuple[Facts, ...]:
    """Drops the node numbers from host names that are unique without them, which reads better."""
    names = {facts.host: facts.host.partition(" (node ")[0] for facts in ranks}
    if len(set(names.values())) < len(names):
        return tuple(ranks)
    return tuple(replace(facts, host=names[facts.host]) for facts in ranks)


def _other(store: Store, rank: int, size: int, timeout: float) -> Examination | None:
    """Sends this rank's facts to the first and does what that says. If the first never comes, rank 1 reports it."""
    try:
        store.set(f"facts/{rank}", json.dumps(asdict(Facts.of_this_rank(rank))))
        if not _wait_for(store, ["facts/0"], timeout):
            return None if rank > 1 else _only_this_host("meet", f"rank 0 did not arrive within {timeout:g} s")
        # One second more than rank 0 waits for facts, because rank 0 decides only after its own timeout.
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


def _work_together(store: Store, rank: int, size: int, timeout: float) -> tuple[list[Link], str]:
    """Runs an all-reduce over all ranks and measures the links. Returns the links, and why it failed, if it did.

    The sum is checked, because a wrong one is a broken network card or library, and training would go on with it.
    """
    device = local_device()
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend, span = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=span)
        total, expected = torch.tensor([rank + 1], device=device), size * (size + 1) // 2
        dist.all_reduce(total)
        if total.item() != expected:
            return [], f"a sum over all ranks gave {total.item()} instead of {expected}"
        return links(rank, size, device, min(ALL_LINKS, timeout / 2)), ""
    except RuntimeError as error:
        store.set(f"failure/{rank}", first_line(error))
        return [], _failures(store, size)


def _failures(store: Store, size: int) -> str:
    """Gathers the failures of ranks that report within a second: the cause may be on another rank than this one."""
    keys = [f"failure/{rank}" for rank in range(size)]
    _wait_for(store, keys, 1.0)
    ranks: dict[str, list[str]] = {}
    for rank, key in enumerate(keys):
        if store.check([key]):
            ranks.setdefault(store.get(key).decode(), []).append(str(rank))
    return "; ".join(f"rank {' and '.join(those)}: {failure}" for failure, those in ranks.items())


def _only_this_host(failed_at: str, failure: str) -> Examination:
    """Returns an examination that never got beyond this host."""
    return Examination(0, _short_host_names([Facts.of_this_rank(local_rank())]), failed_at=failed_at, failure=failure)


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
