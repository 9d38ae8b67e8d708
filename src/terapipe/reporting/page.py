"""The interactive page of a simulated or measured step, or of several runs on one time scale."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from terapipe.planning.slices import Plan
from terapipe.reporting.html import asset, page
from terapipe.reporting.panels import comparison, comparison_heading, idle_bars, memory_curves, slice_bars
from terapipe.reporting.style import DARKEST, LIGHTEST, MIDDLE, OP_HUES, OP_NAMES, op_color
from terapipe.reporting.view import RunView, transfers
from terapipe.scheduling.actions import COMPUTE

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
    """A self-contained HTML page for one or several runs, on one time scale.

    ``budget`` is in bytes per rank. ``first`` and ``sections`` are headings with ready HTML, placed before and after
    the sections about the runs.
    """
    if not runs:
        raise ValueError("a report needs at least one run to show")
    parts = [
        ("", _facts(facts)),
        *first,
        ("Timeline", _timeline(runs)),
        (comparison_heading(runs), comparison(runs)),
        ("Idle time by cause", idle_bars(runs)),
        ("Memory", memory_curves(runs, budget)),
        ("Slices", slice_bars(runs)),
    ]
    return page(title, lead, [part for part in parts if part[1]] + list(sections))


def _facts(facts: Mapping[str, str]) -> str:
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return f"<dl class='facts'>{rows}</dl>" if rows else ""


def _timeline(runs: Sequence[RunView]) -> str:
    """The elements that ``timeline.js`` fills, its data and the script itself."""
    ops = {e.action.op for run in runs for e in run.timeline.events}
    drawn = [op for op in OP_HUES if op in ops]
    keys = "".join(f"<span><i style='background:{op_color(op)}'></i>{OP_NAMES[op]}</span>" for op in drawn)
    switch = "<label><input type='checkbox' name='transfers'> transfers</label>" if ops - COMPUTE else ""
    names = escape(", ".join(run.name for run in runs))
    return (
        "<div id='timeline'><div class='tools'>"
        f"<p class='legend'>{keys}<span><i class='idle'></i>idle</span></p>"
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
        f"<script type='application/json' id='timeline-data'>{_embedded(runs)}</script>"
        f"<script>\n{asset('timeline.js')}</script>"
    )


def _embedded(runs: Sequence[RunView]) -> str:
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
        "bars": [_packed(row, tick) for row in bars],
        "transfers": _transfers(run, plan, number, tick),
    }


def _transfers(run: RunView, plan: Plan, number: dict[tuple[int, int], int], tick: float) -> list[list[int]]:
    """Bars under the receiving rank. Their code is that of the computation that uses what arrives."""
    rows: list[list[_Bar]] = [[] for _ in range(plan.num_ranks)]
    for transfer in transfers(run.timeline):
        _, stage, s = transfer.arrival
        code = (number[s.microbatch, s.number] * plan.num_stages + stage) * len(OP_HUES) + (not transfer.is_forward)
        rows[plan.rank_of(stage)].append((code, transfer.start, transfer.end))
    return [_packed(sorted(row, key=lambda bar: bar[1]), tick) for row in rows]


def _packed(bars: Iterable[_Bar], tick: float) -> list[int]:
    packed: list[int] = []
    before = 0
    for code, start, end in bars:
        begin, before_this = round(start / tick), before
        before = max(round(end / tick), begin)
        packed += (code, begin - before_this, before - begin)
    return packed
