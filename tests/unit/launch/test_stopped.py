"""A rank that is stopped does not hold up the end of a run, and is left alone before."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from terapipe.files import write
from terapipe.launch.processes import launch
from terapipe.launch.stopped import LOOK, ending_stopped_ranks
from terapipe.runtime.comm.environment import rank_and_size
from tests.support.commands import PATIENCE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


def fail_beside_a_stopped_rank(folder: str) -> None:
    """Rank 1 stops; rank 0 fails once it sees that."""
    rank, mark = rank_and_size()[0], Path(folder) / "pid"
    if rank == 1:
        write(mark, str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    while not mark.exists() or state(int(mark.read_text())) != "T":
        time.sleep(0.02)
    write(Path(folder) / "failed", str(time.time()))
    raise ValueError("rank 0 fails")


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_stopped_rank_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """torchelastic gave it 30 seconds to react to SIGTERM, which a stopped process cannot."""
    with pytest.raises(ChildFailedError):
        launch(fail_beside_a_stopped_rank, 2, str(tmp_path))
    assert time.time() - float((tmp_path / "failed").read_text()) < 30


def test_a_stopped_rank_is_left_alone_while_nobody_has_failed() -> None:
    """A SIGTERM to all ranks asks them to save; one that is stopped may be looked at by a debugger."""
    stopped, other = (subprocess.Popen(["sleep", "1000"]) for _ in range(2))
    try:
        stopped.send_signal(signal.SIGSTOP)
        while state(stopped.pid) != "T":
            time.sleep(0.02)
        stopped.send_signal(signal.SIGTERM)
        with ending_stopped_ranks():
            time.sleep(5 * LOOK)
            assert stopped.poll() is None
            other.kill()
            assert stopped.wait(PATIENCE) == -signal.SIGKILL
    finally:
        for process in (stopped, other):
            process.kill()
            process.wait()
