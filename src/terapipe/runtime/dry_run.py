"""One rank's whole step without memory, devices or other ranks: shapes, dtypes, hidden waits and bytes at real size.

Tensors are fake: they have a shape, a dtype and a device, and no numbers. Messages to other ranks go nowhere. What
would read a number, and so make the host wait for the device, is an error that names the line.
"""

import time
import traceback
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from terapipe.modeling.stage import Splittable, next_token_labels
from terapipe.planning.slices import Plan
from terapipe.runtime.mesh import DP, PP
from terapipe.runtime.pipeline import Pipeline
from terapipe.runtime.transport import Transport

T = TypeVar("T")


@dataclass(frozen=True)
class DryRun:
    """What one rank's step would need. Bytes are those of tensors alive at the same time, at most."""

    rank: int
    device: str  # of the fake tensors
    weights: int  # bytes of parameters and buffers
    peak: int  # bytes, weights included, without the optimizer's state
    seconds: float  # that the dry run took
    sent: dict[str, int] = field(default_factory=dict)  # number of messages by kind
    waits: tuple[str, ...] = ()  # lines that would make the host wait for the device

    def __str__(self) -> str:
        gib = 1 << 30
        waits = f"; host waits at {', '.join(self.waits)}" if self.waits else "; no hidden waits"
        return (
            f"rank {self.rank} on fake {self.device} tensors: peak {self.peak / gib:.2f} GiB, of which weights "
            f"{self.weights / gib:.2f} GiB; {sum(self.sent.values())} messages sent{waits} ({self.seconds:.1f} s)"
        )


def fake_device() -> torch.device:
    """A GPU where torch knows GPUs, even if there is none; else the CPU, whose attention kernels need a little more
    memory."""
    known = torch.cuda.is_available() or torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    return torch.device("cuda", 0) if known else torch.device("cpu")


def dry_run(model: Splittable, plan: Plan, rank: int = 0, *, dp: int = 1) -> DryRun:
    """Forward and backward of one batch on this rank of the pipeline, one of ``dp`` replicas. The model must be on the
    meta device."""
    began, device = time.perf_counter(), fake_device()
    counter = MemoryCounter(device)
    waits: tuple[str, ...] = ()
    ids = torch.zeros(plan.batch_size, plan.seq_len, dtype=torch.int64)
    ids[:, ::2] = 1  # labels must not look like ids
    with FakeTensorMode(allow_non_fake_inputs=True), _replaceable_parameters():
        pipe = _DryPipeline(model, plan, rank, dp, device)
        with counter:
            counter.count(pipe)
            weights = counter.current
            try:
                pipe.step(ids, next_token_labels(ids), total=plan.batch_size * plan.seq_len)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                waits = (_line_of(error),)
    transport = pipe.transport
    assert isinstance(transport, _DryTransport)
    seconds = time.perf_counter() - began
    return DryRun(rank, device.type, weights, counter.peak, seconds, dict(transport.sent), waits)


def _line_of(error: Exception) -> str:
    """The innermost line of this package or of the model that read a number."""
    lines = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    return f"{lines[-1].filename}:{lines[-1].lineno}" if lines else str(error)


class MemoryCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages on a device that are alive, now and at most."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._alive: set[int] = set()
        self.current = self.peak = 0

    def count(self, module: nn.Module) -> None:
        for x in (*module.parameters(), *module.buffers()):
            self._add(x)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._add(x)
        return out

    def _add(self, x: Tensor) -> None:
        if x.device.type != self._device.type:
            return
        storage = x.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._alive:
            return
        self._alive.add(key)
        self.current += nbytes
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._drop, key, nbytes)

    def _drop(self, key: int, nbytes: int) -> None:
        self._alive.discard(key)
        self.current -= nbytes


@contextmanager
def _replaceable_parameters() -> Iterator[None]:
    """Moving a module replaces its parameters: the data of fake tensors cannot be exchanged."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


class _DryPipeline(Pipeline):
    def __init__(self, model: Splittable, plan: Plan, rank: int, dp: int, device: torch.device) -> None:
        self._place = rank, dp
        super().__init__(model, plan, device=device)

    def _make_transport(self, *_: Any) -> Transport:
        rank, dp = self._place
        return _DryTransport(self.device, rank, self.plan.num_ranks, dp)


class _Sent(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _DryTransport(Transport):
    """What other ranks would send has the right shape and no numbers; what they would say is what this one says."""

    def __init__(self, device: torch.device, rank: int, size: int, dp: int) -> None:
        self.device, self.timeout = device, 0.0
        self.rank, self.size = rank, size
        self.dp_rank, self.dp_size, self.tp_rank, self.tp_size = 0, dp, 0, 1
        self.mesh_dims, self.hosts = {}, dict.fromkeys(range(size), "")
        self.sent: Counter[str] = Counter()
        self._failure, self._talk, self._groups = None, {}, {}

    def _place(self, line: str) -> tuple[int, int]:
        return {PP: (self.rank, self.size), DP: (self.dp_rank, self.dp_size)}.get(line, (0, 1))

    @property
    def global_rank(self) -> int:
        return self.rank

    def others(self, *lines: str) -> tuple[int, ...]:
        return ()

    def name(self, place: int) -> str:
        return f"rank {place}"

    def connect(self, pairs: Collection[tuple[int, int]]) -> None:
        pass

    def send(self, tensor: Tensor, peer: int, why: object) -> dist.Work:
        self.sent[str(why).partition("(")[0]] += 1
        return _Sent()

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, why: object) -> tuple[Tensor, dist.Work]:
        return torch.empty(shape, dtype=dtype, device=self.device), _Sent()

    def wait(self, work: dist.Work, peer: int, why: object) -> None:
        pass

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        return torch.empty_like(tensor).add_(tensor)

    def broadcast(self, tensor: Tensor, source: int, why: str, over: str = PP) -> Tensor:
        return tensor

    def all_reduce(self, tensor: Tensor, over: str = "all", op: Any = dist.ReduceOp.SUM) -> Tensor:
        return tensor

    def start_sum(self, tensor: Tensor) -> dist.Work:
        self.sent["sum of gradients"] += 1
        return _Sent()

    def finish_sum(self, work: dist.Work) -> None:
        pass

    def gather(self, value: T, over: str = PP) -> list[T]:
        return [value] * self._place(over)[1]

    def gather_numbers(self, numbers: Sequence[int], over: str = PP) -> list[list[int]]:
        return [list(numbers)]

    @contextmanager
    def failing_together(self, at: Any = None) -> Iterator[None]:
        yield
