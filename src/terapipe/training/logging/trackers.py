"""The numbers of a run to TensorBoard, Weights & Biases and trackio."""

import textwrap
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

from terapipe import files
from terapipe.config import LoggingConfig

Row = Mapping[str, Any]
_NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "tokens_per_second": "speed/tokens_per_second",
    "seconds": "speed/seconds",
    "predicted": "speed/predicted",
    "idle": "speed/idle",
    "eval_loss": "eval/loss",
    "perplexity": "eval/perplexity",
}


def _scalars(row: Row) -> dict[str, float]:
    """The numbers of a row, by their names in TensorBoard and the trackers."""
    scalars = {name: row[key] for key, name in _NAMES.items() if row.get(key) is not None}
    memory = {f"memory/rank{rank}": size for rank, size in enumerate(row.get("memory") or ()) if size is not None}
    return scalars | memory


class TensorBoard:
    """TensorBoard event files."""

    name = "TensorBoard"

    def __init__(self, folder: Path, step: int) -> None:
        self._make_writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._folder = folder
        self._purge_step: int | None = step + 1 if step else 0  # hides later steps in older files
        self._writer: Any = None
        self._pause, self._skip = 10, 0  # rows to skip after the next failure; rows still to skip

    def write(self, row: Row) -> None:
        """A writer that has failed cannot be used again, and its thread prints the error. The next one begins a new
        file, so while the disk stays full it is tried at growing intervals."""
        if self._skip:
            self._skip -= 1
            return
        try:
            self._add(row)
        except OSError:
            self._writer, self._skip, self._pause = None, self._pause, 2 * self._pause
            raise

    def _add(self, row: Row) -> None:
        if self._writer is None:
            self._writer = self._make_writer(self._folder, purge_step=self._purge_step, flush_secs=15)
            self._purge_step = None
        for name, value in _scalars(row).items():
            self._writer.add_scalar(name, value, row.get("step"))
        for name, text in _texts(row).items():
            self._writer.add_text(name, text, row.get("step"))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _texts(row: Row) -> dict[str, str]:
    """As Markdown. A sample is indented, so that TensorBoard shows its line breaks and asterisks unchanged."""
    texts = {}
    if "sample" in row:
        sample = str(row["sample"]).encode("utf-8", "replace").decode("utf-8")
        texts["samples"] = textwrap.indent(sample, "    ", lambda line: True)
    if "event" in row:
        texts["events"] = f"**{row['event']}** {row.get('message', '')}"
    return texts


def tracker_names(config: LoggingConfig) -> list[str]:
    return [name for name in ("wandb", "trackio") if getattr(config, name)]


class Tracker:
    """A run of wandb or trackio, which have the same interface.

    Neither can remove rows. So a run that goes back to an earlier step begins a new tracker run in the same group; one
    that continues where it ended continues its tracker run.
    """

    def __init__(self, name: str, project: str, folder: Path, new_run: bool, settings: Mapping[str, Any]) -> None:
        self.name = name
        file = folder / f"{name}-run"
        if new_run or not file.exists():
            files.write(file, uuid4().hex[:8])
        run, group = file.read_text(encoding="utf-8"), folder.resolve().name
        options = {"id": run, "dir": str(folder)} if name == "wandb" else {}
        self._run: Any = import_module(name).init(
            project=project, name=f"{group}-{run}", group=group, config=dict(settings), resume="allow", **options
        )

    def write(self, row: Row) -> None:
        scalars = _scalars(row)
        if scalars:
            self._guarded(lambda: self._run.log(scalars, step=row.get("step")))

    def close(self) -> None:
        self._guarded(self._run.finish)

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # errors of networks and databases, of any type
            raise OSError(f"{type(error).__name__}: {error}") from error
