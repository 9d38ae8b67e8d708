"""Processes that tests have started, directly or not, known by a variable in their environment."""

import os
from contextlib import suppress
from pathlib import Path

# Python's own, which end with the process that started them.
_HELPERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")


def started_with(mark: str) -> dict[int, str]:
    """The command lines of all but this process that have ``NAME=value`` in their environment. Linux only."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    found.pop(os.getpid(), None)
    return {pid: command for pid, command in found.items() if not _is_helper(pid, command)}


def _is_helper(pid: int, command: str) -> bool:
    """Ranks of tests have the forkserver's command line, too, but are its children."""
    with suppress(OSError):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return parent == os.getpid() and any(helper in command for helper in _HELPERS)
    return True
