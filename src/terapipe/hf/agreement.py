"""The same weights on all processes, as DistributedDataParallel makes them: those of the first one."""

import hashlib
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn


def agree_on_weights(model: nn.Module, device: torch.device) -> None:
    """Where processes made models with different random weights, all get those of the first. All must call it."""
    named = dict(chain(model.named_parameters(), model.named_buffers()))
    real = {name: tensor for name, tensor in named.items() if not tensor.is_meta}
    mine = {name: _digest(tensor) for name, tensor in real.items()}
    everyone: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if any(other.keys() != mine.keys() for other in everyone):
        strange = set.union(*(set(other) ^ set(everyone[0]) for other in everyone))
        raise ValueError(f"all processes must make the same model, they differ in {', '.join(sorted(strange)[:3])}")
    for name, tensor in real.items():
        if any(other[name] != mine[name] for other in everyone):
            _take_over(tensor, device)


def _digest(tensor: Tensor) -> str:
    """Of all of it: of an embedding that was made larger, a few new rows may be all that differs."""
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.blake2b(raw, digest_size=16).hexdigest()}"


@torch.no_grad()
def _take_over(tensor: Tensor, device: torch.device) -> None:
    """By way of the device: NCCL sends nothing else."""
    there = tensor.detach().to(device).contiguous()
    dist.broadcast(there, 0)
    tensor.data.copy_(there)
