"""A training loop in plain PyTorch, as anyone would write it, which knows nothing of pipelines."""

from collections.abc import Callable

import torch
from torch import Tensor

from terapipe import GPT
from terapipe.training.config import RunConfig
from terapipe.training.data.loader import Batches, Sequences
from terapipe.training.optimizer import learning_rate


def curve(
    told: RunConfig, gpt: GPT, rows: Batches, steps: int, loss_of: Callable[[GPT, Sequences], Tensor]
) -> list[float]:
    """The losses of so many steps."""
    groups = [
        {"params": [p for p in gpt.parameters() if p.ndim >= 2], "weight_decay": told.optimizer.weight_decay},
        {"params": [p for p in gpt.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(told.optimizer.beta1, told.optimizer.beta2), eps=1e-4)
    size = told.data.batch_size * told.optimizer.accumulate
    found = []
    for step in range(steps):
        loss = loss_of(gpt, rows.read(size * step, size))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), told.optimizer.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, told.lr, told.optimizer)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found
