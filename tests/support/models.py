"""A small GPT, the plain single-process truth about it, and the same through a pipeline."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from terapipe import GPT, GPTConfig, Layout, Pipeline, Plan, device_mesh
from terapipe.modeling.stage import IGNORE

TINY = GPTConfig(layers=4, hidden=16, heads=4, vocab=19, max_seq_len=64)


def make_model(config: GPTConfig, dtype: torch.dtype = torch.float64) -> GPT:
    """Weights larger than an initialisation's, so that attention is far from uniform, yet well conditioned."""
    model = GPT(config, seed=3).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            wide = "embedding" in name or "positions" in name
            parameter.mul_(1.0 if "norm" in name else 40.0 if wide else 8.0)
            # A bias that is the same everywhere would be invisible to the norm after it.
            bias = name.endswith("bias")
            parameter.add_(0.03 * torch.sin(torch.arange(len(parameter), dtype=dtype)) if bias else 0.01)
    return model


def make_batch(config: GPTConfig, batch: int, tokens: int, ignored: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab, (batch, tokens), generator=generator)
    labels = torch.randint(config.vocab, (batch, tokens), generator=generator)
    if ignored:
        labels[torch.rand(batch, tokens, generator=generator) < 0.4] = IGNORE
        labels[-1, -1] = 1
    return ids, labels


def plain(config: GPTConfig, ids: Tensor, labels: Tensor, dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the whole model in one piece, by code that knows nothing of slices."""
    model = make_model(config, dtype)
    loss = model.loss(model(ids), labels) / (labels != IGNORE).sum()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


_meshes: dict[Layout, DeviceMesh] = {}


def mesh_of(layout: Layout) -> DeviceMesh:
    """Made once in each process: its groups stay until the process ends."""
    if layout not in _meshes:
        _meshes[layout] = device_mesh(layout)
    return _meshes[layout]


def laid_out(
    config: GPTConfig, layout: Layout, plan: Plan, ids: Tensor, labels: Tensor, dtype: torch.dtype, shard: bool = False
) -> tuple[float, dict[str, Tensor]]:
    """This rank's loss and its gradients in full, where each replica has its rows of the batch."""
    pipe = Pipeline(make_model(config, dtype), plan, mesh=mesh_of(layout), shard=shard, timeout=300.0)
    rows = slice(pipe.dp_rank * plan.batch_size, (pipe.dp_rank + 1) * plan.batch_size)
    loss = pipe.step(ids[rows] if pipe.is_first else None, labels[rows] if pipe.is_last else None)
    return loss.item(), gradients(pipe)


def gradients(pipe: Pipeline) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in pipe.named_parameters() if p.grad is not None}


def whole(x: Tensor) -> Tensor:
    """In one piece, on the CPU."""
    full: Tensor = x.full_tensor() if isinstance(x, DTensor) else x
    return full.cpu()


def piped(
    config: GPTConfig, plan: Plan, ids: Tensor, labels: Tensor, dtype: torch.dtype
) -> tuple[float, dict[str, Tensor]]:
    """This rank's loss and gradients."""
    pipe = Pipeline(make_model(config, dtype), plan, timeout=300.0)
    loss = pipe.step(ids if pipe.is_first else None, labels if pipe.is_last else None)
    return loss.item(), gradients(pipe)


def worst_error(
    wanted: tuple[float, dict[str, Tensor]], found: list[tuple[float, dict[str, Tensor]]], config: GPTConfig
) -> float:
    """The largest difference of any gradient from the plain model's, relative to the largest of all gradients: some,
    such as that of a key's bias, are zero but for rounding."""
    loss, gradients = wanted
    scale = max(truth.abs().max().item() for truth in gradients.values())
    worst = max(abs(other - loss) / abs(loss) for other, _ in found)
    seen = set()
    for _, part in found:
        for name, gradient in part.items():
            name = "embedding.weight" if config.tied and name == "head.weight" else name
            seen.add(name)
            worst = max(worst, (gradient - gradients[name]).abs().max().item() / scale)
    assert seen == set(gradients), f"no gradient for {set(gradients) - seen}"
    return worst


def variant(**changes: Any) -> GPTConfig:
    return replace(TINY, **changes)
