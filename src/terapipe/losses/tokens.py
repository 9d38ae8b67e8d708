"""Losses that are sums over tokens: the step divides them by the number of labels in the whole batch.

Each function makes a ``loss_fn(logits, targets)`` that ``Pipeline`` calls for each slice, with the targets of the
slice's tokens only.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from terapipe.losses.objective import LossFn, Targets, entry, labels_in
from terapipe.modeling.stage import IGNORE


def labels_of(targets: Targets) -> Tensor:
    """The labels among targets, or a ValueError that says what they must be.

    Args:
        targets: Labels, or a dict that has them.
    """
    labels = labels_in(targets)
    if labels is None:
        raise ValueError(
            "targets must be labels, (batch, seq_len) of torch.int64, or a dict that has them under 'labels', got "
            f"{sorted(targets) if isinstance(targets, dict) else type(targets).__name__}"
        )
    return labels


def token_log_probs(logits: Tensor, targets: Targets) -> Tensor:
    """The log-probability of each label, (size, length); 0 where the label is -100.

    Args:
        logits: (size, length, vocabulary).
        targets: Labels, or a dict that has them.
    """
    labels = labels_of(targets)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none").view_as(labels)


def token_entropies(logits: Tensor) -> Tensor:
    """The entropy of each token's distribution, (size, length), in float32 or wider.

    Args:
        logits: (size, length, vocabulary).
    """
    log_probs = F.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    return -(log_probs.exp() * log_probs).sum(-1)


def cross_entropy(*, label_smoothing: float = 0.0, z_loss: float = 0.0) -> LossFn:
    """Cross-entropy. Targets: labels; or a dict with ``labels`` and ``weights``, which multiply each token's loss.

    Args:
        label_smoothing: As in torch.nn.functional.cross_entropy.
        z_loss: The weight of a term that keeps the logits' log-sum-exp near zero (PaLM).
    """

    def loss_fn(logits: Tensor, targets: Targets) -> tuple[Tensor, dict[str, Tensor]]:
        labels = labels_of(targets)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        losses = F.cross_entropy(
            wide, labels.flatten(), ignore_index=IGNORE, reduction="none", label_smoothing=label_smoothing
        )
        metrics = {}
        if z_loss:
            z = z_loss * wide.logsumexp(-1).square() * (labels.flatten() != IGNORE)
            losses, metrics = losses + z, {"z_loss": z.detach().sum()}
        if isinstance(targets, dict) and "weights" in targets:
            losses = losses * targets["weights"].flatten()
        return losses.sum(), metrics

    return loss_fn


def distillation(
    *, temperature: float = 1.0, alpha: float = 1.0, head: Callable[[Tensor], Tensor] | None = None
) -> LossFn:
    """The divergence KL(teacher || student). Targets: a dict with ``labels`` and ``teacher_logits``, (batch, seq_len,
    vocabulary), or with ``head`` ``teacher_hidden``.

    Args:
        temperature: Divides all logits; the divergence is multiplied by its square.
        alpha: The weight of the divergence; the rest is cross-entropy.
        head: A teacher pipeline's ``logits``. Targets then have its ``hidden_states``, and only the logits of one slice
            exist at a time, the teacher's too.
    """

    @torch.no_grad()
    def teacher_logits(targets: Targets) -> Tensor:
        if head is None:
            return entry(targets, "teacher_logits", "the teacher's logits")
        return head(entry(targets, "teacher_hidden", "the teacher's hidden states"))

    def loss_fn(logits: Tensor, targets: Targets) -> tuple[Tensor, dict[str, Tensor]]:
        labels = labels_of(targets)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        student = F.log_softmax(wide / temperature, -1)
        taught = teacher_logits(targets)
        if taught.shape != wide.shape:
            raise ValueError(
                f"a teacher's logits must have the student's shape, got {tuple(taught.shape)} and {tuple(wide.shape)}; "
                "take a teacher with the same vocabulary"
            )
        teacher = F.log_softmax(taught.to(wide.dtype) / temperature, -1)
        divergences = (teacher.exp() * (teacher - student)).sum(-1) * (labels != IGNORE)
        divergence = divergences.sum() * temperature**2
        metrics = {"distillation": divergence.detach()}
        if alpha == 1.0:
            return divergence, metrics
        hard = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        return alpha * divergence + (1 - alpha) * hard, metrics | {"cross_entropy": hard.detach()}

    return loss_fn
