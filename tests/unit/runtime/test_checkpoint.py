"""Checkpoints: what is in them, and what of it comes back."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from terapipe import Layout, Pipeline, Plan
from terapipe.training.config import OptimizerConfig
from terapipe.training.optimizer import make_optimizer
from tests.support.models import make_batch, make_model, mesh_of, variant, whole
from tests.support.ranks import Ranks

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


def by_torch(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=folder)


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
