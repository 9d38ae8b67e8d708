"""Weights of a model that several processes share: the same on all of them at first, gathered from the stages later."""

from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from terapipe.runtime.checkpoint.frozen import digest_of
from terapipe.runtime.module_tree import persistent_buffers
from terapipe.runtime.pipeline import Pipeline


def agree_on_weights(model: nn.Module, device: torch.device) -> None:
    """Where processes made models with different random weights, all get those of the first, as with
    DistributedDataParallel. All processes must call it together."""
    named = dict(chain(model.named_parameters(), model.named_buffers()))
    real = {name: tensor for name, tensor in named.items() if not tensor.is_meta}
    mine = {name: digest_of(tensor) for name, tensor in real.items()}
    everyone: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if any(other.keys() != mine.keys() for other in everyone):
        strange = set.union(*(set(other) ^ set(everyone[0]) for other in everyone))
        raise ValueError(f"all processes must make the same model, they differ in {', '.join(sorted(strange)[:3])}")
    for name in real:
        forms = [other[name].rpartition(" ")[0] for other in everyone]
        strange_rank = next((rank for rank, form in enumerate(forms) if form != forms[0]), 0)
        if strange_rank:
            raise ValueError(
                f"all processes must make the same model, they differ in {name}: {forms[strange_rank]} on rank "
                f"{strange_rank}, {forms[0]} on rank 0"
            )
    for name, tensor in real.items():
        if any(other[name] != mine[name] for other in everyone):
            _take_over(tensor, device)


@torch.no_grad()
def _take_over(tensor: Tensor, device: torch.device) -> None:
    """By way of the device: NCCL sends nothing else."""
    there = tensor.detach().to(device).contiguous()
    dist.broadcast(there, 0)
    tensor.data.copy_(there)


@torch.no_grad()
def gather_weights(pipe: Pipeline, model: nn.Module) -> None:
    """Copies the weights of all stages into the whole model, on every rank. All ranks must call it together."""
    target = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    held = dict(pipe.named_parameters()) | dict(persistent_buffers(pipe.stages.values()))
    with pipe.failing_together():
        owners: dict[str, int] = {}
        for rank, names in enumerate(pipe.gather(list(held))):
            owners |= {name: rank for name in names if name not in owners}
        for name, owner in owners.items():
            if owner == pipe.rank:
                value = held[name].detach()
                value = value.full_tensor() if isinstance(value, DTensor) else value
            else:
                value = torch.empty_like(target[name], device=pipe.device)
            value = pipe.transport.broadcast(value.contiguous(), owner, f"the weight {name}")
            if target[name] is not held.get(name):
                target[name].data.copy_(value)
