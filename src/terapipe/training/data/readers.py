"""Documents from files: plain text, JSON lines, parquet, and folders that Hugging Face datasets saved."""

import codecs
import glob
import gzip
import io
import json
import os.path
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from terapipe.training.data.pieces import PIECE, Piece, cut, document
from terapipe.training.data.tables import is_dataset, read_parquet, read_saved

Reader = Callable[[Path, str], Iterator[Piece]]


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
    return [match for match in glob.glob(pattern, recursive=True) if Path(match).is_file() or is_dataset(Path(match))]


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
        except UnicodeDecodeError:
            raise ValueError(
                f"text must be UTF-8, {path} is not: {_bad_byte(path)}; convert it, for instance by iconv"
            ) from None
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is damaged or not a gzip file: {error}") from None


def _reader(path: Path) -> Reader:
    if path.is_dir():
        return read_saved
    for suffix, reader in READERS.items():
        if path.name.lower().endswith(suffix):
            return reader
    known = ", ".join(READERS)
    raise ValueError(f"text is read from files that end in {known}, and from folders of datasets, got {path}")


def _bad_byte(path: Path) -> str:
    """The first that is none of UTF-8, and its place in the file, or in what a compressed file holds."""
    decoder, read = codecs.getincrementaldecoder("utf-8")(), 0
    with _opened(path) as file:
        while True:
            block, left = file.read(PIECE), decoder.getstate()[0]
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                place = read - len(left) + error.start
                return f"byte 0x{error.object[error.start]:02x} at place {place} ({error.reason})"
            read += len(block)
            if not block:
                return "it is of another encoding"


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
                yield from document(_entry(line, field, where), field, where)


def _entry(line: bytes, field: str, where: str) -> Any:
    try:
        entry = json.loads(line)
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        raise ValueError(f"{where}: every line must be JSON, this one is not: {error}") from None
    if not isinstance(entry, dict) or field not in entry:
        there = f"fields {', '.join(map(repr, entry))}" if isinstance(entry, dict) else "no fields"
        raise ValueError(f"{where}: every line must have the field {field!r}, this one has {there}; set data.field")
    return entry[field]


READERS: dict[str, Reader] = {
    ".txt": _text,
    ".md": _text,
    ".txt.gz": _text,
    ".jsonl": _lines,
    ".jsonl.gz": _lines,
    ".parquet": read_parquet,
}
