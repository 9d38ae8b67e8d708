"""One rank's whole step without memory, devices or other ranks: shapes, dtypes, hidden waits and bytes at real size.

Tensors are fake: they have a shape, a dtype and a device, and no numbers. Messages to other ranks go nowhere. What
would read a number, and so make the host wait for the device, is an error that names the line.

Under autocast a rank receives hidden states in the dtype that the stage before ends with: float32 where a residual is
added last, half of that where a product comes last. Real ranks learn it from the tag of the first message. A dry run
has no numbers to read, so a few tokens go through the stages before, and their outputs have the dtype::

    stage 0  ->  float32  ->  stage 1  ->  float32  ->  stage 2 (this rank)     (a slice, forwards only)
"""

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
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

from terapipe.losses.tokens import token_log_probs
from terapipe.modeling.stage import Autocast, PipelineModel, SlicedStage, Stage
from terapipe.modeling.weight_grads import to_local
from terapipe.planning.layout import Layout
from terapipe.planning.slices import Plan
from terapipe.runtime import memory_counter
from terapipe.runtime.comm.mesh import TP
from terapipe.runtime.comm.transport import NullTransport
from terapipe.runtime.loss_head import Batch, TokenValues
from terapipe.runtime.memory_counter import MemoryCounter
from terapipe.runtime.pipeline import Pipeline

STEPS = 2  # buffers that the first makes stay for the next


class NoPositions(nn.Module):
    """Stands in a GPT for the table of learned positions where those of the model that is planned are rotated: a table
    of a million rows would be most of the first stage's weights.

    Args:
        dtype: Of the hidden states that it adds nothing to.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        """Zeros, one for each token."""
        return torch.zeros_like(places, dtype=self.dtype)[..., None]

    def reset_parameters(self) -> None:
        """There are none."""


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


def fake_device(*, autocast: bool = False) -> torch.device:
    """A GPU where torch knows GPUs, even if there is none; else the CPU, whose attention kernels need a little more
    memory.

    Args:
        autocast: whether ``torch.autocast`` must work on it, which torch switches off for a GPU that is not there.
    """
    has_cuda = torch.cuda.is_available()
    if not autocast:
        has_cuda = has_cuda or torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    return torch.device("cuda", 0) if has_cuda else torch.device("cpu")


def dry_run(
    model: PipelineModel,
    plan: Plan,
    layout: Layout,
    rank: int,
    *,
    autocast: torch.dtype | None = None,
    state: float = 0,
    attention: str = "",
    blas: int = 0,
    device: torch.device | None = None,
    values: bool = False,
) -> DryRun:
    """Runs two steps of one rank of the pipeline, forward and backward, on fake tensors.

    While stages are made, ``nn.Module._apply`` is replaced for the process: torch would exchange the data of
    parameters, which fake ones do not allow.

    Args:
        model: which stays as it is: a ``fake_copy`` of it is run.
        plan: of the steps.
        layout: of all ranks; not with ``shard``.
        rank: of the pipeline.
        autocast: the dtype of products, as for ``torch.autocast``; by default what the caller has switched on. Messages
            are counted as from the second step on, when both ends know their dtype.
        state: bytes that the optimizer has for a parameter that is trained.
        attention: the kernel of the device that is planned for.
        blas: bytes of its cuBLAS.
        device: of the fake tensors, by default a GPU where torch knows GPUs.
        values: whether one of the two steps is by values of tokens, whose gradients come from outside, as in loops
            that compute a loss of their own (``Pipeline.token_outputs``).
    """
    if layout.shard:
        raise ValueError(
            "a dry run does not know sharded replicas (FSDP2); take a layout with shard=False, on the command line one "
            "without --shard"
        )
    began, device = time.perf_counter(), device or fake_device(autocast=autocast is not None)
    cast = Autocast.current(device) if autocast is None else Autocast(device.type, autocast)
    with _tensor_parallel(layout.tp, device) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        with replaceable_parameters():
            model = model.fake_copy(device)
            transport = NullTransport(device, rank, plan.num_ranks, layout.dp, mesh)
            pipe = Pipeline(model, plan, transport=transport, verify=False)  # there are no numbers to compare
            if cast.dtype is not None:
                pipe._executors.message_format.learn(cast, _message_dtypes(model, plan, pipe.stages, cast, device))
        counter = MemoryCounter(device, attention, pipe._executors.copier.host)
        with counter:
            counter.count(pipe)
            weights = counter.current
            waits = _run_steps(pipe, lambda: Batch.made_up(plan, rank, device), cast, values=values)
        beside = blas + int(state * sum(to_local(p).numel() for p in pipe.parameters() if p.requires_grad))
    sent = {kind: count // STEPS for kind, count in transport.sent.items()}
    seconds = time.perf_counter() - began
    return DryRun(rank, device.type, weights, counter.peak + beside, seconds, sent, waits)


def _run_steps(pipe: Pipeline, make_batch: Callable[[], Batch], cast: Autocast, *, values: bool) -> tuple[str, ...]:
    """Runs the steps, without the checks of a batch, which read numbers.

    Args:
        pipe: On fake tensors.
        make_batch: Makes up what a step is given.
        cast: Under which it computes.
        values: Whether the steps after the first are by values of tokens.

    Returns:
        The line that would make the host wait for the device, if there is one; the steps end there.
    """
    try:
        for step in range(STEPS):
            with cast.on():
                batch = make_batch()
                _train_by_values(pipe, batch) if values and step else pipe._train(batch)
            pipe.zero_grad()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        return (_line_of(error),)
    return ()


def _train_by_values(pipe: Pipeline, batch: Batch) -> None:
    """All forwards, values of tokens, and all backwards from gradients of these."""
    head, executor, outputs = TokenValues(token_log_probs), pipe._executors.get(batch.plan), pipe._token_outputs
    outputs.forwards(batch, executor, head, train=True)
    gradients = {name: torch.ones_like(value) for name, value in outputs.broadcast(batch, head).items()}
    with pipe._accumulate_gradients():
        outputs.backwards(batch, executor, head, gradients)


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


@torch.no_grad()
def _message_dtypes(
    model: PipelineModel, plan: Plan, own: Mapping[int, Stage], autocast: Autocast, device: torch.device
) -> dict[int, torch.dtype]:
    """The dtype of hidden states after each stage, and of their gradients, which cross the same boundary back.

    The output of a stage may be as wide as its input (a residual), so all stages up to the last of this rank take part:
    those of other ranks are made for it, on fake tensors as everything here.

    Args:
        model: makes the stages of other ranks.
        plan: which layers each stage has; its first slice goes through them.
        own: the stages of this rank, which exist already.
        autocast: under which they compute.
        device: of the fake tensors.
    """
    dtypes: dict[int, torch.dtype] = {}
    length, cuts = plan.lengths[0][0], plan.boundaries
    for k in range(min(max(own) + 1, plan.num_stages - 1)):
        stage = own[k] if k in own else model.stage(cuts[k], cuts[k + 1], device)
        shape = stage.hidden_shape(1, length) if k else (1, length)
        x = torch.zeros(shape, dtype=dtypes[k - 1] if k else torch.int64, device=device)
        cache = stage.make_cache(1, length)
        cache.begin(0, length)
        with autocast.on():
            dtypes[k] = SlicedStage(stage, fused=False).forward(x, cache).dtype
    return dtypes


def _line_of(error: Exception) -> str:
    """The innermost line of this package or of the model that read a number."""
    frames = traceback.extract_tb(error.__traceback__)
    own = (__file__, memory_counter.__file__)
    lines = [line for line in frames if "/torch/" not in line.filename and line.filename not in own]
    return f"{lines[-1].filename}:{lines[-1].lineno}" if lines else str(error)


@contextmanager
def replaceable_parameters() -> Iterator[None]:
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
