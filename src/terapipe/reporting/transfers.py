"""The transfers of a Timeline: each send with its receive."""

from collections.abc import Iterator
from typing import NamedTuple

from terapipe.scheduling.actions import COMPUTE, SENDS, Action, Op, counterpart
from terapipe.scheduling.timeline import Event, Timeline


class Transfer(NamedTuple):
    """Both ends, or the one that was recorded."""

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
        """A receive is posted long before anything is sent: the send tells when it began."""
        known = self.send or self.receive
        assert known is not None
        return known.start

    @property
    def end(self) -> float:
        known = self.receive or self.send
        assert known is not None
        return max(known.end, self.start)


def transfers(timeline: Timeline) -> Iterator[Transfer]:
    """In the order of the events that begin them."""
    ends = {e.action: e for e in timeline.events if e.action.op not in COMPUTE}
    for action, event in ends.items():
        other = ends.get(counterpart(action))
        if action.op in SENDS:
            yield Transfer(event, other)
        elif other is None:
            yield Transfer(None, event)
