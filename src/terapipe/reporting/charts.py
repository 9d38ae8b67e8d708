"""Charts as SVG: lines, curves with bands, grouped bars, and time against memory.

Every function takes plain numbers and returns one SVG document, so a chart can stand in a page, in a README or alone.
Each has a local function ``place``, the only one that knows how data become coordinates::

    data (x, y)  --place-->  SVG units      y is turned over: large values are above, where SVG's y is small

Axes begin and end at round numbers only where that costs no room; ``ticks`` puts the labels at round numbers inside.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

from terapipe.reporting.style import TONES, digits, hsl, line_color, memory, memory_unit, seconds
from terapipe.reporting.svg import (
    box,
    document,
    dot,
    legend,
    line,
    path,
    scale,
    staircase,
    text,
    text_width,
    ticks,
)

_LEFT = 74
_DOTTED = 40  # most points of a curve of which each is a dot
# The chart of time against memory.
_WIDTH, _HEIGHT, _X0, _X1, _TOP, _BOTTOM = 960, 420, 84, 930, 34, 366
_GOOD, _FITS = hsl(212, 0.66, 0.46), hsl(212, 0.6, 0.74)
_SIZE = 12  # of names


class Point(NamedTuple):
    """A point of a curve. A run of a million steps is drawn with a few hundred points, each of which stands for many.

    Args:
        x: Such as the number of the step.
        y: The value, or the mean of the values that the point stands for.
        low: The least of these values; ``y`` if it is one.
        high: The largest of these values; ``y`` if it is one.
    """

    x: float
    y: float
    low: float
    high: float


def lines(shown: Mapping[str, Sequence[float]], label: str, width: int = 960, height: int = 260) -> str:
    """Draws one line per series over 1, 2, 3, ..., labeled at its end with its last value.

    Args:
        shown: Series by name. Values that are not finite leave a gap.
        label: What the values are, the title of the chart.
        width: Of the picture, in SVG units.
        height: Of the picture, in SVG units.
    """
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
    parts += scale(((place(0, tick)[1], f"{tick:g}") for tick in ticks(low, high, 5)), _LEFT, right)
    ends = []
    for index, (name, ys) in enumerate(shown.items()):
        points = [place(i, v) for i, v in enumerate(ys) if math.isfinite(v)]
        if points:
            parts.append(path(points, line_color(index)))
            last = next(v for v in reversed(ys) if math.isfinite(v))
            ends.append((points[-1][1], f"{name} {digits(last)}".strip(), line_color(index)))
    below = -math.inf
    for y, words, color in sorted(ends):  # labels stay apart where lines meet
        below = max(y, below + 14)
        parts.append(text(right + 8, below + 4, words, fill=color, size=12))
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
    """Draws several series, each over its own x. The legend has their last values. A series whose points stand for
    several values has a band between the lowest and the highest behind its line.

    Args:
        shown: Points of each series, by name, in order of x.
        label: The title of the chart.
        form: Writes a value for the legend and the y axis, such as ``seconds``.
        below: The name of the x axis, whose values are whole numbers.
        zero: Whether the y axis begins at 0, as it should for times and bytes.
        top: Values above it are drawn at the upper edge: the first loss of a run would flatten all others.
        unit: The unit of the y axis, of which its labels are round multiples.
        width: Of the picture, in SVG units.
        height: Of the picture, in SVG units.
    """
    points = [p for series in shown.values() for p in series]
    if not points or not all(math.isfinite(v) for p in points for v in p):
        raise ValueError(f"curves need at least one point and finite values, got {len(points)} points for {label!r}")
    entries = [
        (f"{name} {form(points[-1].y)}".strip(), line_color(i))
        for i, (name, points) in enumerate(shown.items())
        if points
    ]
    key, head = legend(entries, 0, 34, width)
    head += 16
    left, right, bottom = 64.0, width - 14.0, height - 30.0
    x_low, x_high = _nonempty(min(p.x for p in points), max(p.x for p in points))
    y_low, y_high = min(p.low for p in points), min(top, max(p.high for p in points))
    y_low, y_high = _nonempty(min(0.0, y_low) if zero else y_low, y_high)

    def place(x: float, y: float) -> tuple[float, float]:
        across = left + (right - left) * (x - x_low) / (x_high - x_low)
        return across, max(bottom - (bottom - head) * (y - y_low) / (y_high - y_low), head)

    parts = [
        text(0, 14, label, weight=600),
        *key,
        text(left - 10, height - 10, below, anchor="end", tone="faint", size=11),
    ]
    parts += scale(
        ((place(x_low, tick)[1], form(tick)) for tick in ticks(y_low, y_high, height // 80, unit)), left, right
    )
    for tick in ticks(x_low, x_high, 3 if width < 500 else 6):
        if tick == round(tick):
            x = min(place(tick, y_low)[0], right - text_width(f"{tick:,.0f}", 11) / 2 + 14)
            parts.append(text(x, height - 10, f"{tick:,.0f}", anchor="middle", tone="faint", size=11))
    for index, series in enumerate(shown.values()):
        parts += _curve(series, place, line_color(index))
    return document(width, height, parts, label)


def _nonempty(low: float, high: float) -> tuple[float, float]:
    """A range that is not empty, even if all values are the same."""
    return (low, high) if high > low else (low - (abs(low) / 2 or 1.0), low + (abs(low) / 2 or 1.0))


def _curve(points: Sequence[Point], place: Callable[[float, float], tuple[float, float]], color: str) -> list[str]:
    """One series: its band, its line, and a dot for each point if they are few."""
    parts = []
    if any(p.high > p.low for p in points):
        edge = [place(p.x, p.high) for p in points] + [place(p.x, p.low) for p in reversed(points)]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in edge)
        look = f"fill='{color}' fill-opacity='0.22' stroke='{color}' stroke-opacity='0.3' stroke-width='0.8'"
        parts.append(f"<polygon points='{drawn}' {look}/>")
    line_ = [place(p.x, p.y) for p in points]
    parts.append(path(line_, color, width=1.6))
    if len(points) <= _DOTTED:
        parts += [dot(x, y, 3, color) for x, y in line_]
    return parts


def groups(
    shown: Mapping[str, Sequence[float]], names: Sequence[str], label: str, form: Callable[[float], str] = seconds
) -> str:
    """Draws grouped horizontal bars, all on one scale.

        []predicted  []measured
        2 ranks  ======== 1 s
                 ============ 1.5 s
        4 ranks  ==== 0.5 s
                 ====== 0.75 s

    Args:
        shown: The values of each group, by the group's name.
        names: What the bars of every group are, in the order of the values.
        label: The title of the chart.
        form: Writes a value behind its bar.
    """
    width, row, gap = 960, 15, 12
    most = max((value for values in shown.values() for value in values), default=0.0)
    if not 0 < most < math.inf:
        raise ValueError(f"bars need a positive, finite value, got {dict(shown)}")
    left = max(_LEFT, 24 + max(text_width(name, 13) for name in shown))
    unit = (width - left - 90) / most
    key, _ = legend([(name, line_color(index)) for index, name in enumerate(names)], left, 36)
    parts, y = [text(left, 14, label, weight=600), *key], 54.0
    for name, values in shown.items():
        parts.append(text(left - 12, y + len(values) * row / 2 + 4, name, anchor="end", tone="faint"))
        for index, value in enumerate(values):
            parts.append(box(left, y, max(value * unit, 1), row - 2, fill=line_color(index), round_=2))
            parts.append(text(left + value * unit + 7, y + row - 4, form(value), size=11))
            y += row
        y += gap
    return document(width, y + 6, parts, label)


Place = tuple[float, float]


class Box(NamedTuple):
    """A rectangle that a label would take, in SVG units."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: "Box") -> float:
        """The area that two boxes share, 0 if they do not touch.

        Args:
            other: The other box.
        """
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return wide * high if wide > 0 and high > 0 else 0.0


def frontier(
    points: Mapping[str, Place], front: Collection[str], x_label: str, y_label: str, budget: float | None = None
) -> str:
    """Draws step time against memory: one point per plan, and a line through those that no other beats in both.

        step time
          |  o gpipe
          |            | budget
          |  +--o 1f1b |
          |     +------+----o terapipe       the line is the Pareto front, as stairs: to be faster than one of
          |            |                     its points takes at least the memory of the next
          +-------------------- peak memory per device

    Args:
        points: (bytes, seconds) by name.
        front: The names on the Pareto front of the points that fit.
        x_label: The name of the x axis.
        y_label: The name of the y axis.
        budget: Bytes of a device. Points beyond it are pale. It is drawn if it is within twice the largest point.
    """
    if not points:
        raise ValueError("a frontier needs at least one point")
    x_range, y_range = _range([x for x, _ in points.values()], budget), _range([y for _, y in points.values()])

    def place(point: Place) -> Place:
        x = _X0 + (_X1 - _X0) * (point[0] - x_range[0]) / (x_range[1] - x_range[0])
        return x, _BOTTOM - (_BOTTOM - _TOP) * (point[1] - y_range[0]) / (y_range[1] - y_range[0])

    parts = _scales(x_range, y_range, place, x_label, y_label)
    limit = None
    if budget is not None and x_range[0] <= budget <= x_range[1]:
        limit = place((budget, 0))[0]
        parts.append(line(limit, _TOP - 6, limit, _BOTTOM, tone="ink", dash="5 4"))
        title = f"budget {memory(budget)}"
        right = limit + 6 + text_width(title, _SIZE) < _WIDTH  # else it would be cut off there
        parts.append(
            text(limit + (6 if right else -6), _TOP + 4, title, size=_SIZE, anchor="start" if right else "end")
        )
    corners = staircase(sorted(place(points[name]) for name in front))
    if corners:
        parts.append(path(corners, _GOOD, width=1.5))
    # The front comes first when places for names are chosen, and last when points are drawn, on top of the others.
    placed = {name: place(points[name]) for name in sorted(points, key=lambda name: name not in front)}
    labels = label_boxes(placed, _obstacles(corners, limit))
    for name, (x, y) in reversed(placed.items()):
        fits = budget is None or points[name][0] <= budget
        parts.append(_point(name, points[name], x, y, _GOOD if name in front else _FITS if fits else ""))
        parts += _label(name, labels[name], x, y, tone="ink" if name in front else "faint" if fits else "pale")
    return document(_WIDTH, _HEIGHT, parts, f"{y_label} against {x_label}")


def _obstacles(corners: Sequence[Place], limit: float | None) -> list[Box]:
    """Boxes around the lines that no name should cross."""
    steps = [Box(min(a, c) - 2, min(b, d) - 2, max(a, c) + 2, max(b, d) + 2) for (a, b), (c, d) in pairwise(corners)]
    return steps if limit is None else [*steps, Box(limit - 3, 0, limit + 3, _BOTTOM), Box(limit, 20, limit + 110, 46)]


def label_boxes(placed: Mapping[str, Place], obstacles: Sequence[Box] = ()) -> dict[str, Box]:
    """Places a label for each point: beside, above or below it, farther away if it is crowded there.

    Labels are placed one after the other. Each takes the candidate box that overlaps least with the boxes so far::

            [ name ]          candidates around the point x, near ones first
        [ name ] x [ name ]
            [ name ]

    Args:
        placed: Points by name, in SVG units.
        obstacles: Boxes that no label should cross.
    """
    boxes: dict[str, Box] = {}
    for name, (x, y) in placed.items():
        # Keep clear of the other points, or the name would seem to be theirs.
        others = [Box(a - 20, b - 7, a + 20, b + 7) for other, (a, b) in placed.items() if other != name]
        taken = [*obstacles, *others, *boxes.values()]
        candidates = list(_candidates(x, y, text_width(name, _SIZE)))
        boxes[name] = min(candidates, key=lambda box: sum(map(box.overlap, taken)))  # the first of the least overlap
    return boxes


def _candidates(x: float, y: float, wide: float) -> list[Box]:
    """Boxes in which the name of a point could stand, best ones first: beside, above and below, at the corners, then
    the same farther away. Boxes outside of the chart are left out."""
    boxes = []
    for away in (0, 14, 30, 46, 62, 78, 94):
        for left, top in (
            (x + 10 + away, y - 8),
            (x - 10 - wide - away, y - 8),
            (x - wide / 2, y - 26 - away),
            (x - wide / 2, y + 10 + away),
            (x + 6 + away, y - 22 - away),
            (x + 6 + away, y + 6 + away),
            (x - 6 - wide - away, y - 22 - away),
            (x - 6 - wide - away, y + 6 + away),
        ):
            if left >= _X0 and left + wide <= _WIDTH - 4 and top >= _TOP - 24 and top + 16 <= _BOTTOM:
                boxes.append(Box(left, top, left + wide, top + 16))
    return boxes or [Box(x + 10, y - 8, x + 10 + wide, y + 8)]


def _label(name: str, box: Box, x: float, y: float, tone: str) -> list[str]:
    """A name in its box, with a thin line to its point if it is too far away to be read together."""
    before = box.right <= x
    edge, anchor = (box.right, "end") if before else (box.left, "start")
    parts = [text(edge, box.bottom - 4, name, anchor=anchor, tone=tone, size=_SIZE, halo=True)]
    near_x, near_y = min(max(x, box.left), box.right), min(max(y, box.top), box.bottom)
    if abs(near_x - x) + abs(near_y - y) > 16:  # too far away to be read together
        parts.insert(0, line(x, y, near_x, near_y, tone="pale"))
    return parts


def _point(name: str, point: Place, x: float, y: float, color: str) -> str:
    """A circle with a title that viewers show on hovering.

    Args:
        name: Of the plan.
        point: Its bytes and seconds.
        x: Where it is drawn.
        y: Where it is drawn.
        color: Of a point that fits. Without one the point is pale, in a tone that follows the page's color scheme.
    """
    title = escape(f"{name}: {memory(point[0])}, {seconds(point[1])}")
    fill = f"class='edge' fill='{color}'" if color else f"class='edge pale' fill='{TONES['pale']}'"
    circle = f"<circle cx='{x:.1f}' cy='{y:.1f}' r='5.5' {fill} stroke='{TONES['paper']}'/>"
    return f"<g><title>{title}</title>{circle}</g>"


def _range(values: Sequence[float], extra: float | None = None) -> tuple[float, float]:
    """The values that an axis shows: with a margin on both sides, and from 0 if the smallest is below 0.4 of the
    largest, so that lengths can be compared by eye. A budget far beyond all points would press them together and is
    left out."""
    low, high = min(values), max(values)
    if extra is not None and extra <= 2 * high:
        low, high = min(low, extra), max(high, extra)
    if 0 < low < 0.4 * high:
        return 0.0, 1.06 * high
    margin = 0.12 * (high - low) or 0.1 * high or 1.0
    return low - margin, high + margin


def _scales(x_range: Place, y_range: Place, place: Callable[[Place], Place], x_label: str, y_label: str) -> list[str]:
    """Both axes of ``frontier`` with their names: seconds at the left, bytes below."""
    parts = scale(((place((0, tick))[1], seconds(tick)) for tick in ticks(*y_range, 4)), _X0, _X1)
    for tick in ticks(*x_range, 5, memory_unit(x_range[1])):
        x = place((tick, 0))[0]
        parts.append(line(x, _BOTTOM, x, _BOTTOM + 5))
        parts.append(text(x, _BOTTOM + 19, memory(tick), anchor="middle", tone="faint", size=11))
    parts.append(text(_X0, 14, y_label, weight=600))
    parts.append(text(_X1, _HEIGHT - 10, x_label, anchor="end", weight=600))
    return parts
