"""SVG pictures without dependencies: the elements they are made of, timelines as bars, and conversion to PNG.

A picture is a list of strings, one for each element, which ``document`` puts into an ``<svg>``. Coordinates are SVG
units: x grows to the right, y downwards, and one unit is one pixel where a picture is shown in its own size. That is
all that charts need; a plotting library would bring fonts, a layout engine and megabytes for the same lines.

Each element has its color as an attribute, for a picture that stands alone, and its tone as a class. The style sheet of
a page overrides colors by class, so pictures follow the dark color scheme.

A timeline has a row for each rank, and a bar for each computation from its start to its end::

             predicted                            137 ms per step, 10% idle
    rank 0   [0][1][ 0 ][ 1 ]////[  0  ]//[  1  ][  0  ][  1  ]     blue: forward, orange: backward
    rank 1   //[0][1][ 0 ][ 1 ][  0  ][  1  ][  0  ][  1  ]////     hatched: idle
             |        |        |        |        |        |
             0        20 ms    40 ms    60 ms    80 ms    100 ms
             [] forward  [] backward  [] idle      numbers: slices

Within a microbatch the first slice is darkest, so that the eye follows one sequence down the ranks.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from terapipe.extras import import_extra
from terapipe.reporting.style import OP_HUES, OP_NAMES, TONES, in_words, lightness, op_color, seconds, share, text_color
from terapipe.scheduling.actions import Op
from terapipe.scheduling.timeline import Event, Timeline

_FONT = "font-family='system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif'"
_GLYPH = 0.56  # mean width of a character in font sizes, enough to keep labels apart
_LEFT, _RIGHT, _HEAD = 74, 24, 30
_TALL, _THIN, _BLOCK = 34.0, 5.0, 480.0  # heights of a row, and of all rows of a timeline with many ranks
_ROOMY = 12.0  # rows at least this high have names and numbers
_NARROW = 2.0  # bars narrower than this are drawn together
_STRIP = 3.5  # height of a copy


def document(width: float, height: float, parts: Sequence[str], label: str = "") -> str:
    """Puts elements into an SVG document.

    Args:
        width: In SVG units.
        height: In SVG units.
        parts: The elements, as SVG.
        label: What a screen reader says.
    """
    idle = (
        "<defs><pattern id='idle' width='6' height='6' patternUnits='userSpaceOnUse' patternTransform='rotate(45)'>"
        f"<rect width='6' height='6' class='idle' fill='{TONES['idle']}'/>"
        f"<line x1='0' y1='0' x2='0' y2='6' class='hatch' stroke='{TONES['hatch']}' stroke-width='2'/>"
        "</pattern></defs>"
    )
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0f} {height:.0f}' width='{width:.0f}' "
        f"height='{height:.0f}' role='img' aria-label='{escape(label)}' {_FONT}>"
    )
    return "\n".join([head, idle, box(0, 0, width, height, tone="paper"), *parts, "</svg>"])


def text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    tone: str = "ink",
    fill: str = "",
    size: int = 13,
    weight: int = 400,
    halo: bool = False,
) -> str:
    """Words at a place.

    Args:
        x: Of the anchor.
        y: Of the base line.
        words: Are escaped here.
        anchor: What of the words is at ``x``: their "start", "middle" or "end".
        tone: A name in ``TONES``, which follows the color scheme of a page.
        fill: A fixed color in place of the tone, which no page overrides.
        size: Of the font, in SVG units.
        weight: 400 is regular, 600 bold.
        halo: Whether an edge in the color of the paper keeps lines off the letters.
    """
    color = f"fill='{fill}'" if fill else f"class='{tone}{' edge' * halo}' fill='{TONES[tone]}'"
    color += f" stroke='{TONES['paper']}' stroke-width='3' paint-order='stroke'" if halo else ""
    style = f"font-size='{size}' text-anchor='{anchor}' font-weight='{weight}' {color}"
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{escape(words)}</text>"


def box(x: float, y: float, width: float, height: float, *, tone: str = "", fill: str = "", round_: float = 0) -> str:
    """A rectangle.

    Args:
        x: Of its left edge.
        y: Of its upper edge.
        width: In SVG units.
        height: In SVG units.
        tone: A name in ``TONES``; or
        fill: a fixed color or a pattern such as ``url(#idle)``.
        round_: Radius of its corners.
    """
    color = f"fill='{fill}'" if fill else f"class='{tone}' fill='{TONES[tone]}'"
    corner = f" rx='{round_:g}'" if round_ else ""
    return f"<rect x='{x:.2f}' y='{y:.2f}' width='{width:.2f}' height='{height:.2f}'{corner} {color}/>"


def line(x1: float, y1: float, x2: float, y2: float, *, tone: str = "line", dash: str = "") -> str:
    """A straight line.

    Args:
        x1: Where it begins.
        y1: Where it begins.
        x2: Where it ends.
        y2: Where it ends.
        tone: A name in ``TONES``.
        dash: Lengths of dashes and gaps, such as "5 4"; without it the line is solid.
    """
    dashes = f" stroke-dasharray='{dash}'" if dash else ""
    place = f"x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}'"
    return f"<line {place} class='{tone}' stroke='{TONES[tone]}'{dashes}/>"


def path(points: Sequence[tuple[float, float]], color: str, *, width: float = 2) -> str:
    """A line through points.

    Args:
        points: In SVG units.
        color: A fixed one: lines of a chart mean the same in every color scheme.
        width: Of the line.
    """
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f"<polyline points='{drawn}' fill='none' stroke='{color}' stroke-width='{width:g}' stroke-linejoin='round'/>"


def dot(x: float, y: float, radius: float, color: str) -> str:
    """A filled circle with an edge in the color of the paper, which sets it apart from the line below it.

    Args:
        x: Of its center.
        y: Of its center.
        radius: In SVG units.
        color: A fixed one.
    """
    edge = f"class='edge' stroke='{TONES['paper']}'"
    return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{radius:g}' fill='{color}' {edge}/>"


def legend(entries: Iterable[tuple[str, str]], x: float, y: float, right: float = math.inf) -> tuple[list[str], float]:
    """Names of colors in a row, and in further rows where one is too short: ``[] forward  [] backward  [] idle``.

    Args:
        entries: Words and the color of the square before them.
        x: Where rows begin.
        y: The base line of the first row.
        right: Where rows end at the latest.

    Returns:
        The elements, and the base line of the last row.
    """
    parts, at = [], x
    for words, fill in entries:
        wide = 18 + text_width(words, 12)
        if at > x and at + wide > right:
            at, y = x, y + 18
        parts.append(box(at, y - 10, 12, 12, fill=fill, round_=2))
        parts.append(text(at + 18, y, words, tone="faint", size=12))
        at += wide + 22
    return parts, y


def scale(places: Iterable[tuple[float, str]], left: float, right: float) -> list[str]:
    """The y axis of a chart: a line across it for each value, with its label to the left.

    Args:
        places: The y of each line, and its label.
        left: Where lines begin.
        right: Where lines end.
    """
    parts = []
    for y, label in places:
        parts.append(line(left, y, right, y))
        parts.append(text(left - 10, y + 4, label, anchor="end", tone="faint", size=11))
    return parts


def text_width(words: str, size: float) -> float:
    """About how wide words are drawn: the number of letters times an average width. The real width depends on the
    viewer's fonts, so labels get this much room and a little more.

    Args:
        words: To be drawn.
        size: Of the font.
    """
    return _GLYPH * size * len(words)


def round_step(rough: float) -> float:
    """The largest of 1, 2, 5 times a power of ten that is not above a number: 0.37 gives 0.2.

    Args:
        rough: A positive number.
    """
    power = 10.0 ** math.floor(math.log10(rough))
    return max(m for m in (1, 2, 5) if m * power <= rough * (1 + 1e-9)) * power


def ticks(low: float, high: float, about: int, unit: float = 1.0) -> list[float]:
    """Places of an axis where a label is easy to read: ``ticks(0, 0.9, 3)`` is 0, 0.2, 0.4, 0.6, 0.8.

    Args:
        low: Where the axis begins.
        high: Where it ends.
        about: The least number of intervals; there may be over twice as many.
        unit: What the axis counts in. An axis of GiB has ticks at multiples of 2**30, not of 10**9.
    """
    step = round_step((high - low) / unit / about) * unit
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def staircase(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of the step function through points: a value holds until the next point.

            points        corners
              o             +--o
            o     o      +--+  +--o

    Args:
        points: In order of x.
    """
    corners: list[tuple[float, float]] = []
    for x, y in points:
        corners += [(x, corners[-1][1])] if corners else []
        corners.append((x, y))
    return corners


def timelines(drawn: Mapping[str, Timeline], width: int = 960) -> str:
    """Draws several timelines, one below the other, on one time scale, so that a shorter step is a shorter picture.

    Args:
        drawn: Timelines by name.
        width: Of the picture, in SVG units. Its height follows from the number of ranks.

    Returns:
        The SVG document.
    """
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
    parts += _key(drawn.values(), width, y + 40)
    return document(width, y + 58, parts, "timelines: " + ", ".join(drawn))


def _rows(timeline: Timeline, y: float, unit: float) -> tuple[list[str], float]:
    """One row per rank, and the y at which they end. Many ranks get thin rows and fewer labels."""
    ranks = timeline.plan.num_ranks
    row = _height(ranks)
    copies = [[e for e in timeline.copies if e.rank == rank] for rank in range(ranks)] if row >= _ROOMY else []
    pitch = row + max(1.0, min(6.0, row / 5)) + (2 * _STRIP if any(copies) else 0.0)
    every = next(n for n in (1, 2, 4, 8, 16, 32, 64) if n * pitch >= 15)
    end = timeline.makespan * unit
    parts = []
    for rank, events in enumerate(timeline.by_rank):
        top = y + rank * pitch
        if rank % every == 0:
            parts.append(text(_LEFT - 12, top + row / 2 + 4, f"rank {rank}", anchor="end", tone="faint"))
        parts.append(box(_LEFT, top, end, row, fill="url(#idle)", round_=min(3, row / 4)))
        pending = dict.fromkeys(OP_HUES, 0.0)
        for group in _group(events, unit):
            single = len(group) == 1
            parts.append(_bar(group[0], timeline, top, row, unit) if single else _mix(group, pending, top, row, unit))
        parts += [_strip(event, top + row + 1, unit) for event in (copies[rank] if copies else ())]
    return parts, y + ranks * pitch


def _strip(event: Event, y: float, unit: float) -> str:
    """A copy to the host or back, below the bars of its rank. Each direction has a strip of its own: both may run."""
    top = y + (_STRIP if event.action.op in (Op.BACK, Op.KV_BACK) else 0.0)
    wide = max((event.end - event.start) * unit, 0.5)
    title = escape(f"{in_words(event.action)}, {seconds(event.end - event.start)}")
    bar = box(_LEFT + event.start * unit, top, wide, _STRIP - 0.8, fill=op_color(event.action.op))
    return f"<g><title>{title}</title>{bar}</g>"


def _height(ranks: int) -> float:
    """The height of a row: less for many ranks, so that a thousand of them still make one picture."""
    return max(_THIN, min(_TALL, _BLOCK / ranks))


def _group(events: Sequence[Event], unit: float) -> Iterator[list[Event]]:
    """Groups of events that are too narrow to see, each drawn as one bar: a large run would make gigabytes of SVG."""
    group: list[Event] = []
    for event in events:
        if group and ((event.end - group[0].start) * unit > _NARROW or (event.start - group[-1].end) * unit > 0.5):
            yield group
            group = []
        group.append(event)
    if group:
        yield group


def _bar(event: Event, timeline: Timeline, y: float, row: float, unit: float) -> str:
    """One computation: a bar with the number of its slice, where that fits, and a title that viewers show on hovering.
    Where a microbatch is one slice, its slices would all be 0, so the bar has the number of the microbatch."""
    op, _, s = event.action
    slices = len(timeline.plan.grid[s.microbatch])
    light = lightness(s.number, slices)
    x, wide = _LEFT + event.start * unit, max((event.end - event.start) * unit, 0.5)
    bar = box(x, y, wide, row, fill=op_color(op, light), round_=2.5 if row >= _ROOMY and wide > 5 else 0)
    if wide > 4:
        bar = bar.replace("/>", f" class='edge' stroke='{TONES['paper']}' stroke-width='0.7'/>")
    if row < _ROOMY:
        return bar
    number = str(s.number if slices > 1 else s.microbatch)
    fits = wide > 6 + 7 * len(number)
    inside = (
        text(x + wide / 2, y + row / 2 + 4, number, anchor="middle", fill=text_color(light), size=11) if fits else ""
    )
    title = escape(f"{in_words(event.action)}, {seconds(event.end - event.start)}")
    return f"<g><title>{title}</title>{bar}{inside}</g>"


def _mix(group: Sequence[Event], pending: dict[Op, float], y: float, row: float, unit: float) -> str:
    """One bar for several events. Each op accumulates its share of time in ``pending``, and the op with most pending
    time gives the color, so along a row the colors have the right proportions."""
    busy = sum(e.end - e.start for e in group)
    for event in group:
        pending[event.action.op] += (event.end - event.start) / busy if busy else 0.0
    op = max(pending, key=lambda op: pending[op])
    pending[op] -= 1.0
    long = group[-1].end - group[0].start
    bar = box(_LEFT + group[0].start * unit, y, max(long * unit, 0.5), row, fill=op_color(op))
    return bar.replace("/>", f" opacity='{busy / long:.2f}'/>") if busy < 0.97 * long else bar


def _axis(span: float, unit: float, y: float) -> list[str]:
    """Times below the rows, with a short line upwards for each."""
    parts = []
    for at in ticks(0.0, span, 8):
        x = _LEFT + at * unit
        parts.append(line(x, y - 6, x, y, tone="faint"))
        parts.append(text(x, y + 14, seconds(at), anchor="middle", tone="faint", size=11))
    return parts


def _key(drawn: Collection[Timeline], width: int, y: float) -> list[str]:
    """What colors and numbers mean. Only colors that occur are in it."""
    ops = {e.action.op for timeline in drawn for e in (*timeline.computations, *timeline.copies)}
    parts, _ = legend(
        [*((OP_NAMES[op], op_color(op)) for op in OP_HUES if op in ops), ("idle", "url(#idle)")], _LEFT, y
    )
    plans = [timeline.plan for timeline in drawn if _height(timeline.plan.num_ranks) >= _ROOMY]
    kinds = {"slices" if len(row) > 1 else "microbatches" for plan in plans for row in plan.lengths}
    if kinds:
        words = f"numbers: {' or '.join(sorted(kinds, reverse=True))}"
        parts.append(text(width - _RIGHT, y, words, anchor="end", tone="faint", size=12))
    return parts


def to_png(picture: str, scale: float = 2.0) -> bytes:
    """Turns an SVG picture into a PNG. Needs the ``png`` extra, which brings its own font, so machines without fonts
    will do.

    Args:
        picture: An SVG document, as text.
        scale: Pixels per SVG unit. Two are sharp on most screens.

    Returns:
        The file's content.
    """
    resvg, font = _modules()
    fonts = [str(Path(font.font_directory) / f"Roboto-{weight}.ttf") for weight in ("Regular", "Bold")]
    rendered: bytes = resvg.svg_to_bytes(
        svg_string=picture, zoom=scale, skip_system_fonts=True, font_files=fonts, sans_serif_family="Roboto"
    )
    return bytes(rendered)


def require_png() -> None:
    """Raises ValueError if the ``png`` extra is not installed. Called before long computations."""
    _modules()


def has_png() -> bool:
    """Whether the ``png`` extra is installed."""
    try:
        require_png()
    except ValueError:
        return False
    return True


def _modules() -> list[Any]:
    """The modules of the ``png`` extra: the renderer resvg, and the font Roboto as files."""
    return [import_extra(name, "png", "a PNG picture") for name in ("resvg_py", "font_roboto")]
