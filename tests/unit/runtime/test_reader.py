"""Checkpoints from strangers: nothing in them is run, and no file outside of their folder is read."""

import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import Metadata

from terapipe import Layout
from terapipe.runtime.checkpoint.reader import Reader
from tests.unit.runtime.test_checkpoint import by_torch, pipeline, trained


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


def test_the_index_of_a_checkpoint_names_its_own_files_only(tmp_path: Path) -> None:
    pipe = pipeline(Layout(1, 1, 1))
    pipe.save(tmp_path / "saved")
    index = Reader(tmp_path / "saved").index
    assert index.storage_data is not None
    for entry in index.storage_data.values():
        entry.relative_path = "../elsewhere.distcp"
    (tmp_path / "saved/.metadata").write_bytes(pickle.dumps(index))
    shutil.copy(tmp_path / "saved/__0_0.distcp", tmp_path / "elsewhere.distcp")
    with pytest.raises(ValueError, match=r"must lie in it, its index names '\.\./elsewhere\.distcp'"):
        pipe.load(tmp_path / "saved", verify=False)


def test_a_pipe_in_the_place_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """It was waited for, for ever."""
    os.mkfifo(tmp_path / ".metadata")
    with pytest.raises(ValueError, match="must be a file, got a named pipe"):
        Reader(tmp_path)
