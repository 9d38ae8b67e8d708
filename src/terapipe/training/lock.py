"""One run per folder: the first rank holds a lock on a file in it, which says who it is."""

import errno
import fcntl
import json
import os
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from terapipe.runtime.transport import job, restarts

FILE = "run.lock"


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock. ``ticks``, when it started, tells it from a later one of the same number."""

    host: str
    pid: int
    ticks: str
    since: str
    job: str  # what torchrun calls the run, and how often it has started it again
    restarts: int

    @classmethod
    def this(cls) -> "Holder":
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        return cls(platform.node(), os.getpid(), _ticks(os.getpid()), since, job(), restarts())

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    def is_gone(self) -> bool:
        """As far as can be told from here: of another host, only if torchrun has started its run again."""
        if self.host == platform.node():
            return _ticks(self.pid) != self.ticks
        return bool(self.job) and self.job == job() and restarts() > self.restarts


class Lock:
    """As long as it is entered, no other process can enter one of the same folder. ``with Lock(folder): ...``

    The kernel keeps the lock and lets go of it when the process ends in whatever way, also over NFS and between
    containers. On file systems that know no locks, and for those that another host left, the file's text decides.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
        try:
            self._refuse_second(_locked(file), _holder(file))
        except BaseException:
            file.close()
            raise
        self._file = file
        self._write(json.dumps(asdict(Holder.this())) + "\n")
        return self

    def _refuse_second(self, locked: bool | None, found: Holder | None) -> None:
        elsewhere = found is not None and found.host != platform.node()
        told = found is not None and (locked is None or elsewhere) and not found.is_gone()
        if locked is False or told:
            raise ValueError(
                f"one folder takes one run at a time, {self._path.parent} is in use by {found or 'another process'}; "
                f"wait for it, stop it, or set another logging.folder; if it is surely gone, delete {self._path}"
            )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._file is not None
        with suppress(OSError):  # the disk may be full, or gone
            self._write("")
        self._file.close()
        self._file = None

    def _write(self, text: str) -> None:
        """In place: the lock is on this file, and deleting it would let others lock another of its name."""
        assert self._file is not None
        self._file.seek(0)
        self._file.truncate()
        self._file.write(text.encode())


def _locked(file: BinaryIO) -> bool | None:
    """Whether this process has the lock now; None where there are none."""
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
    """When a process started, and since which boot that counts; nothing, if it is gone or is only waited for."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state, *values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else f"{boot} {values[18]}"
