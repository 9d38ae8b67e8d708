"""Idle time by its cause: one bar for each rank, all runs on one scale."""

from collections.abc import Mapping, Sequence
from html import escape

from terapipe.reporting.palette import CAUSES, OTHER_CAUSE
from terapipe.reporting.shown import Shown
from terapipe.reporting.units import seconds, share

_MANY = 16  # ranks, above which bars are thin and only some are labelled


def charts(shown: Sequence[Shown]) -> str:
    """HTML, or nothing where no run knows its causes."""
    known = [s for s in shown if s.idle]
    most = max((sum(rank.values()) for s in known for rank in s.idle), default=0.0)
    if most <= 0:
        return ""
    found = [cause for s in known for rank in s.idle for cause, spent in rank.items() if spent > 0]
    causes = [c for c in (*CAUSES, *dict.fromkeys(found)) if c in set(found)]
    colours = {cause: CAUSES.get(cause, OTHER_CAUSE) for cause in causes}
    keys = "".join(f"<span><i style='background:{colours[c]}'></i>{escape(c)}</span>" for c in colours)
    return f"<p class='legend'>{keys}</p><div class='panels'>{''.join(_panel(s, colours, most) for s in known)}</div>"


def _panel(shown: Shown, colours: Mapping[str, str], most: float) -> str:
    ranks, step = len(shown.idle), shown.timeline.makespan
    every = max(1, ranks // _MANY) if ranks > _MANY else 1
    rows = [_row(rank, spent, step, colours, most, labelled=rank % every == 0) for rank, spent in enumerate(shown.idle)]
    mean = sum(sum(spent.values()) for spent in shown.idle) / ranks
    head = f"<h3>{escape(shown.name)} <small>{_value(mean, step)} on average</small></h3>"
    return f"<div>{head}<div class='ranks{' many' if ranks > _MANY else ''}'>{''.join(rows)}</div></div>"


def _row(
    rank: int, spent: Mapping[str, float], step: float, colours: Mapping[str, str], most: float, labelled: bool
) -> str:
    parts = {cause: spent.get(cause, 0.0) for cause in colours if spent.get(cause, 0.0) > 0}
    words = ", ".join(f"{cause} {seconds(value)}" for cause, value in parts.items()) or "none"
    bars = "".join(f"<i style='width:{100 * v / most:.2f}%;background:{colours[c]}'></i>" for c, v in parts.items())
    name, value = (f"rank {rank}", _value(sum(parts.values()), step)) if labelled else ("", "")
    title = escape(f"rank {rank} idle: {words}")
    return f"<div title='{title}'><span>{name}</span><b>{bars}</b><span>{value}</span></div>"


def _value(spent: float, step: float) -> str:
    return f"{seconds(spent)}, {share(spent / step)}"
