"""Where a Timeline's idle time comes from."""

from typing import NamedTuple

from terapipe.scheduling.actions import COMPUTE, Action, Op, completes, dependencies
from terapipe.scheduling.timeline import Timeline


class Idle(NamedTuple):
    """Seconds in which one rank computes nothing, by cause."""

    fill: float = 0.0  # before its first forward and before its first backward: the wave has not come yet
    drain: float = 0.0  # after its last computation
    imbalance: float = 0.0  # elsewhere, what it needs is still being computed by another rank
    transfer: float = 0.0  # what it needs is computed, but sent or under way

    @property
    def total(self) -> float:
        return sum(self)


def idle_by_cause(timeline: Timeline) -> tuple[Idle, ...]:
    """One entry for each rank; all of them together are ``timeline.idle`` of all ranks' time."""
    ends = {completes(e.action): e.end for e in timeline.computations}
    found = []
    for events in timeline.by_rank:
        idle = Idle()
        clock = 0.0
        begun: set[bool] = set()
        for _, action, start, end in events:
            gap = max(0.0, start - clock)
            ready = min(max(_ready(action, timeline, ends), clock), start)
            forward = action.op is Op.F
            early = ready - clock if gap else 0.0
            if forward in begun:
                idle = idle._replace(imbalance=idle.imbalance + early)
            else:
                idle = idle._replace(fill=idle.fill + early)
            idle = idle._replace(transfer=idle.transfer + gap - early)
            begun.add(forward)
            clock = max(clock, end)
        found.append(idle._replace(drain=timeline.makespan - clock))
    return tuple(found)


def _ready(action: Action, timeline: Timeline, ends: dict[Action, float]) -> float:
    """When the last of what the action needs was computed, wherever."""
    latest = 0.0
    for need in dependencies(action, timeline.plan):
        while need.op not in COMPUTE:
            (need,) = dependencies(need, timeline.plan)
        latest = max(latest, ends.get(need, 0.0))
    return latest
