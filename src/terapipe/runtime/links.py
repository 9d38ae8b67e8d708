"""Point-to-point connections between the ranks of a pipeline, one kind for each of torch's backends.

gloo: one group for all, whose transfers are told apart by their order. Waits block the host until their timeout.

NCCL: a communicator for each pair of ranks and direction, made and used once before the first step, because making one
blocks the host until the peer makes it too, and must not happen between operations that are on their way. Waits are the
device's: the host goes on. Whether a peer answers at all is the watcher's business (watcher.py).
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from terapipe.runtime.environment import errors_left_to_us

MAX_CTAS = 4  # of the device's multiprocessors that one transfer may hold
PATIENCE = 4  # times the timeout: torch's own watchdog must not end a process before ours has named the cause

# Process-wide, as torch's own list of groups is: a group cannot be closed (see Transport._cut) and keeps threads and
# connections, so a later Transport over the same ranks takes the groups of an earlier one. They are never used at the
# same time. Passing one Transport around would not do: a Pipeline may be made after another was dropped.
_groups: dict[tuple[object, ...], dist.ProcessGroup] = {}
_made: Counter[tuple[object, ...]] = Counter()  # how many there were for each purpose


def group_of(
    ranks: Collection[int], timeout: timedelta, backend: str, *, device: torch.device | None = None, use: str = ""
) -> dist.ProcessGroup:
    """Of these ranks, which all ask for it. With a ``device``, NCCL's communicator is made at once. Groups for another
    ``use`` are other groups."""
    key = (dist.group.WORLD, tuple(ranks), timeout, backend, device, use)
    if key not in _groups:
        span = timeout if backend == "gloo" else PATIENCE * timeout
        options = _options() if backend == "nccl" and device is not None else None
        with errors_left_to_us(), _not_split():
            _groups[key] = new_group(ranks, span, backend, use, pg_options=options, device_id=device)
    return _groups[key]


def new_group(ranks: Collection[int], timeout: timedelta, backend: str, use: str, **more: Any) -> dist.ProcessGroup:
    """Made by its own ranks alone.

    torch would name it after its ranks and the number of groups that the process has. Ranks that have made different
    numbers of groups before, as those at the ends of a pipeline and those in the middle, would wait for each other
    under different names, for ever.
    """
    purpose = (dist.group.WORLD, tuple(ranks), backend, use)
    _made[purpose] += 1
    name = f"terapipe {use} {backend} {'-'.join(map(str, ranks))} {_made[purpose]}"
    kept: Any = distributed_c10d._process_group_name
    torch_names: Any = distributed_c10d
    torch_names._process_group_name = lambda ranks, use_hashed_name: name
    try:
        group: dist.ProcessGroup = dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True, **more)
    finally:
        torch_names._process_group_name = kept
    return group


def forget(groups: Collection[dist.ProcessGroup]) -> None:
    for key in [key for key, group in _groups.items() if group in groups]:
        del _groups[key]


def _options() -> Any:
    """For transfers: they go before computations, and hold few of the device's multiprocessors while they wait."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = MAX_CTAS
    return options


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
    def groups(self) -> list[dist.ProcessGroup]:
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
    def __init__(self, ranks: list[int], rank: int, device: torch.device, timeout: timedelta) -> None:
        """``ranks`` of the pipeline, as torch.distributed counts them."""
        self._ranks, self._rank, self._device, self._timeout = ranks, rank, device, timeout
        self._outgoing: dict[int, dist.ProcessGroup] = {}
        self._incoming: dict[int, dist.ProcessGroup] = {}

    def connect(self, pairs: Collection[tuple[int, int]]) -> None:
        for source, target in _in_order(pairs):
            if self._rank not in (source, target):
                continue
            ranks = sorted((self._ranks[source], self._ranks[target]))
            use = f"from {self._ranks[source]}"
            group = group_of(ranks, self._timeout, "nccl", device=self._device, use=use)
            line = self._outgoing if self._rank == source else self._incoming
            line[target if self._rank == source else source] = group
            self._warm_up(source, target)

    def _warm_up(self, source: int, target: int) -> None:
        """The first message of a pair sets up its buffers."""
        nothing = torch.zeros(1, device=self._device)
        work = self.send(nothing, target) if self._rank == source else self.receive(nothing, source)
        self.wait(work)

    def send(self, tensor: Tensor, peer: int) -> dist.Work:
        return made(dist.isend(tensor, self._ranks[peer], group=self._outgoing[peer]))

    def receive(self, buffer: Tensor, peer: int) -> dist.Work:
        return made(dist.irecv(buffer, self._ranks[peer], group=self._incoming[peer]))

    def wait(self, work: dist.Work) -> None:
        work.wait()

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        return [*self._outgoing.values(), *self._incoming.values()]


def _in_order(pairs: Collection[tuple[int, int]]) -> list[tuple[int, int]]:
    """Both directions of each pair, in one order for all ranks, so that nobody waits in a circle; neighbors from even
    ranks first, so that many pairs are made at the same time."""
    both = {pair for a, b in pairs for pair in ((a, b), (b, a)) if a != b}
    return sorted(both, key=lambda pair: (min(pair) % 2, min(pair), max(pair), pair))


def made(work: dist.Work | None) -> dist.Work:
    assert work is not None  # only a rank outside the group gets none
    return work
