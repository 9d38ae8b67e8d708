"""What happened, or would happen, when: a simulated run and a measured run are both a Timeline."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, NamedTuple, Self

from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import COMPUTE, Action


class Event(NamedTuple):
    """One action of one rank, with the time at which it began and ended."""

    rank: int
    action: Action
    start: float  # seconds since the step began
    end: float


@dataclass(frozen=True)
class Timeline:
    """The events of one step, each rank's in the order in which they began."""

    plan: Plan
    events: tuple[Event, ...]

    @classmethod
    def of(cls, plan: Plan, events: Iterable[Event]) -> Self:
        """Sorted, and moved so that the first computation starts at zero."""
        listed = sorted(events, key=lambda e: (e.rank, e.start, e.end))
        zero = min((e.start for e in listed if e.action.op in COMPUTE), default=0.0)
        return cls(plan, tuple(e._replace(start=e.start - zero, end=e.end - zero) for e in listed))

    @cached_property
    def computations(self) -> tuple[Event, ...]:
        return tuple(e for e in self.events if e.action.op in COMPUTE)

    @cached_property
    def by_rank(self) -> tuple[tuple[Event, ...], ...]:
        """Each rank's computations."""
        found: list[list[Event]] = [[] for _ in range(self.plan.num_ranks)]
        for event in self.computations:
            found[event.rank].append(event)
        return tuple(map(tuple, found))

    @cached_property
    def makespan(self) -> float:
        return max((e.end for e in self.computations), default=0.0)

    @cached_property
    def idle(self) -> float:
        """The share of all ranks' time in which they compute nothing."""
        total = self.makespan * self.plan.num_ranks
        return 1.0 - sum(e.end - e.start for e in self.computations) / total if total else 0.0

    def to_json(self) -> str:
        events = [[e.rank, e.action.to_text(), e.start, e.end] for e in self.events]
        return json.dumps({"plan": self.plan.to_dict(), "events": events})

    @classmethod
    def from_json(cls, text: str) -> Self:
        try:
            data: Any = json.loads(text)
            plan = Plan.from_dict(data["plan"])
            rows = [(int(r), Action.from_text(a, plan), float(t0), float(t1)) for r, a, t0, t1 in data["events"]]
        except (TypeError, KeyError, json.JSONDecodeError, RecursionError):
            raise ValueError("a timeline is a JSON object with the keys 'plan' and 'events'") from None
        if any(not 0 <= rank < plan.num_ranks or not 0 <= end - start < inf for rank, _, start, end in rows):
            raise ValueError(f"a timeline has events of ranks 0 to {plan.num_ranks - 1} that end after they begin")
        return cls(plan, tuple(Event(*row) for row in rows))
