"""Find data files and read their documents: plain text, JSON lines, Parquet, and folders saved by `datasets`.

::

    "texts/*.txt"  --find_files-->  paths  --read_documents-->  DocumentPart, DocumentPart, ...   (text, is_last)
    "pairs.jsonl"  --find_files-->  paths  --read_entries---->  where, (value of each field)

Memory does not grow with the data: documents come in parts of PART characters. A part is cut where no token can span
the cut, so the tokens are those of the whole text.

`datasets` reads the folders that it saved. The other formats have their own readers, because its loaders lose
guarantees (seen with 5.2). "text" converts line ends, keeps the byte order mark and holds a whole document in memory.
"json" reads a missing field as null, converts numbers to text and does not name the line of an error. "parquet" is
several times slower than pyarrow, which it uses, and leaves lock files behind.
"""

import codecs
import glob
import gzip
import io
import json
import os.path
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from terapipe.extras import import_extra
from terapipe.files import check_kind, check_kinds, inside, read_json

PART = 2**18  # characters in a part of a document
ENTRIES = (".jsonl", ".jsonl.gz")  # files whose lines have several fields
ROWS = 64  # table rows converted to Python strings at a time
SURROGATES = re.compile("[\ud800-\udfff]")  # JSON can contain unpaired ones, UTF-8 cannot


class DocumentPart(NamedTuple):
    """A part of a document. Long documents are read in parts, so memory use does not depend on their length.

    Args:
        text: Of the part; never empty.
        is_last: Whether the document ends with it.
    """

    text: str
    is_last: bool


Reader = Callable[[Path, str], Iterator[DocumentPart]]


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Finds the files and saved datasets that names or patterns match.

    Args:
        patterns: Names, or patterns as of a shell, with ``**`` for any folders. A name that exists is not a pattern,
            whatever brackets it has.

    Returns:
        The paths: sorted, so that every start sees them in the same order, and without duplicates.
    """
    paths: dict[Path, Path] = {}
    for pattern in map(os.path.expanduser, patterns):
        matches = [pattern] if Path(pattern).exists() else _matches(pattern)
        if not matches:
            raise ValueError(
                f"every name or pattern of data must match a file, {pattern!r} matches none, seen from {Path.cwd()}"
            )
        for match in sorted(matches):
            check_kind(Path(match))
            paths.setdefault(Path(match).resolve(), Path(match))
    return sorted(paths.values())


def _matches(pattern: str) -> list[str]:
    """What a pattern matches, without plain folders, which one such as ``**`` matches on its way."""
    return [match for match in glob.glob(pattern, recursive=True) if Path(match).is_file() or _is_saved(Path(match))]


def read_documents(paths: Iterable[Path], field: str) -> Iterator[DocumentPart]:
    """Yields all documents that are not empty, in the order of the files.

    Args:
        paths: The files and saved datasets.
        field: Which field or column has the text; plain text has none.
    """
    for path in paths:
        try:
            yield from _reader(path)(path, field)
        except UnicodeDecodeError:
            raise ValueError(
                f"text must be UTF-8, {path} is not: {_bad_byte(path)}; convert it, for instance by iconv"
            ) from None
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is damaged or not a gzip file: {error}") from None


def check_readable(path: Path, fields: Sequence[str] = ()) -> None:
    """Refuses a file or folder from which no documents, or with `fields` no entries, can be read. Goes by names, reads
    no text.

    Args:
        path: Of a file or folder.
        fields: That entries must have; none: documents are read.
    """
    if not fields:
        _reader(path)
    elif not path.is_dir() and not path.name.lower().endswith(ENTRIES):
        raise ValueError(
            f"entries with the fields {', '.join(fields)} are read from .jsonl files and folders of datasets, got "
            f"{path}"
        )
    if path.is_dir():
        _check_saved(path)


def read_entries(paths: Iterable[Path], fields: Sequence[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yields the values of several fields of each entry, and where it is, for messages.

    Args:
        paths: Of .jsonl files and saved datasets.
        fields: That each entry must have.
    """
    for path in paths:
        check_readable(path, fields)
        if path.name.lower().endswith(ENTRIES):
            with _open(path) as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        where = f"{path}, line {number}"
                        yield where, tuple(_field(line, field, where, "[objective]") for field in fields)
        else:
            dataset = _load_saved(path)
            for field in fields:
                _check_column(dataset.column_names, field, path)
            for number, entry in enumerate(dataset):
                yield f"{path}, row {number}", tuple(entry[field] for field in fields)


def _reader(path: Path) -> Reader:
    """The function that reads such a file. The name decides, not the contents."""
    if path.is_dir():
        return _read_saved
    for suffix, reader in READERS.items():
        if path.name.lower().endswith(suffix):
            return reader
    suffixes = ", ".join(READERS)
    raise ValueError(f"text is read from files that end in {suffixes}, and from folders of datasets, got {path}")


# Parts of a document


def split_text(text: str, limit: int = PART) -> Iterator[str]:
    """Splits a text into parts of at most `limit` characters. Only an empty text has an empty part.

    Args:
        text: To split.
        limit: Characters in a part; they are at least half as long, but for the last.
    """
    start = 0
    while len(text) - start > limit:
        stop = _split_point(text, start, start + limit)
        yield text[start:stop]
        start = stop
    yield text[start:]


def _split_point(text: str, start: int, stop: int) -> int:
    """The best place to split in ``(start, stop]``.

    Best is before a single space that follows a word: a token may begin with a space but never ends with one, so the
    tokens stay those of the whole text. Otherwise after a line, otherwise anywhere.

    ::

        ... the quick brown fox jumps ...
                 ^ middle       ^ stop
                         |  split here: "... brown" + " fox jumps"
    """
    middle = (start + stop) // 2
    space = text.rfind(" ", middle + 1, stop + 1)
    while space > 0 and text[space - 1].isspace():
        space = text.rfind(" ", middle + 1, space)
    return space if space > 0 else text.rfind("\n", middle, stop) + 1 or stop


def _parts(text: Any, field: str, where: str) -> Iterator[DocumentPart]:
    """The parts of one document, none if it is null or empty."""
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{where}: {field!r} must hold text, got {text!r:.50}; set data.field")
    if text:
        *before, last = split_text(SURROGATES.sub("\ufffd", text))
        yield from (DocumentPart(part, False) for part in before)
        yield DocumentPart(last, True)


# Text and JSON lines


def _open(path: Path) -> gzip.GzipFile | io.BufferedReader:
    """The bytes of a file, decompressed if its name ends in .gz."""
    return gzip.GzipFile(path) if path.name.lower().endswith(".gz") else path.open("rb")


def _bad_byte(path: Path) -> str:
    """The first byte that is not valid UTF-8 and its offset in the file, after decompression if it is compressed.

    Python's own error has the offset in the block that it was decoding, which helps nobody. So the file is read again,
    only then.
    """
    decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
    with _open(path) as file:
        while True:
            block, pending = file.read(PART), decoder.getstate()[0]
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                place = offset - len(pending) + error.start
                return f"byte 0x{error.object[error.start]:02x} at place {place} ({error.reason})"
            offset += len(block)
            if not block:
                return "it has another encoding"


def _read_text(path: Path, _: str) -> Iterator[DocumentPart]:
    """One document. A byte order mark is dropped, line ends stay as they are. The rest of a block joins the next
    one."""
    rest = ""
    with _open(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        while block := text.read(PART):
            *parts, rest = split_text(rest + block)
            yield from (DocumentPart(part, False) for part in parts)
    if rest:
        yield DocumentPart(rest, True)


def _read_json_lines(path: Path, field: str) -> Iterator[DocumentPart]:
    """One document for each line; empty lines are passed over."""
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}, line {number}"
                yield from _parts(_field(line, field, where), field, where)


def _field(line: bytes, field: str, where: str, key: str = "data.field") -> Any:
    """The value of a field of one line. The message names the fields that there are, because the usual mistake is
    data.field."""
    try:
        entry = json.loads(line)
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: every line must be JSON, this one is not: {error}") from None
    if not isinstance(entry, dict) or field not in entry:
        fields = f"fields {', '.join(map(repr, entry))}" if isinstance(entry, dict) else "no fields"
        raise ValueError(f"{where}: every line must have the field {field!r}, this one has {fields}; set {key}")
    return entry[field]


# Tables


def _read_parquet(path: Path, field: str) -> Iterator[DocumentPart]:
    """One document for each row, ROWS of them in memory at a time."""
    arrow, parquet = (import_extra(name, "data", path) for name in ("pyarrow", "pyarrow.parquet"))
    try:
        # With pre_buffer, pyarrow would keep all row groups that it has read in memory.
        with parquet.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
            _check_column(file.schema_arrow.names, field, path)
            for batch in file.iter_batches(ROWS, columns=[field]):
                for text in batch.column(field).to_pylist():
                    yield from _parts(text, field, str(path))
    except arrow.ArrowException as error:
        raise ValueError(f"{path} is damaged or not a parquet file: {error}") from None


def _is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote this folder; the second file is that of several datasets."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _read_saved(folder: Path, field: str) -> Iterator[DocumentPart]:
    """A dataset saved by ``save_to_disk``; its Arrow files are memory-mapped."""
    dataset = _load_saved(folder)
    _check_column(dataset.column_names, field, folder)
    for table in dataset.select_columns([field]).with_format("arrow").iter(ROWS):
        for text in table.column(field).to_pylist():
            yield from _parts(text, field, str(folder))


def _load_saved(folder: Path) -> Any:
    """Opens a saved dataset. Several in one folder are refused with their names: which one to train on is not ours to
    choose."""
    _check_saved(folder)
    datasets = import_extra("datasets", "data", folder)
    datasets.disable_progress_bars()
    try:
        dataset = datasets.load_from_disk(str(folder))
    except Exception as error:  # of pyarrow, json and datasets itself
        raise ValueError(f"{folder} is damaged or incomplete: {error}; save the dataset again") from None
    if isinstance(dataset, dict):
        names = ", ".join(str(folder / split) for split in dataset)
        raise ValueError(f"{folder} holds several datasets; name one: {names}")
    return dataset


def _check_saved(folder: Path) -> None:
    """A folder must be a saved dataset, and the files that it names its own: a dataset from elsewhere could name any
    file of this machine."""
    if not _is_saved(folder):
        raise ValueError(
            f"a folder must be one that datasets' save_to_disk wrote, {folder} has no state.json; "
            f"to read the files in it, give a pattern: {folder / '*.txt'}"
        )
    check_kinds(folder)
    state = read_json(folder / "state.json") if (folder / "state.json").is_file() else {}
    entries = state.get("_data_files") if isinstance(state, dict) else ()
    for entry in entries if isinstance(entries, list) else ():
        inside(folder, entry.get("filename") if isinstance(entry, dict) else None)


def _check_column(names: Sequence[str], field: str, path: Path) -> None:
    """Refuses a table without the column, and names those that it has."""
    if field not in names:
        raise ValueError(f"{path} has no column {field!r}, it has {', '.join(map(repr, names))}; set data.field")


READERS: Mapping[str, Reader] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".txt.gz": _read_text,
    ".md.gz": _read_text,
    ".jsonl": _read_json_lines,
    ".jsonl.gz": _read_json_lines,
    ".parquet": _read_parquet,
}
