"""Pictures: timelines as bars, series as lines. Plain SVG, no dependencies."""

import math
from collections.abc import Mapping, Sequence
from html import escape

from terapipe.scheduling.actions import Op
from terapipe.scheduling.timeline import Event, Timeline

_FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"
_INK, _FAINT, _GRID, _PAPER = "#1f2933", "#616e7c", "#d9dfe5", "#ffffff"
_HUE = {Op.F: 212, Op.B: 27, Op.I: 27, Op.W: 150}
_NAME = {Op.F: "forward", Op.B: "backward", Op.I: "backward, inputs", Op.W: "backward, weights"}
_LEFT, _RIGHT, _ROW, _GAP, _HEAD = 74, 24, 34, 6, 40


def timelines(drawn: Mapping[str, Timeline], width: int = 960) -> str:
    """Several timelines under each other on one scale of time, so that lengths compare by eye."""
    span = max((t.makespan for t in drawn.values()), default=0.0)
    if span <= 0:
        raise ValueError("a picture needs a timeline with at least one computation")
    unit = (width - _LEFT - _RIGHT) / span
    parts: list[str] = []
    y = 16.0
    for title, timeline in drawn.items():
        parts.append(_text(_LEFT, y + 16, title, size=15, weight=600))
        summary = f"{_seconds(timeline.makespan)} per step, {timeline.idle:.0%} idle"
        parts.append(_text(width - _RIGHT, y + 16, summary, anchor="end", fill=_FAINT))
        y += _HEAD - 10
        for rank in range(timeline.plan.num_ranks):
            parts += _rank(timeline, rank, y, unit)
            y += _ROW + _GAP
        y += 14
    parts += _axis(span, unit, y)
    ops = {e.action.op for t in drawn.values() for e in t.computations}
    parts += _legend([op for op in _HUE if op in ops], width, y + 40)
    return _document(width, y + 58, parts)


def _rank(timeline: Timeline, rank: int, y: float, unit: float) -> list[str]:
    end = timeline.makespan * unit
    parts = [
        _text(_LEFT - 12, y + _ROW / 2 + 4, f"rank {rank}", anchor="end", fill=_FAINT),
        f"<rect x='{_LEFT}' y='{y}' width='{end:.1f}' height='{_ROW}' fill='url(#idle)' rx='3'/>",
    ]
    return parts + [_bar(e, y, unit, timeline) for e in timeline.computations if e.rank == rank]


def _bar(event: Event, y: float, unit: float, timeline: Timeline) -> str:
    op, stage, s = event.action
    count = len(timeline.plan.grid[s.microbatch])
    x, wide = _LEFT + event.start * unit, max((event.end - event.start) * unit, 0.5)
    light = 46 + 26 * (s.number / max(count - 1, 1))
    seconds = _seconds(event.end - event.start)
    label = f"{_NAME[op]}: stage {stage}, microbatch {s.microbatch}, slice {s.number} ({s.length} tokens), {seconds}"
    number = str(s.number) if count > 1 else str(s.microbatch)
    inside = _text(x + wide / 2, y + _ROW / 2 + 4, number, anchor="middle", fill="#fff", size=11) if wide > 15 else ""
    return (
        f"<g><title>{escape(label)}</title><rect x='{x:.2f}' y='{y}' width='{wide:.2f}' height='{_ROW}' rx='2.5' "
        f"fill='hsl({_HUE[op]} 68% {light:.0f}%)' stroke='{_PAPER}' stroke-width='0.7'/>{inside}</g>"
    )


def _axis(span: float, unit: float, y: float) -> list[str]:
    step = _round_step(span / 8)
    parts = []
    for i in range(int(span / step + 1e-9) + 1):
        x = _LEFT + i * step * unit
        parts.append(f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{y - 6}' y2='{y}' stroke='{_FAINT}'/>")
        parts.append(_text(x, y + 14, _seconds(i * step), anchor="middle", fill=_FAINT, size=11))
    return parts


def _legend(ops: Sequence[Op], width: int, y: float) -> list[str]:
    parts, x = [], float(_LEFT)
    for name, fill in [(_NAME[op], f"hsl({_HUE[op]} 68% 52%)") for op in ops] + [("idle", "url(#idle)")]:
        parts.append(f"<rect x='{x}' y='{y - 10}' width='22' height='12' rx='2' fill='{fill}' stroke='{_GRID}'/>")
        parts.append(_text(x + 30, y, name, fill=_FAINT, size=12))
        x += 58 + 7.0 * len(name)
    parts.append(_text(width - _RIGHT, y, "numbers: slices", anchor="end", fill=_FAINT, size=12))
    return parts


def lines(series: Mapping[str, Sequence[float]], label: str, width: int = 960, height: int = 260) -> str:
    """One line for each series over 1, 2, 3, ..., with its last value written at its end."""
    values = [v for ys in series.values() for v in ys if math.isfinite(v)]
    if not values:
        raise ValueError("a chart needs at least one finite value")
    low, high = min(values), max(values)
    high = high if high > low else low + 1.0
    longest = max(map(len, series.values()))
    right, bottom, top = width - 90, height - 34, 24

    def x_of(i: int) -> float:
        return _LEFT + (right - _LEFT) * (i / max(longest - 1, 1))

    def y_of(v: float) -> float:
        return bottom - (bottom - top) * (v - low) / (high - low)

    parts = [_text(_LEFT, 14, label, size=13, weight=600)]
    step = _round_step((high - low) / 5)
    for i in range(math.ceil(low / step), math.floor(high / step) + 1):
        y = y_of(i * step)
        parts.append(f"<line x1='{_LEFT}' x2='{right}' y1='{y:.1f}' y2='{y:.1f}' stroke='{_GRID}'/>")
        parts.append(_text(_LEFT - 10, y + 4, f"{i * step:g}", anchor="end", fill=_FAINT, size=11))
    for hue, (name, ys) in zip((212, 27, 150, 280), series.items(), strict=False):
        points = " ".join(f"{x_of(i):.1f},{y_of(v):.1f}" for i, v in enumerate(ys) if math.isfinite(v))
        color = f"hsl({hue} 68% 46%)"
        parts.append(f"<polyline points='{points}' fill='none' stroke='{color}' stroke-width='2'/>")
        end = f"{name} {ys[-1]:.3f}".strip()
        parts.append(_text(right + 8, y_of(ys[-1]) + 4, end, fill=color, size=12))
    parts.append(_text(_LEFT, height - 12, "1", anchor="middle", fill=_FAINT, size=11))
    parts.append(_text(right, height - 12, str(longest), anchor="middle", fill=_FAINT, size=11))
    return _document(width, height, parts)


def _document(width: float, height: float, parts: Sequence[str]) -> str:
    idle = (
        "<defs><pattern id='idle' width='6' height='6' patternUnits='userSpaceOnUse' patternTransform='rotate(45)'>"
        "<rect width='6' height='6' fill='#f1f4f7'/><line y2='6' stroke='#d3dae1' stroke-width='2'/>"
        "</pattern></defs>"
    )
    frame = f"<rect width='{width}' height='{height:.0f}' fill='{_PAPER}'/>"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height:.0f}' width='{width}' {_FONT}>"
    return "\n".join([head, idle, frame, *parts, "</svg>"])


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", fill: str = _INK, size: int = 13, weight: int = 400
) -> str:
    style = f"font-size='{size}' fill='{fill}' text-anchor='{anchor}' font-weight='{weight}'"
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{escape(text)}</text>"


def _seconds(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"


def _round_step(rough: float) -> float:
    """The largest of 1, 2, 5 times a power of ten that is not above ``rough``."""
    power = 10.0 ** math.floor(math.log10(rough))
    return max(m for m in (1, 2, 5) if m * power <= rough * (1 + 1e-9)) * power
