"""Channels of the pretend NCCL: operations that run one after the other, later than the host posted them."""

import os
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.pretend.waits import note

Run = Callable[[], None]


class Settings:
    """Of all channels of this process; tests may change them."""

    # Seconds between the moment an operation could run and the moment it does.
    delay = float(os.environ.get("TERAPIPE_PRETEND_NCCL_DELAY", "0"))
    # On one host, NCCL does not notice that a peer is gone: its operations never end.
    notices_death = False


class Work(dist.Work):
    """One operation. ``wait`` blocks until it is through; only with a timeout would the host wait for a real one."""

    def __init__(self, name: str, number: int, tensors: list[Tensor], timeout: timedelta) -> None:
        super().__init__()
        self._name, self._number, self._tensors, self._timeout = name, number, tensors, timeout
        self._posted = time.monotonic()
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: str | None = None

    def end(self, error: str | None = None) -> None:
        with self._lock:
            if not self._done.is_set():
                self._error = error
                self._done.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None and timeout > timedelta(0):
            note("Work.wait(timeout)")
            if not self._done.wait(timeout.total_seconds()):
                raise dist.DistBackendError(f"Work {self} timed out in blocking wait.")
        left = self._posted + self._timeout.total_seconds() - time.monotonic()
        if not self._done.wait(max(0.0, left)):
            spent = int(1000 * (time.monotonic() - self._posted))
            self.end(
                f"Watchdog caught collective operation timeout: {self} ran for {spent} milliseconds before timing out."
            )
        if self._error is not None:
            raise dist.DistBackendError(self._error)
        return True

    def __str__(self) -> str:
        numel = sum(x.numel() for x in self._tensors)
        limit = int(1000 * self._timeout.total_seconds())
        return f"WorkNCCL(SeqNum={self._number}, OpType={self._name}, Numel={numel}, Timeout(ms)={limit})"

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return None if self._error is None else dist.DistBackendError(self._error)

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class Channel:
    """A stream of a communicator, which is a thread here."""

    def __init__(self) -> None:
        self._posted: queue.Queue[tuple[Run, Work] | None] = queue.Queue()
        self._pending: set[Work] = set()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="pretend NCCL")
        self._thread.start()

    def post(self, run: Run, work: Work) -> Work:
        self._pending.add(work)
        self._posted.put((run, work))
        return work

    def close(self, error: str | None = None) -> None:
        """Operations that have not ended fail with this error; without one they may still end."""
        self._posted.put(None)
        if error is not None:
            for work in list(self._pending):
                work.end(error)

    def _serve(self) -> None:
        while (posted := self._posted.get()) is not None:
            run, work = posted
            if Settings.delay:
                time.sleep(Settings.delay)
            if work.is_completed():  # it was aborted
                continue
            try:
                run()
            except Exception as error:
                if _is_death(error) and not Settings.notices_death:
                    return
                work.end(str(error))
            else:
                work.end()
            self._pending.discard(work)
            del posted, run, work  # and the tensors


def _is_death(error: Exception) -> bool:
    text = str(error).lower()
    return any(phrase in text for phrase in ("connection closed", "connection reset", "broken pipe"))
