"""How a failure on one rank becomes one message on all of them.

A rank that cannot go on posts a record on a board that all ranks can read, then cuts its connections. Whoever waits for
it is woken at once, reads the board, and raises what it finds: the error of the rank that failed, or else the name of
the rank that others waited for and that has posted nothing.
"""

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

GRACE = 2.0  # seconds that a woken rank gives the others to post their records
SETTLE = 0.25  # ... and to the one that others wait for, once all others have


class PipelineError(RuntimeError):
    """A step that could not be finished, on this rank or another. The pipeline cannot be used after it."""


def is_connection_error(error: Exception) -> bool:
    """Whether an operation between ranks failed, rather than a computation on this one; gloo says it in words only."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def is_out_of_memory(error: BaseException) -> bool:
    """torch says it in words only where the memory is the host's."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def is_timeout(error: Exception) -> bool:
    """Whether this very operation took too long. gloo also names a time-out where another one has closed the
    connection, as ranks do on purpose to wake each other."""
    said = str(error)
    return bool(re.search(r"timed? ?out", said, re.IGNORECASE)) and "caused pair closure" not in said


def own_words(error: Exception) -> str:
    """What an error between ranks says beyond that the connection is gone. NCCL names causes: a GPU that two ranks
    share, no network interface, no memory for its buffers."""
    said = str(error).strip()
    if not isinstance(error, dist.DistBackendError) or _GONE.search(said):
        return ""
    return said.splitlines()[0]


# What NCCL says when a peer is gone, late, or has cut the connection.
_GONE = re.compile(r"abort|timed? ?out|timeout|connection (was )?closed|remote process|shut ?down", re.IGNORECASE)


def in_words(error: BaseException) -> str:
    """An error's kind and what it says, never empty."""
    said = str(error).strip()
    if is_out_of_memory(error):
        return f"out of memory{f': {said}' if said else ''}"
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


@dataclass(frozen=True)
class Record:
    """Why one rank stopped: an error of its own, or a wait for other ranks' actions."""

    rank: int
    error: str = ""  # its own error, in words
    waited_for: str = ""  # the action it stood at
    peers: tuple[int, ...] = ()
    seconds: float = 0.0
    timed_out: bool = False

    def tell(self, name: Callable[[int], str]) -> str:
        if not self.peers:
            at = f" at {self.waited_for}" if self.waited_for else ""
            return f"{name(self.rank)} stopped{at}: {self.error}"
        how = f"waited {self.seconds:.1f} s" if self.timed_out else "was waiting"
        said = f" ({self.error})" if self.error else ""
        return f"{name(self.rank)} {how} at {self.waited_for} for {' or '.join(map(name, self.peers))}{said}"


class Board:
    """The records of all ranks, in the store through which the processes found each other."""

    def __init__(self, store: Store | None, hosts: Mapping[int, str]) -> None:
        """``hosts`` names the host of every rank."""
        self._store, self._hosts = store, hosts

    def name(self, rank: int) -> str:
        several = len(set(self._hosts.values())) > 1
        return f"rank {rank} on {self._hosts[rank]}" if several else f"rank {rank}"

    def post(self, record: Record) -> None:
        if self._store is None:
            return
        try:
            self._store.set_timeout(timedelta(seconds=GRACE))  # it may be on a host that is cut off
            self._store.set(f"rank{record.rank}", json.dumps(asdict(record)))
        except RuntimeError:  # the store went down with the rank that hosted it; the others will see that rank gone
            self._store = None

    def read(self, rank: int) -> Record | None:
        if self._store is None:
            return None
        try:
            if not self._store.check([f"rank{rank}"]):
                return None
            found = json.loads(self._store.get(f"rank{rank}"))
            return Record(**dict(found, peers=tuple(found["peers"])))
        except RuntimeError:
            self._store = None
            return None

    def explain(self, mine: Record, grace: float = GRACE) -> str:
        """One message about all that is known, the same on every rank that had time to post."""
        start = time.monotonic()
        while True:
            found = (self.read(rank) for rank in self._hosts if rank != mine.rank)
            records = sorted([mine, *filter(None, found)], key=lambda r: r.rank)
            suspects = {peer for r in records for peer in r.peers} - {r.rank for r in records}
            # Of several that others wait for, some may only be slow to tell what they wait for themselves; and so may
            # the other end of a transfer that has failed.
            at_most = 0 if any(r.error for r in records) else 1
            heard = len(records) + len(suspects) >= len(self._hosts) and len(suspects) <= at_most
            spent = time.monotonic() - start
            if any(not r.peers for r in records) or self._store is None or spent > (SETTLE if heard else grace):
                return self._tell(records, suspects)
            time.sleep(0.02)

    def _tell(self, records: list[Record], suspects: set[int]) -> str:
        causes = [r.tell(self.name) for r in records if not r.peers]
        if not causes:
            # Nobody waits long for a rank that is gone; who waits for whom may hang together over several ranks.
            late = any(r.timed_out for r in records)
            causes = [_suspicion(self.name(rank), late) for rank in sorted(suspects)]
        waits = [r.tell(self.name) for r in sorted(records, key=lambda r: not r.error) if r.peers]  # the failed first
        return "; ".join([*causes, *waits])


def _suspicion(rank: str, late: bool) -> str:
    if late:
        return f"{rank} did not answer in time: it is stuck, cut off, or slower than the timeout allows"
    return f"{rank} is gone: its process died or lost its connection"
