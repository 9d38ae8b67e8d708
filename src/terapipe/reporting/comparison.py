"""The runs in numbers, one line each."""

from collections.abc import Sequence

from terapipe.reporting import html
from terapipe.reporting.palette import OPS
from terapipe.reporting.shown import Shown
from terapipe.reporting.units import digits, memory, seconds, share
from terapipe.reporting.words import NAMES
from terapipe.scheduling.actions import Op
from terapipe.scheduling.timeline import Timeline

PAIR = ("predicted", "measured")


def heading(shown: Sequence[Shown]) -> str:
    return "Predicted against measured" if pair(shown) else "The runs" if len(shown) > 1 else "The step"


def pair(shown: Sequence[Shown]) -> tuple[Shown, Shown] | None:
    """The predicted and the measured run, where there is one of each."""
    named = {s.name: s for s in shown}
    return (named[PAIR[0]], named[PAIR[1]]) if set(PAIR) <= set(named) else None


def table(shown: Sequence[Shown]) -> str:
    totals = [_totals(s.timeline) for s in shown]
    ops = [op for op in OPS if any(op in total for total in totals)]
    has_memory = any(s.memory for s in shown)
    header = ["", "step time", "idle", *(NAMES[op] for op in ops)] + ["peak memory"] * has_memory
    rows = [_row(s, total, ops, has_memory) for s, total in zip(shown, totals, strict=True)]
    both = pair(shown)
    if both:
        rows.append(_ratios(*both, ops, has_memory))
    elif len(shown) > 1:
        fastest = min(s.timeline.makespan for s in shown)
        header.insert(2, "to the fastest")
        for s, row in zip(shown, rows, strict=True):
            row.insert(2, f"{s.timeline.makespan / fastest:.2f} x")
    note = "Forward and backward: the time of all ranks together." + " Memory: of the fullest rank." * has_memory
    return html.table(header, rows) + f"<p class='note'>{note}</p>"


def _totals(timeline: Timeline) -> dict[Op, float]:
    totals: dict[Op, float] = {}
    for event in timeline.computations:
        totals[event.action.op] = totals.get(event.action.op, 0.0) + event.end - event.start
    return totals


def _row(s: Shown, totals: dict[Op, float], ops: Sequence[Op], has_memory: bool) -> list[str]:
    spent = [seconds(totals[op]) if op in totals else "-" for op in ops]
    peak = [memory(max(s.peaks)) if s.memory else "-"] if has_memory else []
    return [s.name, seconds(s.timeline.makespan), share(s.timeline.idle), *spent, *peak]


def _ratios(predicted: Shown, measured: Shown, ops: Sequence[Op], has_memory: bool) -> list[str]:
    ours, theirs = _totals(predicted.timeline), _totals(measured.timeline)
    pairs = [
        (predicted.timeline.makespan, measured.timeline.makespan),
        (predicted.timeline.idle, measured.timeline.idle),
        *((ours.get(op, 0.0), theirs.get(op, 0.0)) for op in ops),
        *[(max(predicted.peaks, default=0.0), max(measured.peaks, default=0.0))] * has_memory,
    ]
    return [" / ".join(PAIR), *(digits(a / b) if a > 0 and b > 0 else "-" for a, b in pairs)]
