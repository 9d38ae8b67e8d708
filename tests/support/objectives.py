"""Objectives: by name, what a pipeline is given, and what plain code makes of all logits and targets."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terapipe import losses
from terapipe.modeling.stage import IGNORE


def some(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def chunked_head(hidden: Tensor, head: nn.Module, targets: Tensor) -> Tensor:
    """What a fused linear cross-entropy does: the head and the loss of a few tokens at a time."""
    parts = zip(hidden.flatten(0, 1).split(5), targets.flatten().split(5), strict=True)
    losses = [F.cross_entropy(h @ head.weight.t(), t, ignore_index=IGNORE, reduction="sum") for h, t in parts]
    return torch.stack(losses).sum()


def log_probs_of(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1) * (labels != IGNORE)


def smooth(logits: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), t.flatten(), ignore_index=IGNORE, label_smoothing=0.1)


def plain_cross_entropy(logits: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), t.flatten(), ignore_index=IGNORE)


def with_z(logits: Tensor, t: Tensor) -> Tensor:
    z = (logits.logsumexp(-1) ** 2)[t != IGNORE].mean()
    return F.cross_entropy(logits.flatten(0, 1), t.flatten(), ignore_index=IGNORE) + 1e-2 * z


def weighted(logits: Tensor, t: dict[str, Tensor]) -> Tensor:
    counted = t["labels"] != IGNORE
    return -(log_probs_of(logits, t["labels"]) * t["weights"]).sum() / counted.sum()


def distilled(logits: Tensor, t: dict[str, Tensor]) -> Tensor:
    counted = t["labels"] != IGNORE
    student, teacher = torch.log_softmax(logits / 2, -1)[counted], torch.softmax(t["teacher_logits"] / 2, -1)[counted]
    soft = F.kl_div(student, teacher, reduction="batchmean") * 4
    return 0.7 * soft + 0.3 * F.cross_entropy(logits[counted], t["labels"][counted])


def plain_mean(logits: Tensor, t: Tensor) -> Tensor:
    counted = (t != IGNORE).sum(1).clamp(min=1)
    return -(log_probs_of(logits, t).sum(1) / counted).mean()


def plain_dpo(logits: Tensor, t: dict[str, Tensor]) -> Tensor:
    ratios = log_probs_of(logits, t["labels"]).sum(1) - t["reference"]
    return -F.logsigmoid(0.3 * (ratios[0::2] - ratios[1::2])).mean()


def plain_simpo(logits: Tensor, t: Tensor) -> Tensor:
    means = log_probs_of(logits, t).sum(1) / (t != IGNORE).sum(1)
    return -F.logsigmoid(2.0 * (means[0::2] - means[1::2]) - 0.5).mean()


def plain_kto(logits: Tensor, t: dict[str, Tensor]) -> Tensor:
    ratios = log_probs_of(logits, t["labels"]).sum(1) - t["reference"]
    point = ratios.mean().clamp(min=0).detach()
    values = torch.where(t["desirable"], torch.sigmoid(0.1 * (ratios - point)), torch.sigmoid(0.1 * (point - ratios)))
    return (1 - values).mean()


def plain_grpo(logits: Tensor, t: dict[str, Tensor]) -> Tensor:
    log_probs, counted = log_probs_of(logits, t["labels"]), t["labels"] != IGNORE
    ratio, advantages = torch.exp(log_probs - t["old"]), t["advantages"][:, None]
    kept = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    kl = torch.exp(t["reference"] - log_probs) - (t["reference"] - log_probs) - 1
    return (((-kept + 0.04 * kl) * counted).sum(1) / counted.sum(1).clamp(min=1)).mean()


def plain_ppo(logits: Tensor, t: dict[str, Tensor]) -> Tensor:
    log_probs, counted = log_probs_of(logits, t["labels"]), t["labels"] != IGNORE
    ratio = torch.exp(log_probs - t["old"])
    kept = torch.minimum(ratio * t["advantages"], ratio.clamp(0.8, 1.2) * t["advantages"])
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    return ((-kept - 0.01 * entropy) * counted).sum() / counted.sum()


def plain_orpo(logits: Tensor, t: Tensor) -> Tensor:
    log_probs, counted = log_probs_of(logits, t), t != IGNORE
    means = log_probs.sum(1) / counted.sum(1)
    odds = means - torch.log(1 - means.exp())
    nll = -log_probs[0::2].sum() / counted[0::2].sum()
    return nll - 0.5 * F.logsigmoid(odds[0::2] - odds[1::2]).mean()


OBJECTIVES: dict[str, tuple[Any, Callable[..., Tensor]]] = {
    "label smoothing": (losses.cross_entropy(label_smoothing=0.1), smooth),
    "z-loss": (losses.cross_entropy(z_loss=1e-2), with_z),
    "weighted": (losses.cross_entropy(), weighted),
    "distillation": (losses.distillation(temperature=2.0, alpha=0.7), distilled),
    "fused": (losses.HiddenLoss(chunked_head), plain_cross_entropy),
    "sequence mean": (losses.sequence_mean(), plain_mean),
    "dpo": (losses.dpo(beta=0.3), plain_dpo),
    "dpo over the batch": (losses.dpo(beta=0.3, over="batch"), plain_dpo),
    "simpo": (losses.simpo(beta=2.0, gamma=0.5), plain_simpo),
    "orpo over the batch": (losses.orpo(beta=0.5, over="batch"), plain_orpo),
    "kto over the batch": (losses.kto(), plain_kto),
    "grpo": (losses.grpo(beta=0.04), plain_grpo),
    "ppo over the batch": (losses.ppo_clip(entropy=0.01, over="batch"), plain_ppo),
}
