"""Damage to checkpoints, token files and exports, each once trained on or left behind without a word."""

import errno
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import SafetensorError

from benchmarks.chaos.damage import KINDS, Damages
from terapipe import Layout
from terapipe.hf.save import save_pretrained, writing
from terapipe.runtime.checkpoint.manifest import Sum, damage, write_manifest
from terapipe.runtime.checkpoint.reader import Reader
from terapipe.training.checkpoint_folder import clean, folder_of, path_of, steps
from terapipe.training.config import DataConfig, RunConfig
from terapipe.training.data.prepare import prepare
from terapipe.training.data.token_file import Origin, TokenFile, TokenWriter, open_data
from terapipe.training.data.tokenizer import ByteTokenizer
from terapipe.training.evaluation import Evaluator
from terapipe.training.logging.metrics import read
from tests.support.ranks import Ranks
from tests.unit.runtime.test_checkpoint import adam, pipeline, same, snapshot
from tests.unit.runtime.test_checkpoint import steps as train_steps
from tests.unit.runtime.test_hf_files import decoder
from tests.unit.runtime.test_hf_files import pipeline as hf_pipeline
from tests.unit.training.test_run import TEXT, config, losses, train

SMALL = ("model.preset=layers=2,hidden=8,heads=2", "data.seq_len=8", "optimizer.steps=3", "lr.warmup=1",
         "optimizer.accumulate=1", "checkpoints.every=1", "checkpoints.keep=0", "evaluation.every=0")  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "text.txt").write_text(TEXT.read_text()[:2000])
    return folder


@pytest.fixture(scope="module")
def straight(ranks: Callable[[int], Ranks], place: Path) -> RunConfig:
    """A finished run of two ranks: checkpoints of steps 1, 2 and 3, each of two shards."""
    told = config(place / "straight", "", *SMALL)
    ranks(2)(train, told)
    return told


def copied(straight: RunConfig, name: str, **more: object) -> RunConfig:
    told = replace(straight, logging=replace(straight.logging, folder=str(straight.folder.with_name(name))))
    shutil.copytree(straight.folder, told.folder)
    return replace(told, checkpoints=replace(told.checkpoints, **more))  # type: ignore[arg-type]


def flip(path: Path, bits: int = 1) -> None:
    content = bytearray(path.read_bytes())
    for place in random.Random(0).sample(range(8 * len(content)), bits):
        content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)


# Checkpoints


def damaged_on_two_ranks(folder: str) -> list[object]:
    pipe = pipeline(Layout(1, 2, 1))
    optimizer = adam(pipe)
    train_steps(pipe, optimizer, range(1))
    pipe.save(folder, optimizer)
    pipe.save(f"{folder}.whole", optimizer)
    wanted = snapshot(pipe, optimizer)
    if pipe.rank == 0:
        flip(Path(folder) / "__1_0.distcp", 400)
        (Path(folder) / ".metadata").write_bytes(b"")
    pipe.gather(None)
    with pytest.raises(ValueError, match="damaged") as caught:
        pipe.load(folder, optimizer)
    untouched = same(snapshot(pipe, optimizer), wanted)
    pipe.load(f"{folder}.whole", optimizer)
    train_steps(pipe, optimizer, range(1, 2))
    return [str(caught.value), untouched]


def test_flipped_bits_are_not_loaded(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """400 flipped bits in a shard were loaded and trained on. Now all ranks refuse the checkpoint, with the same
    message and before a tensor is changed, and can load another one."""
    first, second = ranks(2)(damaged_on_two_ranks, str(tmp_path / "saved"))
    assert first == second
    assert first[1]
    assert first[0].startswith(f"the checkpoint {tmp_path / 'saved'} is damaged: ")
    assert ".metadata has 0 bytes instead of " in first[0]
    assert "__1_0.distcp does not match its checksum" in first[0]
    assert "weights_only" not in first[0]


def test_twenty_damages_are_noticed(straight: RunConfig, tmp_path: Path) -> None:
    """Flips, cuts, deletions, exchanged files and edited JSON were trained on, or ended in a traceback. Now each is
    named and the run goes on from the newest whole checkpoint. (100 of them in benchmarks.chaos.)"""
    damages, dice = Damages(straight, tmp_path, all_every=2), random.Random(3)
    tried = [damages.attempt(number, dice) for number in range(20)]
    assert [(what, silent) for what, silent in tried if silent] == []
    assert {what.split()[0] for whole, _ in tried for what in whole.split("; ")} == set(KINDS)


def test_all_ranks_go_on_from_the_same_whole_checkpoint(ranks: Callable[[int], Ranks], straight: RunConfig) -> None:
    """Without its index a checkpoint was passed over without a word, and a damaged one counted among those to keep."""
    told = copied(straight, "two", keep=1)
    folder = folder_of(told)
    (path_of(folder, 3) / ".metadata").unlink()
    flip(path_of(folder, 2) / "__1_0.distcp")
    ranks(2)(train, told)
    assert losses(told.folder) == losses(straight.folder)
    said = [row["message"] for row in read(told.folder) if row.get("event") == "damaged"]
    assert [message.split(" is damaged: ")[1] for message in said] == [
        ".metadata is missing; it was renamed to damaged-step-00000003",
        "__1_0.distcp does not match its checksum; it was renamed to damaged-step-00000002",
    ]
    assert steps(folder) == [3]
    assert not damage(path_of(folder, 3))
    assert {f.name for f in folder.glob("damaged-*")} == {"damaged-step-00000002", "damaged-step-00000003"}


def test_notes_of_no_training_run_are_refused(straight: RunConfig) -> None:
    """Notes without a step were a KeyError, shown as a traceback."""
    told = copied(straight, "notes", verify=False)
    (path_of(folder_of(told), 3) / "notes.json").unlink()
    with pytest.raises(ValueError, match=r"notes of a training run, but its notes.json has no valid step, position"):
        train(told)


def test_a_checkpoint_about_to_be_replaced_is_found_again(straight: RunConfig) -> None:
    """A crash between two renames left it beside its place, where the next start deleted it."""
    told = copied(straight, "renamed")
    path = path_of(folder_of(told), 3)
    path.rename(path.with_name(f"{path.name}.old"))
    clean(folder_of(told))
    assert steps(folder_of(told)) == [1, 2, 3]


def test_a_loss_that_is_not_a_number_is_not_the_best(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN counted as lower than any loss; the first rank then compared it with None and died."""
    found = iter([float("nan"), 2.0, float("nan")])
    monkeypatch.setattr(Evaluator, "run", lambda self, step: next(found))
    told = config(place / "nan", "", *SMALL, "evaluation.every=1")
    train(told)
    text = {step: (path_of(folder_of(told), step) / "notes.json").read_text() for step in (1, 2, 3)}
    assert "NaN" not in "".join(text.values())
    notes = {step: json.loads(text[step]) for step in text}
    assert [(notes[step]["eval_loss"], notes[step]["best"]) for step in notes] == [
        (None, None),
        (2.0, 2.0),
        (None, 2.0),
    ]
    assert json.loads((folder_of(told) / "best.json").read_text()) == {"step": 2, "eval_loss": 2.0}


# Token files


@pytest.mark.parametrize("name", ["tokens.bin", "documents.npy", "meta.json", "manifest.json"])
def test_a_damaged_token_file_is_named_and_made_again(place: Path, tmp_path: Path, name: str) -> None:
    """Of a token file only the sizes were compared: flipped bits were trained on."""
    told = DataConfig(train=(str(place / "text.txt"),), seq_len=8, eval_share=0.3)
    prepare(told, tmp_path)
    wanted = [(file.tokens.tolist(), file.starts.tolist()) for file in _files(told, tmp_path)]
    said: list[str] = []
    prepare(told, tmp_path, say=said.append)
    assert not said
    flip(tmp_path / "train" / name)
    prepare(told, tmp_path, say=said.append)
    (message,) = said
    assert message.startswith(f"the token file {tmp_path / 'train'} is damaged: {name} ")
    assert [(file.tokens.tolist(), file.starts.tolist()) for file in _files(told, tmp_path)] == wanted
    (tmp_path / "eval" / name).unlink()
    prepare(told, tmp_path, say=said.append)
    assert f"{tmp_path / 'eval'} is damaged: {name} is missing" in said[1]


def _files(told: DataConfig, folder: Path) -> list[TokenFile]:
    data = open_data(told, folder)
    assert data.eval is not None
    return [data.train, data.eval]


def test_a_damaged_trained_tokenizer_is_refused(place: Path, tmp_path: Path) -> None:
    """It was taken as it was, and the texts encoded again with it."""
    told = DataConfig(train=(str(place / "text.txt"),), seq_len=8, tokenizer="train", vocab=280)
    prepare(told, tmp_path)
    path = tmp_path / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"tokenizer is not the one that made the tokens .* delete the folder"):
        prepare(told, tmp_path)


def test_a_full_disk_is_named_with_the_path(place: Path, tmp_path: Path) -> None:
    """'No space left on device' did not say on which."""
    writer = TokenWriter(tmp_path / "train", ByteTokenizer(), Origin("", ""))
    path = tmp_path / "train.partial" / "tokens.bin"
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'") as caught:
        writer.add_all([place / "text.txt"], "text", lambda tokens: None)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}'"), writing(tmp_path):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


# Exports


def test_an_interrupted_export_leaves_the_old_one(
    straight: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer was written after the model was put in place, and all else in the folder was deleted."""
    told = copied(straight, "exported", export=str(tmp_path / "model"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "README.md").write_text("mine")

    def interrupt(self: ByteTokenizer, folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ByteTokenizer, "save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(told)
    assert [f.name for f in tmp_path.rglob("*")] == ["model", "README.md"]
    train(told)
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= {
        f.name for f in (tmp_path / "model").iterdir()
    }


def test_an_interrupted_hugging_face_export_leaves_the_old_one(tmp_path: Path) -> None:
    """The same, for models of Hugging Face."""
    pipe = hf_pipeline(decoder("llama"), Layout(1, 1, 1))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_text("old")

    def fail(folder: Path) -> None:
        assert (folder / "model.safetensors").exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_pretrained(pipe, tmp_path / "model", finish=fail)
    assert [f.name for f in tmp_path.rglob("*")] == ["model", "model.safetensors"]
    assert (tmp_path / "model" / "model.safetensors").read_text() == "old"


@pytest.mark.parametrize("name", ["", "text.txt"])
def test_an_export_does_not_replace_the_run(place: Path, name: str) -> None:
    """An export to the run's own folder deleted its checkpoints; one to a file failed after the last step."""
    told = config(place / "itself", "", *SMALL, f"checkpoints.export={place / name}")
    with pytest.raises(ValueError, match=r"checkpoints.export must be a folder of its own"):
        train(told)


# Names that lead out of a folder


def test_a_manifest_names_its_own_files_only(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    for name in ("../secret", str(tmp_path / "secret"), "link"):
        write_manifest(folder, {name: Sum().add(b"secret")})
        (problem,) = damage(folder)
        assert "must lie in it" in problem


def test_the_index_of_a_checkpoint_names_its_own_files_only(tmp_path: Path) -> None:
    pipe = pipeline(Layout(1, 1, 1))
    pipe.save(tmp_path / "saved")
    index = Reader(tmp_path / "saved").index
    assert index.storage_data is not None
    for place in index.storage_data.values():
        place.relative_path = "../elsewhere.distcp"
    (tmp_path / "saved/.metadata").write_bytes(pickle.dumps(index))
    shutil.copy(tmp_path / "saved/__0_0.distcp", tmp_path / "elsewhere.distcp")
    with pytest.raises(ValueError, match=r"must lie in it, its index names '\.\./elsewhere\.distcp'"):
        pipe.load(tmp_path / "saved", verify=False)


def test_a_pipe_in_the_place_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """It was waited for, for ever."""
    os.mkfifo(tmp_path / ".metadata")
    with pytest.raises(ValueError, match="must be a file, got a named pipe"):
        Reader(tmp_path)
