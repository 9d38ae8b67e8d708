"""The numbers of a run: metrics.jsonl, TensorBoard, Weights & Biases, trackio. Only rank 0 writes them.

Training never stops because a row could not be written. The first failure is reported; the next row is tried again.
"""

import json
import math
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from terapipe import files
from terapipe.config import LoggingConfig
from terapipe.training.logging.trackers import Row, TensorBoard, Tracker, tracker_names

FILE = "metrics.jsonl"


class _Sink(Protocol):
    name: str

    def write(self, row: Row) -> None: ...  # failures are OSErrors

    def close(self) -> None: ...


class Metrics:
    """Writes rows to all sinks. ``step`` is the step that training starts from: rows of later steps, left by an earlier
    attempt, are dropped."""

    def __init__(
        self,
        folder: Path,
        config: LoggingConfig,
        *,
        step: int,
        settings: Mapping[str, Any],
        complain: Callable[[str], None] = print,
    ) -> None:
        check(config)
        folder.mkdir(parents=True, exist_ok=True)
        self._complain = complain
        self._failed: set[str] = set()
        lines = _Lines(folder / FILE)
        self._attempt(FILE, lines.cut, step)
        self._sinks: list[_Sink] = [lines]
        if config.tensorboard:
            try:
                self._sinks.append(TensorBoard(folder / "tensorboard", step))
            except ImportError as error:
                complain(f"no event files: {error}; pip install tensorboard, or set logging.tensorboard = false")
        for name in tracker_names(config):
            self._sinks.append(Tracker(name, getattr(config, name), folder, lines.went_back, settings))

    def write(self, row: Row) -> None:
        row = _finite(row)
        for sink in self._sinks:
            self._attempt(sink.name, sink.write, row)

    def close(self) -> None:
        for sink in self._sinks:
            self._attempt(sink.name, sink.close)

    def _attempt(self, name: str, action: Callable[..., None], *arguments: Any) -> None:
        try:
            action(*arguments)
        except OSError as error:
            if name not in self._failed:
                self._failed.add(name)
                self._complain(f"{name} could not be written: {error}; training goes on, later rows are tried again")


def read(folder: Path) -> list[dict[str, Any]]:
    """All rows of a run, none if there is no file. Lines torn by a crash are skipped."""
    path = folder / FILE
    return [row for row in map(_row, path.read_bytes().split(b"\n")) if row] if path.exists() else []


def check(config: LoggingConfig) -> None:
    """Refuses trackers that are not installed. Called before anything is started."""
    for name in tracker_names(config):
        # An empty folder left by an earlier run, ./wandb, can be imported too.
        try:
            installed = hasattr(import_module(name), "init")
        except ImportError:
            installed = False
        if not installed:
            raise ValueError(
                f"logging.{name} = {getattr(config, name)!r} needs the package {name}, which is not installed; "
                f"pip install {name}, or leave logging.{name} empty"
            )


def _finite(value: Any) -> Any:
    """With null instead of NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


class _Lines:
    """metrics.jsonl. The file is opened for each row, so that a row can be read as soon as it is written."""

    name = FILE

    def __init__(self, path: Path) -> None:
        self._path = path
        self._complete = 0  # bytes of complete rows; a full disk may leave a part of a row behind them
        self.went_back = True  # whether training starts from an earlier step than the last row

    def cut(self, step: int) -> None:
        """Drops torn lines and rows of later steps, or all rows if training starts from the beginning."""
        before = self._path.read_bytes() if self._path.exists() else b""
        self._complete = before.rfind(b"\n") + 1
        rows = [(line, row) for line in before.split(b"\n") if (row := _row(line))]
        kept = [line for line, row in rows if step and row.get("step", 0) <= step]
        after = b"".join(line + b"\n" for line in kept)
        if after != before:
            files.write(self._path, after.decode("utf-8"))
        self._complete = len(after)
        self.went_back = not step or len(kept) < len(rows)

    def write(self, row: Row) -> None:
        self._append(json.dumps(row, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        self._append(b"")

    def _append(self, line: bytes) -> None:
        with self._path.open("ab", buffering=0) as file:
            start = min(file.tell(), self._complete)
            file.truncate(start)
            if file.write(line) < len(line):
                raise OSError("the disk took only a part of a row")
            self._complete = start + len(line)
