"""Ends ranks that are stopped (SIGSTOP, a debugger) when the run is over.

If a rank fails, torchelastic sends SIGTERM to the others and waits 30 seconds before it kills them. A stopped process
cannot react, and the rank that did not answer in time is often just that: the run would end 30 seconds late::

    rank 0   runs ... waits for rank 1 ... fails
    rank 1   stopped ......................|  SIGTERM is pending, never handled
    watcher  looks every 0.2 s             |--> SIGKILL

A debugger's rank is left alone as long as nobody has failed: two things must hold, that another rank has ended, and
that a SIGTERM waits for this one.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOOK = 0.2  # seconds between looks


@contextmanager
def ending_stopped_ranks() -> Iterator[None]:
    """Inside, a thread watches the children of this process. Only on Linux, which tells their state in /proc; elsewhere
    it sees no children and does nothing."""
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(over,), name="terapipe stopped ranks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _watch(over: threading.Event) -> None:
    """Kills children that are stopped and have a SIGTERM pending, once another child has ended, until ``over``."""
    seen: set[int] = set()
    while not over.wait(LOOK):
        alive = {pid for pid in _children(os.getpid()) if _state(pid) not in "XZ"}
        seen |= alive
        if seen <= alive:  # nobody has ended: a SIGTERM is the user's, and asks for a checkpoint
            continue
        for pid in alive:
            if _state(pid) in "Tt" and _is_asked_to_end(pid):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    """Returns the children of all threads of a process: the kernel lists them by the thread that started them."""
    children = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            children += [int(child) for child in task.read_text().split()]
    return children


def _state(pid: int) -> str:
    """Returns the kernel's letter for a process's state; X, dead, for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def _is_asked_to_end(pid: int) -> bool:
    """Tells whether a SIGTERM is pending for a process: for its first thread, or for all.

    The kernel writes pending signals as a bit mask in hexadecimal, signal 1 in the lowest bit: SigPnd for the thread,
    ShdPnd for the process.
    """
    with suppress(OSError, ValueError, KeyError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        pending = int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)
        return bool(pending & 1 << (signal.SIGTERM - 1))
    return False
