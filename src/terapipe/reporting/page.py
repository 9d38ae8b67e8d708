"""The interactive page of a simulated or measured step, or of several runs on one time scale.

A page is one HTML file that loads nothing. ``report`` puts its sections together; those without data are left out::

    title, lead                       what the page is about
    facts                             names and values, given by the caller
    Timeline                          a canvas that timeline.js draws from JSON inside the page: zoom, pan, tooltips
    Predicted against measured        a table: step time, idle share, seconds by kind of work, peak memory
    Idle time by cause                a bar per rank: fill, drain, imbalance, transfer
    Memory                            a small SVG chart per rank: bytes over time against the budget
    Slices                            a bar per microbatch, divided into its slices

Only the timeline needs a script: a step of 96 ranks has 400 thousand actions, which would be as many elements in HTML.
All else is drawn here, so it can be read, printed and searched without one. HTML is written by f-strings: most of its
lines compute what they write (a width, a color, a title). Idle bars and slices as templates would be 35 lines of HTML
and 54 of Python that prepares their values, for 64 lines of Python now.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import accumulate
from typing import Any

from terapipe.planning.slices import Plan
from terapipe.reporting.style import (
    CAUSES,
    DARKEST,
    LIGHTEST,
    MIDDLE,
    OP_HUES,
    OP_NAMES,
    OTHER_CAUSE,
    asset,
    count,
    digits,
    legend,
    lightness,
    line_color,
    memory,
    memory_unit,
    op_color,
    page,
    seconds,
    share,
    table,
    text_color,
)
from terapipe.reporting.style import facts as facts_list
from terapipe.reporting.svg import document, dot, line, path, scale, staircase, text, text_width, ticks
from terapipe.reporting.view import RunView, Steps, transfers
from terapipe.scheduling.actions import COMPUTE, COPIES, Op
from terapipe.scheduling.timeline import Timeline

PAIR = ("predicted", "measured")
_MANY = 16  # with more ranks, bars of idle time are thin and only some are labeled
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 400, 196, 58, 392, 34, 168  # of a memory chart
_FEW = 4  # most ranks of which each gets a memory chart
_MOST_CUTS = 8  # different ways to slice a microbatch that are drawn


def comparison_heading(runs: Sequence[RunView]) -> str:
    """The heading above the table of runs.

    Args:
        runs: As for ``report``.
    """
    return "Predicted against measured" if _pair(runs) else "The runs" if len(runs) > 1 else "The step"


def _pair(runs: Sequence[RunView]) -> tuple[RunView, RunView] | None:
    """The predicted and the measured run, if both are there.

    Args:
        runs: As for ``report``.
    """
    named = {run.name: run for run in runs}
    return (named[PAIR[0]], named[PAIR[1]]) if set(PAIR) <= set(named) else None


def comparison(runs: Sequence[RunView]) -> str:
    """A table of the runs in numbers, a row for each. Of a predicted and a measured run, another row has the ratios; of
    other runs, a column has each step's time relative to the fastest.

    Args:
        runs: As for ``report``.
    """
    totals = [_totals(run.timeline) for run in runs]
    ops = [op for op in OP_HUES if any(op in total for total in totals)]
    has_memory = any(run.memory for run in runs)
    header = ["", "step time", "idle", *(OP_NAMES[op] for op in ops)] + ["peak memory"] * has_memory
    rows = [_comparison_row(run, total, ops, has_memory) for run, total in zip(runs, totals, strict=True)]
    both = _pair(runs)
    if both:
        rows.append(_ratios(*both, ops, has_memory))
    elif len(runs) > 1:
        fastest = min(run.timeline.makespan for run in runs)
        header.insert(2, "to the fastest")
        for run, row in zip(runs, rows, strict=True):
            row.insert(2, f"{run.timeline.makespan / fastest:.2f} x")
    note = "Forward and backward: the time of all ranks together." + " Memory: of the fullest rank." * has_memory
    return table(header, rows) + f"<p class='note'>{note}</p>"


def _totals(timeline: Timeline) -> dict[Op, float]:
    """Seconds of all ranks together by kind of computation. A measured step whose forwards take longer than predicted
    shows here, also if idle time hides it in the step's time.

    Args:
        timeline: Of one run.
    """
    totals: dict[Op, float] = {}
    for event in timeline.computations:
        totals[event.action.op] = totals.get(event.action.op, 0.0) + event.end - event.start
    return totals


def _comparison_row(run: RunView, totals: dict[Op, float], ops: Sequence[Op], has_memory: bool) -> list[str]:
    """A run's cells: name, step time, idle share, seconds of each kind of computation, peak of the fullest rank."""
    spent = [seconds(totals[op]) if op in totals else "-" for op in ops]
    peak = [memory(max(run.peaks)) if run.memory else "-"] if has_memory else []
    return [run.name, seconds(run.timeline.makespan), share(run.timeline.idle), *spent, *peak]


def _ratios(predicted: RunView, measured: RunView, ops: Sequence[Op], has_memory: bool) -> list[str]:
    """The row of predicted over measured: 1 is a right prediction, less than 1 one that was too short."""
    ours, theirs = _totals(predicted.timeline), _totals(measured.timeline)
    pairs = [
        (predicted.timeline.makespan, measured.timeline.makespan),
        (predicted.timeline.idle, measured.timeline.idle),
        *((ours.get(op, 0.0), theirs.get(op, 0.0)) for op in ops),
        *[(max(predicted.peaks, default=0.0), max(measured.peaks, default=0.0))] * has_memory,
    ]
    return [" / ".join(PAIR), *(digits(a / b) if a > 0 and b > 0 else "-" for a, b in pairs)]


def idle_bars(runs: Sequence[RunView]) -> str:
    """A bar per rank with its idle time by cause, all runs on one scale. Empty if no run knows the causes.

        []fill []drain []imbalance []transfer
        rank 0  |ddddddd        |  12 ms, 9%
        rank 1  |ffdddii        |  11 ms, 8%      f: waits for its first input, d: has nothing left to do

    Args:
        runs: As for ``report``.
    """
    shown = [run for run in runs if run.idle]
    most = max((sum(rank.values()) for run in shown for rank in run.idle), default=0.0)
    if most <= 0:
        return ""
    observed = [cause for run in shown for rank in run.idle for cause, spent in rank.items() if spent > 0]
    causes = [c for c in (*CAUSES, *dict.fromkeys(observed)) if c in set(observed)]
    colors = {cause: CAUSES.get(cause, OTHER_CAUSE) for cause in causes}
    panels = "".join(_idle_panel(run, colors, most) for run in shown)
    return f"{legend(colors)}<div class='panels'>{panels}</div>"


def _idle_panel(run: RunView, colors: Mapping[str, str], most: float) -> str:
    """The bars of one run. Of many ranks, only about sixteen are labeled, and bars are thin."""
    ranks, step = len(run.idle), run.timeline.makespan
    every = max(1, ranks // _MANY) if ranks > _MANY else 1
    rows = [_idle_row(i, spent, step, colors, most, labeled=i % every == 0) for i, spent in enumerate(run.idle)]
    mean = sum(sum(spent.values()) for spent in run.idle) / ranks
    head = f"<h3>{escape(run.name)} <small>{_of_step(mean, step)} on average</small></h3>"
    return f"<div>{head}<div class='ranks{' many' if ranks > _MANY else ''}'>{''.join(rows)}</div></div>"


def _idle_row(
    rank: int, spent: Mapping[str, float], step: float, colors: Mapping[str, str], most: float, labeled: bool
) -> str:
    """The bar of one rank.

    Args:
        rank: Of the pipeline.
        spent: Idle seconds by cause.
        step: Seconds of the whole step.
        colors: By cause, in the order in which they are drawn.
        most: Idle seconds of a bar that takes the whole width.
        labeled: Whether name and value stand beside it. The title, on hovering, has them always.
    """
    parts = {cause: spent.get(cause, 0.0) for cause in colors if spent.get(cause, 0.0) > 0}
    words = ", ".join(f"{cause} {seconds(value)}" for cause, value in parts.items()) or "none"
    bars = "".join(f"<i style='width:{100 * v / most:.2f}%;background:{colors[c]}'></i>" for c, v in parts.items())
    name, value = (f"rank {rank}", _of_step(sum(parts.values()), step)) if labeled else ("", "")
    title = escape(f"rank {rank} idle: {words}")
    return f"<div title='{title}'><span>{name}</span><b>{bars}</b><span>{value}</span></div>"


def _of_step(spent: float, step: float) -> str:
    """A time and its share of the step: "12 ms, 9%"."""
    return f"{seconds(spent)}, {share(spent / step)}"


def memory_curves(runs: Sequence[RunView], budget: int | None) -> str:
    """Memory over time, a small chart per rank on one scale; with many ranks, of some. Empty if no run knows it.

    Args:
        runs: As for ``report``.
        budget: Bytes of a device. If it is above three times the peak, a note says so: a line there would flatten all
            curves.
    """
    shown = [run for run in runs if run.memory]
    peak = max((p for run in shown for p in run.peaks), default=0.0)
    if not peak:
        return ""
    span = max(run.timeline.makespan for run in shown)
    near = budget is not None and budget <= 3 * peak
    top = 1.1 * max(peak, float(budget or 0) if near else 0.0)
    ranks = _ranks_to_draw(shown)
    drawn = "".join(_memory_chart(shown, i, name, span, top, budget if near else None) for i, name in ranks.items())
    notes = []
    if len(shown) > 1:
        notes.append(legend({run.name: line_color(i) for i, run in enumerate(shown)}))
    if budget is not None and not near:
        notes.append(f"<p class='note'>The budget of {memory(budget)} lies far above this scale.</p>")
    return "".join(notes) + f"<div class='panels'>{drawn}</div>"


def _ranks_to_draw(shown: Sequence[RunView]) -> dict[int, str]:
    """Ranks and their labels: all if they are few, else the first, middle, last and fullest."""
    num_ranks = max(len(run.memory) for run in shown)
    if num_ranks <= _FEW:
        return {rank: f"rank {rank}" for rank in range(num_ranks)}
    fullest = max(((p, -rank) for run in shown for rank, p in enumerate(run.peaks)))
    why = {0: "first", num_ranks // 2: "middle", num_ranks - 1: "last"}
    why[-fullest[1]] = " and ".join(filter(None, (why.get(-fullest[1]), "highest peak")))
    return {rank: f"rank {rank}, {why[rank]}" for rank in sorted(why)}


def _memory_chart(shown: Sequence[RunView], rank: int, name: str, span: float, top: float, budget: int | None) -> str:
    """The curves of all runs on one rank. The first run is drawn last, on top."""
    x_unit, y_unit = (_RIGHT - _LEFT) / span, (_BOTTOM - _TOP) / top
    parts = [text(0, 14, name, weight=600), *_memory_scales(span, top, x_unit, y_unit)]
    end = float(_RIGHT)
    for index, run in reversed(list(enumerate(shown))):
        steps = run.memory[rank] if rank < len(run.memory) else ()
        if not steps:
            continue
        reduced = peaks_by_column(steps, span, _RIGHT - _LEFT)
        points = [(_LEFT + t * x_unit, _BOTTOM - size * y_unit) for t, size in reduced]
        last = min(_LEFT + max(run.timeline.makespan, steps[-1][0]) * x_unit, _RIGHT)
        corners = staircase(points)
        corners.append((max(last, corners[-1][0]), corners[-1][1]))
        parts.append(path(corners, line_color(index), width=1.6))
        x, y = min(points, key=lambda point: point[1])
        label = memory(run.peak(rank))
        parts += [
            dot(x, y, 3.5, line_color(index)),
            text(end, 14, label, anchor="end", fill=line_color(index), size=12, weight=600),
        ]
        end -= text_width(label, 12) + 12
    parts.append(text(end, 14, "peak", anchor="end", tone="faint", size=12))
    if budget is not None:
        y = _BOTTOM - budget * y_unit
        parts.append(line(_LEFT, y, _RIGHT, y, tone="ink", dash="5 4"))
        parts.append(text(_RIGHT, y - 5, f"budget {memory(budget)}", anchor="end", size=11))
    return document(_WIDTH, _HEIGHT, parts, f"memory of {name}")


def _memory_scales(span: float, top: float, x_unit: float, y_unit: float) -> list[str]:
    """Both axes of a memory chart: bytes at the left, seconds below."""
    sizes = ticks(0, top, 3, memory_unit(top))
    parts = scale(((_BOTTOM - size * y_unit, memory(size)) for size in sizes), _LEFT, _RIGHT)
    for at in ticks(0, span, 3):
        x = _LEFT + at * x_unit
        parts.append(text(x, _BOTTOM + 18, seconds(at), anchor="middle", tone="faint", size=11))
    return parts


def peaks_by_column(steps: Steps, span: float, columns: float) -> list[tuple[float, float]]:
    """Reduces a step function to at most two points per column of pixels, its highest and its last. A step of a large
    plan has a hundred thousand changes; averages would hide the peak, which is what the chart is for.

    Args:
        steps: (second, bytes from then on), in order of time.
        span: Seconds of all columns.
        columns: How many.
    """
    reduced: dict[int, list[tuple[float, float]]] = {}
    for at, size in steps:
        column = int(at / span * columns)
        same = reduced.setdefault(column, [(at, size)])
        highest = max([*same, (at, size)], key=lambda step: step[1])
        reduced[column] = [highest] if highest == (at, size) else [highest, (at, size)]
    return [step for column in sorted(reduced) for step in reduced[column]]


def slice_bars(runs: Sequence[RunView]) -> str:
    """A bar per microbatch, divided into its slices. Runs with the same slices are drawn once.

        microbatches 0 to 7 x 8   1 sequence of 2048 tokens, 4 slices of 384 to 704
        [    704    |   576   |  384  |  384  ]

    Args:
        runs: As for ``report``.
    """
    same: dict[tuple[object, ...], list[RunView]] = {}
    for run in runs:
        same.setdefault((run.timeline.plan.sizes, run.timeline.plan.lengths), []).append(run)
    return "".join(_plan(alike[0].timeline.plan, alike if len(same) > 1 else []) for alike in same.values())


def _plan(plan: Plan, runs: Sequence[RunView]) -> str:
    """The bars of one plan. Microbatches that are cut in the same way share a bar, and at most eight ways are drawn."""
    alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for m, key in enumerate(zip(plan.sizes, plan.lengths, strict=True)):
        alike.setdefault(key, []).append(m)
    head = f"<h3>{escape(', '.join(run.name for run in runs))}</h3>" if runs else ""
    drawn = "".join(_microbatch(size, lengths, which) for (size, lengths), which in list(alike.items())[:_MOST_CUTS])
    rest = len(alike) - _MOST_CUTS
    more = f"<p class='note'>{count(rest, 'other way')} of cutting not drawn.</p>" if rest > 0 else ""
    return f"{head}<div class='cuts'>{drawn}</div>{more}"


def _microbatch(size: int, lengths: Sequence[int], which: Sequence[int]) -> str:
    """One bar with its caption: which microbatches, how many sequences and tokens, and how long their slices are."""
    times = f" <b>&times; {len(which)}</b>" if len(which) > 1 else ""
    spread = f"{min(lengths)}" if min(lengths) == max(lengths) else f"{min(lengths)} to {max(lengths)}"
    note = (
        f"{count(size, 'sequence')} of {count(sum(lengths), 'token')}, {count(len(lengths), 'slice')} of {spread}"
        if len(lengths) > 1
        else f"{count(size, 'sequence')} of {count(sum(lengths), 'token')}, whole"
    )
    contexts = accumulate(lengths, initial=0)
    slices = (_slice(i, n, context, lengths) for i, (n, context) in enumerate(zip(lengths, contexts, strict=False)))
    return f"<div><p>{_which(which)}{times} <small>{note}</small></p><div class='cut'>{''.join(slices)}</div></div>"


def _slice(number: int, length: int, context: int, lengths: Sequence[int]) -> str:
    """One part of a bar, as wide as its share of the tokens. Its length stands in it if there is room."""
    light = lightness(number, len(lengths))
    wide = length / sum(lengths)
    label = str(length) if wide > 0.013 * len(str(length)) else ""
    title = f"slice {number}: {count(length, 'token')} after {context}"
    style = f"flex:{length} 0 0;background:{op_color(Op.F, light)};color:{text_color(light)}"
    return f"<i title='{title}' style='{style}'>{label}</i>"


def _which(numbers: Sequence[int]) -> str:
    """Names microbatches: "microbatch 3", "microbatches 0 to 7", or a list that ends with an ellipsis."""
    if len(numbers) == 1:
        return f"microbatch {numbers[0]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"microbatches {numbers[0]} to {numbers[-1]}"
    return "microbatches " + ", ".join(map(str, numbers[:6])) + (", …" if len(numbers) > 6 else "")


_Bar = tuple[int, float, float]  # code, start and end in seconds


def report(
    title: str,
    lead: str,
    runs: Sequence[RunView],
    *,
    facts: Mapping[str, str] = {},
    budget: int | None = None,
    first: Sequence[tuple[str, str]] = (),
    sections: Sequence[tuple[str, str]] = (),
) -> str:
    """Makes a self-contained HTML page for one or several runs, on one time scale.

    Args:
        title: The heading.
        lead: A sentence below it.
        runs: At least one. If their names are "predicted" and "measured", the page compares the two.
        facts: Names and values for the box at the top.
        budget: Bytes of a device, drawn into memory charts.
        first: Headings with ready HTML, placed before the sections about the runs.
        sections: Headings with ready HTML, placed after them.

    Returns:
        The page as text.
    """
    if not runs:
        raise ValueError("a report needs at least one run to show")
    parts = [
        ("", facts_list(facts)),
        *first,
        ("Timeline", _timeline(runs)),
        (comparison_heading(runs), comparison(runs)),
        ("Idle time by cause", idle_bars(runs)),
        ("Memory", memory_curves(runs, budget)),
        ("Slices", slice_bars(runs)),
    ]
    return page(title, lead, [part for part in parts if part[1]] + list(sections))


def _timeline(runs: Sequence[RunView]) -> str:
    """The elements that ``timeline.js`` fills, its data and the script itself."""
    ops = {e.action.op for run in runs for e in run.timeline.events}
    colors = {OP_NAMES[op]: op_color(op) for op in OP_HUES if op in ops}
    words = "transfers and copies" if ops & COPIES else "transfers"
    switch = f"<label><input type='checkbox' name='transfers'> {words}</label>" if ops - COMPUTE else ""
    names = escape(", ".join(run.name for run in runs))
    return (
        "<div id='timeline'><div class='tools'>"
        f"{legend(colors, with_idle=True)}"
        f"<p class='buttons'>{switch}<button type='button' name='out' aria-label='zoom out'>&minus;</button>"
        "<button type='button' name='in' aria-label='zoom in'>+</button>"
        "<button type='button' name='all'>whole step</button></p></div>"
        f"<div class='plot' tabindex='0' role='application' aria-label='Timeline of {names}. Arrow keys walk from "
        "action to action, plus and minus zoom, escape shows the whole step.'><canvas></canvas><canvas></canvas></div>"
        "<p class='tip' role='status' hidden></p></div>"
        "<p class='note'>A row for each rank; the shade is the slice, the first of a microbatch darkest. The wheel or "
        "two fingers zoom, dragging pans, a double click shows the whole step; arrow keys walk from action to action."
        "</p>"
        "<noscript><p class='note'>The timeline is drawn by a script, which this browser does not run.</p></noscript>"
        f"<script type='application/json' id='timeline-data'>{_json_of(runs)}</script>"
        f"<script>\n{asset('timeline.js')}</script>"
    )


def _json_of(runs: Sequence[RunView]) -> str:
    """The runs as compact JSON for ``timeline.js``. It is safe in a script element: ``<`` is escaped.

    All times are whole ticks. A bar is three numbers: its code (op, stage and slice as one number), the ticks since the
    previous bar on its rank ended, and its own ticks. A run of 96 ranks with 4000 actions each takes about 5 MB.
    """
    span = max(run.timeline.makespan for run in runs)
    tick = 10.0 ** (math.floor(math.log10(span)) - 7)
    data = {
        "tick": tick,
        "ops": [[OP_NAMES[op], *look] for op, look in OP_HUES.items()],
        "light": [DARKEST, LIGHTEST, MIDDLE],
        "runs": [_run_data(run, tick) for run in runs],
    }
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _run_data(run: RunView, tick: float) -> dict[str, Any]:
    """One run as ``timeline.js`` reads it: bars by row, in ticks of time.

        code = (slice * stages + stage) * ops + op       one number for what a bar is; the script takes it apart again

    Args:
        run: With its timeline.
        tick: Seconds of one tick.
    """
    timeline, plan = run.timeline, run.timeline.plan
    op_code = {op: i for i, op in enumerate(OP_HUES)}
    number = {(s.microbatch, s.number): i for i, s in enumerate(plan.slices)}
    bars: list[list[_Bar]] = [[] for _ in range(plan.num_ranks)]
    for rank, (op, stage, s), start, end in timeline.computations:
        code = (number[s.microbatch, s.number] * plan.num_stages + stage) * len(OP_HUES) + op_code[op]
        bars[rank].append((code, start, end))
    return {
        "name": run.name,
        "end": round(timeline.makespan / tick),
        "idle": round(timeline.idle, 4),
        "stages": plan.num_stages,
        "lengths": [list(row) for row in plan.lengths],
        "bars": [_pack(row, tick) for row in bars],
        "transfers": _transfers(run, plan, number, tick),
    }


def _transfers(run: RunView, plan: Plan, number: dict[tuple[int, int], int], tick: float) -> list[list[int]]:
    """Bars under the receiving rank. Their code is that of the computation that uses what arrives. Copies to the host
    and back are among them, with codes of their own."""
    rows: list[list[_Bar]] = [[] for _ in range(plan.num_ranks)]
    for transfer in transfers(run.timeline):
        _, stage, s = transfer.arrival
        code = (number[s.microbatch, s.number] * plan.num_stages + stage) * len(OP_HUES) + (not transfer.is_forward)
        rows[plan.rank_of(stage)].append((code, transfer.start, transfer.end))
    op_code = {op: i for i, op in enumerate(OP_HUES)}
    for rank, (op, stage, s), start, end in run.timeline.copies:
        code = (number[s.microbatch, s.number] * plan.num_stages + stage) * len(OP_HUES) + op_code[op]
        rows[rank].append((code, start, end))
    return [_pack(sorted(row, key=lambda bar: bar[1]), tick) for row in rows]


def _pack(bars: Iterable[_Bar], tick: float) -> list[int]:
    """The bars of one row as numbers, three for each: code, ticks since the bar before ended, own ticks. Differences
    are short numbers, and so is the page. They add up to the rounded end, so errors do not.

    Args:
        bars: Of one rank, in order of their starts.
        tick: Seconds of one tick.
    """
    packed: list[int] = []
    before = 0
    for code, start, end in bars:
        begin, before_this = round(start / tick), before
        before = max(round(end / tick), begin)
        packed += (code, begin - before_this, before - begin)
    return packed
