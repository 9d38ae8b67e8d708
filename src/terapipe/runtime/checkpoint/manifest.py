"""The manifest of a folder: size and checksum of every file in it, taken while the files are written.

Checkpoints and token files have one. It is the last file to be written, so a folder without it was not finished::

    {
     "format": 1,
     "files": {"__0_0.distcp": [123904, "5d41f0a7"], ".metadata": [...], "notes.json": [...]},
     "crc32": "9c0b2e11"        of all that stands before it
    }

Without it a flipped bit in a shard would be loaded as a weight, and training would go on with it.
"""

import io
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from terapipe.files import check_kind, inside, with_path

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MANIFEST = "manifest.json"
FORMAT = 1  # of manifests that are written; no other is read
CHUNK = 2**20  # bytes read at a time


class FormatError(ValueError):
    """A folder was written in another format. It is not damaged: nobody may set it aside or replace it for that."""


class Sum(NamedTuple):
    """Size and CRC-32 of a file, or of its beginning. The CRC guards against accidents, not against forgery."""

    size: int = 0
    crc32: int = 0

    def add(self, data: "ReadableBuffer") -> "Sum":
        """Returns the sum of what was summed so far, followed by these bytes.

        Args:
            data: any buffer. Its bytes are counted, not its items: a view of float32 has four of them per item.
        """
        return Sum(self.size + memoryview(data).nbytes, zlib.crc32(data, self.crc32))


class SummedFile(io.BufferedWriter):
    """A new file that sums its bytes while they are written. Reading it again would take as long, and would trust the
    disk that the checksum is to guard against.

    Args:
        path: of the file, which is overwritten.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.sum = Sum()

    def write(self, data: "ReadableBuffer") -> int:
        self.sum = self.sum.add(data)
        return super().write(data)


def write_manifest(folder: Path, files: Mapping[str, Sum]) -> None:
    """Writes the manifest and flushes it to the disk.

    Args:
        folder: that the manifest describes.
        files: the sum of each file in it, by name.
    """
    with with_path(folder / MANIFEST), (folder / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(_text(files))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> dict[str, Sum]:
    """Reads the manifest of a folder. It raises ValueError unless the file is byte for byte what ``write_manifest``
    wrote, and unless every name in it stays inside the folder: a manifest from elsewhere must not make us read other
    files. Another format is a FormatError.

    Args:
        folder: with the manifest.

    Returns:
        The sum that each file must have, by its name in the folder. The files themselves are not looked at.
    """
    check_kind(folder / MANIFEST)
    try:
        text = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"{MANIFEST} is missing: it was deleted, or the folder was written before there were checksums"
        ) from None
    except OSError as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error.strerror or error}") from None
    try:
        content = json.loads(text)
        # Before damage, which another format looks like. A flipped bit in the number itself is damage, though.
        if content["format"] != FORMAT and content.pop("crc32") == _checksum(content):
            raise FormatError(
                f"{folder} was written by another version of terapipe: its {MANIFEST} has format {content['format']}, "
                f"this version reads format {FORMAT}; read it with the version that wrote it"
            )
        files = {name: Sum(size, int(crc, 16)) for name, (size, crc) in content["files"].items()}
        # Written again, it must give the same bytes. That is stricter than its own checksum, and shorter to say.
        whole = _text(files).encode() == text
    except FormatError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise ValueError(f"{MANIFEST} is damaged or was edited: it does not match its own checksum")
    for name in files:
        inside(folder, name, links=False)
    return files


def _text(files: Mapping[str, Sum]) -> str:
    """Returns the manifest as JSON, with a checksum of its own content. Files are sorted by name: the same files give
    the same text, whichever rank's sums came first."""
    content: dict[str, object] = {
        "format": FORMAT,
        "files": {name: [size, f"{crc:08x}"] for name, (size, crc) in sorted(files.items())},
    }
    return json.dumps({**content, "crc32": _checksum(content)}, indent=1) + "\n"


def _checksum(content: Mapping[str, object]) -> str:
    """Sums a manifest without its last entry. Every format must have this sum: it tells another one from damage."""
    return f"{zlib.crc32(json.dumps(content).encode()):08x}"


def damage(folder: Path, part: int = 0, parts: int = 1, *, sums: bool = True) -> list[str]:
    """Compares the files of a folder with its manifest.

    Args:
        folder: to look at.
        part: which share of the files, so that ranks can divide the work.
        parts: number of shares.
        sums: whether to read the files and compare checksums; otherwise only sizes are compared, and no file but the
            manifest is read.

    Returns:
        What is wrong: file and reason of each. A folder of another format is no damage, it raises FormatError.
    """
    try:
        files = read_manifest(folder)
    except FormatError:
        raise
    except ValueError as error:
        return [str(error)]
    damages = (_damage(folder / name, files[name], sums) for name in sorted(files)[part::parts])
    return [wrong for wrong in damages if wrong]


def is_whole(folder: Path, name: str) -> bool:
    """Tells whether one file of a folder is there as it was written. A folder whose manifest cannot be trusted has no
    such file.

    Args:
        folder: with a manifest.
        name: of the file, which is read and summed.
    """
    try:
        return not _damage(folder / name, read_manifest(folder)[name], sums=True)
    except (ValueError, KeyError):
        return False


def _damage(path: Path, wanted: Sum, sums: bool) -> str:
    """Says what is wrong with a file; empty if nothing is. It looks at the size first, which is free."""
    try:
        size = path.stat().st_size
        if size != wanted.size:
            return f"{path.name} has {size} bytes instead of {wanted.size}"
        if sums and _sum(path) != wanted:
            return f"{path.name} does not match its checksum"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror or error}"
    return ""


def _sum(path: Path) -> Sum:
    """Sums a file that may be larger than the memory: all pieces are read into the same buffer."""
    total, view = Sum(), memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(view):
            total = total.add(view[:count])
    return total
