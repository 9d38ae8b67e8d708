"""A Timeline in a terminal."""

from string import ascii_uppercase, digits

from terapipe.scheduling.actions import Op
from terapipe.scheduling.timeline import Timeline

_FORWARD, _BACKWARD, _WEIGHTS, _IDLE = digits, ascii_uppercase, "+", "·"


def draw(timeline: Timeline, width: int = 100, scale: float | None = None) -> str:
    """One line for each rank; ``scale`` is the time of the whole width, by default the timeline's own makespan.

    Forwards show the last digit of their slice's number, backwards its letter (A for slice 0), idle time dots.
    """
    span = scale or timeline.makespan
    if width < 1 or span <= 0:
        raise ValueError(f"a drawing needs a width and a duration, got {width} columns for {span} s")
    columns = min(width, max(1, round(width * timeline.makespan / span)))
    lines = []
    for rank in range(timeline.plan.num_ranks):
        cells = [_IDLE] * columns
        events = [e for e in timeline.computations if e.rank == rank]
        for column in range(columns):
            middle = (column + 0.5) * span / width
            cells[column] = next(
                (_mark(e.action.op, e.action.slice.number) for e in events if e.start <= middle < e.end), _IDLE
            )
        lines.append(f"rank {rank} │{''.join(cells)}│")
    return "\n".join(lines)


def _mark(op: Op, number: int) -> str:
    if op is Op.F:
        return _FORWARD[number % len(_FORWARD)]
    return _WEIGHTS if op is Op.W else _BACKWARD[number % len(_BACKWARD)]
