"""Memory over time: one small chart for each rank that tells something, all on one scale."""

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from terapipe.reporting.drawing import document, line, path, text, text_width, ticks
from terapipe.reporting.palette import TONES, series
from terapipe.reporting.shown import Shown, Steps
from terapipe.reporting.units import memory, memory_unit, seconds

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 400, 196, 58, 392, 34, 168
_FEW = 4  # ranks, of which each gets its chart


def charts(shown: Sequence[Shown], budget: int | None) -> str:
    """HTML, or nothing where no run knows its memory."""
    known = [s for s in shown if s.memory]
    peak = max((p for s in known for p in s.peaks), default=0.0)
    if not peak:
        return ""
    span = max(s.timeline.makespan for s in known)
    near = budget is not None and budget <= 3 * peak
    top = 1.1 * max(peak, float(budget or 0) if near else 0.0)
    ranks = _telling(known)
    drawn = "".join(_chart(known, rank, name, span, top, budget if near else None) for rank, name in ranks.items())
    notes = []
    if len(known) > 1:
        keys = (f"<span><i style='background:{series(i)}'></i>{escape(s.name)}</span>" for i, s in enumerate(known))
        notes.append(f"<p class='legend'>{''.join(keys)}</p>")
    if budget is not None and not near:
        notes.append(f"<p class='note'>The budget of {memory(budget)} lies far above this scale.</p>")
    return "".join(notes) + f"<div class='panels'>{drawn}</div>"


def _telling(known: Sequence[Shown]) -> dict[int, str]:
    """The ranks to draw and what to call them: all, or the first, middle, last and fullest."""
    count = max(len(s.memory) for s in known)
    if count <= _FEW:
        return {rank: f"rank {rank}" for rank in range(count)}
    fullest = max(((p, -rank) for s in known for rank, p in enumerate(s.peaks)))
    why = {0: "first", count // 2: "middle", count - 1: "last"}
    why[-fullest[1]] = " and ".join(filter(None, (why.get(-fullest[1]), "highest peak")))
    return {rank: f"rank {rank}, {why[rank]}" for rank in sorted(why)}


def _chart(known: Sequence[Shown], rank: int, name: str, span: float, top: float, budget: int | None) -> str:
    x_unit, y_unit = (_RIGHT - _LEFT) / span, (_BOTTOM - _TOP) / top
    parts = [text(0, 14, name, weight=600), *_scales(span, top, x_unit, y_unit)]
    end = float(_RIGHT)
    for index, run in reversed(list(enumerate(known))):
        steps = run.memory[rank] if rank < len(run.memory) else ()
        if not steps:
            continue
        points = [(_LEFT + t * x_unit, _BOTTOM - size * y_unit) for t, size in thinned(steps, span, _RIGHT - _LEFT)]
        last = min(_LEFT + max(run.timeline.makespan, steps[-1][0]) * x_unit, _RIGHT)
        parts.append(path(_staircase(points, last), series(index), width=1.6))
        x, y = min(points, key=lambda point: point[1])
        dot = (
            f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.5' fill='{series(index)}' class='edge' stroke='{TONES['paper']}'/>"
        )
        label = memory(run.peak(rank))
        parts += [dot, text(end, 14, label, anchor="end", fill=series(index), size=12, weight=600)]
        end -= text_width(label, 12) + 12
    parts.append(text(end, 14, "peak", anchor="end", tone="faint", size=12))
    if budget is not None:
        y = _BOTTOM - budget * y_unit
        parts.append(line(_LEFT, y, _RIGHT, y, tone="ink", dash="5 4"))
        parts.append(text(_RIGHT, y - 5, f"budget {memory(budget)}", anchor="end", size=11))
    return document(_WIDTH, _HEIGHT, parts, f"memory of {name}")


def _scales(span: float, top: float, x_unit: float, y_unit: float) -> list[str]:
    parts = []
    for size in ticks(0, top, 3, memory_unit(top)):
        y = _BOTTOM - size * y_unit
        parts.append(line(_LEFT, y, _RIGHT, y))
        parts.append(text(_LEFT - 8, y + 4, memory(size), anchor="end", tone="faint", size=11))
    for at in ticks(0, span, 3):
        x = _LEFT + at * x_unit
        parts.append(text(x, _BOTTOM + 18, seconds(at), anchor="middle", tone="faint", size=11))
    return parts


def thinned(steps: Steps, span: float, columns: float) -> list[tuple[float, float]]:
    """At most two points for each column of pixels, its last one and its highest: a peak is never lost."""
    kept: dict[int, list[tuple[float, float]]] = {}
    for at, size in steps:
        column = int(at / span * columns)
        same = kept.setdefault(column, [(at, size)])
        highest = max([*same, (at, size)], key=lambda step: step[1])
        kept[column] = [highest] if highest == (at, size) else [highest, (at, size)]
    return [step for column in sorted(kept) for step in kept[column]]


def _staircase(points: Sequence[tuple[float, float]], right: float) -> list[tuple[float, float]]:
    corners = [points[0]]
    for (_, y), (x, next_y) in pairwise(points):
        corners += [(x, y), (x, next_y)]
    return [*corners, (max(right, points[-1][0]), points[-1][1])]
