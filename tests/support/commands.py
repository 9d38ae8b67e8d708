"""`terapipe` as a command, started for a test: what it says goes to a file, and nothing of it is left at the end."""

import argparse
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from terapipe.cli import parser

MARK = "TERAPIPE_TEST"  # in the environment of all that a test started

PATIENCE = 1800.0  # seconds before a process is taken to hang; a busy machine may need many minutes


def options_of_verbs() -> dict[str, list[argparse.Action]]:
    """The options of each verb. argparse lists them under private names only."""
    (verbs,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    return {name: verb._actions for name, verb in verbs.choices.items()}


class Command:
    """A process and all that it starts, which carry the same mark."""

    def __init__(self, arguments: Sequence[str], output: Path) -> None:
        self._mark, self._output = uuid.uuid4().hex, output
        line = [sys.executable, "-u", "-m", "terapipe", *arguments]
        with output.open("wb") as file:
            environment = {**os.environ, MARK: self._mark}
            self._process = subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT, env=environment)

    @property
    def said(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")

    def until(self, event: Callable[[], bool]) -> None:
        """However long it takes, as long as the process lives; the deadline is for one that hangs."""
        deadline = time.monotonic() + PATIENCE
        while not event():
            assert self._process.poll() is None, self.said
            assert time.monotonic() < deadline, f"it hangs; it said: {self.said or 'nothing'}"
            time.sleep(0.02)

    def end(self) -> int:
        """Waits for the exit code; nothing that was started may outlive the process."""
        code = self._process.wait(timeout=PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while left := self._alive():
            assert time.monotonic() < deadline, f"{left} are left"
            time.sleep(0.02)
        return code

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def workers(self) -> list[int]:
        """The ranks that it started, in order."""
        found = {pid: _environment(pid).get("RANK") for pid in self._alive()}
        return sorted((pid for pid, rank in found.items() if rank is not None), key=lambda pid: int(found[pid] or 0))

    def _alive(self) -> list[int]:
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [pid for pid in pids if _environment(pid).get(MARK) == self._mark]

    def kill(self) -> None:
        for pid in self._alive():
            os.kill(pid, signal.SIGKILL)
        self._process.wait()


def _environment(pid: int) -> dict[str, str]:
    """Nothing of a process that is gone, is a zombie, or is not ours."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


@contextmanager
def started(arguments: Sequence[str], output: Path) -> Iterator[Command]:
    command = Command(arguments, output)
    try:
        yield command
    finally:
        command.kill()
