"""A Timeline as text, for a terminal."""

import math
from string import ascii_uppercase, digits

from terapipe.reporting.style import count
from terapipe.scheduling.actions import Op
from terapipe.scheduling.timeline import Timeline

_FORWARD, _BACKWARD, _WEIGHTS, _IDLE = digits, ascii_uppercase, "+", "·"


def draw(timeline: Timeline, width: int = 100, scale: float | None = None, rows: int = 16) -> str:
    """One line per rank. ``scale`` is the time of the whole width, by default the timeline's makespan.

    A forward shows the last digit of its slice's number, a backward its letter (A is slice 0), a deferred weight
    gradient a plus, idle time dots. Of more than ``rows`` ranks, the first and the last are shown.
    """
    span = scale or timeline.makespan
    if width < 1 or rows < 2 or span <= 0:
        raise ValueError(
            f"a drawing needs a width, two rows and a duration, got {width} columns and {rows} rows for {span} s"
        )
    ranks = timeline.plan.num_ranks
    columns = min(width, max(1, round(width * timeline.makespan / span)))
    cells = {rank: [_IDLE] * columns for rank in _drawn_ranks(ranks, rows)}
    for event in timeline.computations:
        if event.rank in cells:
            # A column shows the event at its middle.
            first, last = (math.ceil(t * width / span - 0.5) for t in (event.start, event.end))
            first, last = max(first, 0), min(last, columns)
            if first < last:
                mark = _mark(event.action.op, event.action.slice.number)
                cells[event.rank][first:last] = mark * (last - first)
    label = len(str(ranks - 1))
    lines = [f"rank {rank:>{label}} │{''.join(row)}│" for rank, row in cells.items()]
    if len(cells) < ranks:
        lines.insert((len(cells) + 1) // 2, f"     {'⋮':>{label}} {count(ranks - len(cells), 'more rank')}")
    return "\n".join(lines)


def _drawn_ranks(ranks: int, rows: int) -> list[int]:
    if ranks <= rows:
        return list(range(ranks))
    return [*range((rows + 1) // 2), *range(ranks - rows // 2, ranks)]


def _mark(op: Op, number: int) -> str:
    if op is Op.F:
        return _FORWARD[number % len(_FORWARD)]
    return _WEIGHTS if op is Op.W else _BACKWARD[number % len(_BACKWARD)]
