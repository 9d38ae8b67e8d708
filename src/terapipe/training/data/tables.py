"""Documents from tables: parquet files, and folders that Hugging Face datasets saved."""

import json
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from terapipe.training.data.pieces import Piece, document

ROWS = 64  # of a table, made Python strings at a time


def is_dataset(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def read_parquet(path: Path, field: str) -> Iterator[Piece]:
    arrow, parquet = _pyarrow("pyarrow", path), _pyarrow("pyarrow.parquet", path)
    try:
        # Not buffered ahead: pyarrow would keep what it has read of all row groups.
        with parquet.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
            yield from _rows(file.schema_arrow, file.iter_batches(ROWS, columns=[field]), field, path)
    except arrow.ArrowException as error:
        raise ValueError(f"{path} is damaged or not a parquet file: {error}") from None


def read_saved(folder: Path, field: str) -> Iterator[Piece]:
    """A dataset, as ``save_to_disk`` left it."""
    arrow = _pyarrow("pyarrow", folder)
    for path in _parts(folder):
        try:
            with arrow.memory_map(str(path)) as file, arrow.ipc.open_stream(file) as batches:
                yield from _rows(batches.schema, batches, field, folder)
        except (arrow.ArrowException, FileNotFoundError) as error:
            raise ValueError(f"{path} is damaged or missing: {error}; save the dataset again") from None


def _parts(folder: Path) -> list[Path]:
    several, state = folder / "dataset_dict.json", folder / "state.json"
    if several.exists():
        splits = json.loads(several.read_bytes())["splits"]
        raise ValueError(f"{folder} holds several datasets; name one: {', '.join(str(folder / s) for s in splits)}")
    if not state.exists():
        raise ValueError(
            f"a folder must be one that datasets' save_to_disk wrote, {folder} has no state.json; "
            f"to read the files in it, give a pattern: {folder / '*.txt'}"
        )
    entries = json.loads(state.read_bytes())
    if entries.get("_indices_files") or entries.get("_indices_data_files"):
        raise ValueError(
            f"{folder} holds a selection of a dataset, as row numbers; save the rows themselves: "
            "dataset.flatten_indices().save_to_disk(...)"
        )
    return [folder / entry["filename"] for entry in entries["_data_files"]]


def _rows(schema: Any, batches: Iterable[Any], field: str, path: Path) -> Iterator[Piece]:
    if field not in schema.names:
        raise ValueError(f"{path} has no column {field!r}, it has {', '.join(map(repr, schema.names))}; set data.field")
    for batch in batches:
        for first in range(0, len(batch), ROWS):
            for text in batch.column(field).slice(first, ROWS).to_pylist():
                yield from document(text, field, str(path))


def _pyarrow(module: str, path: Path) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError:
        raise ValueError(f"{path} is read with pyarrow, which is not installed; pip install terapipe[data]") from None
