"""Checkpoints: what is in them, that nothing in them is run, and that training goes on while they are written."""

import errno
import os
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load, save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from terapipe import Layout, Pipeline, PipelineError, Plan
from terapipe.runtime.checkpoint import writer
from terapipe.runtime.checkpoint.reader import Reader
from terapipe.training.config import OptimizerConfig
from terapipe.training.optimizer import make_optimizer
from tests.support.models import make_batch, make_model, mesh_of, variant, whole
from tests.support.ranks import Ranks, join

CONFIG = variant(tied=True, layers=2)
ROOT = Path(__file__).parents[3]
ALONE = Layout(1, 1, 1)


def pipeline(layout: Layout = ALONE, shard: bool = False, dtype: torch.dtype = torch.float64) -> Pipeline:
    boundaries = (0, 2) if layout.pp == 1 else (0, 1, 2)
    plan = Plan((1,), ((8, 4),), boundaries, "terapipe-1f1b")
    mesh = mesh_of(layout) if layout.devices > 1 else None
    return Pipeline(make_model(CONFIG, dtype), plan, mesh=mesh, shard=shard, timeout=300.0)


def adam(pipe: Pipeline, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pipe.parameters(), lr=lr)


def steps(pipe: Pipeline, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        pipe.step(*make_batch(CONFIG, 1, 12, ignored=True, seed=seed))
        optimizer.step()
        pipe.zero_grad()


def snapshot(pipe: Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Of this rank's parts, copied."""
    found = {}
    for name, p in pipe.named_parameters():
        found[name] = p
        found |= {f"{name}.{key}": x for key, x in optimizer.state[p].items()}
    return {name: (x.to_local() if isinstance(x, DTensor) else x).detach().clone() for name, x in found.items()}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def trained(folder: Path, **more: Any) -> tuple[Pipeline, torch.optim.Optimizer]:
    pipe = pipeline()
    optimizer = adam(pipe)
    steps(pipe, optimizer, range(2))
    pipe.save(folder, optimizer, **more)
    return pipe, optimizer


# Nothing is run


class Evil:
    """A pickle of it makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_an_index_that_would_run_something_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "saved")
    index = tmp_path / "saved" / ".metadata"
    mark = tmp_path / "mark"
    index.write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(ValueError, match=r"\.metadata is not the index .* it asks for posix\.mkdir"):
        pipeline().load(tmp_path / "saved", verify=False)
    assert not mark.exists()
    pickle.loads(index.read_bytes())
    assert mark.exists(), "by anybody else it would have been run"


def test_an_index_that_hides_it_among_the_rest_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "saved")
    found = FileSystemReader(tmp_path / "saved").read_metadata()
    found.planner_data = Evil(tmp_path / "mark")
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(ValueError, match=r"posix\.mkdir"):
        pipeline().load(tmp_path / "saved", verify=False)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("attribute", ["mark", "__eq__"])
def test_an_index_that_changes_classes_is_refused(tmp_path: Path, attribute: str) -> None:
    """Written by hand: the class itself, then BUILD with an attribute to set."""
    before = dict(vars(Metadata))
    text = f"c{Metadata.__module__}\nMetadata\n(N(S'{attribute}'\nI1\ndtb."
    (tmp_path / ".metadata").write_text(text)
    with pytest.raises(ValueError, match=f"it changes Metadata.{attribute}"):
        Reader(tmp_path)
    assert dict(vars(Metadata)) == before
    pickle.loads(text.encode())
    assert dict(vars(Metadata)) != before, "by anybody else it would have been changed"
    if attribute in before:
        setattr(Metadata, attribute, before[attribute])
    else:
        delattr(Metadata, attribute)


@pytest.mark.parametrize("text", [b"", b"nonsense", pickle.dumps(7), pickle.dumps(Metadata(state_dict_metadata=3))])  # type: ignore[arg-type]
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(text)
    with pytest.raises(ValueError, match=r"\.metadata is not the index of a checkpoint"):
        pipeline().load(tmp_path, verify=False)


def by_torch(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=folder)


def test_pickled_values_are_never_read(tmp_path: Path) -> None:
    pipe, _ = trained(tmp_path / "saved")
    state: dict[str, Any] = {name: p.detach() for name, p in pipe.named_parameters()}
    name = next(iter(state))
    mark = tmp_path / "mark"
    by_torch({"model": {**state, name: Evil(mark)}}, tmp_path / "evil")
    with pytest.raises(ValueError, match=f"model.{name} must be a tensor, got pickled bytes"):
        pipeline().load(tmp_path / "evil", verify=False)
    assert not mark.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load({"model": {name: None}}, checkpoint_id=tmp_path / "evil")
    assert mark.exists(), "by anybody else it would have been run"


def test_only_tensors_are_saved(tmp_path: Path) -> None:
    trained(tmp_path / "saved", extra={"more": torch.ones(2)}, notes={"step": 2})
    found = FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    assert not [name for name, kind in found.items() if isinstance(kind, BytesStorageMetadata)]
    assert {name.split(".")[0] for name in found} == {"model", "optimizer", "extra"}
    assert not [name for name in found if "param_groups" in name]


def test_checkpoints_by_torch_alone_load_unverified(tmp_path: Path) -> None:
    """They have no manifest, and hyperparameters as pickles, which nobody asks for."""
    pipe, optimizer = trained(tmp_path / "new")
    module = next(iter(pipe.stages.values()))
    moments = get_optimizer_state_dict(module, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    by_torch({"model": dict(pipe.named_parameters()), "optimizer": moments}, tmp_path / "old")
    kinds = FileSystemReader(tmp_path / "old").read_metadata().state_dict_metadata.values()
    assert any(isinstance(kind, BytesStorageMetadata) for kind in kinds)
    other = pipeline()
    loaded = adam(other, lr=0.5)
    with pytest.raises(ValueError, match=r"old is damaged: manifest.json is missing: .* before there were checksums"):
        other.load(tmp_path / "old", loaded)
    other.load(tmp_path / "old", loaded, verify=False)
    assert same(snapshot(other, loaded), snapshot(pipe, optimizer))


# What is in them


def test_hyperparameters_are_those_of_the_run(tmp_path: Path) -> None:
    trained(tmp_path / "saved")
    pipe = pipeline()
    optimizer = adam(pipe, lr=0.5)
    pipe.load(tmp_path / "saved", optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert all(p.grad is None for p in pipe.parameters())


def test_an_optimizer_of_which_nothing_was_saved_begins_anew(tmp_path: Path) -> None:
    pipe, optimizer = trained(tmp_path / "saved")
    pipe.save(tmp_path / "weights")
    pipe.load(tmp_path / "weights", optimizer)
    assert not optimizer.state


class Counting(torch.optim.SGD):
    """Keeps numbers in its state, and dictionaries."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1
                state["inner"] = {"share": 0.1 * state["steps"], "sum": p.grad.clone()}


def test_numbers_and_missing_state_are_kept_too(tmp_path: Path) -> None:
    pipe, other = pipeline(), pipeline()
    rest = list(pipe.parameters())[1:]
    optimizer, loaded = Counting(pipe.parameters()), Counting(other.parameters())
    for _ in range(3):
        for p in rest:
            p.grad = torch.ones_like(p)
        optimizer.step()
    pipe.save(tmp_path / "saved", optimizer)
    other.load(tmp_path / "saved", loaded)
    assert next(other.parameters()) not in loaded.state
    for p, q in zip(rest, list(other.parameters())[1:], strict=True):
        assert loaded.state[q]["steps"] == 3
        assert isinstance(loaded.state[q]["steps"], int)
        assert loaded.state[q]["inner"]["share"] == optimizer.state[p]["inner"]["share"]
        assert torch.equal(loaded.state[q]["inner"]["sum"], optimizer.state[p]["inner"]["sum"])


def test_notes_come_back(tmp_path: Path) -> None:
    notes = {"step": 7, "best": float("inf"), "text": "grün", "list": [1, None]}
    pipe, _ = trained(tmp_path / "saved", notes=notes)
    assert pipe.load(tmp_path / "saved") == notes
    pipe.save(tmp_path / "saved")
    assert pipe.load(tmp_path / "saved") == {}
    with pytest.raises(ValueError, match="notes must be what JSON can hold, got: Object of type Tensor"):
        pipe.save(tmp_path / "saved", notes={"a": torch.ones(1)})
    for text, said in (("{", "must be JSON"), ("[1]", "must hold a JSON object, got list")):
        (tmp_path / "saved" / "notes.json").write_text(text)
        with pytest.raises(ValueError, match=f"notes.json {said}"):
            pipeline().load(tmp_path / "saved", verify=False)


def test_extra_tensors_are_filled_where_they_fit(tmp_path: Path) -> None:
    given = {"random.cpu": torch.get_rng_state(), "b": torch.arange(3), "c": torch.ones(2)}
    pipe, _ = trained(tmp_path / "saved", extra=given)
    mine = {
        "random.cpu": torch.zeros_like(given["random.cpu"]), "b": torch.zeros(4, dtype=torch.int64),
        "c": torch.zeros(2, dtype=torch.int32), "d": torch.zeros(1),
    }  # fmt: skip
    held = dict(mine)
    loaded = pipe.load(tmp_path / "saved", extra=mine)
    assert loaded.extra_names == {"random.cpu"}
    assert mine["random.cpu"] is held["random.cpu"]
    assert torch.equal(mine["random.cpu"], given["random.cpu"])
    assert not any(mine[name].any() for name in "bcd")
    with pytest.raises(ValueError, match="extra values must be tensors, got int for 'step'"):
        pipe.save(tmp_path / "saved", extra={"step": 1})  # type: ignore[dict-item]


# Several ranks, and in the background


def of_their_own(folder: str) -> tuple[list[str], bool]:
    """Extra tensors and notes of two ranks; and what one does wrong, all are told, and go on."""
    pipe = pipeline(Layout(1, 2, 1))
    optimizer = adam(pipe)
    steps(pipe, optimizer, range(1))
    mine = {f"rank.{pipe.rank}": torch.full((3,), pipe.rank)}
    said = []
    for extra, notes in (({"same": torch.ones(1)}, {}), (mine, {"a": pipe if pipe.rank else 0})):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            pipe.save(folder, optimizer, extra=extra, notes=notes)
        said.append(str(caught.value))
    pipe.save(folder, optimizer, extra=mine, notes={"by": "all"})
    found = {f"rank.{rank}": torch.zeros(3, dtype=torch.int64) for rank in range(3)}
    loaded = pipe.load(folder, optimizer, extra=found)
    fine = all(torch.equal(found[f"rank.{rank}"], torch.full((3,), rank)) for rank in range(2))
    steps(pipe, optimizer, range(1))
    return said, fine and loaded == {"by": "all"} and loaded.extra_names == {"rank.0", "rank.1"}


@pytest.mark.gpu_seldom
def test_ranks_have_tensors_of_their_own(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    (first, fine), (second, also) = ranks(2)(of_their_own, str(tmp_path / "saved"))
    assert fine
    assert also
    assert first[0] == second[0]
    assert first[0].startswith("extra tensors must have a name of their own on every rank, got 'same' on 2 of them")
    assert first[1].startswith("rank 1 could not begin to save: ValueError: notes must be what JSON can hold")
    assert second[1].startswith("notes must be what JSON can hold")
    assert [f.name for f in tmp_path.iterdir()] == ["saved"]


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


def masters(layout: Layout, shard: bool, folder: str, first: bool) -> dict[str, Tensor]:
    pipe = pipeline(layout, shard, torch.bfloat16)
    optimizer = make_optimizer(pipe.named_parameters(), OptimizerConfig(lr=1e-3))
    if first:
        steps(pipe, optimizer, range(2))
        pipe.save(folder, optimizer)
    else:
        pipe.load(folder, optimizer)
    found = {name: whole(optimizer.state[p]["master"]) for name, p in pipe.named_parameters()}
    assert all(torch.equal(whole(p), found[name].bfloat16()) for name, p in pipe.named_parameters())
    return {("embedding.weight" if name in pipe.tied else name): x for name, x in found.items()}


@pytest.mark.gpu_seldom
def test_masters_load_in_other_layouts(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    wanted = ranks(2)(masters, Layout(2, 1, 1), True, folder, True)[0]
    assert same(masters(ALONE, False, folder, False), wanted)
    pieces = ranks(2)(masters, Layout(1, 2, 1), False, folder, False)
    assert same({name: x for piece in pieces for name, x in piece.items()}, wanted)
    assert any(x.bfloat16().float().ne(x).any() for x in wanted.values())


# Disks and processes fail


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
    code = f"from tests.unit.runtime.test_checkpoint import until_killed; until_killed({{}}, {str(folder)!r})"
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
