"""Point-to-point connections between the ranks of a pipeline, one kind for each of torch's backends.

gloo: one group for all, whose transfers are told apart by their order. Waits block the host until their timeout.

NCCL: a communicator for each pair of ranks and direction, made and used once before the first step, because making one
blocks the host until the peer makes it too, and must not happen between operations that are on their way. Waits are the
device's: the host goes on. Whether a peer answers at all is the watcher's business (watcher.py).
"""

import atexit
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import GroupName

from terapipe.runtime.environment import default_group_is_ours, errors_left_to_us
from terapipe.runtime.threads import start_thread

MAX_CTAS = 4  # of the device's multiprocessors that one transfer may hold
PATIENCE = 4  # times the timeout: torch's own watchdog must not end a process before ours has named the cause
LEAVE = 10.0  # seconds that the end of the process waits for communicators to be closed

# Process-wide, as torch's own list of groups is: a group cannot be closed (see Transport._cut) and keeps threads and
# connections, so a later Transport over the same ranks takes the groups of an earlier one. They are never used at the
# same time. Passing one Transport around would not do: a Pipeline may be made after another was dropped.
_groups: dict[tuple[object, ...], dist.ProcessGroup] = {}
_pairs: dict[tuple[object, ...], Any] = {}  # NCCL's communicators of two ranks, by the group of their pipeline
_closing: list[threading.Thread] = []  # in which communicators are aborted or shut down


def group_of(ranks: Collection[int], timeout: timedelta, backend: str, ctas: int = 1) -> dist.ProcessGroup:
    """Of these ranks, which all ask for it. torch names a group by the number of groups that a rank has: all ranks of a
    pipeline must make as many, in the same order. ``ctas``: how many multiprocessors its operations may hold on a GPU;
    by default NCCL has buffers for dozens of them, hundreds of megabytes, and most groups send a few numbers."""
    key = (dist.group.WORLD, tuple(ranks), timeout, backend)
    if key not in _groups:
        span, options = (timeout, None) if backend == "gloo" else (PATIENCE * timeout, _options(timeout, ctas))
        with errors_left_to_us(), _not_split():
            _groups[key] = dist.new_group(list(ranks), span, backend, options, use_local_synchronization=True)
    return _groups[key]


def _options(timeout: timedelta, ctas: int, *, before_computations: bool = False) -> Any:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=before_computations)
    options.config.max_ctas = ctas
    options._timeout = PATIENCE * timeout
    return options


def forget(groups: Collection[object]) -> None:
    """Nobody gets these again."""
    for known in (_groups, _pairs):
        for key in [key for key, group in known.items() if group in groups]:
            del known[key]


def abort(groups: Collection[Any], device: torch.device) -> None:
    """Aborts NCCL's communicators, all at the same time, and does not wait for it.

    ncclCommAbort sets a flag and waits for the kernels of its communicator. Those may be queued behind kernels that
    wait for a message of another one: aborted one after the other, the first would wait for ever. torch's
    ``ProcessGroupNCCL.abort`` waits as long, whatever its timeout.
    """
    for group in groups:
        _close(group.abort, device)


def _close(function: Callable[[], None], device: torch.device) -> None:
    def close() -> None:
        with suppress(RuntimeError):  # it may be broken in any way
            function()

    _closing.append(start_thread(close, device, "terapipe-closing"))


@atexit.register
def leave() -> None:
    """At the end of a process on GPUs, closes the connections that were made here. Pairs are unknown to
    ``destroy_process_group``: torch would warn of them, and abort what peers still receive. What a rank that is gone
    holds up is left behind."""
    ours = dist.is_initialized() and default_group_is_ours()
    if (_pairs or ours) and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.device("cuda", torch.cuda.current_device())
        for backend in _pairs.values():
            _close(backend.shutdown, device)
        if ours:
            _close(dist.destroy_process_group, device)
        _pairs.clear()
    deadline = time.monotonic() + LEAVE
    for thread in _closing:
        thread.join(max(0.0, deadline - time.monotonic()))


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


Guard = Callable[[Callable[[], None], int], None]  # calls a function that may wait for a peer for ever


class Links(ABC):
    """``peer`` counts within the pipeline."""

    @abstractmethod
    def connect(self, pairs: Collection[tuple[int, int]], guard: Guard) -> None:
        """Makes what transfers between these pairs of ranks need. All ranks of the pipeline call it alike."""

    @abstractmethod
    def send(self, tensor: Tensor, peer: int) -> dist.Work: ...

    @abstractmethod
    def receive(self, buffer: Tensor, peer: int) -> dist.Work: ...

    @abstractmethod
    def wait(self, work: dist.Work) -> None:
        """What follows on this device comes after it."""

    def first(self, peer: int, *, sends: bool) -> dist.Work | None:
        """The first message of a connection, which knows its errors ever after; see ``words_of``."""
        return None

    @property
    def groups(self) -> list[Any]:
        """That it made itself."""
        return []


class GlooLinks(Links):
    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self._group, self._timeout = group, timeout

    def connect(self, pairs: Collection[tuple[int, int]], guard: Guard) -> None:
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
        self._first: dict[tuple[int, bool], dist.Work] = {}

    def connect(self, pairs: Collection[tuple[int, int]], guard: Guard) -> None:
        for source, target in _in_order(pairs):
            if self._rank in (source, target):
                guard(partial(self._connect, source, target), target if self._rank == source else source)

    def _connect(self, source: int, target: int) -> None:
        """The first message of a pair sets up its buffers."""
        pair, sends = self._pair(source, target), self._rank == source
        nothing = torch.zeros(1, device=self._device)
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

    def _pair(self, source: int, target: int) -> Any:
        key = (self._group, source, target, self._timeout)
        if key not in _pairs:
            name = f"terapipe from {source} to {target}"
            options = _options(self._timeout, MAX_CTAS, before_computations=True)
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


def words_of(first: dist.Work | None) -> str:
    """What NCCL says of a communicator that has failed, of which this is any operation."""
    if first is None or not first.is_completed():  # which asks NCCL
        return ""
    error = first.exception()
    return str(error).strip().partition("\n")[0] if error is not None else ""


def made(work: dist.Work | None) -> dist.Work:
    assert work is not None  # only a rank outside the group gets none
    return work
