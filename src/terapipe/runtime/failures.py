"""How a failure on one rank becomes one message on all of them.

A rank that cannot go on posts a record on a board that all ranks can read, then cuts its connections. Whoever waits for
it is woken at once, reads the board, and raises what it finds: the error of the rank that failed, or else the name of
the rank that others waited for and that has posted nothing.
"""

import json
import time
from dataclasses import asdict, dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

GRACE = 2.0  # seconds that a woken rank gives the others to post their records
SETTLE = 0.25  # ... and those that somebody waits for, once all others have


class PipelineError(RuntimeError):
    """A step that could not be finished, on this rank or another. The pipeline cannot be used after it."""


@dataclass(frozen=True)
class Record:
    """Why one rank stopped: an error of its own, or a wait for another rank's action."""

    rank: int
    error: str = ""  # its own error, in words
    waited_for: str = ""  # the action it stood at
    peer: int | None = None
    seconds: float = 0.0
    timed_out: bool = False

    def __str__(self) -> str:
        if self.peer is None:
            return f"rank {self.rank} stopped{' at ' + self.waited_for if self.waited_for else ''}: {self.error}"
        how = f"waited {self.seconds:.1f} s" if self.timed_out else "was waiting"
        return f"rank {self.rank} {how} at {self.waited_for} for rank {self.peer}"


class Board:
    """The records of all ranks, in the store through which the processes found each other."""

    def __init__(self, store: Store | None, ranks: int) -> None:
        self._store, self._ranks = store, ranks

    def post(self, record: Record) -> None:
        if self._store is None:
            return
        try:
            self._store.set(f"rank{record.rank}", json.dumps(asdict(record)))
        except RuntimeError:  # the store went down with the rank that hosted it; the others will see that rank gone
            self._store = None

    def read(self, rank: int) -> Record | None:
        if self._store is None:
            return None
        try:
            if not self._store.check([f"rank{rank}"]):
                return None
            return Record(**json.loads(self._store.get(f"rank{rank}")))
        except RuntimeError:
            self._store = None
            return None

    def explain(self, mine: Record, grace: float = GRACE) -> str:
        """One message about all that is known, the same on every rank that had time to post."""
        start = time.monotonic()
        while True:
            found = (self.read(rank) for rank in range(self._ranks) if rank != mine.rank)
            records = sorted([mine, *filter(None, found)], key=lambda r: r.rank)
            suspects = {r.peer for r in records if r.peer is not None} - {r.rank for r in records}
            heard = len(records) + len(suspects) >= self._ranks
            spent = time.monotonic() - start
            if any(r.peer is None for r in records) or self._store is None or spent > (SETTLE if heard else grace):
                return _tell(records, suspects)
            time.sleep(0.02)


def _tell(records: list[Record], suspects: set[int]) -> str:
    causes = [str(r) for r in records if r.peer is None]
    if not causes:
        late = {r.peer for r in records if r.timed_out}
        causes = [_suspicion(rank, rank in late) for rank in sorted(suspects)]
    waits = [str(r) for r in records if r.peer is not None]
    return "; ".join([*causes, *waits])


def _suspicion(rank: int, late: bool) -> str:
    if late:
        return f"rank {rank} did not answer in time: it is stuck, or slower than the timeout allows"
    return f"rank {rank} is gone: its process died or lost its connection"
