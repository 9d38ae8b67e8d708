"""One run per folder: rank 0 locks a file in it, which names the process. Runs that share a cache take turns.

::

    start A   lock run.lock ok                -> writes "host, pid, start time, job" into it, trains
    start B   lock refused                    -> reads who has it, and says so
    A is killed                               -> the kernel releases the lock
    start C   lock ok                         -> the name in the file is of a dead process: goes on from its checkpoint

`filelock` is not used. It would replace `_try_lock` and nothing else: most of this module tells who has the lock, and
whether a process of another host that has not released it still lives.
"""

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
# Another file: a run that prepares data in its own folder has locked that one already.
TURNS = "turns.lock"


@dataclass(frozen=True)
class Holder:
    """The process that has a lock.

    Args:
        host: Its name.
        pid: On that host.
        ticks: Its start time, which tells it from a later process with the same pid.
        since: When it took the lock, for people.
        job: torchrun's id of the run; empty without torchrun.
        restarts: How many times torchrun had restarted it.
    """

    host: str
    pid: int
    ticks: str
    since: str
    job: str
    restarts: int

    @classmethod
    def this(cls) -> "Holder":
        """Describes this process."""
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        return cls(platform.node(), os.getpid(), _ticks(os.getpid()), since, job(), restarts())

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    def is_gone(self) -> bool:
        """Tells whether the process has ended, as far as this host can tell. Of a process of another host it knows only
        this: if torchrun has restarted the run since, it ended all processes of the start before."""
        if self.host == platform.node():
            return _ticks(self.pid) != self.ticks
        return bool(self.job) and self.job == job() and restarts() > self.restarts


class Lock:
    """``with Lock(folder): ...`` refuses a folder that another process has locked.

    The kernel releases the lock however the process ends, also over NFS and between containers. On file systems without
    locks, and for locks of another host, the contents of the file decide.

    Args:
        folder: Of the run; made if it is not there.
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
        """Decides by the lock, and by the name in the file where there is no lock, or it is of another host."""
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
    """Waits for other processes that do the same with this folder; on file systems without locks it does not wait.

    Args:
        folder: Made if it is not there.
    """
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
    """Who is named in the file; None if nobody is, or it is torn."""
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
