"""Damaged files are refused by name, a manifest names no file outside of its folder, another format is none of ours."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from terapipe import Layout
from terapipe.runtime.checkpoint.manifest import MANIFEST, FormatError, Sum, damage, is_whole, write_manifest
from tests.support.ranks import Ranks
from tests.support.training_runs import flip_bits
from tests.unit.runtime.test_checkpoint import adam, pipeline, same, snapshot
from tests.unit.runtime.test_checkpoint import steps as train_steps


def damaged_on_two_ranks(folder: str) -> list[object]:
    pipe = pipeline(Layout(1, 2, 1))
    optimizer = adam(pipe)
    train_steps(pipe, optimizer, range(1))
    pipe.save(folder, optimizer)
    pipe.save(f"{folder}.whole", optimizer)
    wanted = snapshot(pipe, optimizer)
    if pipe.rank == 0:
        flip_bits(Path(folder) / "__1_0.distcp", 400)
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


def test_a_manifest_names_its_own_files_only(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    for name in ("../secret", str(tmp_path / "secret"), "link"):
        write_manifest(folder, {name: Sum().add(b"secret")})
        (problem,) = damage(folder)
        assert "must lie in it" in problem


def write_as_format_2(folder: Path, rest: object) -> None:
    content = {"format": 2, "files": rest}
    content["crc32"] = f"{zlib.crc32(json.dumps(content).encode()):08x}"
    (folder / MANIFEST).write_text(json.dumps(content))


def test_another_format_is_refused_by_its_number(tmp_path: Path) -> None:
    """It was called damaged; a run would have set it aside and gone on with an older checkpoint."""
    (tmp_path / "file").write_bytes(b"content")
    write_manifest(tmp_path, {"file": Sum().add(b"content")})
    ours = (tmp_path / MANIFEST).read_text()
    assert is_whole(tmp_path, "file")
    for rest in (json.loads(ours)["files"], ["other", "things"]):
        write_as_format_2(tmp_path, rest)
        with pytest.raises(FormatError, match=r"has format 2, this version reads format 1; read it with the version"):
            damage(tmp_path)
        assert not is_whole(tmp_path, "file")
    for text in (ours.replace('"format": 1', '"format": 2'), ours.replace('"format": 1,', ""), "[]", ours[:-9]):
        (tmp_path / MANIFEST).write_text(text)
        assert damage(tmp_path) == ["manifest.json is damaged or was edited: it does not match its own checksum"]


def other_format_on_two_ranks(folder: str) -> str:
    pipe = pipeline(Layout(1, 2, 1))
    pipe.save(folder)
    if pipe.rank == 0:
        write_as_format_2(Path(folder), {})
    pipe.gather(None)
    with pytest.raises(ValueError, match=r"has format 2") as caught:
        pipe.load(folder)
    pipe.gather(None)  # all ranks can go on
    return str(caught.value)


def test_all_ranks_refuse_a_checkpoint_of_another_format(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    first, second = ranks(2)(other_format_on_two_ranks, str(tmp_path / "saved"))
    assert first == second
    assert "damaged" not in first
