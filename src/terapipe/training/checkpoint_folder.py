"""The folder with the checkpoints of a run: list them, find the one to resume from, save, remove old ones.

::

    checkpoints/
      step-00000300/            complete: the name is given by a rename after the last file is on the disk
      step-00000400/
      step-00000400.old/        was being replaced when a crash came; `clean` puts it back
      step-00000500.partial/    was being written; `clean` deletes it
      step-00000200.removed/    was being deleted; `clean` deletes it
      damaged-step-00000350/    its files do not match their checksums; never deleted by us, never loaded
      best.json                 which step had the lowest evaluation loss

The name of a folder says all there is to know about its state, so a kill between any two lines of this module is
repaired by `clean` at the next start. What is inside a checkpoint is the business of `terapipe.runtime.checkpoint`.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from terapipe import files
from terapipe.files import recover
from terapipe.runtime import ALL, Transport
from terapipe.runtime.checkpoint import NOTES, Saving, verify_files
from terapipe.training.config import CheckpointConfig, RunConfig
from terapipe.training.state import RunState

NAME = re.compile(r"step-(\d{8})")
BEST = "best.json"


def folder_of(config: RunConfig) -> Path:
    """Returns the folder that holds a run's checkpoints.

    Args:
        config: Of the run.
    """
    return config.folder / "checkpoints"


def check_begin(config: RunConfig) -> None:
    """Refuses to begin anew in a folder that has checkpoints: they would be mixed with those of another run.

    Args:
        config: Of the run; `checkpoints.resume = "off"` asks to begin anew.
    """
    folder = folder_of(config)
    if steps(folder) and config.checkpoints.resume == "off":
        raise ValueError(
            f"checkpoints.resume = 'off' begins anew, but {folder} holds checkpoints of a run before; take another "
            "logging.folder, or move them"
        )


def steps(folder: Path) -> list[int]:
    """Returns the steps of all complete checkpoints, in order. Whether their files are intact is checked by
    `newest_whole`.

    Args:
        folder: As `folder_of` returns it; it need not exist.
    """
    names = (NAME.fullmatch(f.name) for f in folder.glob("step-*") if f.is_dir())
    return sorted(int(name[1]) for name in names if name)


def newest_whole(folder: Path, world: Transport, verify: bool) -> tuple[Path | None, list[str]]:
    """Finds the newest checkpoint without damaged files. All ranks call it together and get the same result.

    Ranks share the work of reading the files. Damaged checkpoints that are newer are renamed, so that they do not count
    among those to keep; otherwise two damaged ones would push out the last whole one.

    Args:
        folder: As `folder_of` returns it.
        world: Connects the ranks.
        verify: Whether to compare checksums; otherwise the newest is taken as it is.

    Returns:
        The checkpoint, None if there is none; and a message about each damaged one.

    Raises:
        ValueError: There are checkpoints, but none is whole. To begin anew then would throw away what can be restored.
    """
    damaged: dict[Path, str] = {}
    for step in reversed(world.gather(steps(folder), ALL)[0]):
        path = path_of(folder, step)
        problem = verify_files(path, world) if verify else ""
        if not problem:
            if world.global_rank == 0:
                _set_aside(damaged)
            return path, [f"{problem}; it was renamed to {_aside(old).name}" for old, problem in damaged.items()]
        damaged[path] = problem
    if damaged:
        raise ValueError(
            f"none of the {len(damaged)} checkpoints in {folder} is whole: {'; '.join(damaged.values())}. Restore one "
            "of them, or move them away to begin anew"
        )
    return None, []


def _set_aside(damaged: Iterable[Path]) -> None:
    """Renames damaged checkpoints. One of an earlier start may have the new name already; the newer one replaces it."""
    for path in damaged:
        shutil.rmtree(_aside(path), ignore_errors=True)
        path.rename(_aside(path))


def _aside(path: Path) -> Path:
    return path.with_name(f"damaged-{path.name}")


def load(checkpoint: Path, state: RunState, *, verify: bool) -> Mapping[str, Any]:
    """Loads parameters, optimizer and random states into a state. All ranks call it together.

    Args:
        checkpoint: Its folder. It may be of another layout, or of another run.
        state: Loaded in place.
        verify: Whether to compare the checksums of its files first.

    Returns:
        Its notes, which `RunState.resume` takes.
    """
    notes = state.pipe.load(checkpoint, state.optimizer, extra=state.random, verify=verify)
    _check_notes(notes, checkpoint)
    return notes


def _check_notes(notes: Mapping[str, Any], folder: Path) -> None:
    """Refuses notes that are not those of a training run, or not of the step that the folder is named after."""
    kinds = {"step": int, "position": int, "skipped": int, "layout": str, "best": float | int | None}
    invalid = [name for name, kind in kinds.items() if not isinstance(notes.get(name, ...), kind)]
    if invalid:
        raise ValueError(
            f"the checkpoint {folder} must have the notes of a training run, but its {NOTES} has no valid "
            f"{', '.join(invalid)}; resume from a checkpoint that terapipe train wrote"
        )
    name = NAME.fullmatch(folder.name)
    if name and int(name[1]) != notes["step"]:
        raise ValueError(f"the checkpoint {folder} is of step {notes['step']}; rename it, or move it away")


def path_of(folder: Path, step: int) -> Path:
    """Returns the folder of a checkpoint. Eight digits: names sort like numbers.

    Args:
        folder: As `folder_of` returns it.
        step: Of the checkpoint.
    """
    return folder / f"step-{step:08d}"


def clean(folder: Path) -> None:
    """Removes what a crash left behind, and restores a checkpoint that was being replaced. Called on rank 0, before
    anything else looks at the folder.

    Args:
        folder: As `folder_of` returns it.
    """
    for old in folder.glob("step-*.old"):
        recover(old.with_suffix(""))
    for leftover in folder.glob("step-*.*"):
        shutil.rmtree(leftover, ignore_errors=True)


class CheckpointFolder:
    """Saves checkpoints, and removes old ones. All ranks have one; rank 0 removes.

    ::

        save(step 100) -- copy to memory --+----- written in the background -----+
        step 101, 102, ...                 |  training goes on                   |
        poll() after each step                                                   +-> "saved", best.json, remove old

    Old checkpoints are removed only after a newer one is complete on the disk. That needs room
    for one more than `keep`, and leaves at no moment fewer than `keep` whole ones.

    Args:
        folder: As `folder_of` returns it.
        config: How many to keep, and whether to write in the background.
        is_main: Whether this rank is the one that removes.
        say: Called with an event, a message and, if it is not the current one, the step.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, is_main: bool, say: Callable[..., None]) -> None:
        self.folder, self._config, self._is_main, self._say = folder, config, is_main, say
        self._saving: tuple[Mapping[str, Any], Saving] | None = None

    @property
    def best(self) -> tuple[int, float] | None:
        """The step with the lowest evaluation loss of those saved, and the loss; None if there is none."""
        try:
            best = json.loads((self.folder / BEST).read_text(encoding="utf-8"))
            return int(best["step"]), float(best["eval_loss"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, state: RunState, notes: Mapping[str, Any], wait: bool) -> bool:
        """Saves a state under its step. All ranks call it together, between two steps.

        Args:
            state: Its tensors are copied before this returns, so the next step may change them.
            notes: What `RunState.take_notes` returned.
            wait: Whether the checkpoint must be complete on return. Otherwise it may be written in the background.

        Returns:
            False if it failed, for example on a full disk: training continues, and older checkpoints stay.
        """
        arguments: dict[str, Any] = {"extra": state.random, "notes": notes}
        self.finish()
        step = int(notes["step"])
        folder = path_of(self.folder, step)
        try:
            if wait or not self._config.background:
                state.pipe.save(folder, state.optimizer, **arguments)
                self._note_saved(notes)
            else:
                self._saving = notes, state.pipe.save_in_background(folder, state.optimizer, **arguments)
        except OSError as error:
            self._note_failure(step, error)
            return False
        return True

    def poll(self) -> None:
        """Finishes a save in the background if it is done. Called after every step; it does not wait."""
        if self._saving is not None and self._saving[1].done():
            self.finish()

    def finish(self) -> None:
        """Waits for a save in the background, if there is one."""
        if self._saving is None:
            return
        notes, saving = self._saving
        self._saving = None
        try:
            saving.result()
        except OSError as error:
            self._note_failure(int(notes["step"]), error)
        else:
            self._note_saved(notes)

    def _note_saved(self, notes: Mapping[str, Any]) -> None:
        """Tells of a complete checkpoint and removes the oldest ones. best.json is written first: what it names
        stays."""
        step, loss = int(notes["step"]), notes.get("eval_loss")
        self._say("checkpoint", f"saved {path_of(self.folder, step)}", step)
        if not self._is_main:
            return
        if loss is not None and loss == notes["best"]:
            files.write(self.folder / BEST, json.dumps({"step": step, "eval_loss": loss}) + "\n")
        best = self.best[0] if self._config.best and self.best else None
        for old in steps(self.folder)[: -self._config.keep] if self._config.keep else ():
            if old != best:
                self._remove(path_of(self.folder, old))

    def _remove(self, path: Path) -> None:
        """Renames before deleting, so that an incomplete checkpoint never has the name of a complete one."""
        removed = path.with_name(path.name + ".removed")
        path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)

    def _note_failure(self, step: int, error: OSError) -> None:
        self._say("failed", f"step {step} could not be saved, training goes on: {error}")
