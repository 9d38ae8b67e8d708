"""The output of a run: a live panel on a terminal, which is left as it was, plain lines elsewhere; rows of its log.

::

    +--------------------------- runs: gpt-tiny ----------------------------+
    | ========================--------------  step 620/1000   0:02:11 left  |
    |                                                                       |
    | loss        3.412      eval loss  3.507     tokens/s   81,920         |
    | recent mean 3.430      perplexity 33.4      step time  100 ms         |
    | lr          2.1e-04    checkpoint step 600  predicted  96 ms (1.04 x) |
    | step 600, evaluation ...                                              |
    +-----------------------------------------------------------------------+

Both show the rows that metrics.jsonl gets, and nothing else: what was on the screen can be read again from the file.
Only rank 0 shows anything.
"""

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
    the background.

    The launcher enters one as well as rank 0, because a process that is killed restores nothing.
    """

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def __enter__(self) -> Self:
        """Remembers the terminal's attributes and switches the echo of control characters off."""
        with suppress(*_NO_TERMINAL):
            before = termios.tcgetattr(sys.stdin.fileno())
            settings = [*before]
            settings[3] &= ~termios.ECHOCTL
            if _set(settings):
                self._before = before
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leaves the terminal as it was, however the run ended."""
        self.restore()

    def restore(self) -> None:
        """Restores the terminal, and shows the cursor, which an interrupted panel leaves hidden. Also called from a
        signal handler, and harmless when called twice."""
        with suppress(*_NO_TERMINAL):
            if self._before is not None and _set(self._before):
                self._before = None
        with suppress(*_NO_TERMINAL):
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), SHOW_CURSOR)


def _set(attributes: list[Any]) -> bool:
    """Whether the attributes were set. Only in the foreground: the kernel suspends a background process that changes
    its terminal."""
    terminal = sys.stdin.fileno()
    if os.tcgetpgrp(terminal) != os.getpgrp():
        return False
    termios.tcsetattr(terminal, termios.TCSADRAIN, attributes)
    return True


_MAX_BARS = 8  # up to this number of ranks, each has a bar of its memory
_WIDE, _MIDDLE, _NARROW = 116, 84, 50  # terminal widths for four, three and two columns of values
_LABEL = 11  # characters


def number(value: float) -> str:
    """Formats a number with three decimal places, so that digits do not move between steps; more if small, an exponent
    if huge.

    Args:
        value: Finite.
    """
    if abs(value) >= 1e6:
        return f"{value:.2e}"
    return f"{value:.3f}" if abs(value) >= 0.1 or value == 0 else digits(value)


def extremes(sizes: Sequence[float]) -> str:
    """Formats the smallest and the largest of some sizes, as "1.2 GiB to 3.4 GiB"; one of them if they look alike.

    Args:
        sizes: In bytes, one for each rank.
    """
    low, high = memory(min(sizes)), memory(max(sizes))
    return high if low == high else f"{low} to {high}"


# Labels and formats of the values, by topic: what the model learns, how far it has come, how fast it is. Keys are those
# of rows, and those that `Display._remember` computes from several rows.
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
    """Draws the progress of the run, as the first line of the panel.

    Args:
        step: Steps done, since the start of training and not of this process.
        total: Steps in all.
        left: The time that is left, as text; empty before the first step.
    """
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(ratio=1)
    done = ProgressBar(total=max(total, 1), completed=step)
    row.add_row(done, f"step {step}/{total}", f"{left} left" if left else "")
    return row


def values(latest: Mapping[str, Any], width: int) -> list[RenderableType]:
    """Draws all values that there are, in as many columns as fit.

    Args:
        latest: The latest value of each key.
        width: Of the terminal, in characters.
    """
    quality, state, speed = (_pairs(latest, topic) for topic in _PANEL)
    memory_bars = _memory(latest.get("memory"), 20 if width >= _MIDDLE or width < _NARROW else 8)
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
    """Bars of the memory of each rank, relative to the fullest; of many ranks the extremes and which is fullest."""
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


def _pairs(latest: Mapping[str, Any], topic: Mapping[str, tuple[str, Callable[[Any], str]]]) -> Table:
    """Labels and values of one topic. A key that no row has had yet takes no line."""
    table = Table.grid(padding=(0, 1))
    table.add_column(min_width=_LABEL)
    for key, (name, form) in topic.items():
        if key in latest:
            table.add_row(Text(name, "dim"), Text(form(latest[key]), no_wrap=True, overflow="ellipsis"))
    return table


_RECENT = 50  # rows whose mean or median is shown
# Events that ask for attention. Others are printed plainly.
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
    """Shows the rows that are also written to files. Missing values and values that are not finite are left out.

    Args:
        console: Where to. Whether it is a terminal decides between panel and lines.
        total: Steps of the run.
        start: The step that training starts from.
        every: Steps between plain lines.
        title: Of the panel, or the first line.
        clock: In seconds; tests bring their own.
    """

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
        self._latest: dict[str, Any] = {}  # the latest value of each key, and values computed from several rows
        self._losses: deque[float] = deque(maxlen=_RECENT)
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._pace: deque[tuple[float, int]] = deque([(clock(), start)], maxlen=2 * _RECENT)
        self._widths: dict[str, int] = {}  # of columns in plain lines
        self._live: Live | None = None

    def __enter__(self) -> Self:
        """Draws the panel, or prints the title."""
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            # Live draws in a thread, four times a second at most, however fast steps are.
            self._live = Live(self._view(), console=self._console, refresh_per_second=4)
            self._live.start()
        else:
            self.say(self._title)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leaves the last panel on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, message: str, style: str = "") -> None:
        """Prints a line, above the panel if there is one. A disk that is full, where output goes to a file, does not
        stop training.

        Args:
            message: May have anything in it; what cannot be printed is replaced.
            style: As rich names it.
        """
        with suppress(OSError):
            self._console.print(Text(self._printable(message), style=style), soft_wrap=self._live is None)

    def row(self, row: Mapping[str, Any]) -> None:
        """Takes a row and shows what is new in it.

        Args:
            row: Of a step, an evaluation, a sample or an event. Keys are those of metrics.jsonl.
        """
        row = {key: value for key, value in row.items() if _has_value(value)}
        step = row.get("step", self._step)
        self._remember(row, step)
        self._announce(row, step)
        if self._live is not None:
            self._live.update(self._view())
        elif "seconds" in row and (step % self._every == 0 or step == self._total):
            self.say(self._line(row, step))

    def _remember(self, row: Mapping[str, Any], step: int) -> None:
        """Updates what the panel shows. Speed and step time are medians of the last _RECENT steps, the loss a mean: one
        slow step says nothing about the next, while every loss counts."""
        latest = self._latest
        if row.get("event") == "checkpoint":
            latest["saved"] = step
        elif "event" in row:
            latest["last"] = f"step {step}, {_event(row)}"
        latest |= row
        if "eval_loss" in row:
            latest["evaluated"] = step
        if "seconds" not in row:
            return
        self._step = step
        self._pace.append((self._clock(), step))
        self._losses += [row["loss"]] if "loss" in row else []
        if len(self._losses) > 1:
            latest["recent"] = fmean(self._losses)
        self._seconds.append(row["seconds"])
        latest["median"] = median(self._seconds)
        if "tokens_per_second" in row and latest["median"]:  # from the same steps as the median time
            latest["tokens_per_second"] = row["tokens_per_second"] * row["seconds"] / latest["median"]
        if row.get("predicted"):
            latest["forecast"] = f"{seconds(row['predicted'])} ({latest['median'] / row['predicted']:.2f} x)"
        if row.get("skipped"):
            latest["left_out"] = latest.get("left_out", 0) + 1

    def _announce(self, row: Mapping[str, Any], step: int) -> None:
        """Prints events, evaluations and samples. The panel shows checkpoints itself."""
        if "event" in row and not (self._live and row["event"] == "checkpoint"):
            self.say(f"step {step}  {_event(row)}", _STYLES.get(row["event"], ""))
        if "eval_loss" in row:
            perplexity = f", perplexity {digits(row['perplexity'])}" if "perplexity" in row else ""
            self.say(f"step {step}  evaluation: loss {number(row['eval_loss'])}{perplexity}")
        if "sample" in row:
            self.say(f"step {step}  sample:")
            self.say("\n".join(f"  | {line}" for line in str(row["sample"]).split("\n")), "dim")

    def _time_left(self) -> str:
        """Remaining time by the wall clock, as hours, minutes and seconds; empty before the first step.

        The pace is that of the last 100 steps with all that came between them, evaluations and checkpoints.
        """
        (began, first), (now, last) = self._pace[0], self._pace[-1]
        if last <= first:
            return ""
        return str(timedelta(seconds=round((now - began) / (last - first) * (self._total - last))))

    def _line(self, row: Mapping[str, Any], step: int) -> str:
        """Values are aligned with those of the line before. A column that has had a value keeps its place::

        step  10/1000  loss 5.512  lr 3.00e-05  grad norm 2.310   81,920 tokens/s  0.100 s
        step  20/1000  loss 4.876  lr 6.00e-05  grad norm 11.482  81,411 tokens/s  0.101 s  (predicted 0.096 s)
        """
        row = {**row, "left": self._time_left()}
        cells = {key: form(row[key]) for key, form in _COLUMNS.items() if row.get(key) not in (None, [], "")}
        for key, cell in cells.items():
            self._widths[key] = max(self._widths.get(key, 0), len(cell))
        aligned = [cells.get(key, "").rjust(self._widths[key]) for key in _COLUMNS if key in self._widths]
        return "  ".join([f"step {step:>{len(str(self._total))}}/{self._total}", *aligned]).rstrip()

    def _view(self) -> RenderableType:
        """The panel as it is now. A finished view is handed over: the thread that draws must not read values that
        change."""
        parts = [bar(self._step, self._total, self._time_left()), "", *values(self._latest, self._console.width)]
        if "last" in self._latest:
            last = self._printable(self._latest["last"]).replace("\n", " ")
            parts += ["", Text(last, style="dim", no_wrap=True, overflow="ellipsis")]
        return Panel(
            Group(*parts), title=Text(self._printable(self._title), "bold default"), border_style="bright_black"
        )

    def _printable(self, text: str) -> str:
        """Generated text can contain anything: replaces control characters and what the output cannot encode."""
        printable = "".join(
            c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text.expandtabs(4)
        )
        encoding = self._console.encoding
        return printable.encode(encoding, "replace").decode(encoding)


def _has_value(value: Any) -> bool:
    """Whether there is something to show: neither None nor NaN nor infinite."""
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _event(row: Mapping[str, Any]) -> str:
    """The event and its message."""
    return f"{row['event']}: {row['message']}" if row.get("message") else str(row["event"])


class RunLog:
    """Where a run writes its rows: display and metrics files on rank 0. On other ranks, rows are dropped, so that code
    that writes rows need not ask which rank it is.

    Args:
        display: None on other ranks.
        metrics: None on other ranks.
    """

    def __init__(self, display: Display | None = None, metrics: Metrics | None = None) -> None:
        self._display, self._metrics = display, metrics

    @property
    def is_main(self) -> bool:
        """Whether rows go anywhere."""
        return self._metrics is not None

    def row(self, row: Mapping[str, Any]) -> None:
        """Takes a row and hands it to both.

        Args:
            row: Has a step, and the keys that `metrics` lists. Every rank may call it, at no cost.
        """
        if self._display is not None:
            self._display.row(row)
        if self._metrics is not None:
            self._metrics.write(row)
