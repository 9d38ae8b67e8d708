"""Finds out what `terapipe doctor` judges: each rank's surroundings, whether the ranks meet, how fast they talk.

What a rank knows goes to the first one through the store, not through the connections that may be what is wrong.
"""

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from terapipe.doctor.environment import facts, share_cores
from terapipe.doctor.links import links, plainly
from terapipe.launch.processes import launch
from terapipe.runtime.transport import local_device, local_rank, rank_and_size

Found = dict[str, Any]  # plain values: it becomes JSON on its way

ALL_LINKS = 10.0  # seconds to measure them in, at most


def alone(ranks: int, port: int, timeout: float) -> Found:
    """Starts ranks on this machine and examines them; ``port`` is that which torchrun would be given."""
    why_not = blocked(port)
    logging.disable(logging.ERROR)  # torch logs a trace of its own where a rank dies, which says nothing of the rank
    try:
        found: Found = launch(examine, ranks, timeout, True)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        found = _only_this_host("start", f"rank {rank} died with exit code {failure.exitcode}")
    except (RuntimeError, OSError) as error:
        found = _only_this_host("start", plainly(error))
    finally:
        logging.disable(logging.NOTSET)
    return {**found, "port": port, "blocked": why_not}


def blocked(port: int) -> str:
    """Why nobody could listen on this port, nothing if one can."""
    try:
        if socket.has_dualstack_ipv6():  # as torch's store does
            socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True).close()
        else:
            socket.create_server(("", port)).close()
    except OSError as error:
        return os.strerror(error.errno).lower() if error.errno else str(error)
    return ""


def examine(timeout: float, pin: bool = False) -> Found | None:
    """What every rank runs; the first returns what all of them found. One that meets nobody returns what it knows."""
    with _diverted(1, 2):  # some versions of gloo greet on stdout, where a report may be JSON
        if pin:
            share_cores()
        try:
            store, rank, size = _meet(timedelta(seconds=timeout))
        except RuntimeError as error:
            # Nobody else will tell of this host, and of its ranks one is enough.
            return None if local_rank() else _only_this_host("meet", plainly(error))
        store = PrefixStore("terapipe/doctor", store)
        try:
            return _first(store, size, timeout) if rank == 0 else _other(store, rank, size, timeout)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _meet(span: timedelta) -> tuple[Store, int, int]:
    """The store, this rank and the number of ranks, without waiting for the others: so they can be named if they miss.

    A rank that hosts the store would wait in torch's rendezvous, unless it takes itself to be the only one.
    """
    with open(os.devnull, "w") as nowhere, _diverted(2, nowhere.fileno()):  # torch writes C++ traces of what it raises
        store, _, _ = next(rendezvous("env://?world_size=1", timeout=span))
    return (store, *rank_and_size())


def _first(store: Store, size: int, timeout: float) -> Found:
    found: Found = {"size": size, "where": _address(store), "timeout": timeout}
    store.set("facts/0", json.dumps(facts(0)))
    keys = [f"facts/{rank}" for rank in range(size)]
    _wait_for(store, keys, timeout)
    arrived = [key for key in keys if store.check([key])]
    store.set("go", "yes" if len(arrived) == size else "no")
    found["ranks"] = [json.loads(store.get(key)) for key in arrived]
    return {**found, **_work_together(store, 0, size, timeout)} if len(arrived) == size else found


def _other(store: Store, rank: int, size: int, timeout: float) -> Found | None:
    try:
        store.set(f"facts/{rank}", json.dumps(facts(rank)))
        if not _wait_for(store, ["facts/0"], timeout):
            return None if rank > 1 else _only_this_host("meet", f"rank 0 did not arrive within {timeout:g} s")
        if _wait_for(store, ["go"], timeout + 1) and store.get("go") == b"yes":
            _work_together(store, rank, size, timeout)
    except RuntimeError:  # the store went down with the first rank, whose story that is
        pass
    return None


def _wait_for(store: Store, keys: list[str], timeout: float) -> bool:
    """Whether they all came in time. Asks again and again, as a store that waits in vain writes about it to stderr."""
    deadline = time.monotonic() + timeout
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _work_together(store: Store, rank: int, size: int, timeout: float) -> Found:
    """A sum over all ranks, then the links: what a pipeline needs to work."""
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
        store.set(f"failure/{rank}", plainly(error))
        return {"failure": _failures(store, size)}


def _failures(store: Store, size: int) -> str:
    """What went wrong on which ranks, as far as they tell soon: what one suffers may be another's fault."""
    keys = [f"failure/{rank}" for rank in range(size)]
    _wait_for(store, keys, 1.0)
    ranks: dict[str, list[str]] = {}
    for rank, key in enumerate(keys):
        if store.check([key]):
            ranks.setdefault(store.get(key).decode(), []).append(str(rank))
    return "; ".join(f"rank {' and '.join(those)}: {failure}" for failure, those in ranks.items())


# Words


def _only_this_host(failed_at: str, failure: str) -> Found:
    return {"size": 0, "ranks": [facts(local_rank())], "failed_at": failed_at, "failure": failure}


def _address(store: Store) -> str:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if isinstance(store, TCPStore) else ""


@contextmanager
def _diverted(source: int, target: int) -> Iterator[None]:
    """What anybody, C++ too, writes to one file descriptor goes to another one meanwhile."""
    sys.stdout.flush()
    kept = os.dup(source)
    os.dup2(target, source)
    try:
        yield
    finally:
        os.dup2(kept, source)
        os.close(kept)
