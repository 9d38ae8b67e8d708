"""Reads checkpoints without running any of them: torch's index is a pickle, and a pickle may call anything.

    .metadata       torch's index, a pickle: which tensor has which shape, and in which file its parts are
    __0_0.distcp    tensors, which torch reads with ``weights_only=True``
    notes.json      what the caller of ``Pipeline.save`` wanted to remember, such as the step
    frozen.json     which weights are left out, with their source and digests
    manifest.json   sizes and checksums of the others (manifest.py)

Checkpoints are passed on and downloaded. Checksums do not help against whoever made one on purpose: the manifest is
theirs, too. So the index may name ten classes that only describe tensors, and point to files of its own folder.
"""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from terapipe.files import check_kind, inside, read_json

INDEX, NOTES, FROZEN = ".metadata", "notes.json", "frozen.json"

_CLASSES: tuple[type, ...] = (
    Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata,
    TensorProperties, _MEM_FORMAT_ENCODING, _StorageInfo, torch.Size,
)  # fmt: skip
# A pickle names the classes that it makes. These describe tensors and nothing else; any other name is refused. Their
# names are taken from the classes, because torch moves and renames private ones between versions.
_DESCRIPTIONS = {(kind.__module__, kind.__qualname__): kind for kind in _CLASSES}


class Reader(FileSystemReader):
    """Reads the tensors of a checkpoint. It reads the index once, and refuses one that holds anything but
    descriptions of tensors. torch's own reader would unpickle it without a look, each time it is asked.

    Args:
        folder: of the checkpoint. ``index`` is what it says: shapes, dtypes and places of all ranks' tensors.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.index = _index(folder / INDEX)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index


class TensorsOnly(DefaultLoadPlanner):
    """Plans to load tensors, and refuses everything else: torch would unpickle it, and a pickle may call anything."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """torch calls this for every entry that the index declares to be no tensor."""
        raise ValueError(f"{read_item.storage_index.fqn} must be a tensor, got pickled bytes, which are never read")


def read_notes(folder: Path) -> dict[str, Any]:
    """Reads the notes of a checkpoint; empty if it was saved without.

    Args:
        folder: of the checkpoint.
    """
    return _read_object(folder / NOTES)


def read_frozen(folder: Path) -> tuple[str, dict[str, str]]:
    """Reads which frozen weights a checkpoint leaves out.

    Args:
        folder: of the checkpoint.

    Returns:
        Where the weights came from, such as a model's folder, for messages; and the digest of each by its name. Both
        are empty if nothing was left out.
    """
    content = _read_object(folder / FROZEN)
    weights = content.get("weights", {})
    if not isinstance(weights, dict) or not all(isinstance(digest, str) for digest in weights.values()):
        raise ValueError(f"{folder / FROZEN} must name the weights that the checkpoint leaves out, with digests")
    return str(content.get("source", "")), weights


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def reason(error: BaseException) -> str:
    """Says in one line, never empty, why something could not be read. torch's own words are replaced where it advises
    to unpickle a tensor without its safeguards: nobody should do that.

    Args:
        error: of torch, pickle or the system.
    """
    said = str(error).strip().partition("\n")[0]
    if isinstance(error, pickle.UnpicklingError) and "weights" in said.lower():
        return "a tensor cannot be read"
    return said or type(error).__name__


def _index(path: Path) -> Metadata:
    """Reads an index, and refuses one that describes something else or points to files outside of its folder."""
    check_kind(path)
    try:
        index = _unpickle(path)
    except OSError:
        raise
    except Exception as error:  # a pickle can fail in any way
        raise ValueError(f"{path} is not the index of a checkpoint, or a damaged one: {reason(error)}") from None
    if not isinstance(index, Metadata) or not isinstance(index.state_dict_metadata, dict):
        raise ValueError(f"{path} is not the index of a checkpoint: it holds {type(index).__name__}")
    places = index.storage_data if isinstance(index.storage_data, dict) else {}
    for name in {getattr(place, "relative_path", None) for place in places.values()}:
        inside(path.parent, name, links=False)
    return index


def _unpickle(path: Path) -> object:
    """Unpickles a file that may name the classes of an index only, and undoes what it did to those classes. The
    ``BUILD`` instruction of a pickle sets attributes of whatever stands on its stack, also of a class: an
    innocent-looking index could replace ``Metadata.__init__`` for the rest of the process."""
    before = {kind: dict(vars(kind)) for kind in _CLASSES}
    try:
        with path.open("rb") as file:
            return _Unpickler(file).load()
    finally:
        _refuse_changes(before)


def _refuse_changes(before: dict[type, dict[str, Any]]) -> None:
    """Undoes changes of classes and raises if there were any: a pickle can set attributes of any class it may name."""
    # ``old`` as the default: it is no attribute's value, so a new attribute counts as changed. Attributes that are
    # gone are not looked for, as no instruction deletes one.
    changed = [
        (kind, name) for kind, old in before.items() for name, x in vars(kind).items() if old.get(name, old) is not x
    ]
    for kind, name in changed:
        delattr(kind, name)
        if name in before[kind]:
            setattr(kind, name, before[kind][name])
    if changed:
        raise pickle.UnpicklingError(f"it changes {' and '.join(f'{kind.__name__}.{name}' for kind, name in changed)}")


class _Unpickler(pickle.Unpickler):
    """Unpickles what torch writes to an index, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """pickle calls this for every global that a file names, before it calls or builds anything with it."""
        if (module, name) in _DESCRIPTIONS:
            return _DESCRIPTIONS[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        stand_in = _stand_in(module, name)
        if stand_in is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index needs; do not trust this file")
        return stand_in


def _stand_in(module: str, name: str) -> Callable[..., Any] | None:
    """Returns a function in the place of functions, and of classes that other code uses. It is a new one each time,
    so that no pickle can change what others use.

    Args:
        module: that the pickle names.
        name: in this module. A path becomes a plain text, a layout torch's only one for saved tensors.

    Returns:
        None for a name that no index needs.
    """
    if module.split(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):  # where it was written
        return lambda *parts: "/".join(parts)
    if (module, name) == ("torch.serialization", "_get_layout"):
        return lambda layout: {"torch.strided": torch.strided}[layout]
    return None
