"""Plans from a bare table of costs: equal stages, forward and backward together, on the table's own grid of lengths."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from terapipe.planning.cost import Array, Numbers, Part, Sending
from terapipe.planning.layout import Layout
from terapipe.planning.slices import Plan
from terapipe.planning.solver import Cuts, solve_table
from terapipe.scheduling.simulator import measure
from terapipe.search.choice import Choice
from terapipe.search.choose import Decision
from terapipe.search.refine import preference
from terapipe.search.request import Request

ORDERS = ("terapipe", "terapipe-1f1b")  # of gpipe and 1f1b these are the sliced forms; the table has no weight halves


@dataclass(frozen=True)
class CostTable:
    """Seconds of a slice on one stage by size, length and context; what is not listed is not allowed."""

    seconds: Mapping[tuple[int, int, int], float]

    @classmethod
    def from_json(cls, text: str) -> Self:
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"a cost table must be whole JSON, this one is damaged or cut off: {error}") from None
        if not isinstance(rows, list) or not rows:
            raise ValueError(
                "a cost table is a JSON list of objects with size, length, context and seconds, none found"
            )
        return cls(dict(_row(i, row) for i, row in enumerate(rows)))

    @property
    def sizes(self) -> list[int]:
        return sorted({size for size, _, _ in self.seconds})

    @property
    def unit(self) -> int:
        return math.gcd(*(n for _, length, context in self.seconds for n in (length, context)))

    def array(self, tokens: int, sizes: Sequence[int]) -> Array:
        """By size, length and context in units, as the solver takes it."""
        units, unit = tokens // self.unit, self.unit
        table = np.full((len(sizes), units, units), np.inf)
        for (size, length, context), seconds in self.seconds.items():
            if size in sizes and length + context <= tokens:
                table[sizes.index(size), length // unit - 1, context // unit] = seconds
        return table

    # As a Cost, for the simulator

    def forward(self, part: Part, size: Numbers, length: Numbers, context: Numbers) -> Array:
        return self._look_up(size, length, context) / 3

    def backward(self, part: Part, size: Numbers, length: Numbers, context: Numbers) -> Array:
        return self._look_up(size, length, context) * 2 / 3

    def weights(self, part: Part, size: Numbers, length: Numbers) -> Array:
        return np.zeros(np.broadcast(size, length).shape)

    def transfer(self, source: int, target: int, size: Numbers, length: Numbers) -> Array:
        return np.zeros(np.broadcast(size, length).shape)

    def sending(self, source: int, target: int) -> Sending:
        return Sending()

    def once(self, held: Sequence[Part]) -> float:
        return 0.0

    def _look_up(self, size: Numbers, length: Numbers, context: Numbers) -> Array:
        found = np.broadcast(size, length, context)
        rows = [self.seconds.get((int(b), int(l), int(c)), math.inf) for b, l, c in found]
        return np.array(rows, dtype=np.float64).reshape(found.shape)


def _row(i: int, row: Any) -> tuple[tuple[int, int, int], float]:
    keys = ("size", "length", "context")
    if not isinstance(row, dict) or not {*keys, "seconds"} <= set(row):
        raise ValueError(f"row {i} of a cost table needs size, length, context and seconds, got {row!r}")
    size, length, context = (row[key] for key in keys)
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (size, length, context))
    if not whole or size < 1 or length < 1 or context < 0:
        raise ValueError(f"row {i} of a cost table: size and length are at least 1, context at least 0, got {row!r}")
    seconds = row["seconds"]
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ValueError(
            f"row {i} of a cost table: seconds must be finite and at least 0, got {seconds!r} for size {size}, "
            f"length {length}, context {context}; measure it again or leave the row out"
        )
    return (size, length, context), float(seconds)


def choose_by_table(table: CostTable, request: Request) -> Decision:
    """The exact cuts by the formula for ``terapipe``; for other orders the same cuts, timed by simulation."""
    if request.pipe is None:
        raise ValueError("a cost table says nothing of the number of stages; give --pipe")
    if request.order not in (None, *ORDERS):
        raise ValueError(f"with a cost table the order is one of {', '.join(ORDERS)}, got {request.order!r}")
    if request.tokens % table.unit:
        raise ValueError(
            f"the sequence must be a multiple of the table's unit of {table.unit} tokens, got {request.tokens}"
        )
    layout = Layout(request.data or 1, request.pipe, request.tensor or 1)
    cuts = _solved(table, request, request.batch // layout.data)
    plan = Plan(cuts.sizes, cuts.lengths, tuple(range(layout.pipe + 1)))
    work = sum(table.seconds[s.size, s.length, s.context] for s in plan.slices)
    flush = Choice(layout, plan, cuts.time, 1 - work / cuts.time if cuts.time else 0.0, 0, True)
    found = [flush]
    if request.order != "terapipe":
        other = replace(plan, order="terapipe-1f1b")
        step, idle = measure(other, table)
        found.append(Choice(layout, other, step, idle, 0, True))
    chosen, *rest = sorted((c for c in found if request.order in (None, c.plan.order)), key=preference)
    return Decision(chosen, tuple(rest))


def _solved(table: CostTable, request: Request, batch: int) -> Cuts:
    sizes = [request.microbatch] if request.microbatch else table.sizes
    array = table.array(request.tokens, sizes)
    lengths = range(table.unit, request.tokens + 1, table.unit)
    if isinstance(request.slices, tuple):
        allowed = set(request.slices)
        array[:, [n not in allowed for n in lengths]] = np.inf
    return solve_table(array, stages=request.pipe or 1, batch=batch, unit=table.unit, sizes=sizes)
