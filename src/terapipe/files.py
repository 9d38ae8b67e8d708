"""Files and folders: what is read must be a file, what is replaced is written beside and renamed, so that a crash loses
nothing."""

import json
import os
import shutil
import stat
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def read(path: Path) -> str:
    """The text of a file that a user names."""
    check_kind(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file") from None


def read_json(path: Path) -> Any:
    try:
        return json.loads(read(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} must be JSON, got: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} must be JSON, got lists or objects inside each other without end") from None


def check_kind(path: Path) -> None:
    """Refuses a path that is neither file nor folder: who reads a pipe waits for its writer, and some devices have no
    end. A missing one is left to whoever opens it."""
    with suppress(OSError):
        kind = KINDS.get(stat.S_IFMT(path.stat().st_mode))
        if kind:
            raise ValueError(f"{path} must be a file, got {kind}; name a file")


def check_kinds(folder: Path) -> None:
    """The same for all that a folder holds."""
    for path in folder.iterdir() if folder.is_dir() else ():
        check_kind(path)


def inside(folder: Path, name: object, *, links: bool = True) -> Path:
    """The path of a file that an index in a folder names: it must lie in the folder, because whoever wrote the index
    is not to choose what is read elsewhere. Without ``links``, a link to somewhere else is refused, too."""
    text = name if isinstance(name, str) else ""
    path = folder / text
    leaves = PurePosixPath(text).is_absolute() or PureWindowsPath(text).anchor or ".." in PurePosixPath(text).parts
    if not text or leaves or "\0" in text or (not links and not path.resolve().is_relative_to(folder.resolve())):
        raise ValueError(f"the files of {folder} must lie in it, its index names {name!r}; do not trust this folder")
    check_kind(path)
    return path


def write(path: Path, content: str | bytes) -> None:
    """Replaces a file; the old one stays whole until the new one is. Text is written as UTF-8."""
    check_kind(path)  # a file that is renamed to the name of a device takes its place
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")  # its own: several ranks may write the same file
    try:
        with naming(path):
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
