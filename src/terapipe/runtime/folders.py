"""Folders that are replaced as a whole: written beside, then renamed, so that a crash loses nothing already saved."""

import shutil
from pathlib import Path


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
