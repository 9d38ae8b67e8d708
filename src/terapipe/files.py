"""Files and folders: what is read must be a file, what is replaced is written beside and renamed, so that a crash loses
nothing.

    write(path, text)             path.1f3a.part  --rename-->  path                 one file
    replace_folder(folder, new)   folder --> folder.old,  folder.partial --> folder,  folder.old is removed
                                           ^ a crash here leaves no folder: recover(folder) renames folder.old back

A rename on one file system happens wholly or not at all, a write does not. Whoever reads ``folder`` therefore sees the
old one or the new one, and whoever writes calls ``recover`` first.
"""

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
    """Reads a file that a user names.

    Args:
        path: A text file in UTF-8. Pipes, devices and binary files are refused by name.
    """
    check_kind(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file") from None


def read_json(path: Path) -> Any:
    """Reads a JSON file that a user names. Errors name the file.

    Args:
        path: Of the file.
    """
    try:
        return json.loads(read(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} must be JSON, got: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} must be JSON, got lists or objects inside each other without end") from None


def check_kind(path: Path) -> None:
    """Refuses a path that is neither file nor folder: who reads a pipe waits for its writer, and some devices have no
    end.

    Args:
        path: To be read or written. A missing one passes: whoever opens it says so better.
    """
    with suppress(OSError):
        kind = KINDS.get(stat.S_IFMT(path.stat().st_mode))
        if kind:
            raise ValueError(f"{path} must be a file, got {kind}; name a file")


def check_kinds(folder: Path) -> None:
    """Refuses a folder in which something is neither file nor folder.

    Args:
        folder: Such as a model's. Folders inside it are not looked into.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        check_kind(path)


def inside(folder: Path, name: object, *, links: bool = True) -> Path:
    """The path of a file that an index in a folder names. It must lie in the folder, because whoever wrote the index (a
    checkpoint from somewhere else) is not to choose what is read elsewhere.

    Args:
        folder: With the index.
        name: What the index says: any JSON value.
        links: Whether the file may be a link to somewhere else, as in the cache of the Hugging Face hub.
    """
    text = name if isinstance(name, str) else ""
    path = folder / text
    leaves = PurePosixPath(text).is_absolute() or PureWindowsPath(text).anchor or ".." in PurePosixPath(text).parts
    if not text or leaves or "\0" in text or (not links and not path.resolve().is_relative_to(folder.resolve())):
        raise ValueError(f"the files of {folder} must lie in it, its index names {name!r}; do not trust this folder")
    check_kind(path)
    return path


def write(path: Path, content: str | bytes) -> None:
    """Replaces a file; the old one stays whole until the new one is. Missing folders are made.

    Args:
        path: Of the file.
        content: Text, written as UTF-8, or bytes.
    """
    check_kind(path)  # a file that is renamed to the name of a device takes its place
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")  # its own: several ranks may write the same file
    try:
        with with_path(path):
            part.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def sibling(folder: Path, what: str) -> Path:
    """The path of a folder's companion in the same parent: ``sibling(Path("run/step-10"), "partial")`` is
    ``run/step-10.partial``. In the same parent, because a rename works only within one file system.

    Args:
        folder: That is to be replaced.
        what: "partial" while the new one is written, "old" while the two change places.
    """
    return folder.with_name(f"{folder.name}.{what}")


def recover(folder: Path) -> None:
    """Puts back what a crash in the middle of ``replace_folder`` left aside.

    Args:
        folder: That may be missing.
    """
    old = sibling(folder, "old")
    if old.exists() and not folder.exists():
        old.rename(folder)


def replace_folder(folder: Path, new: Path) -> None:
    """Makes a new folder the folder of that name. Three renames, of which a crash may come after any.

    Args:
        folder: The name, with or without a folder there.
        new: A complete folder in the same parent.
    """
    recover(folder)
    old = sibling(folder, "old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def flush(folder: Path) -> None:
    """Writes the names in a folder to the disk; not all systems can. A file that is safe on the disk is lost after a
    power failure if its name is not.

    Args:
        folder: In which files were made or renamed.
    """
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def flush_files(folder: Path) -> None:
    """Writes all files of a folder, and their names, to the disk: what is renamed into place must not be empty after a
    power failure.

    Args:
        folder: Complete, before it is renamed.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    flush(folder)


def copy_others(folder: Path, new: Path, replaced: Collection[str]) -> None:
    """Copies a folder, but for the files that the new one will have itself.

    Args:
        folder: To copy.
        new: Its copy, which must not exist.
        replaced: Patterns of names that are left out, such as ``*.safetensors``, in the folder itself.
    """

    def left_out(at: str, names: list[str]) -> set[str]:
        return {name for name in names if Path(at) == folder and any(fnmatch(name, pattern) for pattern in replaced)}

    shutil.copytree(folder, new, ignore=left_out)


@contextmanager
def with_path(path: Path) -> Iterator[None]:
    """Adds the path to an OSError that has none: a write to a full disk does not know the file's name.

    Args:
        path: That is read or written inside.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
