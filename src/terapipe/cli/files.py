"""Checks the files of a command before anything is computed."""

import argparse
from pathlib import Path

from terapipe.reporting.svg import require_png

OUTPUTS = ("save", "slurm", "kubernetes", "html", "svg", "png", "trace", "out")
INPUTS = ("profile", "cost_table", "plan", "measured")


def check_outputs(parsed: argparse.Namespace) -> None:
    """Refuses outputs that cannot be written or would overwrite another file of the same command."""
    taken: dict[Path, str] = {}
    for name in (*INPUTS, *OUTPUTS):
        path = getattr(parsed, name, None)
        if not isinstance(path, Path):
            continue
        if name in OUTPUTS:
            _check_file(path, name)
            if path.resolve() in taken:
                raise ValueError(f"--{name} and {taken[path.resolve()]} are the same file, {path}; name another")
        taken[path.resolve()] = name.replace("_", "-")
    if getattr(parsed, "png", None) is not None:
        require_png()


def _check_file(path: Path, name: str) -> None:
    if path.is_dir():
        raise ValueError(f"--{name} names a file to write, {path} is a folder")
    parent = next(folder for folder in path.resolve().parents if folder.exists())
    if not parent.is_dir():
        raise ValueError(f"--{name} {path} cannot be written: {parent} is a file, not a folder")
