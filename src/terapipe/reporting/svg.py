"""Pictures. Here timelines as bars; the charts come from their own files. Plain SVG, no dependencies."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from html import escape

from terapipe.reporting.charts import groups, lines
from terapipe.reporting.drawing import box, document, line, text, text_width, ticks
from terapipe.reporting.frontier import frontier
from terapipe.reporting.palette import OPS, TONES, lightness, of_op, on
from terapipe.reporting.units import seconds, share
from terapipe.reporting.words import NAMES, in_words
from terapipe.scheduling.actions import Op
from terapipe.scheduling.timeline import Event, Timeline

__all__ = ["frontier", "groups", "lines", "timelines"]

_LEFT, _RIGHT, _HEAD = 74, 24, 30
_TALL, _THIN, _BLOCK = 34.0, 5.0, 480.0  # heights of a row, and of all rows of a timeline with many ranks
_ROOMY = 12.0  # rows of this height have names and numbers
_NARROW = 2.0  # bars narrower than this are drawn together


def timelines(drawn: Mapping[str, Timeline], width: int = 960) -> str:
    """Several timelines under each other on one scale of time, so that lengths compare by eye."""
    span = max((t.makespan for t in drawn.values()), default=0.0)
    if span <= 0:
        raise ValueError("a picture needs a timeline with at least one computation")
    unit = (width - _LEFT - _RIGHT) / span
    parts: list[str] = []
    y = 16.0
    for title, timeline in drawn.items():
        summary = f"{seconds(timeline.makespan)} per step, {share(timeline.idle)} idle"
        parts.append(text(_LEFT, y + 16, title, size=15, weight=600))
        parts.append(text(width - _RIGHT, y + 16, summary, anchor="end", tone="faint"))
        rows, y = _rows(timeline, y + _HEAD, unit)
        parts += rows
        y += 14
    parts += _axis(span, unit, y)
    parts += _legend(drawn.values(), width, y + 40)
    return document(width, y + 58, parts, "timelines: " + ", ".join(drawn))


def _rows(timeline: Timeline, y: float, unit: float) -> tuple[list[str], float]:
    """One row for each rank, thinner and with fewer labels the more there are; and where they end."""
    ranks = timeline.plan.num_ranks
    row = _height(ranks)
    pitch = row + max(1.0, min(6.0, row / 5))
    every = next(n for n in (1, 2, 4, 8, 16, 32, 64) if n * pitch >= 15)
    end = timeline.makespan * unit
    parts = []
    for rank, events in by_rank(timeline).items():
        top = y + rank * pitch
        if rank % every == 0:
            parts.append(text(_LEFT - 12, top + row / 2 + 4, f"rank {rank}", anchor="end", tone="faint"))
        parts.append(box(_LEFT, top, end, row, fill="url(#idle)", round_=min(3, row / 4)))
        owed = dict.fromkeys(OPS, 0.0)
        for group in _grouped(events, unit):
            single = len(group) == 1
            parts.append(_bar(group[0], timeline, top, row, unit) if single else _mixed(group, owed, top, row, unit))
    return parts, y + ranks * pitch


def _height(ranks: int) -> float:
    return max(_THIN, min(_TALL, _BLOCK / ranks))


def by_rank(timeline: Timeline) -> dict[int, list[Event]]:
    """Each rank's computations."""
    found: dict[int, list[Event]] = {rank: [] for rank in range(timeline.plan.num_ranks)}
    for event in timeline.computations:
        found[event.rank].append(event)
    return found


def _grouped(events: Sequence[Event], unit: float) -> Iterator[list[Event]]:
    """Neighbours that would be too narrow to see are drawn as one bar, or a large run makes a picture of gigabytes."""
    group: list[Event] = []
    for event in events:
        if group and ((event.end - group[0].start) * unit > _NARROW or (event.start - group[-1].end) * unit > 0.5):
            yield group
            group = []
        group.append(event)
    if group:
        yield group


def _bar(event: Event, timeline: Timeline, y: float, row: float, unit: float) -> str:
    op, _, s = event.action
    slices = len(timeline.plan.grid[s.microbatch])
    light = lightness(s.number, slices)
    x, wide = _LEFT + event.start * unit, max((event.end - event.start) * unit, 0.5)
    bar = box(x, y, wide, row, fill=of_op(op, light), round_=2.5 if row >= _ROOMY and wide > 5 else 0)
    if wide > 4:
        bar = bar.replace("/>", f" class='edge' stroke='{TONES['paper']}' stroke-width='0.7'/>")
    if row < _ROOMY:
        return bar
    number = str(s.number if slices > 1 else s.microbatch)
    fits = wide > 6 + 7 * len(number)
    inside = text(x + wide / 2, y + row / 2 + 4, number, anchor="middle", fill=on(light), size=11) if fits else ""
    title = escape(f"{in_words(event.action)}, {seconds(event.end - event.start)}")
    return f"<g><title>{title}</title>{bar}{inside}</g>"


def _mixed(group: Sequence[Event], owed: dict[Op, float], y: float, row: float, unit: float) -> str:
    """One bar for several, in the colour of the op that is owed most: along a row each op gets its share of them."""
    busy = sum(e.end - e.start for e in group)
    for event in group:
        owed[event.action.op] += (event.end - event.start) / busy if busy else 0.0
    op = max(owed, key=lambda op: owed[op])
    owed[op] -= 1.0
    long = group[-1].end - group[0].start
    bar = box(_LEFT + group[0].start * unit, y, max(long * unit, 0.5), row, fill=of_op(op))
    return bar.replace("/>", f" opacity='{busy / long:.2f}'/>") if busy < 0.97 * long else bar


def _axis(span: float, unit: float, y: float) -> list[str]:
    parts = []
    for at in ticks(0.0, span, 8):
        x = _LEFT + at * unit
        parts.append(line(x, y - 6, x, y, tone="faint"))
        parts.append(text(x, y + 14, seconds(at), anchor="middle", tone="faint", size=11))
    return parts


def _legend(drawn: Collection[Timeline], width: int, y: float) -> list[str]:
    ops = {e.action.op for timeline in drawn for e in timeline.computations}
    parts, x = [], float(_LEFT)
    for name, fill in [(NAMES[op], of_op(op)) for op in OPS if op in ops] + [("idle", "url(#idle)")]:
        parts.append(box(x, y - 10, 22, 12, fill=fill, round_=2))
        parts.append(text(x + 30, y, name, tone="faint", size=12))
        x += 56 + text_width(name, 12)
    if any(_height(timeline.plan.num_ranks) >= _ROOMY for timeline in drawn):
        parts.append(text(width - _RIGHT, y, "numbers: slices", anchor="end", tone="faint", size=12))
    return parts
