"""The thread that notices failures on GPUs, by itself: transfers that do not end, silent ranks, failures elsewhere."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import WorkResult  # type: ignore[attr-defined]

from terapipe.runtime.comm import watcher
from terapipe.runtime.comm.environment import host_name
from terapipe.runtime.comm.watcher import Watcher

LONG = 300.0
CPU = torch.device("cpu")
LEAVING = """
import time

import torch
import torch.distributed as dist
from terapipe.runtime.comm import watcher

watcher.BEAT = 1e-4  # always inside the store

class Owner:
    def told(self, *what): pass

owner = Owner()
store = dist.TCPStore("localhost", 0, 1, True)
cpu = torch.device("cpu")
kept = [watcher.Watcher(store, rank, cpu, 10.0, owner.told, owner.told) for rank in range(20)]
time.sleep(0.2)
"""


class Transfer(dist.Work):
    """What a transfer is to the watcher. Completed is what torch says of one that has failed, too, and asking for it
    asks the device."""

    def __init__(self, ended: WorkResult | None = None) -> None:
        super().__init__()
        self.result_of_it: Any = torch.futures.Future()
        if ended is not None:
            self.result_of_it.set_result(int(ended))

    def is_completed(self) -> bool:
        raise AssertionError("the device was asked")

    def get_future_result(self) -> Any:
        return self.result_of_it


def silent() -> str:
    raise AssertionError("nothing has failed")


class Owner:
    """What a transport is to its watcher."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.event = threading.Event()

    def failed(self, *what: Any) -> None:
        self.said.append(("failed", *what))
        self.event.set()

    def heard(self, *what: Any) -> None:
        self.said.append(("heard", *what))
        self.event.set()

    def watched(self, store: Any, timeout: float) -> Watcher:
        return Watcher(store, 0, CPU, timeout, self.failed, self.heard)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "BEAT", 0.01)


def alive(store: Any, stop: threading.Event) -> Callable[[], None]:
    """Rank 1, which gives signs of life."""

    def run() -> None:
        beat = 0
        while not stop.wait(0.01):
            beat += 1
            store.set("beat1", f"{beat} {os.getpid()} {host_name()}")

    return run


def test_a_transfer_that_does_not_end_is_told_with_its_peer() -> None:
    store, owner, stop = dist.HashStore(), Owner(), threading.Event()
    living = threading.Thread(target=alive(store, stop))
    living.start()
    watching = owner.watched(store, 0.2)
    watching.watch(Transfer(WorkResult.SUCCESS), silent, (1,), "the first")
    watching.watch(Transfer(), silent, (1,), "the second")
    assert owner.event.wait(LONG)
    stop.set()
    living.join()
    (kind, why, peers, seconds, is_dead, words) = owner.said[0]
    assert (kind, why, peers, is_dead, words) == ("failed", "the second", (1,), False, "")
    assert seconds > 0.2


@pytest.mark.parametrize("result", [WorkResult.COMM_ERROR, WorkResult.TIMEOUT])
def test_a_transfer_that_has_failed_is_not_taken_for_finished(result: WorkResult) -> None:
    """It was forgotten: nothing was pending any more, and the device waited for ever."""
    store, owner = dist.HashStore(), Owner()
    watching = owner.watched(store, LONG)
    failing = Transfer()
    watching.watch(Transfer(), silent, (2,), "another")  # whose peer is innocent
    watching.watch(failing, lambda: "the cable is cut", (1,), "a message")
    failing.result_of_it.set_result(int(result))
    assert owner.event.wait(LONG)
    kind, why, peers, _, is_dead, words = owner.said[0]
    assert (kind, why, peers, is_dead, words) == ("failed", "a message", (1,), True, "the cable is cut")


def test_it_holds_no_messages() -> None:
    """All messages of the last half second stayed in memory."""
    owner, transfer = Owner(), Transfer()
    watching = owner.watched(dist.HashStore(), LONG)
    watching.watch(transfer, silent, (1,), "a message")
    reference = weakref.ref(transfer)
    del transfer
    assert reference() is None


def test_a_call_that_does_not_return_is_told_with_its_peer() -> None:
    store, owner, stop = dist.HashStore(), Owner(), threading.Event()
    living = threading.Thread(target=alive(store, stop))
    living.start()
    owner.watched(store, 0.2).watch_call(Future(), (1,), "a connection")
    assert owner.event.wait(LONG)
    stop.set()
    living.join()
    assert owner.said[0][:3] == ("failed", "a connection", (1,))


def ended() -> int:
    """The number of a process that is no more."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize("patience", ["SILENCE", "BUSY"])
def test_a_silent_rank_is_dead_long_before_the_timeout(monkeypatch: pytest.MonkeyPatch, patience: str) -> None:
    place = {"SILENCE": f"{ended()} {host_name()}", "BUSY": "1 elsewhere"}[patience]
    monkeypatch.setattr(watcher, "SILENCE", LONG)
    monkeypatch.setattr(watcher, "BUSY", LONG)
    monkeypatch.setattr(watcher, patience, 0.2)
    store, owner = dist.HashStore(), Owner()
    store.set("beat1", f"1 {place}")
    owner.watched(store, LONG).watch(Transfer(), silent, (1,), "a message")
    assert owner.event.wait(LONG)
    kind, why, peers, _, is_dead, _ = owner.said[0]
    assert (kind, why, peers, is_dead) == ("failed", "a message", (1,), True)


def test_a_rank_gives_its_first_sign_of_life_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that died within half a second had given none: the others took it for busy, for a minute."""
    monkeypatch.setattr(watcher, "BEAT", LONG)
    store, owner = dist.HashStore(), Owner()
    owner.watched(store, LONG)
    assert store.get("beat0").decode() == f"0 {os.getpid()} {host_name()}"


def test_a_process_that_is_held_up_is_not_dead() -> None:
    """Saving a large model may hold the interpreter for longer: nothing is heard, but the process is there."""
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert watcher.has_ended(f"1 {zombie.pid} {host_name()}")
    zombie.wait()
    assert watcher.has_ended(f"1 {zombie.pid} {host_name()}")
    assert not watcher.has_ended(f"1 {os.getpid()} {host_name()}")
    assert not watcher.has_ended(f"1 {zombie.pid} elsewhere")
    assert not watcher.has_ended(""), "a rank that has not given a sign yet"


def test_a_failure_elsewhere_is_heard() -> None:
    store, owner, other = dist.HashStore(), Owner(), Owner()
    owner.watched(store, LONG).watch(Transfer(), silent, (1,), "a message")
    Watcher(store, 1, CPU, LONG, other.failed, other.heard).post()
    assert owner.event.wait(LONG)
    assert owner.said == [("heard", "a message", (1,))]
    assert other.said == [], "who has failed knows it"


def test_a_rank_that_waits_for_nothing_hears_who_has_failed() -> None:
    store, owner, other = dist.HashStore(), Owner(), Owner()
    owner.watched(store, LONG)
    Watcher(store, 3, CPU, LONG, other.failed, other.heard).post()
    assert owner.event.wait(LONG)
    assert owner.said == [("heard", None, (3,))]


def test_it_ends_with_its_owner() -> None:
    before = set(threading.enumerate())
    owner = Owner()
    owner.watched(dist.HashStore(), LONG)
    mine = [thread for thread in threading.enumerate() if thread not in before]
    assert len(mine) == 1
    del owner
    gc.collect()
    mine[0].join(LONG)
    assert not mine[0].is_alive()


def test_processes_leave_in_peace() -> None:
    """A thread that was inside the store when the interpreter ended aborted the process: SIGABRT, in one of many."""
    assert subprocess.run([sys.executable, "-c", LEAVING], timeout=LONG).returncode == 0
