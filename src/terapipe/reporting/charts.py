"""Charts of numbers: series as lines, values as bars."""

import math
from collections.abc import Callable, Mapping, Sequence

from terapipe.reporting.drawing import box, document, line, path, text, text_width, ticks
from terapipe.reporting.palette import of_op, series
from terapipe.reporting.units import digits, seconds
from terapipe.scheduling.actions import Op

_LEFT = 74


def lines(shown: Mapping[str, Sequence[float]], label: str, width: int = 960, height: int = 260) -> str:
    """One line for each series over 1, 2, 3, ..., with its last value written at its end."""
    values = [v for ys in shown.values() for v in ys if math.isfinite(v)]
    if not values:
        raise ValueError("a chart needs at least one finite value")
    low, high = min(values), max(values)
    high = high if high > low else low + 1.0
    longest = max(map(len, shown.values()))
    right, bottom, top = width - 90, height - 34, 24

    def place(i: int, v: float) -> tuple[float, float]:
        x = _LEFT + (right - _LEFT) * (i / max(longest - 1, 1))
        return x, bottom - (bottom - top) * (v - low) / (high - low)

    parts = [text(_LEFT, 14, label, weight=600)]
    for tick in ticks(low, high, 5):
        y = place(0, tick)[1]
        parts.append(line(_LEFT, y, right, y))
        parts.append(text(_LEFT - 10, y + 4, f"{tick:g}", anchor="end", tone="faint", size=11))
    ends = []
    for index, (name, ys) in enumerate(shown.items()):
        points = [place(i, v) for i, v in enumerate(ys) if math.isfinite(v)]
        if points:
            parts.append(path(points, series(index)))
            last = next(v for v in reversed(ys) if math.isfinite(v))
            ends.append((points[-1][1], f"{name} {digits(last)}".strip(), series(index)))
    below = -math.inf
    for y, words, colour in sorted(ends):  # apart from each other, also where the lines meet
        below = max(y, below + 14)
        parts.append(text(right + 8, below + 4, words, fill=colour, size=12))
    parts.append(text(_LEFT, height - 12, "1", anchor="middle", tone="faint", size=11))
    parts.append(text(right, height - 12, str(longest), anchor="middle", tone="faint", size=11))
    return document(width, height, parts, label)


def bars(
    shown: Mapping[str, float], label: str, form: Callable[[float], str] = seconds, width: int = 960, row: int = 26
) -> str:
    """One horizontal bar for each value, which is written at its end."""
    most = max(shown.values(), default=0.0)
    if not 0 < most < math.inf:
        raise ValueError(f"bars need a positive, finite value, got {dict(shown)}")
    left = max(_LEFT, 24 + max(text_width(name, 13) for name in shown))
    unit = (width - left - 100) / most
    parts = [text(left, 14, label, weight=600)]
    for i, (name, value) in enumerate(shown.items()):
        y = 28 + i * (row + 8)
        parts.append(text(left - 12, y + row / 2 + 4, name, anchor="end", tone="faint"))
        parts.append(box(left, y, max(value * unit, 1), row, fill=of_op(Op.F), round_=3))
        parts.append(text(left + value * unit + 8, y + row / 2 + 4, form(value)))
    return document(width, 34 + len(shown) * (row + 8), parts, label)


def groups(
    shown: Mapping[str, Sequence[float]], names: Sequence[str], label: str, form: Callable[[float], str] = seconds
) -> str:
    """For each row several bars under each other, one for each name, on one scale."""
    width, row, gap = 960, 15, 12
    most = max((value for values in shown.values() for value in values), default=0.0)
    if not 0 < most < math.inf:
        raise ValueError(f"bars need a positive, finite value, got {dict(shown)}")
    left = max(_LEFT, 24 + max(text_width(name, 13) for name in shown))
    unit = (width - left - 90) / most
    parts = [text(left, 14, label, weight=600)]
    x = float(left)
    for index, name in enumerate(names):
        parts.append(box(x, 26, 12, 12, fill=series(index), round_=2))
        parts.append(text(x + 18, 37, name, tone="faint", size=12))
        x += 42 + text_width(name, 12)
    y = 54.0
    for name, values in shown.items():
        parts.append(text(left - 12, y + len(values) * row / 2 + 4, name, anchor="end", tone="faint"))
        for index, value in enumerate(values):
            parts.append(box(left, y, max(value * unit, 1), row - 2, fill=series(index), round_=2))
            parts.append(text(left + value * unit + 7, y + row - 4, form(value), size=11))
            y += row
        y += gap
    return document(width, y + 6, parts, label)
