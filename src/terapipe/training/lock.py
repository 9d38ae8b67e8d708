"""One run per folder: rank 0 locks a file in it, which names the process. Runs that share a cache take turns."""

import errno
import fcntl
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from terapipe.files import with_path
from terapipe.runtime import job, restarts

FILE = "run.lock"
TURNS = "turns.lock"


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock. ``ticks``, its start time, tells it from a later process with the same pid."""

    host: str
    pid: int
    ticks: str
    since: str
    job: str  # torchrun's id of the run, and the number of restarts
    restarts: int

    @classmethod
    def this(cls) -> "Holder":
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        return cls(platform.node(), os.getpid(), _ticks(os.getpid()), since, job(), restarts())

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    def is_gone(self) -> bool:
        """As far as this host can tell. A process of another host is gone if torchrun has restarted its run."""
        if self.host == platform.node():
            return _ticks(self.pid) != self.ticks
        return bool(self.job) and self.job == job() and restarts() > self.restarts


class Lock:
    """``with Lock(folder): ...`` refuses a folder that another process has locked.

    The kernel releases the lock however the process ends, also over NFS and between containers. On file systems without
    locks, and for locks of another host, the contents of the file decide.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
        try:
            self._refuse_second(_try_lock(file), _holder(file))
        except BaseException:
            file.close()
            raise
        self._file = file
        self._write(json.dumps(asdict(Holder.this())) + "\n")
        return self

    def _refuse_second(self, locked: bool | None, holder: Holder | None) -> None:
        elsewhere = holder is not None and holder.host != platform.node()
        alive = holder is not None and (locked is None or elsewhere) and not holder.is_gone()
        if locked is False or alive:
            raise ValueError(
                f"one folder takes one run at a time, {self._path.parent} is in use by {holder or 'another process'}; "
                f"wait for it, stop it, or set another logging.folder; if it is surely gone, delete {self._path}"
            )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._file is not None
        with suppress(OSError):  # the disk may be full, or gone
            self._write("")
        self._file.close()
        self._file = None

    def _write(self, text: str) -> None:
        """In place: the lock is on this inode, and a new file of the same name would not be locked."""
        assert self._file is not None
        with with_path(self._path):
            self._file.seek(0)
            self._file.truncate()
            self._file.write(text.encode())


@contextmanager
def taking_turns(folder: Path) -> Iterator[None]:
    """Waits for other processes that do the same with this folder; on file systems without locks it does not wait."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / TURNS).open("ab") as file:
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_EX)  # released when the file is closed
        yield


def _try_lock(file: BinaryIO) -> bool | None:
    """Whether this process has the lock now; None if the file system has no locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        return None
    return True


def _holder(file: BinaryIO) -> Holder | None:
    try:
        return Holder(**json.loads(file.read()))
    except (ValueError, TypeError):
        return None


def _ticks(pid: int) -> str:
    """Boot id and start time of a process; empty if it is gone or a zombie."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state, *values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else f"{boot} {values[18]}"
