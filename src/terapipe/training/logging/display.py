"""The output of a run: a live panel on a terminal, which is left as it was, plain lines elsewhere; rows of its log."""

import math
import os
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from statistics import fmean, median
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from terapipe.reporting.style import count, digits, memory, seconds, share
from terapipe.training.logging.metrics import Metrics

SHOW_CURSOR = b"\x1b[?25h"
_NO_TERMINAL = (termios.error, OSError, ValueError, AttributeError)  # errors if there is no terminal


class Terminal:
    """While it is entered, Ctrl-C does not print ^C, which would move the panel. Does nothing without a terminal or in
    the background."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def __enter__(self) -> Self:
        with suppress(*_NO_TERMINAL):
            before = termios.tcgetattr(sys.stdin.fileno())
            settings = [*before]
            settings[3] &= ~termios.ECHOCTL
            if _set(settings):
                self._before = before
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.restore()

    def restore(self) -> None:
        """Also called from a signal handler: an interrupted panel leaves the cursor hidden."""
        with suppress(*_NO_TERMINAL):
            if self._before is not None and _set(self._before):
                self._before = None
        with suppress(*_NO_TERMINAL):
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), SHOW_CURSOR)


def _set(attributes: list[Any]) -> bool:
    """Only in the foreground: the kernel suspends a background process that changes its terminal."""
    terminal = sys.stdin.fileno()
    if os.tcgetpgrp(terminal) != os.getpgrp():
        return False
    termios.tcsetattr(terminal, termios.TCSADRAIN, attributes)
    return True


_MAX_BARS = 8  # up to this number of ranks, each has a bar of its memory
_WIDE, _MIDDLE, _NARROW = 116, 84, 50  # terminal widths for four, three and two columns of values
_LABEL = 11  # characters


def number(value: float) -> str:
    """Three decimal places, so that digits do not move between steps; more if small, an exponent if huge."""
    if abs(value) >= 1e6:
        return f"{value:.2e}"
    return f"{value:.3f}" if abs(value) >= 0.1 or value == 0 else digits(value)


def extremes(sizes: Sequence[float]) -> str:
    low, high = memory(min(sizes)), memory(max(sizes))
    return high if low == high else f"{low} to {high}"


# Labels and formats of the values, by topic.
_PANEL: tuple[dict[str, tuple[str, Callable[[Any], str]]], ...] = (
    {
        "loss": ("loss", number),
        "recent": ("recent mean", number),
        "lr": ("lr", "{:.2e}".format),
        "grad_norm": ("grad norm", number),
    },
    {
        "eval_loss": ("eval loss", number),
        "perplexity": ("perplexity", digits),
        "evaluated": ("evaluated", "step {}".format),
        "saved": ("checkpoint", "step {}".format),
        "left_out": ("left out", lambda steps: count(steps, "step")),
    },
    {
        "tokens_per_second": ("tokens/s", "{:,.0f}".format),
        "median": ("step time", seconds),
        "forecast": ("predicted", str),
        "idle": ("idle", share),
    },
)


def bar(step: int, total: int, left: str) -> RenderableType:
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(ratio=1)
    done = ProgressBar(total=max(total, 1), completed=step)
    row.add_row(done, f"step {step}/{total}", f"{left} left" if left else "")
    return row


def values(known: Mapping[str, Any], width: int) -> list[RenderableType]:
    """All known values, in as many columns as fit."""
    quality, state, speed = (_pairs(known, topic) for topic in _PANEL)
    memory_bars = _memory(known.get("memory"), 20 if width >= _MIDDLE or width < _NARROW else 8)
    columns = [[quality, state, speed, *memory_bars]]
    if width >= _WIDE:
        columns = [[quality], [state], [speed], memory_bars]
    elif width >= _MIDDLE:
        columns = [[quality], [state], [speed]]
    elif width >= _NARROW:
        columns = [[quality, state], [speed, *memory_bars]]
    grid = Table.grid(padding=(0, 2), expand=True)
    for _ in columns:
        grid.add_column(ratio=1)
    grid.add_row(*(Group(*column) for column in columns))
    return [grid, *(["", *memory_bars] if memory_bars and _MIDDLE <= width < _WIDE else ())]


def _memory(sizes: Sequence[float] | None, width: int) -> list[RenderableType]:
    if not sizes:
        return []
    rows = Table.grid(padding=(0, 1))
    if len(sizes) > _MAX_BARS:
        rows.add_row(Text("memory".ljust(_LABEL), "dim"), extremes(sizes))
        rows.add_row(Text("fullest", "dim"), f"rank {sizes.index(max(sizes))}")
        return [rows]
    for rank, size in enumerate(sizes):
        used = ProgressBar(max(*sizes, 1), size, width, complete_style="cyan", finished_style="cyan")
        rows.add_row(Text(f"rank {rank}", "dim"), used, memory(size))
    return [rows]


def _pairs(known: Mapping[str, Any], topic: Mapping[str, tuple[str, Callable[[Any], str]]]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(min_width=_LABEL)
    for key, (name, form) in topic.items():
        if key in known:
            table.add_row(Text(name, "dim"), Text(form(known[key]), no_wrap=True, overflow="ellipsis"))
    return table


_RECENT = 50  # rows whose mean or median is shown
_STYLES = {"nan": "bold red", "failed": "bold red", "drift": "yellow", "stopped": "yellow"}
# The columns of plain lines.
_COLUMNS: dict[str, Callable[[Any], str]] = {
    "loss": lambda value: f"loss {number(value)}",
    "metrics": lambda metrics: "  ".join(
        f"{name} {number(value)}" for name, value in metrics.items() if value is not None
    ),
    "lr": lambda value: f"lr {value:.2e}",
    "grad_norm": lambda value: f"grad norm {number(value)}",
    "tokens_per_second": lambda value: f"{value:,.0f} tokens/s",
    "seconds": seconds,
    "predicted": lambda value: f"(predicted {seconds(value)})",
    "idle": lambda value: f"idle {share(value)}",
    "memory": lambda sizes: f"memory {extremes(sizes)}",
    "left": lambda value: f"{value} left",
}


class Display:
    """Shows the rows that are also written to files. Missing values and values that are not finite are left out."""

    def __init__(
        self,
        console: Console,
        total: int,
        start: int,
        every: int,
        title: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._total, self._every, self._title, self._clock = console, total, every, title, clock
        self._step = start
        self._known: dict[str, Any] = {}  # the latest value of each key, and values computed from several rows
        self._losses: deque[float] = deque(maxlen=_RECENT)
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._pace: deque[tuple[float, int]] = deque([(clock(), start)], maxlen=2 * _RECENT)
        self._widths: dict[str, int] = {}  # of columns in plain lines
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            # Live draws in a thread. It gets finished views, so it never sees values that are being changed.
            self._live = Live(self._view(), console=self._console, refresh_per_second=4)
            self._live.start()
        else:
            self.say(self._title)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, message: str, style: str = "") -> None:
        """Print a line, above the panel if there is one."""
        with suppress(OSError):  # output to a file on a full disk must not stop training
            self._console.print(Text(self._printable(message), style=style), soft_wrap=self._live is None)

    def row(self, row: Mapping[str, Any]) -> None:
        row = {key: value for key, value in row.items() if _is_known(value)}
        step = row.get("step", self._step)
        self._remember(row, step)
        self._announce(row, step)
        if self._live is not None:
            self._live.update(self._view())
        elif "seconds" in row and (step % self._every == 0 or step == self._total):
            self.say(self._line(row, step))

    def _remember(self, row: Mapping[str, Any], step: int) -> None:
        known = self._known
        if row.get("event") == "checkpoint":
            known["saved"] = step
        elif "event" in row:
            known["last"] = f"step {step}, {_event(row)}"
        known |= row
        if "eval_loss" in row:
            known["evaluated"] = step
        if "seconds" not in row:
            return
        self._step = step
        self._pace.append((self._clock(), step))
        self._losses += [row["loss"]] if "loss" in row else []
        if len(self._losses) > 1:
            known["recent"] = fmean(self._losses)
        self._seconds.append(row["seconds"])
        known["median"] = median(self._seconds)
        if "tokens_per_second" in row and known["median"]:  # from the same steps as the median time
            known["tokens_per_second"] = row["tokens_per_second"] * row["seconds"] / known["median"]
        if row.get("predicted"):
            known["forecast"] = f"{seconds(row['predicted'])} ({known['median'] / row['predicted']:.2f} x)"
        if row.get("skipped"):
            known["left_out"] = known.get("left_out", 0) + 1

    def _announce(self, row: Mapping[str, Any], step: int) -> None:
        """Print events, evaluations and samples. The panel shows checkpoints itself."""
        if "event" in row and not (self._live and row["event"] == "checkpoint"):
            self.say(f"step {step}  {_event(row)}", _STYLES.get(row["event"], ""))
        if "eval_loss" in row:
            perplexity = f", perplexity {digits(row['perplexity'])}" if "perplexity" in row else ""
            self.say(f"step {step}  evaluation: loss {number(row['eval_loss'])}{perplexity}")
        if "sample" in row:
            self.say(f"step {step}  sample:")
            self.say("\n".join(f"  | {line}" for line in str(row["sample"]).split("\n")), "dim")

    def _time_left(self) -> str:
        """Remaining time by the wall clock, which includes evaluations and checkpoints; empty before the first step."""
        (began, first), (now, last) = self._pace[0], self._pace[-1]
        if last <= first:
            return ""
        return str(timedelta(seconds=round((now - began) / (last - first) * (self._total - last))))

    def _line(self, row: Mapping[str, Any], step: int) -> str:
        """Values are aligned with those of the line before. A column that has had a value keeps its place."""
        row = {**row, "left": self._time_left()}
        cells = {key: form(row[key]) for key, form in _COLUMNS.items() if row.get(key) not in (None, [], "")}
        for key, cell in cells.items():
            self._widths[key] = max(self._widths.get(key, 0), len(cell))
        aligned = [cells.get(key, "").rjust(self._widths[key]) for key in _COLUMNS if key in self._widths]
        return "  ".join([f"step {step:>{len(str(self._total))}}/{self._total}", *aligned]).rstrip()

    def _view(self) -> RenderableType:
        parts = [bar(self._step, self._total, self._time_left()), "", *values(self._known, self._console.width)]
        if "last" in self._known:
            last = self._printable(self._known["last"]).replace("\n", " ")
            parts += ["", Text(last, style="dim", no_wrap=True, overflow="ellipsis")]
        return Panel(
            Group(*parts), title=Text(self._printable(self._title), "bold default"), border_style="bright_black"
        )

    def _printable(self, text: str) -> str:
        """Generated text can contain anything: replace control characters and what the output cannot encode."""
        printable = "".join(
            c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text.expandtabs(4)
        )
        encoding = self._console.encoding
        return printable.encode(encoding, "replace").decode(encoding)


def _is_known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _event(row: Mapping[str, Any]) -> str:
    return f"{row['event']}: {row['message']}" if row.get("message") else str(row["event"])


class RunLog:
    """Rank 0 has a display and metrics files. On other ranks, rows are dropped."""

    def __init__(self, display: Display | None = None, metrics: Metrics | None = None) -> None:
        self._display, self._metrics = display, metrics

    @property
    def is_main(self) -> bool:
        return self._metrics is not None

    def row(self, row: Mapping[str, Any]) -> None:
        if self._display is not None:
            self._display.row(row)
        if self._metrics is not None:
            self._metrics.write(row)
