"""Damages checkpoint folders of a finished run at random, resumes it, and sees whether each damage is noticed.

A try: a copy of the run, its newest checkpoint damaged (every so many times all of them), resumed in this process as
`terapipe train` would. The damage is noticed if a message names the checkpoint, the file and a reason, and the run goes
on from the newest whole checkpoint to the losses of the undisturbed run; or if it is refused with such a message where
no checkpoint is whole.
"""

import io
import json
import random
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from terapipe.runtime import Transport
from terapipe.training import Run, folder_of, path_of, read_metrics, steps
from terapipe.training.config import RunConfig


class Never:
    """A stop signal that is never received."""

    received = ""


class Damages:
    def __init__(self, straight: RunConfig, place: Path, all_every: int = 5) -> None:
        """``straight`` is the finished run, with at least two checkpoints; copies of it are made in ``place``."""
        self._straight, self._place, self._all_every = straight, place, all_every
        self._losses = {row["step"]: row["loss"] for row in read_metrics(straight.folder) if "loss" in row}

    def attempt(self, number: int, dice: random.Random) -> tuple[str, str]:
        """What was damaged, and what was not noticed of it, or nothing."""
        name = f"damaged{number}"
        told = replace(
            self._straight, logging=replace(self._straight.logging, folder=str(self._place / name), tensorboard=False)
        )
        shutil.copytree(self._straight.folder, told.folder)
        found = steps(folder_of(told))
        hit = found if (number + 1) % self._all_every == 0 else found[-1:]
        damaged = {step: damage(path_of(folder_of(told), step), dice) for step in hit}
        whole = [step for step in found if step not in damaged]
        silent = self._silent(told, damaged, whole)
        shutil.rmtree(told.folder)
        return "; ".join(what for what, _ in damaged.values()), silent

    def _silent(self, told: RunConfig, damaged: dict[int, tuple[str, set[str]]], whole: list[int]) -> str:
        try:
            with redirect_stdout(io.StringIO()):
                Run(told, Transport.join(torch.device("cpu")), Never()).run()  # type: ignore[arg-type]
        except ValueError as error:
            said, refused = str(error), True
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        else:
            said, refused = "\n".join(row["message"] for row in read_metrics(told.folder) if "message" in row), False
        if refused == bool(whole):
            return f"refused: {said}" if refused else "began anew"
        for step, (_, files) in damaged.items():
            if not _named(said, path_of(folder_of(told), step), files):
                return f"not named in: {said}"
        if whole and f"went on from {path_of(folder_of(told), whole[-1])}" not in said:
            return f"did not go on from step {whole[-1]}: {said}"
        return "" if refused or self._same(told) else "another result"

    def _same(self, told: RunConfig) -> bool:
        """To rounding: the undisturbed run may have had another layout."""
        losses = {row["step"]: row["loss"] for row in read_metrics(told.folder) if "loss" in row}
        return losses.keys() == self._losses.keys() and all(
            abs(losses[step] - wanted) < 1e-5 * wanted for step, wanted in self._losses.items()
        )


def _named(said: str, folder: Path, files: set[str]) -> bool:
    """Whether the message says which file of which checkpoint, and why."""
    _, _, reasons = said.partition(f"the checkpoint {folder} is damaged: ")
    first, _, why = reasons.partition(" ")
    return first in files and len(why) > 5


# Kinds of damage


def damage(folder: Path, dice: random.Random) -> tuple[str, set[str]]:
    """What was done, and the files in which it can be seen."""
    kind, do = dice.choice(list(KINDS.items()))
    files = do(folder, dice)
    return f"{kind} {', '.join(files)}", set(files)


def _some_file(folder: Path, dice: random.Random) -> Path:
    return dice.choice(sorted(path for path in folder.iterdir() if path.stat().st_size))


def _flip(folder: Path, dice: random.Random) -> list[str]:
    path = _some_file(folder, dice)
    content = bytearray(path.read_bytes())
    for place in dice.sample(range(8 * len(content)), min(dice.choice((1, 8, 400)), 8 * len(content))):
        content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)
    return [path.name]


def _truncate(folder: Path, dice: random.Random) -> list[str]:
    path = _some_file(folder, dice)
    path.write_bytes(path.read_bytes()[: dice.randrange(path.stat().st_size)])
    return [path.name]


def _delete(folder: Path, dice: random.Random) -> list[str]:
    path = _some_file(folder, dice)
    path.unlink()
    return [path.name]


def _swap(folder: Path, dice: random.Random) -> list[str]:
    first, second = dice.sample(sorted(folder.iterdir()), 2)
    a, b = first.read_bytes(), second.read_bytes()
    assert a != b
    first.write_bytes(b)
    second.write_bytes(a)
    return [first.name, second.name]


def _edit(folder: Path, dice: random.Random) -> list[str]:
    """A value of a JSON file becomes another, or goes."""
    path = dice.choice(sorted(folder.glob("*.json")))
    content: Any = json.loads(path.read_text())
    inner = content
    name = dice.choice(list(inner))
    while isinstance(inner[name], dict):
        inner, name = inner[name], dice.choice(list(inner[name]))
    if dice.random() < 0.3:
        del inner[name]
    else:
        inner[name] = inner[name] + 1 if isinstance(inner[name], int | float) else f"{inner[name]}0"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return [path.name]


KINDS: dict[str, Callable[[Path, random.Random], list[str]]] = {
    "flip": _flip, "truncate": _truncate, "delete": _delete, "swap": _swap, "edit": _edit,
}  # fmt: skip
