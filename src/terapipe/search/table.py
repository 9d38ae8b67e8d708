"""Plans from a cost table: equal stages, forward plus backward, at the lengths that the table lists.

For whoever has measured slices with other tools, or wants to know what the exact solver says about other numbers. A
table is a JSON list; each row is one slice on one stage::

    {"size": 1, "length": 512, "context": 1024, "seconds": 0.0213}
      sequences    tokens         tokens before     forward plus backward
      in the       of the         the slice in
      microbatch   slice          its sequence

A table knows no memory, no transfers and no differences between stages. So nothing is searched beside the cuts: layout
and recomputation are the user's, and options that would have no effect are refused.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from terapipe.planning.cost import Array, LinkBehavior, Numbers, StageSpec
from terapipe.planning.layout import Layout
from terapipe.planning.slices import Plan, even_lengths, microbatch_sizes
from terapipe.planning.solver import solve_table
from terapipe.scheduling.simulator import makespan
from terapipe.search.evaluator import PlanEstimate, preference
from terapipe.search.request import Request
from terapipe.search.result import PlanResult

MOST_UNITS = 2**13  # the table of all slices then has 512 MiB for each size
ORDERS = ("terapipe", "terapipe-1f1b")  # the other sliced orders need weight gradients apart, or several chunks


@dataclass(frozen=True)
class CostTable:
    """Seconds of a slice on one stage, by size, length and context. Slices that are not listed are not allowed."""

    seconds: Mapping[tuple[int, int, int], float]

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads a list of rows, each with size, length, context and seconds.

        Args:
            text: The JSON.
        """
        try:
            rows = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"a cost table must be whole JSON, this one is damaged or cut off: {error}") from None
        if not isinstance(rows, list) or not rows:
            raise ValueError(
                "a cost table is a JSON list of objects with size, length, context and seconds, none found"
            )
        return cls(dict(_row(i, row) for i, row in enumerate(rows)))

    @property
    def sizes(self) -> list[int]:
        """The microbatch sizes that the table lists, ascending."""
        return sorted({size for size, _, _ in self.seconds})

    @property
    def seq_len(self) -> int:
        """The longest sequence that the table covers."""
        return max(length + context for _, length, context in self.seconds)

    def times(self, plan: Plan) -> list[float]:
        """The seconds of each slice of a plan, in the order of ``Plan.slices``; inf where the table has no row.

        Args:
            plan: The plan. All of its stages are taken to be alike.
        """
        return [self.seconds.get((s.size, s.length, s.context), math.inf) for s in plan.slices]

    def formula(self, plan: Plan) -> float:
        """The paper's formula for a flush: sum of all slices + (stages - 1) * the longest. It is exact for equal stages
        without transfers. Infinite if a row is missing.

        Args:
            plan: The plan.
        """
        times = self.times(plan)
        return sum(times) + (plan.num_stages - 1) * max(times)

    @property
    def unit(self) -> int:
        """The greatest common divisor of all lengths and contexts."""
        return math.gcd(*(n for _, length, context in self.seconds for n in (length, context)))

    def array(self, seq_len: int, sizes: Sequence[int]) -> Array:
        """The table as ``solve_table`` takes it: by size, length and context in units.

        Args:
            seq_len: Tokens per sequence. Rows that reach beyond it are left out.
            sizes: The microbatch sizes to keep, one row of the array for each.
        """
        units, unit = seq_len // self.unit, self.unit
        if units > MOST_UNITS:
            raise ValueError(
                f"the lengths of a cost table must divide sequences into at most {MOST_UNITS} parts, got {units} of "
                f"{unit} tokens; measure slices of multiples of 128 tokens"
            )
        table = np.full((len(sizes), units, units), np.inf)
        for (size, length, context), seconds in self.seconds.items():
            if size in sizes and length + context <= seq_len:
                table[sizes.index(size), length // unit - 1, context // unit] = seconds
        return table

    # As a Cost, for the simulator

    def forward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """A third of a slice's seconds, as the FLOPs are."""
        return self._look_up(size, length, context) / 3

    def backward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """Two thirds of a slice's seconds."""
        return self._look_up(size, length, context) * 2 / 3

    def weights(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        return np.zeros(np.broadcast(size, length).shape)

    def transfer(self, source: int, target: int, size: Numbers, length: Numbers) -> Array:
        return np.zeros(np.broadcast(size, length).shape)

    def link_behavior(self, source: int, target: int) -> LinkBehavior:
        return LinkBehavior()

    def per_step(self, stages: Sequence[StageSpec]) -> float:
        return 0.0

    def _look_up(self, size: Numbers, length: Numbers, context: Numbers) -> Array:
        keys = np.broadcast(size, length, context)
        rows = [self.seconds.get((int(b), int(l), int(c)), math.inf) for b, l, c in keys]
        return np.array(rows, dtype=np.float64).reshape(keys.shape)


def _row(i: int, row: Any) -> tuple[tuple[int, int, int], float]:
    """The key and the seconds of row ``i``. A damaged row is refused with its number: a wrong time would silently
    give a wrong plan."""
    keys = ("size", "length", "context")
    if not isinstance(row, dict) or not {*keys, "seconds"} <= set(row):
        raise ValueError(f"row {i} of a cost table needs size, length, context and seconds, got {row!r}")
    size, length, context = (row[key] for key in keys)
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (size, length, context))
    if not whole or size < 1 or length < 1 or context < 0:
        raise ValueError(f"row {i} of a cost table: size and length are at least 1, context at least 0, got {row!r}")
    seconds = row["seconds"]
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e30:
        raise ValueError(
            f"row {i} of a cost table: seconds must be finite and at least 0, got {seconds!r} for size {size}, "
            f"length {length}, context {context}; measure it again or leave the row out"
        )
    return (size, length, context), float(seconds)


def choose_by_table(table: CostTable, request: Request) -> PlanResult:
    """Cuts optimally by the formula for ``terapipe``, and simulates the same cuts for ``terapipe-1f1b``.

    Args:
        table: Seconds of slices.
        request: The batch, and what the user has fixed. It must fix ``pp``; a table says nothing of stages.
    """
    if request.pp is None:
        raise ValueError("a cost table says nothing of the number of stages; give pp")
    if request.order not in (None, *ORDERS):
        raise ValueError(f"with a cost table the order is one of {', '.join(ORDERS)}, got {request.order!r}")
    _refuse_ignored(request)
    if request.seq_len % table.unit:
        raise ValueError(
            f"the sequence must be a multiple of the table's unit of {table.unit} tokens, got {request.seq_len}"
        )
    if request.seq_len > table.seq_len:
        raise ValueError(f"no row of the table reaches beyond {table.seq_len} tokens, sequences have {request.seq_len}")
    layout = Layout(request.dp or 1, request.pp, request.tp or 1)
    plan = _plan(table, request, request.batch_size // layout.dp, tuple(range(layout.pp + 1)))
    work, step = sum(table.times(plan)), table.formula(plan)
    flush = PlanEstimate(layout, plan, step, 1 - work / step if step else 0.0, 0, True)
    estimates = [flush]
    if request.order != "terapipe":
        other = replace(plan, order="terapipe-1f1b")
        step, idle = makespan(other, table)
        estimates.append(PlanEstimate(layout, other, step, idle, 0, True))
    chosen, *rest = sorted((c for c in estimates if request.order in (None, c.plan.order)), key=preference)
    return PlanResult(chosen, tuple(rest), request)


def _refuse_ignored(request: Request) -> None:
    """Refuses arguments that would have no effect with a table."""
    unsupported = {
        "chunks": request.chunks, "recompute": request.recompute, "distinct": request.distinct,
        "shard": request.shard or None, "memory": request.budget,
    }  # fmt: skip
    ignored = [name for name, value in unsupported.items() if value is not None]
    if ignored:
        raise ValueError(
            f"a cost table knows one kind of stage and no memory, so {' and '.join(ignored)} would have no effect; "
            "leave it out, or plan with a cluster or a profile"
        )


def _plan(table: CostTable, request: Request, batch_size: int, boundaries: tuple[int, ...]) -> Plan:
    """The solver's cuts, or the fixed slices with the best microbatch size."""
    sizes = [request.microbatch_size] if request.microbatch_size else table.sizes
    if not request.fixed_slices:
        array = table.array(request.seq_len, sizes)
        cuts = solve_table(array, stages=len(boundaries) - 1, batch_size=batch_size, unit=table.unit, sizes=sizes)
        return Plan(cuts.sizes, cuts.lengths, boundaries)
    lengths = tuple(request.slice_lengths or ())
    if not lengths:
        count = request.num_slices or 1
        lengths = even_lengths(request.seq_len, count, table.unit)
        if len(lengths) != count:
            raise ValueError(f"the table's unit of {table.unit} tokens allows at most {len(lengths)} slices")
    rows = [microbatch_sizes(batch_size, size) for size in sizes]
    best = min((Plan(row, (lengths,) * len(row), boundaries) for row in rows), key=table.formula)
    if table.formula(best) == math.inf:
        missing = next(s for s, t in zip(best.slices, table.times(best), strict=True) if t == math.inf)
        raise ValueError(
            f"the table has no row for size {missing.size}, length {missing.length}, context {missing.context}, which "
            "these slices need; measure it, or fix other slices"
        )
    return best
