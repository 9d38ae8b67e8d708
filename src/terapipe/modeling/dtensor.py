"""Operators split over devices: parameters are DTensors, the arithmetic of slices is on their local parts."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement


def to_local(x: Tensor) -> Tensor:
    """This device's part of a DTensor, as autograd sees it; any other tensor as it is."""
    part: Tensor = x.to_local() if isinstance(x, DTensor) else x
    return part


def as_dtensor_like(x: Tensor, part: Tensor) -> Tensor:
    """A local part as a DTensor with the layout of ``x``; the part itself if ``x`` is an ordinary tensor."""
    if not isinstance(x, DTensor):
        return part
    return DTensor.from_local(part, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


@torch.no_grad()
def fill(x: Tensor, whole: Tensor) -> None:
    """Copies a whole tensor, or this device's part of it, to ``x``."""
    if isinstance(x, DTensor):
        whole = distribute_tensor(whole.to(x.device), x.device_mesh, x.placements, src_data_rank=None).to_local()
    to_local(x).copy_(whole)


class GradientSum:
    """A hook for a parameter that all devices hold and of whose gradient each knows a part. It belongs to how a stage
    computes gradients, so it is called for each slice, not once per step as the hooks of users are."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def __call__(self, gradient: Tensor) -> Tensor:
        return DTensor.from_local(gradient, self._mesh, [Partial()], run_check=False).full_tensor()


class Replicated(ParallelStyle):
    """A module that every device computes in full; its output is then cut, if asked, at no cost.

    Its parameters become DTensors nevertheless: an optimizer that works on many tensors at once takes no mixture.
    """

    def __init__(self, output: Placement | None = None) -> None:
        super().__init__()
        self.output = output or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, self._wrap, self._unwrap)  # type: ignore[arg-type]

    @staticmethod
    def _wrap(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)

    def _unwrap(self, module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        return output.redistribute(placements=[self.output]).to_local()


def is_row_parallel(weight: DTensor) -> bool:
    """Whether each device has some of the inputs of a linear layer, and all of its outputs in part."""
    return weight.placements == (Shard(1),)
