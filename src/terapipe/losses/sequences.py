"""Losses of whole sequences: means over each, classes and rewards at the last token."""

import torch
import torch.nn.functional as F
from torch import Tensor

from terapipe.losses.objective import SequenceLoss, Targets, entry
from terapipe.losses.tokens import labels_of
from terapipe.modeling.stage import IGNORE


def counted(targets: Targets) -> Tensor:
    """Which labels count, (rows, seq_len)."""
    return labels_of(targets) != IGNORE


def sequence_sum(values: Tensor, targets: Targets) -> Tensor:
    """Of each sequence's values where labels count, (rows,)."""
    return (values * counted(targets)).sum(1)


def sequence_average(values: Tensor, targets: Targets) -> Tensor:
    return sequence_sum(values, targets) / counted(targets).sum(1).clamp(min=1)


def sequence_mean() -> SequenceLoss:
    """Cross-entropy as a mean over sequences of the mean over each one's labels: long ones weigh no more than short
    ones. Targets: labels."""
    return SequenceLoss(lambda log_probs, targets: -sequence_average(log_probs, targets).mean())


def last_tokens(input_ids: Tensor, pad_token_id: int | None) -> Tensor:
    """The place of the last token that is not padding, (rows,), as transformers' sequence classifiers look for it.

    Padding must be on the right: no token sees those after it, so it changes nothing.
    """
    if pad_token_id is None:
        return input_ids.new_full((len(input_ids),), input_ids.shape[1] - 1)
    real = input_ids != pad_token_id
    last = (real * torch.arange(input_ids.shape[1], device=input_ids.device)).argmax(1)
    if bool((~real[:, 0] & real.any(1)).any()):
        raise ValueError(
            "sequences must be padded on the right, got some that begin with padding "
            f"(token {pad_token_id}); set the tokenizer's padding_side to 'right'"
        )
    return last


def scores(logits: Tensor, targets: Targets) -> Tensor:
    """What a head makes of each token, in float32 or wider: values of a ``SequenceLoss`` that needs no labels."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def at_last(values: Tensor, targets: Targets) -> Tensor:
    """Each sequence's values at the place that ``targets["last"]`` names, (rows, classes)."""
    last = entry(targets, "last", "the place of each sequence's last token (see last_tokens)")
    return values[torch.arange(len(values), device=values.device), last]


def classification(*, regression: bool = False) -> SequenceLoss:
    """For sequence classifiers: cross-entropy of the scores at the last token, or with ``regression`` their squared
    error, as transformers computes them.

    Targets: a dict with ``classes``, (batch,) of torch.int64, or of floating point for regression; and ``last``, see
    ``last_tokens``.
    """

    def fn(values: Tensor, targets: Targets) -> Tensor:
        found, wanted = at_last(values, targets), entry(targets, "classes", "the class of each sequence")
        if regression:
            return F.mse_loss(found.squeeze(-1), wanted.to(found.dtype))
        return F.cross_entropy(found, wanted)

    return SequenceLoss(fn, scores)
