"""The numbers of a run as they come: metrics.jsonl, TensorBoard, Weights & Biases, trackio. Only rank 0 writes them.

Training never stops because a number could not be written: that is said once, and tried again with the next row.
"""

import json
import math
import textwrap
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from terapipe.config import LoggingConfig
from terapipe.reporting import html

Row = Mapping[str, Any]
FILE = "metrics.jsonl"
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
                self._sinks.append(_TensorBoard(folder / "tensorboard", step))
            except ImportError as error:
                complain(f"no event files: {error}; pip install tensorboard, or set logging.tensorboard = false")
        for name in _trackers(config):
            self._sinks.append(_Tracker(name, getattr(config, name), folder, lines.went_back, settings))

    def write(self, row: Row) -> None:
        row = _finite(row)
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
    for name in _trackers(config):
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


def flat(row: Row) -> dict[str, float]:
    """The numbers of a row by the names they have in TensorBoard and the trackers."""
    found = {name: row[key] for key, name in _NAMES.items() if row.get(key) is not None}
    ranks = {f"memory/rank{rank}": size for rank, size in enumerate(row.get("memory") or ()) if size is not None}
    return found | ranks


def _trackers(config: LoggingConfig) -> list[str]:
    return [name for name in ("wandb", "trackio") if getattr(config, name)]


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity: null stands for them."""
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
            html.write(self._path, after.decode("utf-8"))
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


class _TensorBoard:
    name = "TensorBoard"

    def __init__(self, folder: Path, step: int) -> None:
        self._make = import_module("torch.utils.tensorboard").SummaryWriter
        self._folder = folder
        self._purge: int | None = step + 1 if step else 0  # what older files have from there on is hidden
        self._writer: Any = None
        self._pause, self._skip = 10, 0  # rows to let pass after the next failure, and before the next attempt

    def write(self, row: Row) -> None:
        """A writer that failed is dead, and its thread prints why: the next one begins a file of its own, so while a
        disk stays full it is tried ever more seldom."""
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
            self._writer = self._make(self._folder, purge_step=self._purge, flush_secs=15)
            self._purge = None
        for name, value in flat(row).items():
            self._writer.add_scalar(name, value, row.get("step"))
        for name, text in _texts(row).items():
            self._writer.add_text(name, text, row.get("step"))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _texts(row: Row) -> dict[str, str]:
    """As Markdown, which TensorBoard shows: a sample is indented so that its line breaks and stars are left alone."""
    texts = {}
    if "sample" in row:
        sample = str(row["sample"]).encode("utf-8", "replace").decode("utf-8")
        texts["samples"] = textwrap.indent(sample, "    ", lambda line: True)
    if "event" in row:
        texts["events"] = f"**{row['event']}** {row.get('message', '')}"
    return texts


class _Tracker:
    """wandb or trackio, which are called alike. Neither can forget: going back to an earlier step begins another run
    of the same group, and only one that goes on where it ended is continued."""

    def __init__(self, name: str, project: str, folder: Path, anew: bool, settings: Mapping[str, Any]) -> None:
        self.name = name
        file = folder / f"{name}-run"
        if anew or not file.exists():
            html.write(file, uuid4().hex[:8])
        run, group = file.read_text(encoding="utf-8"), folder.resolve().name
        own = {"id": run, "dir": str(folder)} if name == "wandb" else {}
        self._run: Any = import_module(name).init(
            project=project, name=f"{group}-{run}", group=group, config=dict(settings), resume="allow", **own
        )

    def write(self, row: Row) -> None:
        numbers = flat(row)
        if numbers:
            self._guarded(lambda: self._run.log(numbers, step=row.get("step")))

    def close(self) -> None:
        self._guarded(self._run.finish)

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # whatever their networks and databases throw
            raise OSError(f"{type(error).__name__}: {error}") from error
