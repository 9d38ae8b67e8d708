"""The numbers of a run as they come: metrics.jsonl, TensorBoard, Weights & Biases, trackio. Only rank 0 writes them.

Training never stops because a number could not be written: that is said once, and tried again with the next row.
"""

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from terapipe import files
from terapipe.config import LoggingConfig
from terapipe.training.logging.rows import Row, finite
from terapipe.training.logging.tensorboard import TensorBoard
from terapipe.training.logging.trackers import Tracker, chosen

FILE = "metrics.jsonl"


class _Sink(Protocol):
    name: str

    def write(self, row: Row) -> None: ...  # what goes wrong is an OSError

    def close(self) -> None: ...


class Metrics:
    """``step`` is where training begins: rows of later steps, which an earlier attempt left, are dropped."""

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
        self._said: set[str] = set()
        lines = _Lines(folder / FILE)
        self._attempt(FILE, lines.cut, step)
        self._sinks: list[_Sink] = [lines]
        if config.tensorboard:
            try:
                self._sinks.append(TensorBoard(folder / "tensorboard", step))
            except ImportError as error:
                complain(f"no event files: {error}; pip install tensorboard, or set logging.tensorboard = false")
        for name in chosen(config):
            self._sinks.append(Tracker(name, getattr(config, name), folder, lines.went_back, settings))

    def write(self, row: Row) -> None:
        row = finite(row)
        for sink in self._sinks:
            self._attempt(sink.name, sink.write, row)

    def close(self) -> None:
        for sink in self._sinks:
            self._attempt(sink.name, sink.close)

    def _attempt(self, name: str, action: Callable[..., None], *given: Any) -> None:
        try:
            action(*given)
        except OSError as error:
            if name not in self._said:
                self._said.add(name)
                self._complain(f"{name} could not be written: {error}; training goes on, later rows are tried again")


def read(folder: Path) -> list[dict[str, Any]]:
    """All rows of a run, none where there is no file. A line that a crash tore is passed over."""
    path = folder / FILE
    return [row for row in map(_row, path.read_bytes().split(b"\n")) if row] if path.exists() else []


def check(config: LoggingConfig) -> None:
    """Refuses trackers that are not installed; to be called before anything is started."""
    for name in chosen(config):
        # A folder that an earlier run left, ./wandb, can be imported too, but is empty.
        try:
            there = hasattr(import_module(name), "init")
        except ImportError:
            there = False
        if not there:
            raise ValueError(
                f"logging.{name} = {getattr(config, name)!r} needs the package {name}, which is not installed; "
                f"pip install {name}, or leave logging.{name} empty"
            )


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


class _Lines:
    """One row, one line. The file is opened anew for each, so that every row is there as soon as it is written."""

    name = FILE

    def __init__(self, path: Path) -> None:
        self._path = path
        self._whole = 0  # bytes of whole rows; what lies behind them is what a full disk left of one
        self.went_back = True  # to an earlier step than the last row has

    def cut(self, step: int) -> None:
        """Drops torn lines and rows of later steps; of a run from the beginning, all."""
        before = self._path.read_bytes() if self._path.exists() else b""
        self._whole = before.rfind(b"\n") + 1
        rows = [(line, row) for line in before.split(b"\n") if (row := _row(line))]
        kept = [line for line, row in rows if step and row.get("step", 0) <= step]
        after = b"".join(line + b"\n" for line in kept)
        if after != before:
            files.write(self._path, after.decode("utf-8"))
        self._whole = len(after)
        self.went_back = not step or len(kept) < len(rows)

    def write(self, row: Row) -> None:
        self._append(json.dumps(row, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        self._append(b"")

    def _append(self, line: bytes) -> None:
        with self._path.open("ab", buffering=0) as file:
            start = min(file.tell(), self._whole)
            file.truncate(start)
            if file.write(line) < len(line):
                raise OSError("the disk took only a part of a row")
            self._whole = start + len(line)
