"""One rank's actions. The schedule is built and validated once for all plans of the same shape."""

from functools import lru_cache
from typing import NamedTuple, Self

from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import Action
from terapipe.scheduling.orders import schedule
from terapipe.scheduling.validation import validate


class Shape(NamedTuple):
    """What a schedule depends on: the number of slices, not their lengths."""

    order: str
    counts: tuple[int, ...]  # slices of each microbatch
    num_stages: int
    chunks: int

    @classmethod
    def of(cls, plan: Plan) -> Self:
        return cls(plan.order, tuple(map(len, plan.lengths)), plan.num_stages, plan.chunks)

    def plan(self) -> Plan:
        """A plan of this shape. All slices of a microbatch but the last have one token."""
        most = max(self.counts)
        lengths = tuple((1,) * (count - 1) + (most - count + 1,) for count in self.counts)
        edges = tuple(range(self.num_stages + 1))
        return Plan((1,) * len(self.counts), lengths, edges, self.order, self.chunks)


def validated_actions(plan: Plan, rank: int) -> tuple[Action, ...]:
    """The actions of ``rank``. Raises ValueError if the schedule is incomplete or could deadlock."""
    grid = plan.grid
    return tuple(Action(op, k, grid[s.microbatch][s.number]) for op, k, s in _of_shape(Shape.of(plan), rank))


@lru_cache(maxsize=64)  # holds only the lists of one rank, the process's own
def _of_shape(shape: Shape, rank: int) -> tuple[Action, ...]:
    built = schedule(shape.plan())
    validate(built)
    return built.ranks[rank]
