"""Ranks on one host: where they compute, and whom the launcher blames."""

import json
import logging
import os
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.numa.binding import AffinityMode

from terapipe.launch import processes
from terapipe.launch.processes import blame, launch, take_cores

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc/net is Linux's")


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
    assert launch(print, 1) == wanted
    assert dict(os.environ) == before


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
    options = processes.launch_config(2).numa_options
    assert options is not None
    assert options.affinity_mode is AffinityMode.EXCLUSIVE
    assert processes.launch_config(3).numa_options is None, "more ranks than GPUs"
    monkeypatch.setattr(processes.shutil, "which", lambda name: None)
    assert processes.launch_config(2).numa_options is None


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
