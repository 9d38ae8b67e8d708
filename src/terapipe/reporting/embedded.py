"""Runs as compact JSON, for the script of the page.

All times are whole ticks. A bar is three numbers: its action as one number, the ticks since the bar before it on its
rank ended, and its own ticks. A large run, 96 ranks with 4000 actions each, so takes about five megabytes.
"""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from terapipe.planning.slices import Plan
from terapipe.reporting.palette import DARKEST, LIGHTEST, MIDDLE, OPS
from terapipe.reporting.shown import Shown
from terapipe.reporting.transfers import transfers
from terapipe.reporting.words import NAMES

_NUMBER = {op: i for i, op in enumerate(OPS)}
_Bar = tuple[int, float, float]  # its code, its start and its end in seconds


def embedded(shown: Sequence[Shown]) -> str:
    """JSON that is safe inside a script element: nothing in it can close that."""
    span = max(s.timeline.makespan for s in shown)
    tick = 10.0 ** (math.floor(math.log10(span)) - 7)
    data = {
        "tick": tick,
        "ops": [[NAMES[op], *look] for op, look in OPS.items()],
        "light": [DARKEST, LIGHTEST, MIDDLE],
        "runs": [_run(s, tick) for s in shown],
    }
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _run(shown: Shown, tick: float) -> dict[str, Any]:
    timeline, plan = shown.timeline, shown.timeline.plan
    number = {(s.microbatch, s.number): i for i, s in enumerate(plan.slices)}
    bars: list[list[_Bar]] = [[] for _ in range(plan.num_ranks)]
    for rank, (op, stage, s), start, end in timeline.computations:
        code = (number[s.microbatch, s.number] * plan.num_stages + stage) * len(OPS) + _NUMBER[op]
        bars[rank].append((code, start, end))
    return {
        "name": shown.name,
        "end": round(timeline.makespan / tick),
        "idle": round(timeline.idle, 4),
        "stages": plan.num_stages,
        "lengths": [list(row) for row in plan.lengths],
        "bars": [_packed(row, tick) for row in bars],
        "transfers": _transfers(shown, plan, number, tick),
    }


def _transfers(shown: Shown, plan: Plan, number: dict[tuple[int, int], int], tick: float) -> list[list[int]]:
    """Under the rank that receives; the code is that of what will be computed from what arrives."""
    rows: list[list[_Bar]] = [[] for _ in range(plan.num_ranks)]
    for transfer in transfers(shown.timeline):
        _, stage, s = transfer.arrival
        code = (number[s.microbatch, s.number] * plan.num_stages + stage) * len(OPS) + (not transfer.is_forward)
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
