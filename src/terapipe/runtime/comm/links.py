"""Point-to-point connections between the ranks of a pipeline, one class for each way to send.

gloo: one group for all, whose transfers are told apart by their order. Waits block the host until their timeout.

NCCL: a communicator for each pair of ranks and direction, made and used once before the first step, because making one
blocks the host until the peer makes it too, and must not happen between operations that are on their way. Waits are the
device's: the host goes on. Whether a peer answers at all is the watcher's business (watcher.py).

None: nothing is sent, and what arrives is zeros. For one rank's actions without the others.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from terapipe.runtime.comm.groups import GROUPS, not_none

Guard = Callable[[Callable[[], None], int], None]  # calls a function that may wait for a peer for ever


class Links(ABC):
    """Connections of one rank to others of its pipeline. ``peer`` is a rank's place in the pipeline."""

    @abstractmethod
    def connect(self, pairs: Collection[tuple[int, int]], guard: Guard) -> None:
        """Makes what transfers between these pairs of ranks need. All ranks of the pipeline call it together.

        Args:
            pairs: ranks that will send each other something, in any order.
            guard: calls a function that may wait for this peer for ever, and raises when the peer does not answer.
        """

    @abstractmethod
    def send(self, tensor: Tensor, peer: int) -> dist.Work: ...

    @abstractmethod
    def receive(self, buffer: Tensor, peer: int) -> dist.Work: ...

    @abstractmethod
    def wait(self, work: dist.Work) -> None:
        """Returns when what is computed next on this device may use the message."""

    def first(self, peer: int, *, sends: bool) -> dist.Work | None:
        """The first message of a connection: NCCL tells through it what has gone wrong later; see ``nccl_message``."""
        return None


class GlooLinks(Links):
    """Messages by gloo.

    Args:
        group: of the pipeline's ranks.
        timeout: after which a wait fails.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self._group, self._timeout = group, timeout

    def connect(self, pairs: Collection[tuple[int, int]], guard: Guard) -> None:
        """Does nothing: a group of gloo is connected when it is made."""

    def send(self, tensor: Tensor, peer: int) -> dist.Work:
        return not_none(dist.isend(tensor, group=self._group, group_dst=peer))

    def receive(self, buffer: Tensor, peer: int) -> dist.Work:
        return not_none(dist.irecv(buffer, group=self._group, group_src=peer))

    def wait(self, work: dist.Work) -> None:
        work.wait(self._timeout)


class NcclLinks(Links):
    """Messages by NCCL.

    Args:
        group: of the pipeline's ranks, for objects; its store brings the pairs together.
        rank: this process's place in the pipeline.
        device: its GPU.
        timeout: of torch's own watchdog, times ``PATIENCE``.
        own: called with every communicator as soon as it exists, for whoever must abort it after a failure.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        device: torch.device,
        timeout: timedelta,
        own: Callable[[Any], None],
    ) -> None:
        self._group, self._rank, self._device, self._timeout, self._own = group, rank, device, timeout, own
        self._outgoing: dict[int, Any] = {}
        self._incoming: dict[int, Any] = {}
        self._first: dict[tuple[int, bool], dist.Work] = {}

    def connect(self, pairs: Collection[tuple[int, int]], guard: Guard) -> None:
        for source, target in _connection_order(pairs):
            if self._rank in (source, target):
                guard(partial(self._connect, source, target), target if self._rank == source else source)

    def _connect(self, source: int, target: int) -> None:
        """Makes one pair. Its first message sets up NCCL's buffers."""
        pair = GROUPS.pair(self._group, self._rank, source, target, self._device, self._timeout)
        self._own(pair)
        nothing, sends = torch.zeros(1, device=self._device), self._rank == source
        if sends:
            self._outgoing[target] = pair
            work = self.send(nothing, target)
        else:
            self._incoming[source] = pair
            work = self.receive(nothing, source)
        self.wait(work)
        self._first[target if sends else source, sends] = work

    def first(self, peer: int, *, sends: bool) -> dist.Work | None:
        return self._first.get((peer, sends))

    def send(self, tensor: Tensor, peer: int) -> dist.Work:
        work: dist.Work = self._outgoing[peer].send([tensor], 1, 0)
        return work

    def receive(self, buffer: Tensor, peer: int) -> dist.Work:
        work: dist.Work = self._incoming[peer].recv([buffer], 0, 0)
        return work

    def wait(self, work: dist.Work) -> None:
        work.wait()

    @property
    def groups(self) -> list[Any]:
        """The communicators of this rank's pairs."""
        return [*self._outgoing.values(), *self._incoming.values()]


def _connection_order(pairs: Collection[tuple[int, int]]) -> list[tuple[int, int]]:
    """Both directions of each pair, in the order in which all ranks connect.

    Making a pair waits for the peer. One order for all ranks keeps them from waiting in a circle. Neighbors from even
    ranks come first, so that many pairs are made at the same time::

        at the same time   0-1   2-3   4-5
        then                  1-2   3-4   5-6
    """
    both = {pair for a, b in pairs for pair in ((a, b), (b, a)) if a != b}
    return sorted(both, key=lambda pair: (min(pair) % 2, min(pair), max(pair), pair))


def nccl_message(first: dist.Work | None) -> str:
    """Returns what NCCL says of a communicator that has failed, or an empty string.

    Args:
        first: any operation of it. The first one is best: it holds no message in memory.
    """
    if first is None or not first.is_completed():  # which asks NCCL
        return ""
    error = first.exception()
    return str(error).strip().partition("\n")[0] if error is not None else ""


class Done(dist.Work):
    """A transfer that is through."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class NullLinks(Links):
    """Sends nothing. What is received is zeros: with anything else, made-up steps could compute NaN."""

    def connect(self, pairs: Collection[tuple[int, int]], guard: Guard) -> None:
        pass

    def send(self, tensor: Tensor, peer: int) -> dist.Work:
        return Done()

    def receive(self, buffer: Tensor, peer: int) -> dist.Work:
        buffer.zero_()
        return Done()

    def wait(self, work: dist.Work) -> None:
        pass
