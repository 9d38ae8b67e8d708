"""The idle time of a Timeline, by cause."""

from typing import NamedTuple

from terapipe.scheduling.actions import COMPUTE, Action, Op, completes, dependencies
from terapipe.scheduling.timeline import Timeline


class Idle(NamedTuple):
    """Seconds in which one rank computes nothing, by cause."""

    fill: float = 0.0  # warm-up: waiting for the input of its first forward or first backward to be computed
    drain: float = 0.0  # after its last computation, while other ranks still work
    imbalance: float = 0.0  # later waits for an input that another rank is still computing
    transfer: float = 0.0  # the input is computed but has not arrived

    @property
    def total(self) -> float:
        return sum(self)


def idle_by_cause(timeline: Timeline) -> tuple[Idle, ...]:
    """One entry per rank. Their sum is the share ``timeline.idle`` of ``makespan * num_ranks``."""
    ends = {completes(e.action): e.end for e in timeline.computations}
    per_rank = []
    for events in timeline.by_rank:
        idle = Idle()
        clock = 0.0
        directions_seen: set[bool] = set()  # True: a forward has run, False: a backward has run
        for _, action, start, end in events:
            # A gap has two parts: until `ready` the input is being computed, from then on it is in transfer.
            gap = max(0.0, start - clock)
            ready = min(max(_ready(action, timeline, ends), clock), start)
            forward = action.op is Op.F
            computing = ready - clock if gap else 0.0
            if forward in directions_seen:
                idle = idle._replace(imbalance=idle.imbalance + computing)
            else:
                idle = idle._replace(fill=idle.fill + computing)
            idle = idle._replace(transfer=idle.transfer + gap - computing)
            directions_seen.add(forward)
            clock = max(clock, end)
        per_rank.append(idle._replace(drain=timeline.makespan - clock))
    return tuple(per_rank)


def _ready(action: Action, timeline: Timeline, ends: dict[Action, float]) -> float:
    """When the last computation that the action depends on ended, on any rank."""
    latest = 0.0
    for need in dependencies(action, timeline.plan):
        while need.op not in COMPUTE:  # follow a receive to its send, and that to the computation
            (need,) = dependencies(need, timeline.plan)
        latest = max(latest, ends.get(need, 0.0))
    return latest
