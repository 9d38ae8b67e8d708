"""Training goes on while a checkpoint is written; what goes wrong meanwhile leaves the old one whole."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist

from terapipe import Layout, Pipeline, PipelineError, Plan
from terapipe.runtime.checkpoint import writer
from terapipe.training.config import OptimizerConfig
from terapipe.training.optimizer import make_optimizer
from tests.support.models import make_model
from tests.support.ranks import Ranks, join
from tests.unit.runtime.test_checkpoint import ALONE, CONFIG, ROOT, adam, pipeline, same, snapshot, steps, trained


def in_background(layout: Layout, shard: bool, folder: str, dtype: torch.dtype) -> list[bool]:
    """Nothing is written before training has gone on; what is saved is the state at the moment of the call."""
    pipe = pipeline(layout, shard, dtype)
    optimizer = make_optimizer(pipe.named_parameters(), OptimizerConfig(lr=0.01))
    steps(pipe, optimizer, range(2))
    mine = {f"random.{pipe.transport.global_rank}": torch.get_rng_state()}
    wanted = snapshot(pipe, optimizer)
    gate, write = Event(), writer._write

    def later(*args: Any) -> None:
        assert gate.wait(30)
        write(*args)

    writer._write = later
    try:
        under_way = pipe.save_in_background(folder, optimizer, extra=mine, notes={"step": 2})
    finally:
        writer._write = write
    early = under_way.done() or Path(folder).exists()
    steps(pipe, optimizer, range(2, 4))
    after = snapshot(pipe, optimizer)
    gate.set()
    pipe.save(folder + ".next", optimizer)  # waits for the first
    done = under_way.done()
    under_way.result()
    other = pipeline(layout, shard, dtype)
    loaded = make_optimizer(other.named_parameters(), OptimizerConfig(lr=0.01))
    notes = other.load(folder, loaded, extra={name: torch.zeros_like(x) for name, x in mine.items()})
    results = [
        not early,
        done,
        notes == {"step": 2},
        notes.extra_names == set(mine),
        same(snapshot(other, loaded), wanted),
    ]
    other.load(folder + ".next", loaded)
    return [*results, same(snapshot(other, loaded), after), not same(wanted, after)]


@pytest.mark.gpu_seldom("dp 2 x pp 1 x tp 2")
@pytest.mark.exhaustive_ids("dp 2 x pp 1 x tp 2")
@pytest.mark.parametrize(
    ("layout", "shard", "dtype"),
    [
        (Layout(1, 2, 1), False, torch.float64),
        (Layout(2, 1, 1), True, torch.bfloat16),
        (Layout(2, 2, 1), True, torch.float64),
        (Layout(2, 1, 2), False, torch.float32),
    ],
    ids=str,
)
def test_a_save_in_the_background_is_of_the_moment_of_the_call(
    ranks: Callable[[int], Ranks], tmp_path: Path, layout: Layout, shard: bool, dtype: torch.dtype
) -> None:
    for results in ranks(layout.devices)(in_background, layout, shard, str(tmp_path / "saved"), dtype):
        assert results == [True] * 7
    assert sorted(f.name for f in tmp_path.iterdir()) == ["saved", "saved.next"]


def test_so_it_is_in_one_process(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    assert in_background(ALONE, False, str(tmp_path / "saved"), torch.bfloat16) == [True] * 7


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting is not permitted")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def too_much(folder: str, layout: Layout) -> list[tuple[int | None, str]]:
    pipe = pipeline(layout)
    optimizer = adam(pipe)
    steps(pipe, optimizer, range(1))
    pipe.save(folder, optimizer, notes={"step": 1})
    wanted = snapshot(pipe, optimizer)
    steps(pipe, optimizer, range(1, 2))
    last = pipe.rank == layout.pp - 1
    extra = {f"much.{pipe.rank}": torch.ones(1 << 20)} if last else {}
    said = []
    for save_it in (
        lambda: pipe.save(folder, optimizer, extra=extra),
        lambda: pipe.save_in_background(folder, optimizer, extra=extra).result(),
    ):
        with pytest.raises(OSError) as caught:  # noqa: PT011
            save_it()
        said.append((caught.value.errno, str(caught.value)))
        pipe.transport.gather(None, "all")
        assert os.listdir(Path(folder).parent) == ["saved"]
    steps(pipe, optimizer, range(2, 3))
    pipe.save(folder + ".again", optimizer)
    assert pipe.load(folder, optimizer) == {"step": 1}
    assert same(snapshot(pipe, optimizer), wanted)
    return said


@pytest.mark.gpu_seldom
@pytest.mark.parametrize("size", [1, 2])
def test_a_full_disk_stops_nobody(ranks: Callable[[int], Ranks], small_disk: Path, size: int) -> None:
    folder, layout = str(small_disk / "saved"), Layout(1, size, 1)
    for said in ranks(2)(too_much, folder, layout) if size > 1 else [too_much(folder, layout)]:
        for number, message in said:
            assert number == errno.ENOSPC
            assert f"the checkpoint {folder} could not be saved, rank " in message
            assert ": No space left on device" in message
            assert message.endswith("; what was saved before is whole")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    pipe = pipeline()
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file/saved could not be saved, rank 0: Not a directory"):
        pipe.save(tmp_path / "file" / "saved")
    pipe.save(tmp_path / "saved")


def test_a_name_that_cannot_be_taken_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, optimizer = trained(tmp_path / "saved", notes={"old": True})
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == "saved.partial":
            raise PermissionError(errno.EACCES, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="Permission denied; what was saved before is whole"):
        pipe.save(tmp_path / "saved", optimizer)
    assert [f.name for f in tmp_path.iterdir()] == ["saved"]
    assert pipe.load(tmp_path / "saved") == {"old": True}


def until_killed(rank: int, folder: str) -> None:
    """Neither ever finishes to write; rank 1 is killed, rank 0 ends when it notices."""
    join(rank, 2, f"{folder}.store")
    pipe = Pipeline(make_model(CONFIG), Plan((1,), ((8, 4),), (0, 1, 2)), timeout=300.0)
    optimizer = adam(pipe)
    steps(pipe, optimizer, range(1))
    pipe.save(folder, optimizer, notes={"step": 1})
    steps(pipe, optimizer, range(1, 2))

    def forever(*args: Any) -> None:
        print("writing", flush=True)
        time.sleep(3600)

    writer._Writer.write_data = forever  # type: ignore[method-assign, assignment]
    pipe.save_in_background(folder, optimizer, notes={"step": 2})
    try:
        while True:
            steps(pipe, optimizer, range(1))
    except PipelineError as error:
        print(error, flush=True)
        sys.exit(7)


@pytest.mark.gpu_seldom
def test_killed_while_saving(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    code = f"from tests.unit.runtime.test_writer import until_killed; until_killed({{}}, {str(folder)!r})"
    first, second = (
        subprocess.Popen([sys.executable, "-c", code.format(rank)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    )
    try:
        assert second.stdout is not None
        assert second.stdout.readline() == "writing\n"
        second.kill()
        said, _ = first.communicate(timeout=1800)  # an hour, if it waited for its thread
    finally:
        for process in (first, second):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    assert first.returncode == 7
    assert said.startswith("writing\nrank 1 is gone")
    pipe = pipeline()
    assert pipe.load(folder, adam(pipe)) == {"step": 1}
