"""Channels of the pretend NCCL: operations that run one after the other, later than the host posted them.

As with the real one, the host learns nothing from waiting: ``Work.wait()`` returns at once, and the device waits. It
does so where the next operator runs (device.cpp). An operation that fails keeps the device waiting until its
communicator is aborted; then computations go on, over whatever is in their buffers.
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import WorkResult  # type: ignore[attr-defined]

from tests.pretend.waits import note

Run = Callable[[], None]

REMOTE = (
    "NCCL error: remote process exited or there was a network error, NCCL version 2.27.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
)
_pretend: Any = torch.ops.pretend
_library: list[torch.library.Library] = []  # what it registers is gone with it


class Settings:
    """Of all channels of this process; tests may change them."""

    # Seconds between the moment an operation could run and the moment it does.
    delay = float(os.environ.get("TERAPIPE_PRETEND_NCCL_DELAY", "0"))
    # On one host, NCCL does not notice that a peer is gone: its operations never end.
    notices_death = False
    # Seconds after which making a communicator is given up. NCCL never does.
    gives_up: float | None = None
    # Whether peers answer when a communicator is made: a firewall, or the wrong network interface.
    answers = True
    # Seconds between torch's looks at operations, in a thread of its own.
    look = 0.05
    # Seconds that torch gives a process whose transfer has failed, before it ends it.
    heartbeat = 480.0


def install() -> None:
    library = torch.library.Library("pretend", "IMPL")
    library.impl("await_device", await_device)
    _library.append(library)


# What the device waits for

_awaited: list["Operation"] = []
_awaiting = threading.Lock()


def await_device() -> None:
    """Until all that was waited for on this process's device is through. Raises what a real process would be ended for,
    or would compute wrong numbers from."""
    for operation in list(_awaited):
        operation.ended.wait()
        with _awaiting:
            if operation in _awaited:
                _awaited.remove(operation)
                _pretend.add_awaited(-1)
        if operation.fatal is not None:
            raise dist.DistBackendError(operation.fatal)


class Operation:
    """What the device and torch's watchdog know of a transfer or collective; of its tensors, nothing."""

    def __init__(self, words: str, timeout: timedelta, tears_down: bool) -> None:
        """``tears_down``: whether torch ends the process when it fails."""
        self.words, self.timeout, self.tears_down = words, timeout, tears_down
        self.posted = time.monotonic()
        self.ended = threading.Event()  # on the device
        self.fatal: str | None = None
        self.channel: Channel | None = None
        self.number = -1
        self.after = tuple(_awaited)  # what the device waits for when it is posted
        self.exception: str | None = None
        self._marking = threading.Lock()
        self._result: WorkResult | None = None
        self._future: Any = None

    def end(self, fatal: str | None = None) -> None:
        if not self.ended.is_set():
            self.fatal = fatal
            self.ended.set()
            _posted.pop(self.number, None)

    @property
    def error(self) -> str | None:
        """NCCL's are of a communicator: operations that are long through have them, too."""
        return self.channel.error if self.channel is not None else None

    def block_device(self) -> None:
        with _awaiting:
            if not self.ended.is_set() or self.fatal is not None:
                _awaited.append(self)
                _pretend.add_awaited(1)

    def future(self) -> Any:
        with self._marking:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._result is not None:
                    self._future.set_result(int(self._result))
            return self._future

    def look(self) -> bool:
        """The watchdog's: whether there is no more to be told of it. Where torch handles errors, it ends the process;
        here the next operator does, by raising."""
        if self.error is not None and not self.ended.is_set():
            self._fail(WorkResult.COMM_ERROR, self.error)
        elif not self.ended.is_set() and time.monotonic() - self.posted > self.timeout.total_seconds():
            spent = int(1000 * (time.monotonic() - self.posted))
            self._fail(
                WorkResult.TIMEOUT,
                f"Watchdog caught collective operation timeout: {self.words} ran for {spent} milliseconds before "
                "timing out.",
            )
        elif self.ended.is_set():
            self._mark(WorkResult.SUCCESS)
        return self._result is not None

    def _fail(self, result: WorkResult, text: str) -> None:
        self.exception = self.exception or text
        self._mark(result)
        watchdog.signal()
        if self.tears_down:
            self.end(text)

    def _mark(self, result: WorkResult) -> None:
        with self._marking:
            if self._result is None:
                self._result = result
                if self._future is not None:
                    self._future.set_result(int(result))


class Work(dist.Work):
    """The host's end of an operation, which holds its tensors."""

    def __init__(
        self, name: str, number: int, tensors: list[Tensor], timeout: timedelta, tears_down: bool = True
    ) -> None:
        super().__init__()
        numel, limit = sum(x.numel() for x in tensors), int(1000 * timeout.total_seconds())
        words = f"WorkNCCL(SeqNum={number}, OpType={name}, Numel={numel}, Timeout(ms)={limit})"
        self.operation = Operation(words, timeout, tears_down)
        self._tensors, self._device = tensors, torch.cuda.current_device()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The device waits, and the host only if there is a timeout. Raises an error that ``is_completed`` has found,
        and no other."""
        self.operation.block_device()
        if timeout is not None and timeout > timedelta(0):
            note("Work.wait(timeout)")
            limit = time.monotonic() + timeout.total_seconds()
            while not self.is_completed():
                if time.monotonic() > limit:
                    raise dist.DistBackendError(f"Work {self} timed out in blocking wait.")
                time.sleep(0.001)
        if self.operation.exception is not None:
            assert self.operation.channel is not None
            self.operation.channel.abort()
            raise dist.DistBackendError(self.operation.exception)
        return True

    def __str__(self) -> str:
        return self.operation.words

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Also if it has failed."""
        current = torch.cuda.current_device()
        if current != self._device:
            raise RuntimeError(
                f"an event of cuda:{self._device} was asked for by a thread whose current device is cuda:{current}, "
                "where a real one would make a context"
            )
        self.operation.exception = self.operation.exception or self.operation.error
        return self.operation.exception is not None or self.operation.ended.is_set()

    def is_success(self) -> bool:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")

    def exception(self) -> Exception | None:
        said = self.operation.exception
        return None if said is None else dist.DistBackendError(said)

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> Any:
        """It has a result at once; whoever uses that waits on the device."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def get_future_result(self) -> Any:
        """Of a WorkResult, which torch's watchdog tells when it next looks."""
        return self.operation.future()


class Watchdog:
    """torch's threads that look at operations of NCCL, in one: it tells how they ended. When one has failed it signals
    that in the job's store, and the monitor of each process's first group (``Monitor``) hears of it."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._lock = threading.Lock()
        self._is_running = False
        self.signals: list[Callable[[], None]] = []  # of groups: to tell the other processes
        self.has_failed = False

    def add(self, operation: Operation) -> None:
        with self._lock:
            self._operations.append(operation)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, daemon=True, name="pretend watchdog").start()

    def signal(self) -> None:
        if not self.has_failed:
            self.has_failed = True
            for tell in self.signals:
                tell()

    def _run(self) -> None:
        while True:
            time.sleep(Settings.look)
            with self._lock:
                operations = list(self._operations)
            done = {id(operation) for operation in operations if operation.look()}
            with self._lock:
                self._operations = [operation for operation in self._operations if id(operation) not in done]
                if not self._operations:
                    self._is_running = False
                    return


watchdog = Watchdog()


class Monitor:
    """torch's thread of a process's first group, which ends the process some minutes after a transfer has failed in any
    process of the job; unless the group was aborted or shut down meanwhile, or its environment forbade it."""

    def __init__(self, store: Any, *, dumps: bool, ends: bool) -> None:
        self._store, self._ends = store, ends
        self.stopped = threading.Event()
        if dumps:
            watchdog.signals.append(lambda: store.set("exception_dump", ""))
            threading.Thread(target=self._run, daemon=True, name="pretend monitor").start()

    def _run(self) -> None:
        while not self.stopped.wait(0.25):
            try:
                signaled = watchdog.has_failed or self._store.check(["exception_dump"])
            except RuntimeError:  # the store went down with the rank that hosted it
                return
            if signaled:
                start = time.monotonic()
                while time.monotonic() - start < Settings.heartbeat:  # not to be interrupted
                    time.sleep(0.05)
                if not self.stopped.is_set() and self._ends:
                    os._exit(134)  # as by SIGABRT
                return


# Channels

_numbers = count()  # in which operations of this process were posted
_posted: dict[int, Operation] = {}  # those that have not ended


class Channel:
    """A stream of a communicator, which is a thread here."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[Run, Operation] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="pretend NCCL")
        self._thread.start()
        self.error: str | None = None  # of NCCL, which all operations have from then on

    def post(self, run: Run, work: Work) -> Work:
        operation = work.operation
        operation.channel, operation.number = self, next(_numbers)
        _posted[operation.number] = operation
        watchdog.add(operation)
        self._queue.put((run, operation))
        return work

    def abort(self) -> None:
        """Operations that have not ended do so now, those after what this process posted earlier on other channels:
        kernels run in order, and aborting one communicator does not wake those that wait for another."""
        for operation in self._pending():
            while any(other.number < operation.number and other.channel is not self for other in _pending()):
                time.sleep(0.002)
            operation.end()
        self.error = None  # nobody asks NCCL any more
        self.close()

    def close(self) -> None:
        self._queue.put(None)

    def flush(self) -> None:
        """Until all operations have ended."""
        while self._pending():
            time.sleep(0.002)

    def _pending(self) -> list[Operation]:
        return [operation for operation in _pending() if operation.channel is self]

    def _serve(self) -> None:
        while (posted := self._queue.get()) is not None:
            run, operation = posted
            for earlier in operation.after:
                earlier.ended.wait()
            operation.after = ()
            if Settings.delay:
                time.sleep(Settings.delay)
            if not operation.ended.is_set() and not self._run(run, operation):  # it may have been aborted
                return
            del posted, run, operation  # and the tensors

    def _run(self, run: Run, operation: Operation) -> bool:
        """False if the device is stuck in it."""
        try:
            run()
        except AsynchronousError as error:
            self.error = str(error)
            return False
        except Exception as error:
            if _is_death(error):
                self.error = REMOTE if Settings.notices_death else None
                return False
            operation.end(str(error))
        else:
            operation.end()
        return True


class AsynchronousError(Exception):
    """Of NCCL while an operation runs: the network is down. Its kernel goes on waiting."""


def _pending() -> list[Operation]:
    operations = list(_posted.values())  # at once: other threads change it
    return sorted(operations, key=lambda operation: operation.number)


def _is_death(error: Exception) -> bool:
    text = str(error).lower()
    return any(phrase in text for phrase in ("connection closed", "connection reset", "broken pipe"))
