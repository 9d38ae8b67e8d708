"""The numbers of a run: metrics.jsonl, TensorBoard, Weights & Biases, trackio. Only rank 0 writes them.

A row is a JSON object with a step, and what there is of these:

::

    key                unit        meaning
    -----------------  ----------  ---------------------------------------------------------------------
    loss               nats        mean over the step's labels, before its update
    grad_norm          -           norm of all gradients together, before clipping
    lr                 -           learning rate of the update
    tokens             tokens      taken since the start of training, padding included
    tokens_per_second  tokens/s    of this step, over all ranks
    seconds            s           of this step by rank 0's clock, without evaluation and saving
    predicted          s           of a step, by simulation of the plan
    idle               share       of the pipeline's time in which a rank has nothing to compute
    memory             bytes       at the peak, for each rank
    metrics            -           what the objective or the routers report, by name
    skipped            true        the step was not finite and changed nothing
    eval_loss          nats        mean over the labels of the evaluation data
    perplexity         -           exp(eval_loss), for plain cross-entropy only
    sample             text        generated from the prompt
    event, message     text        what happened: checkpoint, resumed, damaged, changed, drift, nan, ...

Training never stops because a row could not be written. The first failure is reported; rows that the disk refused wait
in memory and are written with a later one.
"""

import errno
import json
import math
import textwrap
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from terapipe import files
from terapipe.training.config import LoggingConfig

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
    scalars |= {f"objective/{name}": value for name, value in (row.get("metrics") or {}).items() if value is not None}
    memory = {f"memory/rank{rank}": size for rank, size in enumerate(row.get("memory") or ()) if size is not None}
    return scalars | memory


class TensorBoard:
    """TensorBoard event files.

    Args:
        folder: For the files; each start of a run adds one.
        step: That training starts from. Later steps in older files are hidden by TensorBoard's purge_step.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, step: int) -> None:
        self._make_writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._folder = folder
        self._purge_step: int | None = step + 1 if step else 0  # hides later steps in older files
        self._writer: Any = None
        self._pause, self._skip = 10, 0  # rows to wait with after the next failure; rows still to wait with
        self._waiting: list[Row] = []

    def write(self, row: Row) -> None:
        """Adds a row.

        A writer that has failed cannot be used again, and its thread prints the error. The next one begins a new file,
        so while the disk stays full it is tried at growing intervals: after 10 rows, 20, 40.

        Args:
            row: Waits in memory until it is written.
        """
        self._waiting.append(row)
        if self._skip:
            self._skip -= 1
            return
        try:
            self._add_waiting()
        except OSError:
            self._writer, self._skip, self._pause = None, self._pause, 2 * self._pause
            raise

    def _add_waiting(self) -> None:
        while self._waiting:
            self._add(self._waiting[0])
            self._waiting.pop(0)

    def _add(self, row: Row) -> None:
        if self._writer is None:
            self._writer = self._make_writer(self._folder, purge_step=self._purge_step, flush_secs=15)
            self._purge_step = None
        for name, value in _scalars(row).items():
            self._writer.add_scalar(name, value, row.get("step"))
        for name, text in _texts(row).items():
            self._writer.add_text(name, text, row.get("step"))

    def close(self) -> None:
        """Writes what still waits, and ends the writer's thread."""
        self._add_waiting()
        if self._writer is not None:
            self._writer.close()


def _texts(row: Row) -> dict[str, str]:
    """Texts of a row, as Markdown. A sample is indented, so that TensorBoard shows its line breaks and asterisks
    unchanged."""
    texts = {}
    if "sample" in row:
        sample = str(row["sample"]).encode("utf-8", "replace").decode("utf-8")
        texts["samples"] = textwrap.indent(sample, "    ", lambda line: True)
    if "event" in row:
        texts["events"] = f"**{row['event']}** {row.get('message', '')}"
    return texts


def tracker_names(config: LoggingConfig) -> list[str]:
    """Returns the trackers that a configuration asks for.

    Args:
        config: The [logging] section.
    """
    return [name for name in ("wandb", "trackio") if getattr(config, name)]


class Tracker:
    """A run of wandb or trackio, which have the same interface.

    Neither can remove rows. So a run that goes back to an earlier step begins a new tracker run in the same group; one
    that continues where it ended continues its tracker run, whose id is in a file of the run's folder.

    Args:
        name: Of the package.
        project: To log to.
        folder: Of the run; its name is the group.
        new_run: Whether training goes back to an earlier step.
        settings: All keys of the configuration, for the tracker's tables.
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
        """Logs the numbers of a row; samples and events stay in metrics.jsonl.

        Args:
            row: Without numbers, nothing is sent.
        """
        scalars = _scalars(row)
        if scalars:
            self._guard(lambda: self._run.log(scalars, step=row.get("step")))

    def close(self) -> None:
        self._guard(self._run.finish)

    def _guard(self, action: Callable[[], object]) -> None:
        """Makes an OSError of whatever a network or a database raises, so that it is treated like a full disk."""
        try:
            action()
        except Exception as error:  # errors of networks and databases, of any type
            raise OSError(f"{type(error).__name__}: {error}") from error


FILE = "metrics.jsonl"


class _Sink(Protocol):
    """Where rows go. A failure is an OSError; a row that failed is kept and written later."""

    name: str

    def write(self, row: Row) -> None: ...  # failures are OSErrors

    def close(self) -> None: ...


class Metrics:
    """Writes rows to all sinks. Rows of steps after the one that training starts from, left by a start that was killed,
    are dropped: those steps are repeated.

    Args:
        folder: Of the run.
        config: Which sinks.
        step: That training starts from.
        settings: For the trackers.
        complain: Called with the first failure of each sink.
    """

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
        """Writes a row to all sinks. Does not raise.

        Args:
            row: NaN and infinity become null.
        """
        row = _finite(row)
        for sink in self._sinks:
            self._attempt(sink.name, sink.write, row)

    def close(self) -> None:
        """Writes what waits, and closes all sinks."""
        for sink in self._sinks:
            self._attempt(sink.name, sink.close)

    def _attempt(self, name: str, action: Callable[..., None], *arguments: Any) -> None:
        """Does it, or reports why not, once for each sink: a full disk would fill the screen, too."""
        try:
            action(*arguments)
        except OSError as error:
            if name not in self._failed:
                self._failed.add(name)
                self._complain(
                    f"{name} could not be written: {error}; training goes on, and what is missing is written later"
                )


def read(folder: Path) -> list[dict[str, Any]]:
    """Reads all rows of a run, none if there is no file. Lines torn by a crash are skipped.

    Args:
        folder: Of the run.
    """
    path = folder / FILE
    return [row for row in map(_row, path.read_bytes().split(b"\n")) if row] if path.exists() else []


def check(config: LoggingConfig) -> None:
    """Refuses trackers that are not installed. Called before anything is started.

    Args:
        config: Names them.
    """
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
    """A line as a row; None if it is torn, or something else."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


class _Lines:
    r"""metrics.jsonl. The file is opened for each row, so that a row can be read as soon as it is
    written.

    ::

        file      {row}\n{row}\n{row}\n{"ste        a full disk took half a row
                  |------ complete ------|           cut here before the next write
        memory    {"step": 4, ...}\n                waits, and is written in whole

    Args:
        path: Of the file.
    """

    name = FILE

    def __init__(self, path: Path) -> None:
        self._path = path
        self._complete = 0  # bytes of complete rows; a full disk may leave a part of a row behind them
        self._waiting = b""  # rows that the disk has refused
        self.went_back = True  # whether training starts from an earlier step than the last row

    def cut(self, step: int) -> None:
        """Drops torn lines and rows of later steps, or all rows if training starts from the beginning.

        Args:
            step: That training starts from.
        """
        before = self._path.read_bytes() if self._path.exists() else b""
        self._complete = before.rfind(b"\n") + 1
        rows = [(line, row) for line in before.split(b"\n") if (row := _row(line))]
        earlier = [line for line, row in rows if step and row.get("step", 0) <= step]
        after = b"".join(line + b"\n" for line in earlier)
        if after != before:
            files.write(self._path, after.decode("utf-8"))
        self._complete = len(after)
        self.went_back = not step or len(earlier) < len(rows)

    def write(self, row: Row) -> None:
        self._waiting += json.dumps(row, allow_nan=False).encode() + b"\n"
        self._append_waiting()

    def close(self) -> None:
        self._append_waiting()

    def _append_waiting(self) -> None:
        """Writes as many whole rows as the disk takes, in one call. A part of a row is cut off again, and OSError
        raised."""
        with files.with_path(self._path), self._path.open("ab", buffering=0) as file:
            start = min(file.tell(), self._complete)
            file.truncate(start)
            taken = self._waiting.rfind(b"\n", 0, file.write(self._waiting) or 0) + 1
            self._complete, self._waiting = start + taken, self._waiting[taken:]
            if self._waiting:
                file.truncate(self._complete)
                raise OSError(errno.ENOSPC, "the disk took only a part of a row")
