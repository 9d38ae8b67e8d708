"""Plans of many equal microbatches: their time and bytes follow from those of two shorter ones.

Once a pipeline is full, every further microbatch of the same kind takes as long as the one before it, and needs the
same memory, or in orders that hold the whole batch as much more. So both are straight lines::

    seconds                         .
                              .           64 microbatches: beyond the second point on the line
                 o m2 = 8
           o m1 = 4
       warm-up                              microbatches

The search asks for thousands of plans, and a step of 64 sequences of a million tokens has a million computations. What
it chooses is simulated whole: see ``PlanEvaluator.confirm``.
"""

from collections.abc import Sequence
from dataclasses import replace

from terapipe.planning.slices import Plan

LONG = 40_000  # computations of a step from which on it is worth it


def shorter_counts(plan: Plan) -> tuple[int, int] | None:
    """The numbers of microbatches of the two shorter plans, or None if the plan is simulated as it is: it is short,
    or its microbatches are not alike.

    The first one is beyond the warm-up, which lasts until all stages have work.

    Args:
        plan: Any plan.
    """
    count, slices = len(plan.sizes), len(plan.lengths[0])
    if 2 * len(plan.sizes) * slices * plan.num_stages < LONG:
        return None
    first = 3 + -(-2 * plan.num_stages // slices)
    if count < 4 * first or not _is_periodic(plan):
        return None
    return first, 2 * first


def _is_periodic(plan: Plan) -> bool:
    """Whether all microbatches are cut, computed again and offloaded alike. The last one may have fewer sequences."""
    alike = len(set(plan.sizes[:-1])) == 1 and len(set(plan.lengths)) == 1
    tables = (plan.recompute, plan.offload)
    if not alike or all(isinstance(table, str | bool) for table in tables):
        return alike
    stages = range(plan.num_stages)
    rows: list[Sequence[object]] = [plan.recompute_of(k) for k in stages]
    rows += [plan.offload_of(k) for k in stages]
    slices = len(plan.lengths[0])
    return all(tuple(row) == tuple(row[:slices]) * len(plan.sizes) for row in rows)


def shorten(plan: Plan, count: int) -> Plan:
    """The plan with so many microbatches, of which the last is the plan's last.

    Args:
        plan: A plan whose microbatches are alike.
        count: Of its microbatches.
    """
    cut = count * len(plan.lengths[0])
    stages = range(plan.num_stages)
    recompute, offload = plan.recompute, plan.offload
    return replace(
        plan,
        sizes=(*plan.sizes[: count - 1], plan.sizes[-1]),
        lengths=plan.lengths[:count],
        recompute=recompute if isinstance(recompute, str) else tuple(plan.recompute_of(k)[:cut] for k in stages),
        offload=offload if isinstance(offload, bool) else tuple(plan.offload_of(k)[:cut] for k in stages),
    )


def extrapolate(at: tuple[int, int], values: tuple[float, float], count: int) -> float:
    """The value of a straight line.

    Args:
        at: Two places.
        values: The values there.
        count: The place to ask for.
    """
    (a, b), (low, high) = at, values
    return high + (count - b) * (high - low) / (b - a)
