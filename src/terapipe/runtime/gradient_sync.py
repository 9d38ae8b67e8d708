"""Replicas of a stage: their gradients are summed once per step, or they share out its parameters and their state."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from terapipe.modeling.cache import SliceCache
from terapipe.modeling.dtensor import to_local
from terapipe.modeling.stage import Predictor, Stage
from terapipe.runtime.transport import Transport

BUCKET = 25 << 20  # bytes that are summed in one message


def match_layouts(parameters: Iterable[nn.Parameter]) -> None:
    """Gives gradients the layout of their parameters: with tokens shared out, those of norms are sums over devices."""
    for p in parameters:
        if isinstance(p, DTensor) and isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
            p.grad = p.grad.redistribute(placements=p.placements)


class GradientReducer:
    """Sums gradients over replicas, in buckets, while the pipeline drains."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._pending: list[tuple[list[Tensor], Tensor, dist.Work]] = []

    def start(self, parameters: Iterable[nn.Parameter]) -> None:
        """To be called when these gradients are complete, on all replicas in the same order."""
        for bucket in _buckets(list(_gradients(parameters))):
            flat = torch.cat([g.flatten() for g in bucket])
            self._pending.append((bucket, flat, self._transport.start_sum(flat)))

    def finish(self) -> None:
        for bucket, flat, work in self._pending:
            self._transport.finish_sum(work)
            for gradient, total in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
                gradient.copy_(total.view_as(gradient))
        self._pending.clear()


def _gradients(parameters: Iterable[nn.Parameter]) -> Iterator[Tensor]:
    for p in parameters:
        if p.requires_grad:
            if p.grad is None:  # the other replicas may have one
                p.grad = torch.zeros_like(p)
            yield to_local(p.grad)


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for gradient in gradients:
        if bucket and (sum(g.nbytes for g in bucket) + gradient.nbytes > BUCKET or bucket[0].dtype != gradient.dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


class Sharded(nn.Module):
    """A stage of which every replica holds a part (FSDP2): gathered at a step's first slice, reduced after its last.

    In between the whole parameters and their gradients stay, however many slices there are.
    """

    def __init__(self, stage: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.stage = stage
        assert isinstance(stage, Stage)
        self._parts = [fully_shard(block, mesh=mesh, reshard_after_forward=False) for block in stage.blocks]
        self._parts.append(fully_shard(self, mesh=mesh, reshard_after_forward=False))
        for part in self._parts:
            part.set_gradient_divide_factor(1.0)  # the loss is already divided by the number of all labels
            part.set_force_sum_reduction_for_comms(True)
        self._keep(True)

    def _keep(self, whole: bool) -> None:
        """Whether parameters and gradients stay whole at the end of a backward."""
        self._parts[-1].set_is_last_backward(not whole)
        self._parts[-1].set_requires_gradient_sync(not whole)
        self._parts[-1].set_reshard_after_backward(not whole)

    def forward(self, x: Tensor, cache: SliceCache | None) -> Tensor:
        if cache is None:
            return x * 1.0
        out: Tensor = self.stage(x, cache)
        return out

    def reduce(self) -> None:
        """FSDP reduces at the end of a backward. Weights' gradients may be put off beyond the last slice's; so this is
        a backward of its own, of nothing."""
        self._keep(False)
        device = next(self.parameters()).device
        self(torch.zeros(1, device=device, requires_grad=True), None).backward()
        self._keep(True)

    def release(self) -> None:
        """Lets go of what was gathered, after forwards only."""
        for part in self._parts:
            part.reshard()

    # The rest of a Stage

    @property
    def blocks(self) -> list[nn.Module]:
        return self._inner.blocks

    @property
    def _inner(self) -> Stage:
        assert isinstance(self.stage, Stage)
        return self.stage

    def make_cache(self, size: int, tokens: int) -> SliceCache:
        return self._inner.make_cache(size, tokens)

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return self._inner.loss(hidden, labels)

    def logits(self, hidden: Tensor) -> Tensor:
        assert isinstance(self.stage, Predictor)
        return self.stage.logits(hidden)

    def hidden_shape(self, size: int, length: int) -> tuple[int, ...]:
        return self._inner.hidden_shape(size, length)
