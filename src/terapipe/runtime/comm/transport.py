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

from terapipe.runtime.comm.environment import (
    default_group_of_others,
    ensure_process_group,
    host_name,
    refuse_blocking_waits,
    stay_on_this_host,
)
from terapipe.runtime.comm.failures import (
    Board,
    PipelineError,
    Record,
    in_words,
    is_connection_error,
    is_out_of_memory,
    is_timeout,
    own_words,
)
from terapipe.runtime.comm.links import (
    MAX_CTAS,
    PATIENCE,
    GlooLinks,
    Links,
    NcclLinks,
    abort,
    forget,
    group_of,
    made,
    words_of,
)
from terapipe.runtime.comm.mesh import ALL, DP, PP, TP, await_ranks, lines_of, with_roles
from terapipe.runtime.comm.threads import start_thread
from terapipe.runtime.comm.watcher import Watcher

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
            refuse_blocking_waits()
            torch.cuda.set_device(device)  # whoever made the process group
        self._groups: dict[str, dist.ProcessGroup] = {}  # for tensors
        self._talk: dict[str, dist.ProcessGroup] = {}  # for objects, by gloo
        self._members: dict[str, list[int]] = {}  # the ranks of a group, once asked for
        self._links: Links | None = None
        self._first: dict[str, dist.Work] = {}  # the first operation of a group, which knows its errors ever after
        self._watcher: Watcher | None = None
        self._failure: PipelineError | None = None
        self._failing = threading.Lock()
        self._cut_by: tuple[int, ...] = ()  # the ranks because of which connections were cut, before there are words
        self._is_told = False  # whether a step has raised the failure
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
                # Weights travel along a pipeline, too, when a whole model is gathered.
                group = group_of(ranks, self._span, "nccl", MAX_CTAS if name == PP else 1)
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
            self._watcher = Watcher(store, self.global_rank, self.device, self.timeout, self._missed, self._heard)
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
            self._links.connect(pairs, lambda make, peer: self._guarded(make, self._peer(peer)))
        if self._is_cuda:  # NCCL makes a communicator at its first operation, which must not be within a step
            for line in self._groups:
                if self._place(line)[1] > 1:
                    self._guarded(lambda line=line: self._operate_first(line), self.others(line))  # type: ignore[misc]

    def _operate_first(self, line: str) -> None:
        work = made(dist.all_reduce(torch.zeros(1, device=self.device), group=self._groups[line], async_op=True))
        work.wait()
        self._first[line] = work

    def _guarded(self, connect: Callable[[], None], peers: tuple[int, ...]) -> None:
        """Connects this rank with others. NCCL waits for them without a deadline, inside of a call that nothing ends:
        so it is called in a thread, which is left behind where they do not answer in time."""
        why = "NCCL's connection (NCCL_DEBUG=INFO says what it tries, NCCL_SOCKET_IFNAME which network)"
        with self._waiting(peers, why):
            if self._watcher is None:
                return connect()
            answer: Future[None] = Future()
            self._watcher.watch_call(answer, peers, why)
            start_thread(lambda: _answer(answer, connect), self.device, "terapipe-connecting")
            while not wait([answer], BEAT).done:
                self._raise_known(why)
            return answer.result()

    def send(self, tensor: Tensor, peer: int, why: object) -> dist.Work:
        with self._waiting(self._peer(peer), why):
            work = self._line().send(tensor, peer)
            return self._watched(work, self._line().first(peer, sends=True), self._peer(peer), why)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, why: object) -> tuple[Tensor, dist.Work]:
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        with self._waiting(self._peer(peer), why):
            work = self._line().receive(buffer, peer)
            return buffer, self._watched(work, self._line().first(peer, sends=False), self._peer(peer), why)

    def wait(self, work: dist.Work, peer: int, why: object) -> None:
        with self._waiting(self._peer(peer), why):
            self._line().wait(work)

    def _line(self) -> Links:
        assert self._links is not None
        return self._links

    def _watched(self, work: dist.Work, first: dist.Work | None, peers: tuple[int, ...], why: object) -> dist.Work:
        """``first``: that of its communicator, which says what has gone wrong and holds no message in memory."""
        if self._watcher is not None:
            self._watcher.watch(work, lambda: words_of(first), peers, why)
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
                self._finish(work, over, peers, why)
        return tensor

    def all_reduce(self, tensor: Tensor, over: str = ALL, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        if self._place(over)[1] > 1:
            peers, why = self.others(over), "a reduction"
            with self._waiting(peers, why):
                work = dist.all_reduce(tensor, op, group=self._groups[over], async_op=self._is_cuda)
                self._finish(work, over, peers, why)
        return tensor

    def _finish(self, work: dist.Work | None, over: str, peers: tuple[int, ...], why: str) -> None:
        """On a GPU, what follows waits for it, not the host."""
        if work is not None:
            self._watched(work, self._first.get(over), peers, why).wait()

    def start_sum(self, tensor: Tensor) -> dist.Work:
        """Over replicas, in place, while this rank goes on."""
        peers, why = self.others(DP), "the sum of gradients"
        with self._waiting(peers, why):
            work = made(dist.all_reduce(tensor, group=self._groups[DP], async_op=True))
            return self._watched(work, self._first.get(DP), peers, why)

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
            self._raise_known("a step")
            yield
            self._raise_known("the end of a step")
        except PipelineError:
            self._is_told = True
            raise
        except Exception as error:
            place, others = str(at() or ""), self.others(DP, TP)
            about_connections = is_connection_error(error)
            if self._failure is not None or (self.has_stopped and about_connections):  # the watcher has cut them
                raise self._known(place) from error
            if others and about_connections:  # within an operator, or while gathering a stage
                raise self.lost(error, place or "the end of a step", others) from error
            self.fail(Record(self.global_rank, in_words(error), place))
            raise

    @property
    def has_stopped(self) -> bool:
        """Whether this rank or another has failed. On GPUs, what the device computed since may be made of messages that
        never came. True before connections are cut, and so before any of that."""
        return bool(self._cut_by) or self._failure is not None

    def refuse_stopped(self, what: str) -> None:
        """Refuses to use gradients or weights after a failure between ranks."""
        if self.has_stopped and self._talk:
            raise PipelineError(
                f"{what} needs gradients or weights that are whole; where a transfer has failed they may be made of "
                f"messages that never came: load the last checkpoint in a new process. {self._known(what)}"
            )

    def _raise_known(self, why: object) -> None:
        """Raises a failure that the watcher has learned of. The first time in its own words."""
        if self.has_stopped:
            known = self._known(why)
            raise PipelineError(f"this pipeline stopped before: {known}") if self._is_told else known

    def _known(self, why: object) -> PipelineError:
        """The failure, when it has been put into words."""
        return self.fail(Record(self.global_rank, "", str(why), self._cut_by))

    @contextmanager
    def _waiting(self, peers: tuple[int, ...], why: object) -> Iterator[None]:
        self._raise_known(why)
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):  # this rank's own failure, for which no other is to blame
                raise
            if self.has_stopped:
                raise self._known(why) from error
            raise self.lost(error, why, peers, time.monotonic() - start) from error

    def lost(self, error: Exception, why: object, peers: tuple[int, ...], seconds: float = 0.0) -> PipelineError:
        """What to raise where an operation between ranks failed."""
        late = seconds >= 0.95 * self.timeout or is_timeout(error)
        return self.fail(Record(self.global_rank, own_words(error), str(why), peers, seconds or self.timeout, late))

    def fail(self, record: Record) -> PipelineError:
        """Tells the other ranks and cuts the connections; returns what to raise here."""
        with self._failing:  # the main thread and the watcher's may both be here: the first of them counts
            if self._failure is None:
                self._board.post(record)
                if self._watcher is not None:
                    self._watcher.post()
                self._cut(record.peers or (record.rank,))
                self._failure = PipelineError(self._board.explain(record))
            return self._failure

    def _missed(self, why: object, peers: tuple[int, ...], seconds: float, is_dead: bool, words: str) -> None:
        """The watcher's: a transfer has failed, does not come to an end, or its peer is dead."""
        self.fail(Record(self.global_rank, words, str(why), peers or self.others(ALL), seconds, not is_dead))

    def _heard(self, why: object | None, peers: tuple[int, ...]) -> None:
        """The watcher's: another rank has failed. If this one is not known to wait for anybody, only the connections
        are cut: where it waits inside an operator, that fails and tells; or it is the one that others wait for."""
        if why is None:
            self._cut(peers)
        else:
            self.fail(Record(self.global_rank, "", str(why), peers))

    def _own_groups(self) -> list[Any]:
        found = [*self._groups.values(), *self._talk.values(), *(self._links.groups if self._links else ())]
        return list({id(group): group for group in found}.values())

    def _cut(self, because_of: tuple[int, ...]) -> None:
        """Wakes everyone who waits for this rank, and this rank where it waits.

        NCCL's communicators can be aborted, those of a default group too that somebody else made: its monitor would end
        the process eight minutes after NCCL has failed anywhere. gloo offers no way to close a group that its peers
        would notice, short of leaving the process; but a receive that times out takes all of the group's connections
        down with it.
        """
        if self._cut_by:
            return
        self._cut_by = because_of  # first: who reads what comes after knows that it may be wrong
        own, talking = self._own_groups(), {id(group) for group in self._talk.values()}
        forget(own)
        if self._is_cuda:
            others = default_group_of_others()
            aborted = [group for group in (*own, others) if group is not None and id(group) not in talking]
            abort(list({id(group): group for group in aborted}.values()), self.device)
            own = [group for group in own if id(group) in talking]
        for group in own:
            for peer in range(group.size()):
                if peer != dist.get_rank(group):
                    with suppress(RuntimeError):  # from the time-out, or because this connection is down already
                        nothing = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=_NEVER_SENT)
                        made(nothing).wait(timedelta(milliseconds=1))


def _answer(answer: Future[T], function: Callable[[], T]) -> None:
    try:
        answer.set_result(function())
    except BaseException as error:
        answer.set_exception(error)


def _identity(device: torch.device) -> str:
    """Of the GPU, among all of its host; empty for CPUs, which ranks may share."""
    if device.type != "cuda":
        return ""
    about = torch.cuda.get_device_properties(device)
    return f"{about.name} {getattr(about, 'uuid', '') or device}"
