"""One rank's part of a schedule that was proved as a whole, once for all plans of its shape."""

from functools import lru_cache

from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import Action
from terapipe.scheduling.orders import schedule
from terapipe.scheduling.shape import Shape
from terapipe.scheduling.validation import validate


def proved(plan: Plan, rank: int) -> tuple[Action, ...]:
    """What ``rank`` does. Raises ValueError if the schedule is not whole, or could block."""
    grid = plan.grid
    return tuple(Action(op, k, grid[s.microbatch][s.number]) for op, k, s in _of_shape(Shape.of(plan), rank))


@lru_cache(maxsize=64)  # a process keeps its own rank's lists only
def _of_shape(shape: Shape, rank: int) -> tuple[Action, ...]:
    made = schedule(shape.plan())
    validate(made)
    return made.ranks[rank]
