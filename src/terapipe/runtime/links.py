"""Point-to-point connections between the ranks of a pipeline, one kind for each of torch's backends.

gloo: one group for all, whose transfers are told apart by their order. Waits block the host until their timeout.

NCCL: a communicator for each pair of ranks and direction, made and used once before the first step, because making one
blocks the host until the peer makes it too, and must not happen between operations that are on their way. Waits are the
device's: the host goes on. Whether a peer answers at all is the watcher's business (watcher.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import GroupName

from terapipe.runtime.environment import errors_left_to_us

MAX_CTAS = 4  # of the device's multiprocessors that one transfer may hold
PATIENCE = 4  # times the timeout: torch's own watchdog must not end a process before ours has named the cause

# Process-wide, as torch's own list of groups is: a group cannot be closed (see Transport._cut) and keeps threads and
# connections, so a later Transport over the same ranks takes the groups of an earlier one. They are never used at the
# same time. Passing one Transport around would not do: a Pipeline may be made after another was dropped.
_groups: dict[tuple[object, ...], dist.ProcessGroup] = {}
_pairs: dict[tuple[object, ...], Any] = {}  # NCCL's communicators of two ranks, by the group of their pipeline


def group_of(ranks: Collection[int], timeout: timedelta, backend: str) -> dist.ProcessGroup:
    """Of these ranks, which all ask for it. torch names a group by the number of groups that a rank has: all ranks of a
    pipeline must make as many, in the same order."""
    key = (dist.group.WORLD, tuple(ranks), timeout, backend)
    if key not in _groups:
        span = timeout if backend == "gloo" else PATIENCE * timeout
        with errors_left_to_us(), _not_split():
            _groups[key] = dist.new_group(list(ranks), span, backend, use_local_synchronization=True)
    return _groups[key]


def forget(groups: Collection[object]) -> None:
    """Nobody gets these again."""
    for known in (_groups, _pairs):
        for key in [key for key, group in known.items() if group in groups]:
            del known[key]


@contextmanager
def _not_split() -> Iterator[None]:
    """Where the default group is bound to a device, torch would make new groups by splitting it, for which all ranks
    of the job would have to call, also those that are not of this pipeline."""
    world = dist.group.WORLD
    bound = getattr(world, "bound_device_id", None)
    if world is None or bound is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


class Links(ABC):
    """``peer`` counts within the pipeline."""

    @abstractmethod
    def connect(self, pairs: Collection[tuple[int, int]]) -> None:
        """Makes what transfers between these pairs of ranks need. All ranks of the pipeline call it alike."""

    @abstractmethod
    def send(self, tensor: Tensor, peer: int) -> dist.Work: ...

    @abstractmethod
    def receive(self, buffer: Tensor, peer: int) -> dist.Work: ...

    @abstractmethod
    def wait(self, work: dist.Work) -> None:
        """What follows on this device comes after it."""

    @property
    def groups(self) -> list[Any]:
        """That it made itself."""
        return []


class GlooLinks(Links):
    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self._group, self._timeout = group, timeout

    def connect(self, pairs: Collection[tuple[int, int]]) -> None:
        """A group of gloo is connected when it is made."""

    def send(self, tensor: Tensor, peer: int) -> dist.Work:
        return made(dist.isend(tensor, group=self._group, group_dst=peer))

    def receive(self, buffer: Tensor, peer: int) -> dist.Work:
        return made(dist.irecv(buffer, group=self._group, group_src=peer))

    def wait(self, work: dist.Work) -> None:
        work.wait(self._timeout)


class NcclLinks(Links):
    """``group`` is that of the pipeline's ranks for objects. Communicators are made by NCCL's class itself, not by
    ``new_group``: each rank makes its own pairs only, which torch's names for groups do not allow."""

    def __init__(self, group: dist.ProcessGroup, rank: int, device: torch.device, timeout: timedelta) -> None:
        self._group, self._rank, self._device, self._timeout = group, rank, device, timeout
        self._outgoing: dict[int, Any] = {}
        self._incoming: dict[int, Any] = {}

    def connect(self, pairs: Collection[tuple[int, int]]) -> None:
        for source, target in _in_order(pairs):
            if self._rank == source:
                self._outgoing[target] = self._pair(source, target)
                self.wait(self.send(self._nothing(), target))
            elif self._rank == target:
                self._incoming[source] = self._pair(source, target)
                self.wait(self.receive(self._nothing(), source))

    def _nothing(self) -> Tensor:
        """The first message of a pair sets up its buffers."""
        return torch.zeros(1, device=self._device)

    def _pair(self, source: int, target: int) -> Any:
        key = (self._group, source, target, self._timeout)
        if key not in _pairs:
            name = f"terapipe from {source} to {target}"
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # before computations
            options.config.max_ctas = MAX_CTAS
            options._timeout = PATIENCE * self._timeout
            options.group_name = GroupName(name)
            options.global_ranks_in_group = dist.get_process_group_ranks(self._group)
            store = PrefixStore(name, self._group.get_group_store())
            with errors_left_to_us():
                backend = dist.ProcessGroupNCCL(store, int(self._rank == target), 2, options)
            backend.eager_connect_single_device(self._device)
            _pairs[key] = backend
        return _pairs[key]

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
        return [*self._outgoing.values(), *self._incoming.values()]


def _in_order(pairs: Collection[tuple[int, int]]) -> list[tuple[int, int]]:
    """Both directions of each pair, in one order for all ranks, so that nobody waits in a circle; neighbors from even
    ranks first, so that many pairs are made at the same time."""
    both = {pair for a, b in pairs for pair in ((a, b), (b, a)) if a != b}
    return sorted(both, key=lambda pair: (min(pair) % 2, min(pair), max(pair), pair))


def made(work: dist.Work | None) -> dist.Work:
    assert work is not None  # only a rank outside the group gets none
    return work
