"""One page for a simulated or measured step, or for several on one scale of time."""

from collections.abc import Mapping, Sequence
from html import escape

from terapipe.reporting import comparison, html, idle, lengths, memory
from terapipe.reporting.embedded import embedded
from terapipe.reporting.palette import OPS, of_op
from terapipe.reporting.shown import Shown
from terapipe.reporting.words import NAMES
from terapipe.scheduling.actions import COMPUTE

__all__ = ["Shown", "report"]


def report(
    title: str,
    lead: str,
    shown: Sequence[Shown],
    *,
    facts: Mapping[str, str] = {},
    budget: int | None = None,
    first: Sequence[tuple[str, str]] = (),
    sections: Sequence[tuple[str, str]] = (),
) -> str:
    """HTML that needs nothing but itself. ``budget`` is in bytes per rank; ``first`` and ``sections`` are headings with
    ready HTML under them, before and after what is said of the runs."""
    if not shown:
        raise ValueError("a report needs at least one run to show")
    parts = [
        ("", _facts(facts)),
        *first,
        ("Timeline", _timeline(shown)),
        (comparison.heading(shown), comparison.table(shown)),
        ("Idle time by cause", idle.charts(shown)),
        ("Memory", memory.charts(shown, budget)),
        ("Slices", lengths.charts(shown)),
    ]
    return html.page(title, lead, [part for part in parts if part[1]] + list(sections))


def _facts(facts: Mapping[str, str]) -> str:
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return f"<dl class='facts'>{rows}</dl>" if rows else ""


def _timeline(shown: Sequence[Shown]) -> str:
    """What ``timeline.js`` finds and fills."""
    ops = {e.action.op for s in shown for e in s.timeline.events}
    keys = "".join(f"<span><i style='background:{of_op(op)}'></i>{NAMES[op]}</span>" for op in OPS if op in ops)
    switch = "<label><input type='checkbox' name='transfers'> transfers</label>" if ops - COMPUTE else ""
    names = escape(", ".join(s.name for s in shown))
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
        f"<script type='application/json' id='timeline-data'>{embedded(shown)}</script>"
        f"<script>\n{html.asset('timeline.js')}</script>"
    )
