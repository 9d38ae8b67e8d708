"""All that a schedule depends on: of the lengths of slices only how many there are."""

from typing import NamedTuple, Self

from terapipe.planning.slices import Plan


class Shape(NamedTuple):
    """Plans of one shape have the same schedule, action by action; so it is made and proved once for all of them."""

    order: str
    counts: tuple[int, ...]  # slices of each microbatch
    num_stages: int
    chunks: int

    @classmethod
    def of(cls, plan: Plan) -> Self:
        return cls(plan.order, tuple(map(len, plan.lengths)), plan.num_stages, plan.chunks)

    def plan(self) -> Plan:
        """One of this shape: all slices but the last of a microbatch have one token."""
        most = max(self.counts)
        lengths = tuple((1,) * (count - 1) + (most - count + 1,) for count in self.counts)
        edges = tuple(range(self.num_stages + 1))
        return Plan((1,) * len(self.counts), lengths, edges, self.order, self.chunks)
