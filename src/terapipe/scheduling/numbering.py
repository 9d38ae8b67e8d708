"""Actions as integers, so that validating a large plan works on lists instead of dicts of actions."""

from dataclasses import replace
from functools import cached_property
from itertools import accumulate

from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import COMPUTE, Action, Op, counterpart, dependencies

OPS = tuple(Op)
_PLACE = {op: i for i, op in enumerate(OPS)}


class Numbering:
    """Numbers the actions of a plan: ``(op * num_stages + stage) * width + slice``, ``width`` being the slices.

    A number divided by ``width`` is the row: all actions of one op on one stage. Properties "by row" are indexed so.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.width = plan, len(plan.slices)
        self._firsts = list(accumulate(map(len, plan.lengths), initial=0))
        self._first_i = self.first(Op.I, 0)
        self._from_b_to_i = self._first_i - self.first(Op.B, 0)  # also the count of all I: ops have equal ranges

    def number(self, action: Action) -> int:
        """The number of an action, or -1 if it is not in the plan."""
        op, k, s = action
        if not (0 <= k < self.plan.num_stages and 0 <= s.microbatch < len(self.plan.sizes)):
            return -1
        index = self._firsts[s.microbatch] + s.number
        known = 0 <= index < self.width and self.plan.slices[index] == s
        return self.first(op, k) + index if known else -1

    def action(self, number: int) -> Action:
        row, index = divmod(number, self.width)
        op, k = divmod(row, self.plan.num_stages)
        return Action(OPS[op], k, self.plan.slices[index])

    def first(self, op: Op, stage: int) -> int:
        """The number of the first slice's action. Those of the other slices follow."""
        return (_PLACE[op] * self.plan.num_stages + stage) * self.width

    def completed(self, number: int) -> int:
        """As ``actions.completes``: the ``B`` for an ``I``, else the number itself."""
        is_i = self._first_i <= number < self._first_i + self._from_b_to_i
        return number - self._from_b_to_i if is_i else number

    @cached_property
    def around(self) -> list[tuple[int, int]]:
        """For each slice, how many slices of its microbatch come before and after it."""
        return [(i, len(row) - 1 - i) for row in self.plan.grid for i in range(len(row))]

    @cached_property
    def ranks(self) -> list[int]:
        """The rank that performs the actions, by row."""
        stages = self.plan.num_stages
        return [self.plan.rank_of(k) for k in range(stages)] * len(OPS)

    @cached_property
    def needs(self) -> list[list[tuple[int, int]]]:
        """By row: for each dependency the number of its first slice's action, and its offset in slices."""
        return [self._needs(op, k) for op in OPS for k in range(self.plan.num_stages)]

    def _needs(self, op: Op, stage: int) -> list[tuple[int, int]]:
        middle = self._three_slices.slices[1]
        needed = dependencies(Action(op, stage, middle), self._three_slices)
        return [(self.first(need.op, need.stage), need.slice.number - 1) for need in needed]

    @cached_property
    def _three_slices(self) -> Plan:
        """The same stages with one microbatch of three slices. The middle one has every kind of dependency."""
        return replace(self.plan, sizes=(1,), lengths=((1, 1, 1),))

    @cached_property
    def _counterparts(self) -> list[int]:
        """By row: the number of the first slice's action at the other end of the transfer, -1 for computations."""
        return [self._first_counterpart(op, k) for op in OPS for k in range(self.plan.num_stages)]

    def counterpart(self, transfer: int) -> int:
        """The other end of a transfer, -1 for a computation."""
        row, index = divmod(transfer, self.width)
        first = self._counterparts[row]
        return first if first < 0 else first + index

    def rank(self, number: int) -> int:
        return self.ranks[number // self.width]

    def _first_counterpart(self, op: Op, stage: int) -> int:
        if op in COMPUTE:
            return -1
        other = counterpart(Action(op, stage, self.plan.slices[0]))
        return self.first(other.op, other.stage) if 0 <= other.stage < self.plan.num_stages else -1
