"""Files and folders that are replaced as a whole: written beside, then renamed, so that a crash loses nothing."""

import os
import shutil
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path


def write(path: Path, content: str | bytes) -> None:
    """Replaces a file; the old one stays whole until the new one is. Text is written as UTF-8."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")  # its own: several ranks may write the same file
    try:
        part.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def beside(folder: Path, what: str) -> Path:
    return folder.with_name(f"{folder.name}.{what}")


def recover(folder: Path) -> None:
    """Puts back what a crash in the middle of ``put_in_place`` left aside."""
    old = beside(folder, "old")
    if old.exists() and not folder.exists():
        old.rename(folder)


def put_in_place(folder: Path, new: Path) -> None:
    """``new``, written beside, becomes the folder."""
    recover(folder)
    old = beside(folder, "old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def flush(folder: Path) -> None:
    """The names in it, to the disk; not all systems can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def flush_files(folder: Path) -> None:
    """All files in it, and their names: what is renamed into place must not be empty after a power failure."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    flush(folder)


def copy_others(folder: Path, new: Path, replaced: Collection[str]) -> None:
    """What the folder holds, but for the files that the new one will have itself, given as patterns."""

    def left_out(at: str, names: list[str]) -> set[str]:
        return {name for name in names if Path(at) == folder and any(fnmatch(name, pattern) for pattern in replaced)}

    shutil.copytree(folder, new, ignore=left_out)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the path to an OSError that has none: a write to a full disk does not know the file's name."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
