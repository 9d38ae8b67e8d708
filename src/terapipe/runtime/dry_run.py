"""One rank's whole step without memory, devices or other ranks: shapes, dtypes, hidden waits and bytes at real size.

Tensors are fake: they have a shape, a dtype and a device, and no numbers. Messages to other ranks go nowhere. What
would read a number, and so make the host wait for the device, is an error that names the line.
"""

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from terapipe.modeling.stage import PipelineModel
from terapipe.modeling.weight_grads import to_local
from terapipe.planning.layout import Layout
from terapipe.planning.slices import Plan
from terapipe.runtime import memory_counter
from terapipe.runtime.comm.mesh import TP
from terapipe.runtime.comm.transport import NullTransport
from terapipe.runtime.loss_head import Batch
from terapipe.runtime.memory_counter import MemoryCounter
from terapipe.runtime.pipeline import Pipeline

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
    has_cuda = torch.cuda.is_available() or torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    return torch.device("cuda", 0) if has_cuda else torch.device("cpu")


def dry_run(
    model: PipelineModel, plan: Plan, layout: Layout, rank: int, *, state: int = 0, attention: str = "", blas: int = 0
) -> DryRun:
    """Runs two steps of one rank of the pipeline, forward and backward, on fake tensors.

    While stages are made, ``nn.Module._apply`` is replaced for the process: torch would exchange the data of
    parameters, which fake ones do not allow.

    Args:
        model: on the meta device.
        plan: of the steps.
        layout: of all ranks; not with ``shard``.
        rank: of the pipeline.
        state: bytes that the optimizer has for a parameter.
        attention: the kernel of the device that is planned for.
        blas: bytes of its cuBLAS.
    """
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
            transport = NullTransport(device, rank, plan.num_ranks, layout.dp, mesh)
            pipe = Pipeline(model, plan, transport=transport, verify=False)  # there are no numbers to compare
        with counter:
            counter.count(pipe)
            weights = counter.current
            try:
                for _ in range(STEPS):
                    pipe._train(Batch.made_up(plan, rank, device))  # without the checks of a batch, which read numbers
                    pipe.zero_grad()
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                waits = (_line_of(error),)
        beside = blas + state * sum(to_local(p).numel() for p in pipe.parameters())
    sent = {kind: count // STEPS for kind, count in transport.sent.items()}
    seconds = time.perf_counter() - began
    return DryRun(rank, device.type, weights, counter.peak + beside, seconds, sent, waits)


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
    frames = traceback.extract_tb(error.__traceback__)
    own = (__file__, memory_counter.__file__)
    lines = [line for line in frames if "/torch/" not in line.filename and line.filename not in own]
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
