"""A Timeline as text, for a terminal: one line per rank, one character per share of the time. One sequence in 4 slices
on 4 ranks::

    >>> print(terapipe.simulate(plan, "dgx-a100:1", model="gpt3-1b").to_text(60))
    rank 0 │00112233·······························DDDDDDCCCCCBBBBBAAAAA│
    rank 1 │··001122·33·······················DDDDDCCCCCBBBBBBAAAAA·····│
    rank 2 │····001122233···············DDDDDDCCCCCBBBBBAAAAA···········│
    rank 3 │······00001111222223333DDDDDCCCCCCBBBBBAAAAA················│

A forward shows the last digit of its slice's number, a backward its letter (A is slice 0), a deferred weight gradient a
plus, idle time a dot. Digits go up while the pipeline fills, letters come back down: backwards run from the last slice
to the first, because a slice's keys and values get gradients from all later ones.
"""

import math
from string import ascii_uppercase, digits

from terapipe.reporting.style import count
from terapipe.scheduling.actions import Op
from terapipe.scheduling.timeline import Timeline

_FORWARD, _BACKWARD, _WEIGHTS, _IDLE = digits, ascii_uppercase, "+", "·"


def draw(timeline: Timeline, width: int = 100, scale: float | None = None, rows: int = 16) -> str:
    """Draws a timeline as text. Columns have equal time, and a column shows what runs at its middle, so an action that
    is shorter than a column may be missing.

    Args:
        timeline: Simulated or measured.
        width: Columns of the drawing, without the ranks' names.
        scale: Seconds of the whole width, by default the timeline's makespan. Drawings with one scale can be compared.
        rows: The most ranks to draw. Of more, the first and the last are drawn, with a line that counts the others.

    Returns:
        The lines, joined.
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
    """All ranks if there is room, else as many of the first as of the last, where fill and drain show."""
    if ranks <= rows:
        return list(range(ranks))
    return [*range((rows + 1) // 2), *range(ranks - rows // 2, ranks)]


def _mark(op: Op, number: int) -> str:
    """The character of an action. Numbers beyond 9 and letters beyond Z begin again."""
    if op is Op.F:
        return _FORWARD[number % len(_FORWARD)]
    return _WEIGHTS if op is Op.W else _BACKWARD[number % len(_BACKWARD)]
