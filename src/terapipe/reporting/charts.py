"""Charts of numbers: series as lines, values as bars."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from terapipe.reporting.drawing import box, document, line, path, text, text_width, ticks
from terapipe.reporting.palette import TONES, series
from terapipe.reporting.units import digits, seconds

_LEFT = 74
_DOTTED = 40  # points up to which a curve shows each of them


class Point(NamedTuple):
    """Of a curve. One that stands for several has their mean as ``y``, and their lowest and highest."""

    x: float
    y: float
    low: float
    high: float


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


def curves(
    shown: Mapping[str, Sequence[Point]],
    label: str,
    form: Callable[[float], str] = digits,
    *,
    below: str = "step",
    zero: bool = False,
    top: float = math.inf,
    unit: float = 1.0,
    width: int = 960,
    height: int = 300,
) -> str:
    """Several series, each over its own x, which are whole numbers and named ``below``; the legend has their last
    values. ``zero``: the scale begins there. What lies above ``top`` is drawn at the edge. ``unit`` is what
    the scale counts in."""
    points = [p for series_ in shown.values() for p in series_]
    if not points or not all(math.isfinite(v) for p in points for v in p):
        raise ValueError(f"curves need at least one point and finite values, got {len(points)} points for {label!r}")
    legend, head = _legend(shown, label, form, width)
    left, right, bottom = 64.0, width - 14.0, height - 30.0
    x_low, x_high = _apart(min(p.x for p in points), max(p.x for p in points))
    y_low, y_high = min(p.low for p in points), min(top, max(p.high for p in points))
    y_low, y_high = _apart(min(0.0, y_low) if zero else y_low, y_high)

    def place(x: float, y: float) -> tuple[float, float]:
        across = left + (right - left) * (x - x_low) / (x_high - x_low)
        return across, max(bottom - (bottom - head) * (y - y_low) / (y_high - y_low), head)

    parts = [*legend, text(left - 10, height - 10, below, anchor="end", tone="faint", size=11)]
    for tick in ticks(y_low, y_high, height // 80, unit):
        y = place(x_low, tick)[1]
        parts.append(line(left, y, right, y))
        parts.append(text(left - 10, y + 4, form(tick), anchor="end", tone="faint", size=11))
    for tick in ticks(x_low, x_high, 3 if width < 500 else 6):
        if tick == round(tick):
            x = min(place(tick, y_low)[0], right - text_width(f"{tick:,.0f}", 11) / 2 + 14)
            parts.append(text(x, height - 10, f"{tick:,.0f}", anchor="middle", tone="faint", size=11))
    for index, given in enumerate(shown.values()):
        parts += _curve(given, place, series(index))
    return document(width, height, parts, label)


def _apart(low: float, high: float) -> tuple[float, float]:
    """Something to divide by, also where all values are the same."""
    return (low, high) if high > low else (low - (abs(low) / 2 or 1.0), low + (abs(low) / 2 or 1.0))


def _legend(
    shown: Mapping[str, Sequence[Point]], label: str, form: Callable[[float], str], width: float
) -> tuple[list[str], float]:
    """The title, and under it each series with its last value, in as many rows as that takes; and where they end."""
    parts, x, y = [text(0, 14, label, weight=600)], 0.0, 34.0
    for index, (name, points) in enumerate(shown.items()):
        if not points:
            continue
        words = f"{name} {form(points[-1].y)}".strip()
        if x and x + 18 + text_width(words, 12) > width:
            x, y = 0.0, y + 18
        parts.append(box(x, y - 10, 12, 12, fill=series(index), round_=2))
        parts.append(text(x + 18, y, words, tone="faint", size=12))
        x += 38 + text_width(words, 12)
    return parts, y + 16


def _curve(points: Sequence[Point], place: Callable[[float, float], tuple[float, float]], colour: str) -> list[str]:
    parts = []
    if any(p.high > p.low for p in points):
        edge = [place(p.x, p.high) for p in points] + [place(p.x, p.low) for p in reversed(points)]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in edge)
        look = f"fill='{colour}' fill-opacity='0.22' stroke='{colour}' stroke-opacity='0.3' stroke-width='0.8'"
        parts.append(f"<polygon points='{drawn}' {look}/>")
    line_ = [place(p.x, p.y) for p in points]
    parts.append(path(line_, colour, width=1.6))
    if len(points) <= _DOTTED:
        dot = f"r='3' fill='{colour}' class='edge' stroke='{TONES['paper']}'/>"
        parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' {dot}" for x, y in line_]
    return parts


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
