"""The process groups of this process: torch's default group, those of lines of ranks, NCCL's pairs.

torch keeps its groups process-wide. A group holds threads and connections, and gloo's cannot be closed. So a later
pipeline over the same ranks takes the groups of an earlier one; they are never used at the same time.

Making a group waits for every member, by timeouts of torch's own (half an hour), and its errors name nobody. So ranks
meet in the job's store first (``roll_call``), and those that do not come are named.
"""

import atexit
import hashlib
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.rendezvous import rendezvous

from terapipe.runtime.comm.environment import (
    nccl_errors_raised_here,
    rank_and_size,
    restarts,
    start_thread,
    stay_on_this_host,
    store_address,
    under_torchrun,
)
from terapipe.runtime.comm.errors import PipelineError

if TYPE_CHECKING:
    from terapipe.runtime.checkpoint.writer import CheckpointWriter

MAX_CTAS = 4  # of the device's multiprocessors that one transfer may hold
PATIENCE = 4  # times the timeout: torch's own watchdog must not end a process before ours has named the cause
LEAVE = 10.0  # seconds that the end of the process waits for communicators to be closed
LET_GO = 0.2  # seconds for gloo's threads to let go of the last messages
_NEVER_SENT = 1 << 16  # a tag that no message has


class ProcessGroups:
    """All process groups that terapipe has made in this process. There is one such object, ``GROUPS``."""

    def __init__(self) -> None:
        self.writers: dict[tuple[object, ...], CheckpointWriter] = {}  # by the ranks that save together
        self._own_world: weakref.ref[Any] | None = None  # the default group, if it was made here
        self._groups: dict[tuple[object, ...], dist.ProcessGroup] = {}
        self._pairs: dict[tuple[object, ...], Any] = {}  # NCCL's communicators of two ranks
        self._closing: list[threading.Thread] = []  # in which communicators are aborted or shut down

    # The default group

    def join(self, device: torch.device, timeout: float = 300.0) -> bool:
        """Joins the processes that torchrun started, unless the program has done so.

        Args:
            device: of this process. It decides whether the default group has NCCL, too.
            timeout: seconds after which processes that have not come are named.

        Returns:
            False where there is only this process.
        """
        if not dist.is_initialized() and under_torchrun():
            stay_on_this_host()
            rank, size = rank_and_size()
            # torchrun keeps its store when it restarts processes, and gloo would find addresses of dead ones in it.
            store = PrefixStore(f"terapipe/{restarts()}", _store_of_job(timeout))
            roll_call(store, rank, range(size), timeout, "join the process group")
            store.set_timeout(dist.default_pg_timeout)
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            with nccl_errors_raised_here():
                dist.init_process_group(backend, store=store, rank=rank, world_size=size)
            self._own_world = weakref.ref(dist.group.WORLD)
        return dist.is_initialized()

    @property
    def owns_default_group(self) -> bool:
        return self._own_world is not None and self._own_world() is dist.group.WORLD

    def _nccl_of_users_group(self) -> Any:
        """The communicators of a default group for GPUs that the program made itself, or None."""
        if dist.group.WORLD is None or self.owns_default_group:
            return None
        try:
            return dist.group.WORLD._get_backend(torch.device("cuda"))
        except RuntimeError:  # it is for CPUs alone
            return None

    # Groups and pairs

    def group(self, ranks: Collection[int], timeout: timedelta, backend: str, ctas: int = 1) -> dist.ProcessGroup:
        """Returns the group of these ranks, which all ask for it.

        torch names a group by the number of groups that a rank has: all ranks of a pipeline must make as many, in the
        same order.

        Args:
            ranks: as torch.distributed counts them.
            timeout: of its operations.
            backend: ``gloo`` or ``nccl``.
            ctas: how many multiprocessors its operations may hold on a GPU. By default NCCL has buffers for dozens of
                them, hundreds of megabytes, and most groups send a few numbers.
        """
        key = (dist.group.WORLD, tuple(ranks), timeout, backend)
        if key not in self._groups:
            span, options = (timeout, None) if backend == "gloo" else (PATIENCE * timeout, _nccl_options(timeout, ctas))
            with nccl_errors_raised_here(), _without_splitting():
                group = dist.new_group(list(ranks), span, backend, options, use_local_synchronization=True)
            self._groups[key] = group
        return self._groups[key]

    def pair(
        self, group: dist.ProcessGroup, rank: int, source: int, target: int, device: torch.device, timeout: timedelta
    ) -> Any:
        """Returns NCCL's communicator for messages from one rank to another.

        It is made by NCCL's class itself, not by ``new_group``: each rank makes its own pairs only, which torch's names
        for groups do not allow.

        Args:
            group: of the pipeline's ranks; its store brings the two together.
            rank: this process's place in the group, which is that of ``source`` or of ``target``.
            source: place of the rank that sends.
            target: place of the rank that receives.
            device: of this process.
            timeout: of its operations.
        """
        key = (group, source, target, timeout)
        if key not in self._pairs:
            name = f"terapipe from {source} to {target}"
            options = _nccl_options(timeout, MAX_CTAS, before_computations=True)
            options.group_name = GroupName(name)
            options.global_ranks_in_group = dist.get_process_group_ranks(group)
            store = PrefixStore(name, group.get_group_store())
            with nccl_errors_raised_here():
                backend = dist.ProcessGroupNCCL(store, int(rank == target), 2, options)
            backend.eager_connect_single_device(device)
            self._pairs[key] = backend
        return self._pairs[key]

    # Closing

    def cut(self, gloo: Collection[dist.ProcessGroup], nccl: Collection[Any], device: torch.device) -> None:
        """Wakes everyone who waits for this rank in one of these groups, and this rank where it waits.

        NCCL's communicators can be aborted, those of a default group too that the program made itself: its monitor
        would end the process eight minutes after NCCL has failed anywhere. gloo offers no way to close a group that
        its peers would notice, short of leaving the process; but a receive that times out takes all of the group's
        connections down with it::

            rank 0                                rank 1, waits for rank 0 in gloo
              irecv(tag nobody sends) --- 1 ms
              time-out: gloo closes the pair  ->  its recv raises "connection closed": it reads the board

        Args:
            gloo: groups of gloo. Nobody gets them again from this object.
            nccl: groups and pairs of NCCL, likewise.
            device: of this process.
        """
        for cache in (self._groups, self._pairs):
            for key in [key for key, group in cache.items() if any(group is other for other in (*gloo, *nccl))]:
                del cache[key]
        if device.type == "cuda":
            aborted = {id(group): group for group in (*nccl, self._nccl_of_users_group()) if group is not None}
            self.abort(list(aborted.values()), device)
        for group in gloo:
            for peer in range(group.size()):
                if peer != dist.get_rank(group):
                    with suppress(RuntimeError):  # from the time-out, or because this connection is down already
                        nothing = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=_NEVER_SENT)
                        if nothing is not None:
                            nothing.wait(timedelta(milliseconds=1))

    def abort(self, communicators: Collection[Any], device: torch.device) -> None:
        """Aborts NCCL's communicators, all at the same time, and does not wait for it.

        ncclCommAbort sets a flag and waits for the kernels of its communicator. Those may be queued behind kernels that
        wait for a message of another one::

            device:   [recv of pair A, waits] [recv of pair B] [compute]
            abort(B)  waits for recv B, which is queued behind recv A
            abort(A)  would end recv A, but is called after abort(B) has returned: never

        One thread for each sets all flags. torch's ``ProcessGroupNCCL.abort`` waits as long, whatever its timeout.
        """
        for communicator in communicators:
            self._close(communicator.abort, device)

    def _close(self, function: Callable[[], None], device: torch.device) -> None:
        def close() -> None:
            with suppress(RuntimeError):  # it may be broken in any way
                function()

        self._closing.append(start_thread(close, device, "terapipe-closing"))

    def await_closing(self, seconds: float = LEAVE) -> bool:
        """Waits until communicators that are being closed are closed. False if that takes longer."""
        deadline = time.monotonic() + seconds
        for thread in self._closing:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._closing)

    def leave(self) -> None:
        """Lets gloo finish at the end of a process, and closes connections between GPUs that were made here.

        gloo's threads let go of a message a moment after its transfer has ended. If Python ends in that moment, the
        thread can no longer take the interpreter's lock, and torch aborts the process. So they are given the time.

        ``destroy_process_group`` does not know pairs: torch would warn of them, and abort what peers still receive.
        What a rank that is gone holds up is left behind.
        """
        if dist.is_initialized():
            time.sleep(LET_GO)
        owns_default = dist.is_initialized() and self.owns_default_group
        if (self._pairs or owns_default) and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            device = torch.device("cuda", torch.cuda.current_device())
            for backend in self._pairs.values():
                self._close(backend.shutdown, device)
            if owns_default:
                self._close(dist.destroy_process_group, device)
            self._pairs.clear()
        self.await_closing()


GROUPS = ProcessGroups()
atexit.register(GROUPS.leave)


def _nccl_options(timeout: timedelta, ctas: int, *, before_computations: bool = False) -> Any:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=before_computations)
    options.config.max_ctas = ctas
    options._timeout = PATIENCE * timeout
    return options


@contextmanager
def _without_splitting() -> Iterator[None]:
    """Inside, torch makes new groups by themselves.

    Where the default group is bound to a device, torch would split new groups off from it, for which all ranks of the
    job would have to call, also those that are not of this pipeline.
    """
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


def _store_of_job(timeout: float) -> Store:
    """Connects to torchrun's store. With a world size of 1, or the rank that hosts it would wait in it for the others,
    and name nobody."""
    try:
        store: Store = next(iter(rendezvous("env://?world_size=1", timeout=timedelta(seconds=timeout))))[0]
    except dist.DistError as error:
        raise PipelineError(
            f"no store of the job answered at {store_address()} within {timeout:g} s; rank 0, or torchrun on its host, "
            f"must be started, and be reached there: {str(error).partition(chr(10))[0]}"
        ) from error
    return store


# Meeting before a group is made

_rounds: Counter[tuple[str, tuple[int, ...]]] = Counter()  # how often these ranks have met for this, in this process


def roll_call(store: Store, rank: int, ranks: Sequence[int], timeout: float, what: str) -> None:
    """Returns when all of these ranks have called it as often, for the same purpose.

    Where some are missing in the end, all others raise the same words, and all may try again.

    Args:
        store: of the job.
        rank: of this process.
        ranks: that are to meet.
        timeout: seconds to wait.
        what: they meet for, such as "make a Pipeline".
    """
    if len(ranks) < 2:
        return
    key = what, tuple(ranks)
    group = hashlib.blake2b(repr(key).encode(), digest_size=8).hexdigest()
    meeting = PrefixStore(f"terapipe/roll call/{group}", store)
    try:
        while meeting.check([f"{_rounds[key]}/absent"]):  # others gave up; they will be in the next round
            _rounds[key] += 1
        room = PrefixStore(str(_rounds[key]), meeting)
        _rounds[key] += 1
        absent = _meet(room, rank, ranks, timeout, what)
    except DistError as error:
        cause = str(error).partition("\n")[0]
        raise PipelineError(
            f"rank {rank} waited for all {len(ranks)} ranks to {what}, and lost the job's store, which ends with the "
            f"process that hosts it: {cause}"
        ) from error
    if absent:
        raise PipelineError(absent)


def _meet(room: Store, rank: int, ranks: Sequence[int], timeout: float, what: str) -> str:
    """Empty when all are there, or what all who are there say of the others. Polls, because a wait that times out in
    the store writes to stderr."""
    room.set(f"rank{rank}", "")
    if room.add("arrived", 1) == len(ranks):  # one key to look for, however many ranks there are
        room.set("all", "")
    deadline, pause = time.monotonic() + timeout, 0.001
    while not room.check(["all"]):
        if room.check(["absent"]) or time.monotonic() > deadline:
            missing = [r for r in ranks if not room.check([f"rank{r}"])]
            return room.compare_set("absent", "", _absence(missing, ranks, timeout, what)).decode()
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return ""


def _absence(missing: Sequence[int], ranks: Sequence[int], timeout: float, what: str) -> str:
    named = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return (
        f"all {len(ranks)} ranks must {what}, {'ranks' if len(missing) > 1 else 'rank'} {named} did not within "
        f"{timeout:g} s; look for what happened there, or raise timeout"
    )
