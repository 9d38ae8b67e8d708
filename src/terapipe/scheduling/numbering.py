"""Actions as numbers: lists with hundreds of thousands of actions are then handled as arrays."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import COMPUTE, Action, Op, counterpart, dependencies

Ints = NDArray[np.int64]
OPS = tuple(Op)
CODE = {op: code for code, op in enumerate(OPS)}


class Places(NamedTuple):
    """Where actions stand in tables by stage, op and slice."""

    stages: Ints
    ops: Ints  # as in ``OPS``
    slices: Ints  # as in ``Plan.slices``


class Numbering:
    """Numbers the actions of a plan: ``(op * num_stages + stage) * width + slice``, ``width`` being the slices.

    A number divided by ``width`` is the row: all actions of one op on one stage. Tables "by row" are indexed so.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.width = plan, len(plan.slices)

    @property
    def count(self) -> int:
        """One more than the largest number."""
        return len(OPS) * self.plan.num_stages * self.width

    def numbers(self, actions: Sequence[Action]) -> Ints:
        """The number of each action, or -1 if it is not in the plan."""
        stages, width = self.plan.num_stages, self.width
        base = {op: code * stages for op, code in CODE.items()}
        index = self._index
        found = ((base[op] + k) * width + index[s] if 0 <= k < stages and s in index else -1 for op, k, s in actions)
        return np.fromiter(found, np.int64, len(actions))

    def actions(self, numbers: Ints) -> list[Action]:
        stages, ops, slices = (column.tolist() for column in self.places(numbers))
        known = self.plan.slices
        rows = zip([OPS[op] for op in ops], stages, [known[i] for i in slices], strict=True)
        return list(map(partial(tuple.__new__, Action), rows))  # as Action._make, but without a Python call for each

    def action(self, number: int) -> Action:
        return self.actions(np.array([number]))[0]

    def number(self, ops: Ints, stages: Ints, slices: Ints) -> Ints:
        """The numbers of the actions at these places."""
        return (ops * self.plan.num_stages + stages) * self.width + slices

    def first(self, op: Op, stage: int) -> int:
        """The number of the first slice's action. Those of the other slices follow."""
        return (CODE[op] * self.plan.num_stages + stage) * self.width

    def places(self, numbers: Ints) -> Places:
        rows, slices = np.divmod(numbers, self.width)
        ops, stages = np.divmod(rows, self.plan.num_stages)
        return Places(stages, ops, slices)

    def completed(self, numbers: Ints) -> Ints:
        """As ``actions.completes``: the ``B`` for an ``I``, else the number itself."""
        first = self.first(Op.I, 0)
        is_input_half = (numbers >= first) & (numbers < first + self.plan.num_stages * self.width)
        return np.where(is_input_half, numbers - (first - self.first(Op.B, 0)), numbers)

    def ranks(self, numbers: Ints) -> Ints:
        """The rank that performs each action."""
        return self._rank_by_stage[self.places(numbers).stages]

    def counterparts(self, numbers: Ints) -> Ints:
        """The other end of each transfer, -1 for computations."""
        rows, slices = np.divmod(numbers, self.width)
        firsts = self._counterpart_by_row[rows]
        return np.where(firsts < 0, -1, firsts + slices)

    def dependencies(self, numbers: Ints) -> list[Ints]:
        """What each action depends on, as ``actions.dependencies``: arrays with one dependency of each, or -1."""
        return self._look_up(self._needs_by_row, numbers)

    def computations_needed(self, numbers: Ints) -> list[Ints]:
        """As ``dependencies``, with the computation whose result is transferred in place of a transfer."""
        return self._look_up(self._computations_by_row, numbers)

    def _look_up(self, table: list[tuple[Ints, Ints]], numbers: Ints) -> list[Ints]:
        rows, slices = np.divmod(numbers, self.width)
        first_of_microbatch, last_of_microbatch = self._edges
        found = []
        for firsts, offsets in table:
            first, offset = firsts[rows], offsets[rows]
            outside = (offset < 0) & first_of_microbatch[slices] | (offset > 0) & last_of_microbatch[slices]
            found.append(np.where((first < 0) | outside, -1, first + slices + offset))
        return found

    @cached_property
    def _index(self) -> dict[tuple[int, ...], int]:
        return {s: i for i, s in enumerate(self.plan.slices)}

    @cached_property
    def _edges(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """For each slice, whether it is the first, and whether it is the last, of its microbatch."""
        grid = self.plan.grid
        return (
            np.array([s is row[0] for row in grid for s in row]),
            np.array([s is row[-1] for row in grid for s in row]),
        )

    @cached_property
    def _rank_by_stage(self) -> Ints:
        return np.array([self.plan.rank_of(k) for k in range(self.plan.num_stages)])

    @cached_property
    def _counterpart_by_row(self) -> Ints:
        return np.array([self._first_counterpart(op, k) for op in OPS for k in range(self.plan.num_stages)])

    def _first_counterpart(self, op: Op, stage: int) -> int:
        if op in COMPUTE:
            return -1
        other = counterpart(Action(op, stage, self.plan.slices[0]))
        return self.first(other.op, other.stage) if 0 <= other.stage < self.plan.num_stages else -1

    @cached_property
    def _needs_by_row(self) -> list[tuple[Ints, Ints]]:
        return self._table(dependencies)

    @cached_property
    def _computations_by_row(self) -> list[tuple[Ints, Ints]]:
        return self._table(_computations_needed)

    def _table(self, needed: Callable[[Action, Plan], Sequence[Action]]) -> list[tuple[Ints, Ints]]:
        """By row: for each dependency the number of its first slice's action, or -1, and its offset in slices.

        Looked up in a plan with the same stages and one microbatch of three slices. The middle one has every kind of
        dependency.
        """
        plan = self.plan
        small = Plan((1,), ((1, 1, 1),), plan.boundaries, plan.order, plan.chunks)
        rows = [needed(Action(op, k, small.slices[1]), small) for op in OPS for k in range(plan.num_stages)]
        shape = max(map(len, rows)), len(rows)
        firsts, offsets = np.full(shape, -1), np.zeros(shape, dtype=np.int64)
        for row, needs in enumerate(rows):
            for i, need in enumerate(needs):
                firsts[i, row], offsets[i, row] = self.first(need.op, need.stage), need.slice.number - 1
        return list(zip(firsts, offsets, strict=True))


def _computations_needed(action: Action, plan: Plan) -> list[Action]:
    """The dependencies, with the computation whose result is transferred in place of a transfer."""
    found = []
    for need in dependencies(action, plan):
        while need.op not in COMPUTE:  # a receive depends on its send, a send on what it sends
            (need,) = dependencies(need, plan)
        found.append(need)
    return found
