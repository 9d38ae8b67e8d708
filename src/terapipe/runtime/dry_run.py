"""One rank's whole step without memory, devices or other ranks: shapes, dtypes, hidden waits and bytes at real size.

Tensors are fake: they have a shape, a dtype and a device, and no numbers. Messages to other ranks go nowhere. What
would read a number, and so make the host wait for the device, is an error that names the line.
"""

import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from terapipe.modeling.dtensor import to_local
from terapipe.modeling.stage import PipelineModel
from terapipe.planning.layout import Layout
from terapipe.planning.slices import Plan
from terapipe.runtime import memory_counter
from terapipe.runtime.comm.mesh import DP, PP, TP
from terapipe.runtime.comm.transport import Transport
from terapipe.runtime.inputs import made_up_batch
from terapipe.runtime.memory_counter import MemoryCounter
from terapipe.runtime.pipeline import Pipeline
from terapipe.runtime.silence import Nothing, SilentTransport
from terapipe.runtime.traits import Traits

T = TypeVar("T")

STEPS = 2  # buffers that the first makes stay for the next


@dataclass(frozen=True)
class DryRun:
    """What one rank's step would need. Bytes are those of tensors alive at the same time, at most."""

    rank: int  # of the pipeline
    device: str  # of the fake tensors
    weights: int  # bytes of parameters and buffers
    peak: int  # bytes, with weights, the optimizer's state, and what attention kernels and cuBLAS need inside
    seconds: float  # that the dry run took
    sent: dict[str, int] = field(default_factory=dict)  # number of messages in a step, by kind
    waits: tuple[str, ...] = ()  # lines that would make the host wait for the device
    predicted: int | None = None  # bytes, by the planner

    def __str__(self) -> str:
        gib = 1 << 30
        planned = "" if self.predicted is None else f" ({self.predicted / gib:.2f} GiB by the planner)"
        waits = f"; the host would wait at {', '.join(self.waits)}" if self.waits else "; no hidden waits"
        kind = "CUDA tensors" if self.device == "cuda" else "CPU tensors, because this torch has no CUDA"
        return (
            f"rank {self.rank}: peak {self.peak / gib:.2f} GiB{planned}, weights {self.weights / gib:.2f} GiB, "
            f"{sum(self.sent.values())} messages sent{waits}; on fake {kind}, in {self.seconds:.1f} s"
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def fake_device() -> torch.device:
    """A GPU where torch knows GPUs, even if there is none; else the CPU, whose attention kernels need a little more
    memory."""
    known = torch.cuda.is_available() or torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    return torch.device("cuda", 0) if known else torch.device("cpu")


def dry_run(
    model: PipelineModel, plan: Plan, layout: Layout, rank: int, *, state: int = 0, attention: str = "", blas: int = 0
) -> DryRun:
    """Two steps of this rank of the pipeline, forward and backward. The model must be on the meta device. ``state`` is
    the number of bytes that the optimizer keeps for a parameter, ``attention`` the kernel of the device that is planned
    for, and ``blas`` the bytes of its cuBLAS."""
    if layout.shard:
        raise ValueError(
            "a dry run does not know sharded replicas (FSDP2); take a layout with shard=False, on the command line one "
            "without --shard"
        )
    began, device = time.perf_counter(), fake_device()
    counter = MemoryCounter(device, attention)
    waits: tuple[str, ...] = ()
    with _tensor_parallel(layout.tp, device) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        with _replaceable_parameters():
            pipe = _DryPipeline(model, plan, rank, layout.dp, mesh, device)
        with counter:
            counter.count(pipe)
            weights = counter.current
            try:
                for _ in range(STEPS):
                    pipe.train_on_nothing()
                    pipe.zero_grad()
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                waits = (_line_of(error),)
        kept = blas + state * sum(to_local(p).numel() for p in pipe.parameters())
    sent = {kind: count // STEPS for kind, count in cast(_DryTransport, pipe.transport).sent.items()}
    seconds = time.perf_counter() - began
    return DryRun(rank, device.type, weights, counter.peak + kept, seconds, sent, waits)


@contextmanager
def _tensor_parallel(degree: int, device: torch.device) -> Iterator[DeviceMesh | None]:
    """A mesh of ranks that do not exist."""
    if degree == 1:
        yield None
        return
    if dist.is_initialized():
        raise ValueError("a dry run of tensor parallel stages makes processes up; call it where there are no others")
    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=degree)
    try:
        yield init_device_mesh(device.type, (degree,), mesh_dim_names=(TP,))
    finally:
        dist.destroy_process_group()


def _line_of(error: Exception) -> str:
    """The innermost line of this package or of the model that read a number."""
    known = traceback.extract_tb(error.__traceback__)
    own = (__file__, memory_counter.__file__)
    lines = [line for line in known if "/torch/" not in line.filename and line.filename not in own]
    return f"{lines[-1].filename}:{lines[-1].lineno}" if lines else str(error)


@contextmanager
def _replaceable_parameters() -> Iterator[None]:
    """Inside, moving a module replaces its parameters. torch would exchange their data; fake ones do not allow it."""
    plain = nn.Module._apply
    nn.Module._apply = _replace_parameters  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = plain  # type: ignore[method-assign]


@torch.no_grad()
def _replace_parameters(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    for child in module.children():
        _replace_parameters(child, function)
    for name, p in module._parameters.items():
        if p is not None:
            module._parameters[name] = nn.Parameter(function(p), p.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


class _DryPipeline(Pipeline):
    def __init__(
        self, model: PipelineModel, plan: Plan, rank: int, dp: int, mesh: DeviceMesh | None, device: torch.device
    ) -> None:
        self._place = rank, dp, mesh
        super().__init__(model, plan, device=device, verify=False)  # fake tensors have no numbers to compare

    def _compared_parts(self, model: PipelineModel) -> tuple[Traits, ...]:
        """There are no other ranks, and no numbers."""
        return ()

    def train_on_nothing(self) -> None:
        """A step. What it checks of a batch before needs numbers, and is left out."""
        self._is_warm = True
        self._train(made_up_batch(self.plan, self.rank, self.device))

    def _make_transport(self, *_: Any) -> Transport:
        rank, dp, mesh = self._place
        return _DryTransport(self.device, rank, self.plan.num_ranks, dp, mesh)


class _DryTransport(SilentTransport):
    """What other ranks would send has the right shape and no numbers; what they would say is what this one says."""

    def __init__(self, device: torch.device, rank: int, size: int, dp: int, mesh: DeviceMesh | None) -> None:
        super().__init__(device, rank)
        self.size, self.timeout = size, 0.0
        self.dp_rank, self.dp_size = 0, dp
        self.tp_rank, self.tp_size = 0, 1 if mesh is None else mesh.size()
        self._mesh, self.mesh_dims = mesh, {TP: TP}
        self.hosts = dict.fromkeys(range(size), "")
        self.sent: Counter[str] = Counter()
        self._failure, self._cut_by, self._talk, self._groups = None, (), {}, {}

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
        return super().send(tensor, peer, why)

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        return torch.empty_like(tensor).add_(tensor)

    def broadcast(self, tensor: Tensor, source: int, why: str, over: str = PP) -> Tensor:
        return tensor

    def all_reduce(self, tensor: Tensor, over: str = "all", op: Any = dist.ReduceOp.SUM) -> Tensor:
        return tensor

    def start_sum(self, tensor: Tensor) -> dist.Work:
        self.sent["sum of gradients"] += 1
        return Nothing()

    def finish_sum(self, work: dist.Work) -> None:
        pass

    def gather(self, value: T, over: str = PP) -> list[T]:
        return [value] * self._place(over)[1]

    def gather_numbers(self, numbers: Sequence[int], over: str = PP) -> list[list[int]]:
        return [list(numbers)]

    @contextmanager
    def failing_together(self, at: Any = None) -> Iterator[None]:
        yield
