"""The norm of gradients that are spread over stages, replicas and parts."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from terapipe.modeling.dtensor import to_local
from terapipe.runtime.transport import DP, TP, Transport


def total_norm(parameters: Iterable[nn.Parameter], norm_type: float, transport: Transport, wide: torch.dtype) -> Tensor:
    """Over all ranks, on every rank. No parameter may be given on two ranks of a pipeline."""
    grads = [to_local(p.grad) for p in parameters if p.grad is not None and _counts_here(p, transport)]
    # Without any gradients torch answers in its default precision.
    norm = nn.utils.get_total_norm(grads, norm_type).to(transport.device, wide)
    if math.isinf(norm_type):
        return transport.all_reduce(norm, op=dist.ReduceOp.MAX)
    return transport.all_reduce(norm**norm_type) ** (1.0 / norm_type)


def _counts_here(parameter: nn.Parameter, transport: Transport) -> bool:
    """Of ranks that hold the same values, the first counts them; all do of which each holds a part."""
    places = {DP: transport.dp_rank, TP: transport.tp_rank}
    if isinstance(parameter, DTensor):
        for name, placement in zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True):
            if not placement.is_replicate():
                places.pop(name)
    return not any(places.values())
