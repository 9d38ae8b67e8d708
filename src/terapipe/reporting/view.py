"""What is shown: a run (a Timeline with its idle causes and memory curves) and its transfers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from terapipe.planning.cost import Memory
from terapipe.scheduling.actions import COMPUTE, SENDS, Action, Op, counterpart
from terapipe.scheduling.simulator import curves
from terapipe.scheduling.timeline import Event, Timeline, idle_by_cause

Steps = Sequence[tuple[float, float]]  # a step function: (second, bytes from then on)


@dataclass(frozen=True)
class RunView:
    """One run of a comparison. What is not known is left empty, and its section is not drawn."""

    name: str  # "predicted", "measured", or an order's name
    timeline: Timeline
    idle: Sequence[Mapping[str, float]] = ()  # per rank: seconds by cause
    memory: Sequence[Steps] = ()  # per rank

    def __post_init__(self) -> None:
        ranks = self.timeline.plan.num_ranks
        if not self.timeline.computations:
            raise ValueError(f"a run to show needs at least one computation, {self.name!r} has none")
        for what, given in (("idle times", self.idle), ("memory curves", self.memory)):
            if len(given) not in (0, ranks):
                raise ValueError(f"{what} are given for every rank or for none, got {len(given)} for {ranks} ranks")

    @classmethod
    def of(cls, name: str, timeline: Timeline, memory: Memory | None = None) -> Self:
        """With the causes of idle time and, given a memory model, each rank's bytes over time."""
        idle = [cause._asdict() for cause in idle_by_cause(timeline)]
        return cls(name, timeline, idle, curves(timeline, memory) if memory else ())

    def peak(self, rank: int) -> float:
        """The most bytes that this rank holds, 0 if not known."""
        return max((size for _, size in self.memory[rank]), default=0.0) if self.memory else 0.0

    @property
    def peaks(self) -> list[float]:
        return [self.peak(rank) for rank in range(len(self.memory))]


class Transfer(NamedTuple):
    """A send with its receive. One of them is None if it was not recorded."""

    send: Event | None
    receive: Event | None

    @property
    def arrival(self) -> Action:
        if self.receive:
            return self.receive.action
        assert self.send is not None
        return counterpart(self.send.action)

    @property
    def is_forward(self) -> bool:
        return self.arrival.op is Op.RECV_F

    @property
    def start(self) -> float:
        """The start of the send: a receive is posted long before its data is sent."""
        event = self.send or self.receive
        assert event is not None
        return event.start

    @property
    def end(self) -> float:
        event = self.receive or self.send
        assert event is not None
        return max(event.end, self.start)


def transfers(timeline: Timeline) -> Iterator[Transfer]:
    """In the order of the events that begin them."""
    ends = {e.action: e for e in timeline.events if e.action.op not in COMPUTE}
    for action, event in ends.items():
        other = ends.get(counterpart(action))
        if action.op in SENDS:
            yield Transfer(event, other)
        elif other is None:
            yield Transfer(None, event)
