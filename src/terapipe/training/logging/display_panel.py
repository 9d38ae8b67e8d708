"""The contents of the panel on a terminal: a progress bar and the latest values."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from terapipe.reporting.units import count, digits, memory, seconds, share

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
