"""What the ranks of a pipeline send each other and decide together, on CPUs by gloo and on GPUs by NCCL."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from terapipe.runtime.environment import ensure_process_group, host_name, stay_on_this_host
from terapipe.runtime.failures import (
    Board,
    PipelineError,
    Record,
    in_words,
    is_connection_error,
    is_out_of_memory,
    is_timeout,
    own_words,
)
from terapipe.runtime.links import PATIENCE, GlooLinks, Links, NcclLinks, forget, group_of, made
from terapipe.runtime.mesh import ALL, DP, PP, TP, await_ranks, lines_of, with_roles
from terapipe.runtime.watcher import Watcher

T = TypeVar("T")

BEAT = 0.5  # seconds between signs of life
_NEVER_SENT = 1 << 16  # a tag that no message has


class Transport:
    """Sends and receives between the ranks of one pipeline, and what they decide together.

    ``rank`` and ``size`` count within the pipeline. There may be replicas of it (``dp``), and each of its ranks may be
    several tensor parallel ones (``tp``). The groups of the pipeline and of all ranks are this object's own; those of
    replicas and tensor parallel ranks are the mesh's. Tensors of a GPU travel by NCCL. Python objects and numbers
    always travel by gloo: nothing waits for the device, and ranks can talk while NCCL is broken. ``mesh_dims`` maps
    ``dp``, ``pp`` and ``tp`` to the mesh's own names.
    """

    def __init__(
        self,
        device: torch.device,
        mesh: DeviceMesh | None = None,
        timeout: float = 300.0,
        mesh_dims: Mapping[str, str] | None = None,
    ) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
        self.device, self.timeout = device, timeout
        self._span = timedelta(seconds=timeout)
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            torch.cuda.set_device(device)  # whoever made the process group
        self._groups: dict[str, dist.ProcessGroup] = {}  # for tensors
        self._talk: dict[str, dist.ProcessGroup] = {}  # for objects, by gloo
        self._members: dict[str, list[int]] = {}  # the ranks of a group, once asked for
        self._links: Links | None = None
        self._watcher: Watcher | None = None
        self._failure: PipelineError | None = None
        self._failing = threading.Lock()
        self._mesh, self.mesh_dims = with_roles(mesh, mesh_dims)
        stay_on_this_host()  # whoever made the process group
        if mesh is not None or ensure_process_group(device, timeout):
            lines = lines_of(self._mesh, self.mesh_dims)
            await_ranks(lines[ALL][0], timeout, "make a Pipeline")
            self._join(lines)
        self.rank, self.size = self._place(PP)
        self.dp_rank, self.dp_size = self._place(DP)
        self.tp_rank, self.tp_size = self._place(TP)
        self._meet()

    def _join(self, lines: Mapping[str, tuple[list[int], dist.ProcessGroup | None]]) -> None:
        """Objects first: ranks must be able to talk when tensors cannot be sent."""
        for name in (PP, ALL):
            self._talk[name] = group_of(lines[name][0], self._span, "gloo")
        for name, (ranks, group) in lines.items():
            if group is not None:
                _set_pg_timeout(PATIENCE * self._span if self._is_cuda else self._span, group)
            elif not self._is_cuda:
                group = self._talk[name]
            else:
                group = group_of(ranks, self._span, "nccl")
            self._groups[name] = group
        if TP in lines:
            ranks, group = lines[TP]
            self._talk[TP] = group_of(ranks, self._span, "gloo") if self._is_cuda or group is None else group

    def _meet(self) -> None:
        store = PrefixStore("terapipe/failures", self._talk[ALL].get_group_store()) if self._talk else None
        self._board = Board(store, dict.fromkeys(self._ranks(ALL), ""))  # until the names are known
        devices = self.gather((host_name(), _identity(self.device)), ALL)
        self.hosts = dict(zip(self._ranks(ALL), (host for host, _ in devices), strict=True))
        self._board = Board(store, self.hosts)
        if store is None:
            return
        self._refuse_shared_devices(devices)
        if self._is_cuda:
            self._watcher = Watcher(store, self.global_rank, self.timeout, self._missed, self._heard)
            self._links = NcclLinks(self._talk[PP], self.rank, self.device, self._span)
        else:
            self._links = GlooLinks(self._groups[PP], self._span)

    def _refuse_shared_devices(self, devices: Sequence[tuple[str, str]]) -> None:
        """NCCL has no communicators of two ranks on one GPU: it fails with an error of its own, or hangs."""
        for i, place in enumerate(devices):
            first = devices.index(place)
            if place[1] and first < i:
                raise ValueError(
                    f"each rank needs a GPU of its own, got {self.name(first)} and {self.name(i)} on {place[1]} of "
                    f"{place[0]}; start as many processes on each host as it has GPUs (--nproc-per-node)"
                )

    def _place(self, line: str) -> tuple[int, int]:
        group = self._groups.get(line)
        return (dist.get_rank(group), group.size()) if group else (0, 1)

    def _ranks(self, line: str) -> list[int]:
        """As torch.distributed counts them, and as messages name them. torch makes a new list at every call."""
        if line not in self._members:
            self._members[line] = dist.get_process_group_ranks(self._groups[line]) if self._groups else [0]
        return self._members[line]

    @property
    def global_rank(self) -> int:
        return self._ranks(PP)[self.rank]

    @property
    def mesh(self) -> DeviceMesh | None:
        return self._mesh

    def submesh(self, role: str) -> DeviceMesh:
        """The dimension of the mesh with this role; only where there is more than one rank along it."""
        assert self._mesh is not None
        return self._mesh[self.mesh_dims[role]]

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        """For objects; None where this process is alone."""
        return self._talk.get(ALL)

    def others(self, *lines: str) -> tuple[int, ...]:
        return tuple(
            sorted({r for line in lines if line in self._groups for r in self._ranks(line)} - {self.global_rank})
        )

    def name(self, place: int) -> str:
        """The rank at this place among all, as messages name it."""
        return self._board.name(self._ranks(ALL)[place])

    # Point to point

    def connect(self, pairs: Collection[tuple[int, int]]) -> None:
        """Prepares transfers between these pairs of ranks. All ranks call it, with the same pairs."""
        if self._links is not None and self.size > 1:
            with self._waiting(self.others(PP), "the connections between neighbors"):
                self._links.connect(pairs)
        if self._is_cuda:  # NCCL makes a communicator at its first operation, which must not be within a step
            for line in self._groups:
                self.all_reduce(torch.zeros(1, device=self.device), line)

    def send(self, tensor: Tensor, peer: int, why: object) -> dist.Work:
        with self._waiting(self._peer(peer), why):
            return self._watched(self._line().send(tensor, peer), self._peer(peer), why)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, why: object) -> tuple[Tensor, dist.Work]:
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        with self._waiting(self._peer(peer), why):
            return buffer, self._watched(self._line().receive(buffer, peer), self._peer(peer), why)

    def wait(self, work: dist.Work, peer: int, why: object) -> None:
        with self._waiting(self._peer(peer), why):
            self._line().wait(work)

    def _line(self) -> Links:
        assert self._links is not None
        return self._links

    def _watched(self, work: dist.Work, peers: tuple[int, ...], why: object) -> dist.Work:
        if self._watcher is not None:
            self._watcher.watch(work, peers, why)
        return work

    def _peer(self, peer: int) -> tuple[int, ...]:
        return (self._ranks(PP)[peer],)

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        """The sum of this rank's tensor and its peer's, the same on both to the last bit."""
        why = "the gradient of a shared parameter"
        tensor = tensor.contiguous()
        # Without tags both ends must begin with the same transfer: that of the lower rank.
        sent = self.send(tensor, peer, why) if self.rank < peer else None
        other, arriving = self.receive(tuple(tensor.shape), tensor.dtype, peer, why)
        sent = sent or self.send(tensor, peer, why)
        self.wait(arriving, peer, why)
        self.wait(sent, peer, why)
        return other.add_(tensor)

    # Together, tensors

    def broadcast(self, tensor: Tensor, source: int, why: str, over: str = PP) -> Tensor:
        place, size = self._place(over)
        if size > 1:
            peers = self.others(over) if place == source else (self._ranks(over)[source],)  # the source waits, too
            with self._waiting(peers, why):
                work = dist.broadcast(tensor, group=self._groups[over], group_src=source, async_op=self._is_cuda)
                self._finish(work, peers, why)
        return tensor

    def all_reduce(self, tensor: Tensor, over: str = ALL, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        if self._place(over)[1] > 1:
            peers, why = self.others(over), "a reduction"
            with self._waiting(peers, why):
                self._finish(dist.all_reduce(tensor, op, group=self._groups[over], async_op=self._is_cuda), peers, why)
        return tensor

    def _finish(self, work: dist.Work | None, peers: tuple[int, ...], why: str) -> None:
        """On a GPU, what follows waits for it, not the host."""
        if work is not None:
            self._watched(work, peers, why).wait()

    def start_sum(self, tensor: Tensor) -> dist.Work:
        """Over replicas, in place, while this rank goes on."""
        peers, why = self.others(DP), "the sum of gradients"
        with self._waiting(peers, why):
            work = made(dist.all_reduce(tensor, group=self._groups[DP], async_op=True))
            return self._watched(work, peers, why)

    def finish_sum(self, work: dist.Work) -> None:
        with self._waiting(self.others(DP), "the sum of gradients"):
            self._line().wait(work)

    # Together, objects

    def gather(self, value: T, over: str = PP) -> list[T]:
        """Every rank's value, on every rank."""
        size = self._place(over)[1]
        if size == 1:
            return [value]
        values: list[T | None] = [None] * size
        with self._waiting(self.others(over), "an exchange between all ranks"):
            dist.all_gather_object(values, value, group=self._talk[over])
        return values  # type: ignore[return-value]

    def gather_numbers(self, numbers: Sequence[int], over: str = PP) -> list[list[int]]:
        """As ``gather``, for as many whole numbers on every rank: one message instead of several."""
        size = self._place(over)[1]
        if size == 1:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in range(size)]
        with self._waiting(self.others(over), "an exchange between all ranks"):
            dist.all_gather(found, mine, group=self._talk[over])
        rows: list[list[int]] = torch.stack(found).tolist()
        return rows

    def collect(self, value: T, over: str = PP) -> list[T] | None:
        """Every rank's value, on the first of them only; None on the others."""
        place, size = self._place(over)
        if size == 1:
            return [value]
        values: list[T | None] | None = None if place else [None] * size
        with self._waiting(self.others(over), "what the first rank collects"):
            dist.gather_object(value, values, group=self._talk[over], group_dst=0)
        return values  # type: ignore[return-value]

    def await_one(self, work: Future[T] | None) -> T | None:
        """Waits for what one rank does in a thread, however long it takes: ranks hear of each other all the while.
        The one that works gives its future, the others None."""
        self.until_all(lambda span: work is None or bool(wait([work], span).done))
        return None if work is None else work.result()

    def until_all(self, done: Callable[[float], bool]) -> None:
        """Waits until it is so on all ranks. Each is asked again and again, and given some seconds to find out."""
        span = 0.0
        while not all(self.gather(done(span), ALL)):
            span = BEAT

    # Failing

    @contextmanager
    def failing_together(self, at: Callable[[], object] = lambda: "") -> Iterator[None]:
        """An error inside stops the other ranks too, with this rank's error. ``at`` tells where this rank stands."""
        try:
            yield
            self._raise_known()
        except PipelineError:
            raise
        except Exception as error:
            place, others = str(at() or ""), self.others(DP, TP)
            if self._failure is not None:  # the watcher has cut the connections that this error is about
                raise self._failure from error
            if others and is_connection_error(error):  # within an operator, or while gathering a stage
                raise self.lost(error, place or "the end of a step", others) from error
            self.fail(Record(self.global_rank, in_words(error), place))
            raise

    def _raise_known(self) -> None:
        if self._failure is not None:
            raise PipelineError(f"this pipeline stopped before: {self._failure}")

    @contextmanager
    def _waiting(self, peers: tuple[int, ...], why: object) -> Iterator[None]:
        self._raise_known()
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):  # this rank's own failure, for which no other is to blame
                raise
            if self._failure is not None:
                raise self._failure from error
            raise self.lost(error, why, peers, time.monotonic() - start) from error

    def lost(self, error: Exception, why: object, peers: tuple[int, ...], seconds: float = 0.0) -> PipelineError:
        """What to raise where an operation between ranks failed, after so many seconds if they are known. A connection
        that this rank has cut itself ends with a time-out, too, but at once."""
        late = seconds >= 0.95 * self.timeout if seconds else is_timeout(error)
        return self.fail(Record(self.global_rank, own_words(error), str(why), peers, seconds or self.timeout, late))

    def fail(self, record: Record) -> PipelineError:
        """Tells the other ranks and cuts the connections; returns what to raise here."""
        with self._failing:  # the main thread and the watcher's may both be here: the first of them counts
            if self._failure is None:
                self._board.post(record)
                if self._watcher is not None:
                    self._watcher.post()
                forget(self._own_groups())
                self._cut()
                self._failure = PipelineError(self._board.explain(record))
            return self._failure

    def _missed(self, why: object, peers: tuple[int, ...], seconds: float, is_dead: bool) -> None:
        """The watcher's: a transfer does not come to an end, or its peer is dead."""
        self.fail(Record(self.global_rank, "", str(why), peers or self.others(ALL), seconds, not is_dead))

    def _heard(self, why: object | None, peers: tuple[int, ...]) -> None:
        """The watcher's: another rank has failed. If this one is not known to wait for anybody, only the connections
        are cut: where it waits inside an operator, that fails and tells; or it is the one that others wait for."""
        if why is None:
            forget(self._own_groups())
            self._cut()
        else:
            self.fail(Record(self.global_rank, "", str(why), peers))

    def _own_groups(self) -> list[Any]:
        found = [*self._groups.values(), *self._talk.values(), *(self._links.groups if self._links else ())]
        return list({id(group): group for group in found}.values())

    def _cut(self) -> None:
        """Wakes everyone who waits for this rank.

        NCCL's communicators can be aborted. gloo offers no way to close a group that its peers would notice, short of
        leaving the process; but a receive that times out takes all of the group's connections down with it.
        """
        talking = {id(group) for group in self._talk.values()}
        for group in self._own_groups():
            if self._is_cuda and id(group) not in talking:
                with suppress(RuntimeError):
                    group.abort()
                continue
            for peer in range(group.size()):
                if peer != dist.get_rank(group):
                    with suppress(RuntimeError):  # from the time-out, or because this connection is down already
                        nothing = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=_NEVER_SENT)
                        made(nothing).wait(timedelta(milliseconds=1))


def _identity(device: torch.device) -> str:
    """Of the GPU, among all of its host; empty for CPUs, which ranks may share."""
    if device.type != "cuda":
        return ""
    about = torch.cuda.get_device_properties(device)
    return f"{about.name} {getattr(about, 'uuid', '') or device}"
