"""Step time against peak memory: who is worth having, and who does not fit."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

from terapipe.reporting.drawing import document, line, path, text, text_width, ticks
from terapipe.reporting.palette import TONES, hsl
from terapipe.reporting.units import memory, memory_unit, seconds

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 960, 420, 84, 930, 34, 366
_GOOD, _FITS = hsl(212, 0.66, 0.46), hsl(212, 0.6, 0.74)
_SIZE = 12

Point = tuple[float, float]


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: "Box") -> float:
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return wide * high if wide > 0 and high > 0 else 0.0


def frontier(points: Mapping[str, Point], x_label: str, y_label: str, budget: float | None = None) -> str:
    """Each point is (bytes, seconds). The line joins those than which no other that fits is better in both."""
    if not points:
        raise ValueError("a frontier needs at least one point")
    best = pareto(points, budget)
    x_range, y_range = _range([x for x, _ in points.values()], budget), _range([y for _, y in points.values()])

    def place(point: Point) -> Point:
        x = _LEFT + (_RIGHT - _LEFT) * (point[0] - x_range[0]) / (x_range[1] - x_range[0])
        return x, _BOTTOM - (_BOTTOM - _TOP) * (point[1] - y_range[0]) / (y_range[1] - y_range[0])

    parts = _scales(x_range, y_range, place, x_label, y_label)
    limit = None
    if budget is not None and x_range[0] <= budget <= x_range[1]:
        limit = place((budget, 0))[0]
        parts.append(line(limit, _TOP - 6, limit, _BOTTOM, tone="ink", dash="5 4"))
        parts.append(text(limit + 6, _TOP + 4, f"budget {memory(budget)}", size=_SIZE))
    corners = _staircase([place(points[name]) for name in best])
    if corners:
        parts.append(path(corners, _GOOD, width=1.5))
    # The best come first, to have the best places for their names, and are drawn last, upon the others.
    placed = {name: place(points[name]) for name in sorted(points, key=lambda name: name not in best)}
    labels = label_boxes(placed, _in_the_way(corners, limit))
    for name, (x, y) in reversed(placed.items()):
        fits = budget is None or points[name][0] <= budget
        parts.append(_point(name, points[name], x, y, _GOOD if name in best else _FITS if fits else ""))
        parts += _label(name, labels[name], x, y, tone="ink" if name in best else "faint" if fits else "pale")
    return document(_WIDTH, _HEIGHT, parts, f"{y_label} against {x_label}")


def pareto(points: Mapping[str, Point], budget: float | None = None) -> list[str]:
    """The names of those that fit and that no other beats in both, from the least memory to the most."""
    best: list[str] = []
    for name, (x, y) in sorted(points.items(), key=lambda item: item[1]):
        if (budget is None or x <= budget) and (not best or y < points[best[-1]][1]):
            best.append(name)
    return best


def _in_the_way(corners: Sequence[Point], limit: float | None) -> list[Box]:
    """The lines that no name should cross."""
    steps = [Box(min(a, c) - 2, min(b, d) - 2, max(a, c) + 2, max(b, d) + 2) for (a, b), (c, d) in pairwise(corners)]
    return steps if limit is None else [*steps, Box(limit - 3, 0, limit + 3, _BOTTOM), Box(limit, 20, limit + 110, 46)]


def label_boxes(placed: Mapping[str, Point], obstacles: Sequence[Box] = ()) -> dict[str, Box]:
    """Where the names go: beside, above or below their points, further off where it is crowded."""
    boxes: dict[str, Box] = {}
    for name, (x, y) in placed.items():
        # Room beside the other points, or the name would seem to be theirs.
        others = [Box(a - 20, b - 7, a + 20, b + 7) for other, (a, b) in placed.items() if other != name]
        taken = [*obstacles, *others, *boxes.values()]
        candidates = list(_candidates(x, y, text_width(name, _SIZE)))
        boxes[name] = min(
            candidates, key=lambda box: sum(map(box.overlap, taken))
        )  # the first without any, if there is
    return boxes


def _candidates(x: float, y: float, wide: float) -> list[Box]:
    found = []
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
            if left >= _LEFT and left + wide <= _WIDTH - 4 and top >= _TOP - 24 and top + 16 <= _BOTTOM:
                found.append(Box(left, top, left + wide, top + 16))
    return found or [Box(x + 10, y - 8, x + 10 + wide, y + 8)]


def _label(name: str, box: Box, x: float, y: float, tone: str) -> list[str]:
    before = box.right <= x
    edge, anchor = (box.right, "end") if before else (box.left, "start")
    parts = [text(edge, box.bottom - 4, name, anchor=anchor, tone=tone, size=_SIZE, halo=True)]
    near_x, near_y = min(max(x, box.left), box.right), min(max(y, box.top), box.bottom)
    if abs(near_x - x) + abs(near_y - y) > 16:  # too far off to be seen as belonging together
        parts.insert(0, line(x, y, near_x, near_y, tone="pale"))
    return parts


def _point(name: str, point: Point, x: float, y: float, colour: str) -> str:
    """Without a colour, what does not fit: as pale as the page has it."""
    title = escape(f"{name}: {memory(point[0])}, {seconds(point[1])}")
    fill = f"class='edge' fill='{colour}'" if colour else f"class='edge pale' fill='{TONES['pale']}'"
    circle = f"<circle cx='{x:.1f}' cy='{y:.1f}' r='5.5' {fill} stroke='{TONES['paper']}'/>"
    return f"<g><title>{title}</title>{circle}</g>"


def _staircase(corners: Sequence[Point]) -> list[Point]:
    """With more memory than one point but less than the next, one is still as slow as the one."""
    points: list[Point] = []
    for x, y in corners:
        points += [(x, points[-1][1])] if points else []
        points.append((x, y))
    return points


def _range(values: Sequence[float], extra: float | None = None) -> tuple[float, float]:
    low, high = min(values), max(values)
    if extra is not None and extra <= 2 * high:
        low, high = min(low, extra), max(high, extra)
    if 0 < low < 0.4 * high:
        return 0.0, 1.06 * high
    margin = 0.12 * (high - low) or 0.1 * high or 1.0
    return low - margin, high + margin


def _scales(x_range: Point, y_range: Point, place: Callable[[Point], Point], x_label: str, y_label: str) -> list[str]:
    parts = []
    for tick in ticks(*y_range, 4):
        y = place((0, tick))[1]
        parts.append(line(_LEFT, y, _RIGHT, y))
        parts.append(text(_LEFT - 10, y + 4, seconds(tick), anchor="end", tone="faint", size=11))
    for tick in ticks(*x_range, 5, memory_unit(x_range[1])):
        x = place((tick, 0))[0]
        parts.append(line(x, _BOTTOM, x, _BOTTOM + 5))
        parts.append(text(x, _BOTTOM + 19, memory(tick), anchor="middle", tone="faint", size=11))
    parts.append(text(_LEFT, 14, y_label, weight=600))
    parts.append(text(_RIGHT, _HEIGHT - 10, x_label, anchor="end", weight=600))
    return parts
