"""What the ranks of a pipeline send each other and decide together, on CPUs by gloo and on GPUs by NCCL."""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from terapipe.planning.cost import Ints
from terapipe.runtime.comm.channel import Channel, Done, GlooLinks, Links, NcclLinks, NullChannel, not_none
from terapipe.runtime.comm.environment import device_of, host_name, refuse_blocking_waits
from terapipe.runtime.comm.failures import BEAT, Failure
from terapipe.runtime.comm.mesh import ALL, DP, PP, TP, Line, Ranks

T = TypeVar("T")

TIMEOUT = 300.0  # seconds that a rank waits for another where nobody says how long


class Transport:
    """All that this process says to other ranks: the sum of ``ranks``, ``channel`` and ``failure``.

    A process needs one. Whoever measures, trains or evaluates takes it as an argument, and ``over`` gives the same
    transport along the lines of a mesh::

        world = Transport.join(device)                  # once per process
        profiler = Profiler(model, transport=world, ...)
        pipe = Pipeline(model, plan, transport=world.over(mesh))
        teacher = Pipeline(other, plan, transport=pipe.transport)

    ``rank`` and ``size`` count within the pipeline, ``dp_rank`` within the replicas, ``tp_rank`` within the ranks that
    share operators.

    Args:
        device: of this process.
        timeout: seconds that a rank waits for another.
        ranks: which processes there are, and where this one is among them.
        channel: point-to-point messages along the pipeline.
        failure: how ranks fail together.
    """

    def __init__(self, device: torch.device, timeout: float, ranks: Ranks, channel: Channel, failure: Failure) -> None:
        self.device, self.timeout = device, timeout
        self.ranks, self.channel, self.failure = ranks, channel, failure
        self.rank, self.size = ranks[PP].rank, ranks[PP].size
        self.dp_rank, self.dp_size = ranks[DP].rank, ranks[DP].size
        self.tp_rank, self.tp_size = ranks[TP].rank, ranks[TP].size
        self.global_rank = ranks.global_rank  # among all processes, as torch.distributed counts
        self._is_cuda = device.type == "cuda"
        self._first: dict[str, dist.Work] = {}  # the first operation of a group, through which NCCL tells errors

    @classmethod
    def join(
        cls,
        device: torch.device,
        mesh: DeviceMesh | None = None,
        timeout: float = TIMEOUT,
        mesh_dims: Mapping[str, str] | None = None,
    ) -> "Transport":
        """Meets the other ranks. All of them call it together.

        Args:
            device: of this process.
            mesh: of ``device_mesh``, or one of the user's; None for a pipeline over all processes.
            timeout: seconds that a rank waits for another, also for it to come here.
            mesh_dims: the names of the mesh's dimensions for ``dp``, ``pp`` and ``tp``, if they have others.
        """
        if not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
        if device.type == "cuda":
            refuse_blocking_waits()
            torch.cuda.set_device(device)  # whoever made the process group
        ranks = Ranks.join(device, timeout, mesh, mesh_dims)
        failure = Failure(ranks, device, timeout)
        transport = cls(device, timeout, ranks, _channel(device, timeout, ranks, failure), failure)
        devices = transport.gather((host_name(), _gpu_identity(device)), ALL)
        ranks.hosts.update(zip(ranks[ALL].members, (host for host, _ in devices), strict=True))
        _refuse_shared_devices(devices, ranks)
        failure.start_watcher()
        return transport

    def over(self, mesh: DeviceMesh, mesh_dims: Mapping[str, str] | None = None) -> "Transport":
        """Returns this transport along the lines of a mesh. All ranks call it together.

        Board, watcher and names stay the same objects, so a failure anywhere stops everything in this process.

        Args:
            mesh: over the same ranks as this transport.
            mesh_dims: the names of the mesh's dimensions for ``dp``, ``pp`` and ``tp``, if they have others.
        """
        ranks = Ranks.join(self.device, self.timeout, mesh, mesh_dims)
        if ranks.hosts.keys() != self.ranks.hosts.keys():
            raise ValueError(
                f"a mesh must have the ranks of its transport, got {sorted(ranks.hosts)} for {sorted(self.ranks.hosts)}"
            )
        ranks.hosts = self.ranks.hosts
        self.failure.own_lines(ranks)
        channel = _channel(self.device, self.timeout, ranks, self.failure)
        return Transport(self.device, self.timeout, ranks, channel, self.failure)

    def connect(self, pairs: Collection[tuple[int, int]]) -> None:
        """Prepares transfers between these pairs of ranks. All ranks call it, with the same pairs.

        NCCL makes a communicator at its first operation, which waits for the peers and must not be within a step. So
        every group does one now.
        """
        self.channel.connect(pairs)
        for role, line in self.ranks.lines.items():
            if self._is_cuda and line.has_peers:
                self.failure.call_guarded(lambda role=role: self._operate_first(role), line.others)  # type: ignore[misc]

    def _operate_first(self, role: str) -> None:
        group = self.ranks[role].tensors
        work = not_none(dist.all_reduce(torch.zeros(1, device=self.device), group=group, async_op=True))
        work.wait()
        self._first[role] = work

    # Tensors, together. A line without a group has nobody to talk to: this process is alone, or pretends.

    def broadcast(self, tensor: Tensor, source: int, why: str, over: str = PP) -> Tensor:
        """Fills the tensor with that of one rank, and returns it.

        Args:
            tensor: of the same shape and dtype on all ranks.
            source: the rank that has the values, by its place on the line.
            why: what it is, for messages about failures.
            over: the line.
        """
        line = self.ranks[over]
        if line.has_peers:
            peers = line.others if line.rank == source else (line.members[source],)  # the source waits, too
            with self.failure.waiting(peers, why):
                work = dist.broadcast(tensor, group=line.tensors, group_src=source, async_op=self._is_cuda)
                self._finish(work, over, peers, why)
        return tensor

    def all_reduce(self, tensor: Tensor, over: str = ALL, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Adds the tensors of all ranks up, in place, and returns the sum.

        Args:
            tensor: of the same shape and dtype on all ranks.
            over: the line.
            op: another way to reduce them.
        """
        line = self.ranks[over]
        if line.has_peers:
            why = "a reduction"
            with self.failure.waiting(line.others, why):
                work = dist.all_reduce(tensor, op, group=line.tensors, async_op=self._is_cuda)
                self._finish(work, over, line.others, why)
        return tensor

    def _finish(self, work: dist.Work | None, over: str, peers: tuple[int, ...], why: str) -> None:
        """On a GPU, what follows waits for it, not the host."""
        if work is not None:
            self.failure.watch(work, self._first.get(over), peers, why).wait()

    def start_sum(self, tensor: Tensor) -> dist.Work:
        """Begins to add a tensor up over replicas, in place, while this rank goes on."""
        line, why = self.ranks[DP], "the sum of gradients"
        with self.failure.waiting(line.others, why):
            work = not_none(dist.all_reduce(tensor, group=line.tensors, async_op=True))
            return self.failure.watch(work, self._first.get(DP), line.others, why)

    def finish_sum(self, work: dist.Work) -> None:
        """Returns when what is computed next may use the sum."""
        with self.failure.waiting(self.ranks[DP].others, "the sum of gradients"):
            self.channel.links.wait(work)

    # Objects, together

    def gather(self, value: T, over: str = PP) -> list[T]:
        """Returns every rank's value, on every rank.

        Args:
            value: anything that can be pickled.
            over: the line.
        """
        line = self.ranks[over]
        if not line.has_peers:
            return [value] * line.size
        values: list[T | None] = [None] * line.size
        with self.failure.waiting(line.others, "an exchange between all ranks"):
            dist.all_gather_object(values, value, group=line.objects)
        return values  # type: ignore[return-value]

    def gather_numbers(self, numbers: Sequence[int], over: str = PP) -> Ints:
        """Does what ``gather`` does for as many whole numbers on every rank, by few and small messages: a row of the
        result for each rank.

        A gather passes around a ring, so it takes as many messages, one after the other, as there are ranks. All ranks
        of a mesh gather along one dimension after the other, and send on what they have heard. 2 replicas of 3 pipeline
        ranks::

            0 1 2   along pp: each knows its own row       0 1 2  |  3 4 5
            3 4 5   along dp: each adds the other's        0 1 2 3 4 5

        1024 replicas of 8 x 8 ranks have 1037 messages to wait for in place of 65,535.

        Args:
            numbers: of at most 63 bits each.
            over: the line.
        """
        rows = np.array([numbers], dtype=np.int64)
        for line in self.ranks.dimensions if over == ALL else [self.ranks[over]]:
            parts = [rows] * line.size
            if line.has_peers:
                tensors = [torch.from_numpy(np.empty_like(rows)) for _ in parts]
                with self.failure.waiting(line.others, "an exchange between all ranks"):
                    dist.all_gather(tensors, torch.from_numpy(rows), group=line.objects)
                parts = [tensor.numpy() for tensor in tensors]
            rows = np.concatenate(parts)
        return rows

    def collect(self, value: T, over: str = PP) -> list[T] | None:
        """Returns every rank's value on the first of them, None on the others.

        Args:
            value: anything that can be pickled.
            over: the line.
        """
        line = self.ranks[over]
        if not line.has_peers:
            return [value] * line.size
        values: list[T | None] | None = None if line.rank else [None] * line.size
        with self.failure.waiting(line.others, "what the first rank collects"):
            dist.gather_object(value, values, group=line.objects, group_dst=0)
        return values  # type: ignore[return-value]

    def await_one(self, work: Future[T] | None) -> T | None:
        """Waits for what one rank does in a thread, however long it takes: ranks hear of each other all the while.

        Args:
            work: the future of the rank that works, None on the others.
        """
        self.until_all(lambda span: work is None or bool(wait([work], span).done))
        return None if work is None else work.result()

    def until_all(self, done: Callable[[float], bool]) -> None:
        """Waits until it is so on all ranks.

        Args:
            done: is asked again and again, and given some seconds to wait in.
        """
        span = 0.0
        while not all(self.gather(done(span), ALL)):
            span = BEAT


def transport_for(
    transport: Transport | None,
    device: torch.device | str | None,
    mesh: DeviceMesh | None,
    timeout: float | None,
    mesh_dims: Mapping[str, str] | None,
) -> Transport:
    """Returns the transport that a pipeline was given, or meets the other ranks for it.

    A transport that exists has its mesh, device and timeout. Others beside it would have to be ignored: a user who
    shortens the timeout of a second pipeline would wait as long as before. So they are refused.

    Args:
        transport: of another pipeline or a profiler in this process, or None.
        device: of this process; by default its GPU, or the CPU where there is none.
        mesh: as for ``Transport.join``.
        timeout: as for ``Transport.join``; by default ``TIMEOUT``.
        mesh_dims: as for ``Transport.join``.
    """
    if transport is None:
        return Transport.join(device_of(device), mesh, TIMEOUT if timeout is None else timeout, mesh_dims)
    beside = {"device": device, "mesh": mesh, "timeout": timeout, "mesh_dims": mesh_dims}
    names = [f"{name}=" for name, value in beside.items() if value is not None]
    if names:
        raise ValueError(
            f"a transport has its mesh, device and timeout, got {' and '.join(names)} beside transport=; pass "
            "transport.over(mesh), give device and timeout to Transport.join, or pass no transport="
        )
    return transport


class NullTransport(Transport):
    """A transport without other ranks: what is sent goes nowhere, what arrives is zeros of the right shape.

    One rank's list of actions can so be run by itself, to warm up or on fake tensors. Nothing may be learned from what
    arrives: ranks must know the same of real messages. What other ranks would say is what this one says.

    Args:
        device: where messages seem to arrive.
        rank: this rank's place in the pipeline.
        size: the number of ranks of the pipeline.
        dp: the number of replicas.
        mesh: of tensor parallel ranks, if there are several.
    """

    def __init__(self, device: torch.device, rank: int, size: int, dp: int = 1, mesh: DeviceMesh | None = None) -> None:
        pipe = Line(tuple(range(size)), rank)
        lines = {PP: pipe, ALL: pipe, DP: Line(tuple(range(dp)))}
        if mesh is not None:
            lines[TP] = Line(tuple(range(mesh.size())))
        ranks = Ranks(lines, mesh, {TP: TP})
        failure = Failure(ranks, device, 0.0)
        channel = NullChannel(device, pipe, failure)
        self.sent = channel.sent  # number of messages, by kind
        super().__init__(device, 0.0, ranks, channel, failure)

    def start_sum(self, tensor: Tensor) -> dist.Work:
        self.sent["sum of gradients"] += 1
        return Done()

    def finish_sum(self, work: dist.Work) -> None:
        pass


def _channel(device: torch.device, timeout: float, ranks: Ranks, failure: Failure) -> Channel:
    line, span = ranks[PP], timedelta(seconds=timeout)
    links: Links | None = None
    if line.objects is not None and device.type == "cuda":
        links = NcclLinks(line.objects, line.rank, device, span, failure.own_communicator)
    elif line.tensors is not None:
        links = GlooLinks(line.tensors, span)
    return Channel(device, line, failure, links)


def checksum(data: str | Tensor) -> int:
    """Returns a number of 63 bits, for ``gather_numbers``: ranks compare numbers, not what they stand for.

    It is never zero: zero means that a rank has nothing to say.

    Args:
        data: words, or a tensor, which is waited for where it is on a GPU.
    """
    raw = data.encode() if isinstance(data, str) else data.cpu().contiguous().numpy().tobytes()
    return (int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big") >> 1) or 1


def _refuse_shared_devices(devices: Sequence[tuple[str, str]], ranks: Ranks) -> None:
    """NCCL has no communicators of two ranks on one GPU: it fails with an error of its own, or hangs.

    Args:
        devices: the host and the GPU of every rank.
        ranks: their names.
    """
    for i, device in enumerate(devices):
        first = devices.index(device)
        if device[1] and first < i:
            raise ValueError(
                f"each rank needs a GPU of its own, got {ranks.name(first)} and {ranks.name(i)} on {device[1]} of "
                f"{device[0]}; start as many processes on each host as it has GPUs (--nproc-per-node)"
            )


def _gpu_identity(device: torch.device) -> str:
    """Tells a GPU apart from all others of its host; empty for CPUs, which ranks may share."""
    if device.type != "cuda":
        return ""
    about = torch.cuda.get_device_properties(device)
    return f"{about.name} {getattr(about, 'uuid', '') or device}"
