"""The pipeline's connections: groups, devices, sends and receives. The only code that reads RANK and the like."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from terapipe.runtime.failures import Board, PipelineError, Record

T = TypeVar("T")

_NEVER_SENT = 1 << 16  # a tag that no message has


def local_rank() -> int:
    """This process among those that torchrun started on this host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def under_torchrun() -> bool:
    return "RANK" in os.environ and "MASTER_ADDR" in os.environ


def local_device() -> torch.device:
    """The device of this process: under torchrun, each takes the GPU of its local rank, if there are GPUs."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank() % torch.cuda.device_count())
    return torch.device("cpu")


def ensure_process_group(device: torch.device) -> bool:
    """Joins the processes that torchrun started, if nobody has yet. False where there is only this process."""
    if not dist.is_initialized() and under_torchrun():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return dist.is_initialized()


class Transport:
    """Tagless sends and receives between the ranks of one pipeline, and what they decide together.

    ``rank`` and ``size`` count within the pipeline. Its process group is its own, so cutting it harms nobody else.
    """

    def __init__(self, device: torch.device, mesh: DeviceMesh | None = None, timeout: float = 300.0) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
        if mesh is not None and mesh.ndim != 1:
            raise ValueError(
                f"a pipeline takes one dimension of a mesh, got {mesh.ndim}; pass mesh['pipe'] or the like"
            )
        self.device = device
        self.timeout = timeout
        self._span = timedelta(seconds=timeout)
        self._group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        store: Store | None = None
        if mesh is not None or ensure_process_group(device):
            ranks = mesh.mesh.tolist() if mesh is not None else list(range(dist.get_world_size()))
            backend = "nccl" if device.type == "cuda" else "gloo"
            self._group = dist.new_group(ranks, self._span, backend, use_local_synchronization=True)
            self.rank, self.size = dist.get_rank(self._group), len(ranks)
            store = PrefixStore("terapipe/failures", self._group.get_group_store())
        self._board = Board(store, self.size)
        self._failure: PipelineError | None = None

    # Point to point

    def send(self, tensor: Tensor, peer: int, why: object) -> dist.Work:
        with self._waiting(peer, why):
            return _work(dist.isend(tensor, group=self._group, group_dst=peer))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, why: object) -> tuple[Tensor, dist.Work]:
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        with self._waiting(peer, why):
            return buffer, _work(dist.irecv(buffer, group=self._group, group_src=peer))

    def wait(self, work: dist.Work, peer: int, why: object) -> None:
        with self._waiting(peer, why):
            work.wait(self._span)

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

    # Together

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        if self.size > 1:
            with self._waiting(source, "the loss"):
                dist.broadcast(tensor, group=self._group, group_src=source)
        return tensor

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        if self.size > 1:
            with self._waiting((self.rank + 1) % self.size, "a reduction over all stages"):
                dist.all_reduce(tensor, op, group=self._group)
        return tensor

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        with self._waiting((self.rank + 1) % self.size, "an exchange between all stages"):
            dist.all_gather_object(values, value, group=self._group)
        return values  # type: ignore[return-value]

    # Failing

    @contextmanager
    def _waiting(self, peer: int, why: object) -> Iterator[None]:
        if self._failure is not None:
            raise PipelineError(f"this pipeline stopped before: {self._failure}")
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            seconds = time.monotonic() - start
            timed_out = seconds >= 0.95 * self.timeout
            record = Record(self.rank, str(error), str(why), peer, seconds, timed_out)
            raise self.fail(record) from None

    def fail(self, record: Record) -> PipelineError:
        """Tells the other ranks and cuts the connections; returns what to raise here."""
        self._board.post(record)
        self._cut()
        self._failure = PipelineError(self._board.explain(record))
        return self._failure

    def _cut(self) -> None:
        """Wakes everyone who waits for this rank.

        gloo offers no way to close a group that its peers would notice, short of leaving the process; but a receive
        that times out takes all of the group's connections down with it.
        """
        if self._group is None or self.device.type != "cpu":
            return
        for peer in range(self.size):
            if peer != self.rank:
                with suppress(RuntimeError):  # from the time-out, or because this connection is down already
                    nothing = dist.irecv(torch.empty(1), group=self._group, group_src=peer, tag=_NEVER_SENT)
                    _work(nothing).wait(timedelta(milliseconds=1))


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None  # only a rank outside the group gets none
    return work
