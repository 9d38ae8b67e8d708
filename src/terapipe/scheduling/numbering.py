"""Actions as whole numbers: what a walk over all actions of a large plan can afford."""

from dataclasses import replace
from functools import cached_property
from itertools import accumulate

from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import COMPUTE, Action, Op, counterpart, dependencies

OPS = tuple(Op)
_PLACE = {op: i for i, op in enumerate(OPS)}


class Numbering:
    """All actions of a plan, counted op by op, stage by stage, slice by slice."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.width = plan, len(plan.slices)
        self._firsts = list(accumulate(map(len, plan.lengths), initial=0))
        self._half, self._whole = self.first(Op.I, 0), self.first(Op.I, 0) - self.first(Op.B, 0)

    def number(self, action: Action) -> int:
        """Of an action of the plan; -1 of any other."""
        op, k, s = action
        if not (0 <= k < self.plan.num_stages and 0 <= s.microbatch < len(self.plan.sizes)):
            return -1
        at = self._firsts[s.microbatch] + s.number
        known = 0 <= at < self.width and self.plan.slices[at] == s
        return self.first(op, k) + at if known else -1

    def action(self, number: int) -> Action:
        row, at = divmod(number, self.width)
        op, k = divmod(row, self.plan.num_stages)
        return Action(OPS[op], k, self.plan.slices[at])

    def first(self, op: Op, stage: int) -> int:
        """Of the first slice's action; those of the other slices follow."""
        return (_PLACE[op] * self.plan.num_stages + stage) * self.width

    def settled(self, number: int) -> int:
        """What others wait for when this is done: an ``I`` settles the ``B`` that it is half of."""
        return number - self._whole if self._half <= number < self._half + self._whole else number

    @cached_property
    def room(self) -> list[tuple[int, int]]:
        """Of each slice, how many of its microbatch come before and after it."""
        return [(i, len(row) - 1 - i) for row in self.plan.grid for i in range(len(row))]

    @cached_property
    def ranks(self) -> list[int]:
        """By op and stage."""
        stages = self.plan.num_stages
        return [self.plan.rank_of(k) for k in range(stages)] * len(OPS)

    @cached_property
    def needs(self) -> list[list[tuple[int, int]]]:
        """By op and stage: the first slice's number of each need, and how many slices it is ahead."""
        return [self._needs(op, k) for op in OPS for k in range(self.plan.num_stages)]

    def _needs(self, op: Op, stage: int) -> list[tuple[int, int]]:
        found = dependencies(Action(op, stage, self._three.slices[1]), self._three)
        return [(self.first(need.op, need.stage), need.slice.number - 1) for need in found]

    @cached_property
    def _three(self) -> Plan:
        """The same stages with one microbatch of three slices: the one in the middle has neighbors on both sides."""
        return replace(self.plan, sizes=(1,), lengths=((1, 1, 1),))

    @cached_property
    def others(self) -> list[int]:
        """By op and stage: of a transfer, the first slice's number of its other end; -1 where there is none."""
        return [self._other(op, k) for op in OPS for k in range(self.plan.num_stages)]

    def _other(self, op: Op, stage: int) -> int:
        if op in COMPUTE:
            return -1
        other = counterpart(Action(op, stage, self.plan.slices[0]))
        return self.first(other.op, other.stage) if 0 <= other.stage < self.plan.num_stages else -1
