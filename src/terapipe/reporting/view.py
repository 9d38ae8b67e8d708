"""What pages and traces show: a run (a Timeline with its idle causes and memory curves) and its transfers.

A Timeline has sends and receives as events of their own. Whoever reads a page wants to see one transfer from the moment
the data could leave until they are there, so ``transfers`` joins the two::

    rank 0   F |=========|send_F|                     a receive is posted long before its data are sent, because
    rank 1         |.......recv_F......|F |=======|   that is how messages overlap with computations: the transfer
                         <------------>               begins with the send and ends with the receive
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from terapipe.planning.cost import Memory
from terapipe.scheduling.actions import RECEIVES, SENDS, Action, Op, counterpart
from terapipe.scheduling.footprint import curves
from terapipe.scheduling.timeline import Event, Timeline, idle_by_cause

Steps = Sequence[tuple[float, float]]  # a step function: (second, bytes from then on)


@dataclass(frozen=True)
class RunView:
    """One run of a comparison. What is not known is left empty, and its section of the page is not drawn.

    Args:
        name: "predicted", "measured", or an order's name. A page with the first two compares them.
        timeline: All actions of the step, on all ranks.
        idle: For each rank, seconds by cause ("fill", "drain", "imbalance", "transfer").
        memory: For each rank, its bytes over time.
    """

    name: str
    timeline: Timeline
    idle: Sequence[Mapping[str, float]] = ()
    memory: Sequence[Steps] = ()

    def __post_init__(self) -> None:
        ranks = self.timeline.plan.num_ranks
        if not self.timeline.computations:
            raise ValueError(f"a run to show needs at least one computation, {self.name!r} has none")
        for what, rows in (("idle times", self.idle), ("memory curves", self.memory)):
            if len(rows) not in (0, ranks):
                raise ValueError(f"{what} are given for every rank or for none, got {len(rows)} for {ranks} ranks")

    @classmethod
    def of(cls, name: str, timeline: Timeline, memory: Memory | None = None) -> Self:
        """Makes a view with the causes of idle time, which follow from the timeline.

        Args:
            name: As for the class.
            timeline: As for the class.
            memory: The planner's memory model. With it the view has each rank's bytes over time.
        """
        idle = [cause._asdict() for cause in idle_by_cause(timeline)]
        return cls(name, timeline, idle, curves(timeline, memory) if memory else ())

    def peak(self, rank: int) -> float:
        """The most bytes that a rank holds, 0 if not known.

        Args:
            rank: Of the pipeline.
        """
        return max((size for _, size in self.memory[rank]), default=0.0) if self.memory else 0.0

    @property
    def peaks(self) -> list[float]:
        """The most bytes of each rank; empty if not known."""
        return [self.peak(rank) for rank in range(len(self.memory))]


class Transfer(NamedTuple):
    """A send with its receive. One of them is None if it was not recorded, as on ranks whose timeline is not there.

    Args:
        send: On the rank that has the data.
        receive: On the rank that needs them.
    """

    send: Event | None
    receive: Event | None

    @property
    def arrival(self) -> Action:
        """The receiving action, which says which stage and slice the data are for, also if only the send was
        recorded."""
        if self.receive:
            return self.receive.action
        assert self.send is not None
        return counterpart(self.send.action)

    @property
    def is_forward(self) -> bool:
        """Whether it brings the input of a forward; else the gradient of a backward."""
        return self.arrival.op is Op.RECV_F

    @property
    def start(self) -> float:
        """The start of the send: a receive is posted long before its data is sent."""
        event = self.send or self.receive
        assert event is not None
        return event.start

    @property
    def end(self) -> float:
        """When the data are there, by the receiver. A receiver's clock that is behind cannot make it end before it
        begins."""
        event = self.receive or self.send
        assert event is not None
        return max(event.end, self.start)


def transfers(timeline: Timeline) -> Iterator[Transfer]:
    """All transfers of a step, in the order of the events that begin them.

    Args:
        timeline: With the transfers of some or all ranks.
    """
    ends = {e.action: e for e in timeline.events if e.action.op in SENDS or e.action.op in RECEIVES}
    for action, event in ends.items():
        other = ends.get(counterpart(action))
        if action.op in SENDS:
            yield Transfer(event, other)
        elif other is None:
            yield Transfer(None, event)
