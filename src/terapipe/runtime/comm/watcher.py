"""Notices on a GPU that another rank has failed, died or stopped answering.

The host does not wait for transfers there, and a device that waits for a peer waits for ever. So a thread of every rank
gives signs of life, reads whether another rank has failed, and looks whether transfers come to an end. When something
is wrong it tells the transport, which aborts its communicators: whatever waits for them goes on, and the main thread
raises what all ranks know.

How a transfer ended is asked of the future that torch's own watchdog sets (``Work.get_future_result``), not of the
``Work``: that takes a transfer which has failed for completed, it holds the message in memory, and it asks the device,
for which CUDA may make this thread wait until the main one is through.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import WorkResult  # type: ignore[attr-defined]
from torch.distributed import Store  # type: ignore[attr-defined]

from terapipe.runtime.comm.environment import host_name, start_thread

BEAT = 0.5  # seconds between looks
LEAVE = 2.0  # seconds that the end of the process waits for the thread
SILENCE = 10.0  # seconds without a sign of life after which a rank is dead whose process has ended on this host
BUSY = 60.0  # the same for any other rank: its interpreter may be held, or its machine be busy


def has_ended(beat: str) -> bool:
    """Whether the process that gave this sign of life has ended. False if it is on another host, or none was given.

    Args:
        beat: ``"<count> <pid> <host>"``. Of a process on this host the kernel knows more than its silence tells: a rank
            that compiles for a minute is silent and alive. Without ``/proc`` (macOS) silence is all there is.
    """
    _, pid, host = beat.split(" ", 2) if beat else ("", "", "")
    if host != host_name() or not Path("/proc/self/stat").exists():
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "XZ"  # dead, or a zombie


def _end(stopped: threading.Event, thread: threading.Thread) -> None:
    """Ends the thread of a watcher that nobody holds any more, or when the process ends. It takes the two objects, not
    the watcher: a finalizer that held its own object would keep it for ever."""
    stopped.set()
    if thread is not threading.current_thread():  # which may be the last to let go of the watcher
        thread.join(LEAVE)


@dataclass
class _Pending:
    """A transfer or a call that has not come to an end, as far as this thread has looked. It holds no tensor: the list
    would keep messages in memory until the next look."""

    has_ended: Callable[[], bool]
    has_failed: Callable[[], bool]  # asked when it has ended
    words: Callable[[], str]  # of NCCL, if it has failed
    peers: tuple[int, ...]  # ranks without which it cannot end
    why: object  # what it is, for the message: its text is made only if it is needed


class Watcher:
    """A thread that looks every half second whether transfers end and whether other ranks are alive::

        give a sign of life (a counter in the store)
        has another rank posted "failed"?   yes: heard(why, peers)
        has a transfer failed?              yes: failed(..., is_dead=True, NCCL's words)
        is the oldest transfer's peer dead? yes: failed(..., is_dead=True, "")
        did none end within the timeout?    yes: failed(..., is_dead=False, "")

    "Failed" comes before the transfers, because it may be why one of them has failed here. One of the two functions is
    called once, in this thread, and the thread ends.

    Args:
        store: of the job, with keys of its own.
        rank: of this process.
        device: of this process.
        timeout: seconds within which one transfer after the other must end.
        failed: ``failed(why, peers, seconds, is_dead, words)``; ``why`` is the transfer and ``peers`` are the ranks
            that it needs.
        heard: ``heard(why, peers)`` where another rank has failed. ``why`` is the transfer that this rank waits for,
            None if there is none, and ``peers`` then is the rank that has failed.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        device: torch.device,
        timeout: float,
        failed: Callable[[object, tuple[int, ...], float, bool, str], object],
        heard: Callable[[object, tuple[int, ...]], object],
    ) -> None:
        self._store: Any = store.clone() if hasattr(store, "clone") else store  # a connection of its own
        self._rank, self._timeout = rank, timeout
        self._failed, self._heard = weakref.WeakMethod(failed), weakref.WeakMethod(heard)
        self._pending: list[_Pending] = []
        self._lock = threading.Lock()
        self._progress = time.monotonic()  # when a transfer last came to an end, or there was none to wait for
        self._beats: dict[int, tuple[bytes, float]] = {}  # of other ranks: the last one, and when it was seen first
        self._stopped = threading.Event()
        self._give_sign(0)  # now: nobody knows of a rank without any whether it has ended
        thread = start_thread(self._run, device, "terapipe-watcher")
        # A thread inside the store's C++ code when the interpreter ends would abort the process.
        weakref.finalize(self, _end, self._stopped, thread)

    def watch(self, work: dist.Work, words: Callable[[], str], peers: tuple[int, ...], why: object) -> None:
        """Watches a transfer that is on its way. Transfers must come to an end one after the other, each within the
        timeout.

        Args:
            work: what torch.distributed returned for it.
            words: asks its communicator what has gone wrong; called in the watcher's thread.
            peers: ranks that it needs.
            why: describes it in the message.
        """
        result: Any = work.get_future_result()  # type: ignore[attr-defined]

        def has_failed() -> bool:
            return bool(WorkResult(result.value()) != WorkResult.SUCCESS)

        self._add(_Pending(result.done, has_failed, words, peers, why))

    def watch_call(self, answer: Future[Any], peers: tuple[int, ...], why: object) -> None:
        """Watches a call in another thread that needs peers, such as the making of a communicator. That it has failed
        is no news here: its caller learns of its errors.

        Args:
            answer: of the call.
            peers: ranks that it needs.
            why: describes it in the message.
        """
        self._add(_Pending(answer.done, lambda: False, lambda: "", peers, why))

    def _add(self, pending: _Pending) -> None:
        with self._lock:
            if not self._pending:  # the time since the last transfer was spent on computing, not on waiting
                self._progress = time.monotonic()
            self._pending.append(pending)

    def post(self) -> None:
        """Tells all ranks that one has failed; what it has to say is on the board already. The last call."""
        self._stopped.set()
        with suppress(RuntimeError):  # the store may have gone down with the rank that failed
            self._store.set("failed", str(self._rank))

    def _run(self) -> None:
        """Runs in the thread, until it has told of a failure, is stopped, or the transport that it tells is gone."""
        beat = 0
        while not self._stopped.wait(BEAT):
            beat += 1
            try:
                self._give_sign(beat)
                alarmed = self._look()
            except RuntimeError:  # the store went down with the rank that hosted it
                alarmed = self._tell(self._failed, "the store of the job", (), 0.0, True, "")
            if alarmed or self._failed() is None:
                return

    def _give_sign(self, beat: int) -> None:
        self._store.set(f"beat{self._rank}", f"{beat} {os.getpid()} {host_name()}")

    def _look(self) -> bool:
        """Looks once, in the order of the class's drawing. Returns whether it has told of a failure."""
        broken, waiting = self._oldest()
        if self._store.check(["failed"]):  # which may be why a transfer has failed here
            at, who = broken or waiting, int(self._store.get("failed"))
            return self._tell(self._heard, at and at.why, at.peers if at else (who,))
        spent = time.monotonic() - self._progress
        if broken is not None:
            return self._tell(self._failed, broken.why, broken.peers, spent, True, broken.words())
        if waiting is None:
            return False
        if dead := self._dead(waiting.peers):
            return self._tell(self._failed, waiting.why, dead, spent, True, "")
        return spent > self._timeout and self._tell(self._failed, waiting.why, waiting.peers, spent, False, "")

    def _oldest(self) -> tuple[_Pending | None, _Pending | None]:
        """The first transfer that has failed, and the first that is not through; those that are, are forgotten."""
        with self._lock:
            ended: list[_Pending] = []
            left: list[_Pending] = []
            for pending in self._pending:
                (ended if pending.has_ended() else left).append(pending)
            if ended or not left:
                self._progress = time.monotonic()
            self._pending = left
        return next((p for p in ended if p.has_failed()), None), left[0] if left else None

    def _dead(self, ranks: Collection[int]) -> tuple[int, ...]:
        """Ranks that have given no sign of life for a while. This rank's clock counts from when it first saw a sign:
        clocks of other hosts may be wrong."""
        dead = []
        for rank in ranks:
            key = f"beat{rank}"
            beat = self._store.get(key) if self._store.check([key]) else b""
            last, since = self._beats.get(rank, (None, 0.0))
            if beat != last:
                self._beats[rank] = beat, time.monotonic()
            elif time.monotonic() - since > (SILENCE if has_ended(beat.decode()) else BUSY):
                dead.append(rank)
        return tuple(dead)

    def _tell(self, whom: Any, *what: object) -> bool:
        """Calls one of the transport's methods, unless the transport is gone. Returns True, so that callers can return
        what they have told."""
        function = whom()
        if function is not None:
            function(*what)
        return True
