"""Preference objectives. Rows 0, 2, 4, ... of a batch are chosen, each followed by the rejected one.

So the two of a pair are in one microbatch, whose size must be even. ``interleave`` makes such a batch of two. Targets
are a dict with ``labels``, in which prompts are -100, and for some ``reference``: the reference model's
log-probabilities, per token as ``Pipeline.log_probs`` returns them, or summed over each sequence.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from terapipe.losses.objective import Over, SequenceLoss, Targets, entry
from terapipe.losses.sequences import at_last, scores, sequence_average, sequence_sum

Metrics = dict[str, Tensor]


def interleave(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Rows of two batches in turn: the first of ``chosen``, the first of ``rejected``, the second of ``chosen``, ..."""
    if chosen.shape != rejected.shape:
        raise ValueError(
            f"chosen and rejected must have the same shape, got {tuple(chosen.shape)} and {tuple(rejected.shape)}; "
            "pad the shorter on the right"
        )
    return torch.stack([chosen, rejected], 1).flatten(0, 1)


def _pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    if len(values) % 2:
        raise ValueError(
            f"a microbatch of pairs must have an even number of sequences, each chosen one followed by its rejected "
            f"one, got {len(values)}; make microbatches of the plan even, or take over='batch'"
        )
    return values[0::2], values[1::2]


def _reference(targets: Targets) -> Tensor:
    what = "the reference model's log-probabilities (compute them with Pipeline.log_probs before training)"
    found = entry(targets, "reference", what)
    return found if found.ndim == 1 else sequence_sum(found, targets)


def _rewards(chosen: Tensor, rejected: Tensor) -> Metrics:
    """As trainers log them."""
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "rewards/accuracies": (chosen > rejected).to(chosen.dtype).mean(),
    }


def dpo(*, beta: float = 0.1, label_smoothing: float = 0.0, over: Over = "microbatch") -> SequenceLoss:
    """Direct preference optimization (Rafailov et al., 2023), with the label smoothing of conservative DPO."""

    def fn(log_probs: Tensor, targets: Targets) -> tuple[Tensor, Metrics]:
        ratios = sequence_sum(log_probs, targets) - _reference(targets)
        chosen, rejected = _pairs(beta * ratios)
        margins = chosen - rejected
        losses = -(1 - label_smoothing) * F.logsigmoid(margins) - label_smoothing * F.logsigmoid(-margins)
        return losses.mean(), _rewards(chosen, rejected)

    return SequenceLoss(fn, over=over)


def simpo(*, beta: float = 2.0, gamma: float = 1.0, over: Over = "microbatch") -> SequenceLoss:
    """SimPO (Meng et al., 2024): the reward is the average log-probability of a sequence, without a reference model.
    ``gamma`` is the margin."""

    def fn(log_probs: Tensor, targets: Targets) -> tuple[Tensor, Metrics]:
        chosen, rejected = _pairs(beta * sequence_average(log_probs, targets))
        return -F.logsigmoid(chosen - rejected - gamma).mean(), _rewards(chosen, rejected)

    return SequenceLoss(fn, over=over)


def orpo(*, beta: float = 0.1, over: Over = "microbatch") -> SequenceLoss:
    """ORPO (Hong et al., 2024): cross-entropy of the chosen sequences and ``beta`` times the loss of the odds ratio."""

    def fn(log_probs: Tensor, targets: Targets) -> tuple[Tensor, Metrics]:
        averages = sequence_average(log_probs, targets)
        chosen, rejected = _pairs(averages)
        odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
        counts = (targets["labels"] if isinstance(targets, dict) else targets) >= 0
        tokens = counts[0::2].sum()
        likelihood = -_pairs(sequence_sum(log_probs, targets))[0].sum() / tokens.clamp(min=1)
        ratio = -F.logsigmoid(odds).mean()
        metrics = {"nll_loss": likelihood.detach(), "odds_ratio_loss": ratio.detach()}
        return likelihood + beta * ratio, metrics | _rewards(beta * chosen, beta * rejected)

    return SequenceLoss(fn, over=over)


def kto(*, beta: float = 0.1, desirable: float = 1.0, undesirable: float = 1.0, over: Over = "batch") -> SequenceLoss:
    """KTO (Ethayarajh et al., 2024): no pairs, each sequence is desirable or not.

    Targets have, beside ``labels`` and ``reference``, ``desirable``: (batch,) of torch.bool; and may have ``kl``:
    (batch,), the log-ratios of mismatched completions, whose mean is the point of reference. Without them it is the
    mean of the sequences' own log-ratios. It has no gradient and is at least 0.
    """

    def fn(log_probs: Tensor, targets: Targets) -> tuple[Tensor, Metrics]:
        ratios = sequence_sum(log_probs, targets) - _reference(targets)
        kl = targets.get("kl", ratios).detach().mean().clamp(min=0)
        good = entry(targets, "desirable", "whether each sequence is desirable")
        signs = torch.where(good, 1.0, -1.0).to(ratios.dtype)
        weights = torch.where(good, desirable, undesirable).to(ratios.dtype)
        losses = weights * (1 - F.sigmoid(beta * signs * (ratios - kl)))
        return losses.mean(), {"kl": kl}

    return SequenceLoss(fn, over=over)


def reward_pairs(*, over: Over = "microbatch") -> SequenceLoss:
    """The Bradley-Terry loss of reward models: sequence classifiers with one class, see ``AutoModelFor
    SequenceClassification`` of transformers. Targets: a dict with ``last``, see ``last_tokens``, and maybe ``margin``,
    (batch,), of which those of chosen rows count."""

    def fn(values: Tensor, targets: Targets) -> tuple[Tensor, Metrics]:
        if values.shape[-1] != 1:
            raise ValueError(
                f"a reward model has one score, got {values.shape[-1]}; load it with "
                "AutoModelForSequenceClassification and num_labels=1"
            )
        chosen, rejected = _pairs(at_last(values, targets).squeeze(-1))
        margin = targets["margin"][0::2] if "margin" in targets else 0.0
        return -F.logsigmoid(chosen - rejected - margin).mean(), _rewards(chosen, rejected)

    return SequenceLoss(fn, scores, over)
