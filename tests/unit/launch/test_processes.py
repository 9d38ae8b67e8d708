"""Ranks on one host: they talk to each other, and listen to nobody else."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.numa.binding import AffinityMode

from terapipe.files import write
from terapipe.launch import processes
from terapipe.launch.loopback import LoopbackRendezvous
from terapipe.launch.processes import blame, launch, take_cores
from terapipe.launch.stopped import LOOK, ending_stopped_ranks
from terapipe.runtime.comm.environment import rank_and_size
from tests.support import hosts
from tests.support.commands import PATIENCE
from tests.support.sockets import listening

LOOPBACK = {"127.0.0.1"}
ON_A_HOST = "from tests.unit.launch.test_processes import *; print(*sorted(launch(talk, 2)), sep=',')"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc/net is Linux's")


def talk() -> set[str]:
    """Where the ranks and their launcher listen, once they have talked."""
    from terapipe.runtime.comm.transport import Transport

    world = Transport.join(torch.device("cpu"))
    own = world.gather((os.getpid(), os.getppid()))
    addresses = listening({pid for pids in own for pid in pids})
    world.gather(None)  # nobody ends before all have looked
    return addresses


def test_ranks_of_one_host_listen_on_the_loopback_only() -> None:
    assert launch(talk, 2) == LOOPBACK


@pytest.mark.skipif(hosts.why_not() is not None, reason="hosts need network namespaces")
def test_a_host_whose_name_has_an_address_listens_on_the_loopback_only() -> None:
    """gloo takes the address of the host's name, which here is that of the network between hosts."""
    with hosts.hosts(1) as (host,):
        (told,) = hosts.finish([host.start(sys.executable, "-c", ON_A_HOST)])
    assert set(told.strip().split(",")) == LOOPBACK


def test_each_restart_has_keys_of_its_own() -> None:
    meeting = LoopbackRendezvous("run")
    first, second = meeting.next_rendezvous(), meeting.next_rendezvous()
    first.store.set("rank", "0")
    assert not second.store.check(["rank"])
    assert first.bootstrap_store_info == second.bootstrap_store_info


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:4"}, None),
    ],
)
def test_memory_of_gpus_is_allocated_in_segments_that_grow(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, str], wanted: str | None
) -> None:
    """Unless the user has said how. Plans that change from batch to batch left holes that fit no other slice."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    starts = lambda config, function: lambda *args: [os.environ.get("PYTORCH_CUDA_ALLOC_CONF")]  # noqa: E731
    monkeypatch.setattr(processes, "elastic_launch", starts)
    before = dict(os.environ)
    assert launch(talk, 1) == wanted
    assert dict(os.environ) == before


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


def cores_of_ranks(monkeypatch: pytest.MonkeyPatch, ranks: int, cores: int) -> list[set[int]]:
    taken: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, those: taken.append(set(those)))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    for rank in range(ranks):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        take_cores()
    return taken


@pytest.mark.skipif(torch.cuda.is_available(), reason="of ranks that compute on the CPU")
def test_ranks_get_physical_cores_of_one_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sockets of 8 cores with two hyperthreads each: 0 to 15 are the first ones, 16 to 31 the second. By their
    numbers, ranks 0 and 2 of 4 had the same cores."""
    for core in range(32):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{core % 16 // 8}\n")
        (folder / "core_id").write_text(f"{core % 8}\n")
    monkeypatch.setattr(processes, "CORES", tmp_path, raising=False)
    for ranks in (2, 4, 8):
        taken = cores_of_ranks(monkeypatch, ranks, 32)
        physical = [{core % 16 for core in cores} for cores in taken]
        assert [len(cores) for cores in taken] == [32 // ranks] * ranks
        assert all(len(cores) == 16 // ranks for cores in physical), "both hyperthreads of a core"
        assert len(set().union(*physical)) == 16, "no core twice"
        assert all(len({core // 8 for core in cores}) == 1 for cores in physical), "one socket"


def test_gpus_have_cores_on_their_numa_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen by torch, where it can: the same for `terapipe train`, `profile` and `doctor`."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(processes.shutil, "which", lambda name: f"/usr/bin/{name}")
    options = processes._config(2).numa_options
    assert options is not None
    assert options.affinity_mode is AffinityMode.EXCLUSIVE
    assert processes._config(3).numa_options is None, "more ranks than GPUs"
    monkeypatch.setattr(processes.shutil, "which", lambda name: None)
    assert processes._config(2).numa_options is None


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


def failure(folder: Path, rank: int, code: int, said: str) -> ProcessFailure:
    file = folder / f"{rank}.json"
    if said:
        file.write_text(json.dumps({"message": {"message": said, "extraInfo": {"timestamp": "1"}}}))
    return ProcessFailure(rank, 0, code, str(file))


@pytest.mark.parametrize(
    ("found", "blamed"),
    [
        # One was stopped: torchelastic killed it in the end, and the one that noticed ended first.
        (
            [(0, 1, "PipelineError: rank 1 did not answer in time: it is stuck; rank 0 waited 5 s at x for rank 1"),
             (1, -9, "")],
            "rank 1 did not answer in time: it is stuck",
        ),
        (
            [(0, 1, "PipelineError: rank 2 is gone: it died; rank 0 was waiting at x for rank 2"), (1, -9, ""),
             (2, -11, "")],
            "rank 2 ended with signal SIGSEGV",
        ),
        (
            [(0, 1, "PipelineError: rank 1 stopped: ValueError: no; rank 0 was waiting at x for rank 1"),
             (1, 1, "ValueError: no; really")],
            "rank 1 stopped: ValueError: no; really",
        ),
        ([(0, 3, "")], "rank 0 ended with exit code 3"),
    ],
)  # fmt: skip
def test_the_last_line_blames_the_right_rank(tmp_path: Path, found: list[tuple[int, int, str]], blamed: str) -> None:
    """The one that ended first was blamed, which was the one that had waited for a rank that hung."""
    assert blame({rank: failure(tmp_path, rank, code, said) for rank, code, said in found}) == blamed


def test_torchs_log_lines_are_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stood between ours, in the middle of the panel."""
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    logger.setLevel(logging.WARNING)
    monkeypatch.setattr(processes, "elastic_launch", lambda *given: lambda *given: None)
    processes.launch_module("nothing", [], 1, 0)
    assert not logger.isEnabledFor(logging.ERROR)
