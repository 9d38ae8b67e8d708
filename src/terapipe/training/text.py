"""Documents from files: plain text, JSON lines, parquet, and folders that Hugging Face datasets saved."""

import glob
import gzip
import io
import json
import os.path
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

PIECE = 2**18  # characters
ROWS = 64  # of a table, made Python strings at a time


class Piece(NamedTuple):
    """A part of a document, and whether it is the last one: no document need be held whole."""

    text: str
    ends: bool


def find(patterns: Sequence[str]) -> list[Path]:
    """The files, or folders of datasets, that these names or patterns mean: sorted, each once."""
    found: dict[Path, Path] = {}
    for pattern in map(os.path.expanduser, patterns):
        matches = [pattern] if Path(pattern).exists() else _matches(pattern)
        if not matches:
            raise ValueError(
                f"every name or pattern of data must match a file, {pattern!r} matches none, seen from {Path.cwd()}"
            )
        for match in sorted(matches):
            found.setdefault(Path(match).resolve(), Path(match))
    return sorted(found.values())


def _matches(pattern: str) -> list[str]:
    """Without the folders that a pattern such as ``**`` only passes through."""
    return [match for match in glob.glob(pattern, recursive=True) if Path(match).is_file() or _is_dataset(Path(match))]


def _is_dataset(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def documents(paths: Iterable[Path], field: str) -> Iterator[str]:
    """Every text that is not empty, in the order of the files."""
    held: list[str] = []
    for piece in pieces(paths, field):
        held.append(piece.text)
        if piece.ends:
            yield "".join(held)
            held = []


def pieces(paths: Iterable[Path], field: str) -> Iterator[Piece]:
    """The same documents, long ones in pieces, so that a file of any size can be read."""
    for path in paths:
        try:
            yield from _reader(path)(path, field)
        except UnicodeDecodeError as error:
            raise ValueError(f"text must be UTF-8, {path} is not: {error}; convert it, for instance by iconv") from None
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is damaged or not a gzip file: {error}") from None


def cut(text: str, longest: int = PIECE) -> Iterator[str]:
    """Parts of at most so many characters, which together are the text; the last one is not empty."""
    start = 0
    while len(text) - start > longest:
        stop = _border(text, start, start + longest)
        yield text[start:stop]
        start = stop
    yield text[start:]


def _border(text: str, start: int, stop: int) -> int:
    """The best place to cut, after ``start`` and not after ``stop``.

    Before a single space that follows a word: tokens may begin with a space, but none ends with one, so the tokens are
    those of the whole text. Failing that, after a line; failing that, anywhere.
    """
    middle = (start + stop) // 2
    space = text.rfind(" ", middle + 1, stop + 1)
    while space > 0 and text[space - 1].isspace():
        space = text.rfind(" ", middle + 1, space)
    return space if space > 0 else text.rfind("\n", middle, stop) + 1 or stop


Reader = Callable[[Path, str], Iterator[Piece]]


def _reader(path: Path) -> Reader:
    if path.is_dir():
        return _saved
    for suffix, reader in READERS.items():
        if path.name.lower().endswith(suffix):
            return reader
    known = ", ".join(READERS)
    raise ValueError(f"text is read from files that end in {known}, and from folders of datasets, got {path}")


def _opened(path: Path) -> gzip.GzipFile | io.BufferedReader:
    return gzip.GzipFile(path) if path.name.lower().endswith(".gz") else path.open("rb")


def _text(path: Path, _: str) -> Iterator[Piece]:
    rest = ""
    with _opened(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        while more := text.read(PIECE):
            *whole, rest = cut(rest + more)
            yield from (Piece(part, False) for part in whole)
    if rest:
        yield Piece(rest, True)


def _lines(path: Path, field: str) -> Iterator[Piece]:
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}, line {number}"
                yield from _document(_entry(line, field, where), field, where)


def _entry(line: bytes, field: str, where: str) -> Any:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: every line must be JSON, this one is not: {error}") from None
    if not isinstance(entry, dict) or field not in entry:
        there = f"fields {', '.join(map(repr, entry))}" if isinstance(entry, dict) else "no fields"
        raise ValueError(f"{where}: every line must have the field {field!r}, this one has {there}; set data.field")
    return entry[field]


def _document(text: Any, field: str, where: str) -> Iterator[Piece]:
    """Nothing, if there is no text."""
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{where}: {field!r} must hold text, got {text!r:.50}; set data.field")
    if text:
        *before, last = cut(LONE.sub("\ufffd", text))
        yield from (Piece(part, False) for part in before)
        yield Piece(last, True)


LONE = re.compile("[\ud800-\udfff]")  # halves of a character: JSON can hold them, UTF-8 cannot


def _parquet(path: Path, field: str) -> Iterator[Piece]:
    arrow, parquet = _pyarrow("pyarrow", path), _pyarrow("pyarrow.parquet", path)
    try:
        # Not buffered ahead: pyarrow would keep what it has read of all row groups.
        with parquet.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
            yield from _rows(file.schema_arrow, file.iter_batches(ROWS, columns=[field]), field, path)
    except arrow.ArrowException as error:
        raise ValueError(f"{path} is damaged or not a parquet file: {error}") from None


def _saved(folder: Path, field: str) -> Iterator[Piece]:
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
                yield from _document(text, field, str(path))


def _pyarrow(module: str, path: Path) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError:
        raise ValueError(f"{path} is read with pyarrow, which is not installed; pip install terapipe[data]") from None


READERS: dict[str, Reader] = {
    ".txt": _text,
    ".md": _text,
    ".txt.gz": _text,
    ".jsonl": _lines,
    ".jsonl.gz": _lines,
    ".parquet": _parquet,
}
