"""Losses of whole sequences: classes and rewards at the last token, preferences, and policy gradients.

Each function makes a ``SequenceLoss``. What it is given beside logits is in ``targets``, a dict:

======================  =====================================================================================
``labels``              (batch, seq_len); prompts and padding are -100
``last``, ``classes``   of classifiers: the place of a sequence's last token, and its class
``reference``, ``old``  log-probabilities of another policy, per token as ``Pipeline.log_probs`` returns them
``advantages``          of policy gradients: (batch,) or (batch, seq_len)
======================  =====================================================================================

Preferences are pairs: rows 0, 2, 4, ... of a batch are chosen, each followed by the rejected one. So the two of a pair
are in one microbatch, whose size must be even. ``interleave`` makes such a batch of two.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from terapipe.losses.objective import Over, SequenceLoss, Targets, entry
from terapipe.losses.tokens import labels_of, token_entropies, token_log_probs
from terapipe.modeling.stage import IGNORE

Metrics = dict[str, Tensor]
# What the sum over tokens is divided by: each sequence's own tokens, all tokens, or sequences times a given length.
Normalization = Literal["sequence", "token", "constant"]


def mask_of(targets: Targets) -> Tensor:
    """Which labels count, (rows, seq_len).

    Args:
        targets: Labels, or a dict that has them.
    """
    return labels_of(targets) != IGNORE


def sequence_sum(values: Tensor, targets: Targets) -> Tensor:
    """Sums each sequence's values where labels count: (rows,).

    Args:
        values: (rows, seq_len).
        targets: Labels, or a dict that has them.
    """
    return (values * mask_of(targets)).sum(1)


def sequence_average(values: Tensor, targets: Targets) -> Tensor:
    """Averages each sequence's values where labels count: (rows,); 0 for a sequence without labels.

    Args:
        values: (rows, seq_len).
        targets: Labels, or a dict that has them.
    """
    return sequence_sum(values, targets) / mask_of(targets).sum(1).clamp(min=1)


def sequence_mean() -> SequenceLoss:
    """Cross-entropy as a mean over sequences of the mean over each one's labels: long ones weigh no more than short
    ones. Targets: labels."""
    return SequenceLoss(lambda log_probs, targets: -sequence_average(log_probs, targets).mean())


def last_tokens(input_ids: Tensor, pad_token_id: int | None) -> Tensor:
    """The place of the last token that is not padding, (rows,), as transformers' sequence classifiers look for it.

    Padding must be on the right: no token sees those after it, so it changes nothing.

    Args:
        input_ids: (rows, tokens).
        pad_token_id: None if there is no padding; then it is the last token of each row.
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
    """What a head makes of each token, in float32 or wider: values of a ``SequenceLoss`` that needs no labels.

    Args:
        logits: (size, length, classes).
        targets: Not looked at.
    """
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def at_last(values: Tensor, targets: Targets) -> Tensor:
    """Each sequence's values at its last token, (rows, classes).

    Args:
        values: (rows, seq_len, classes).
        targets: ``last`` among them says which token that is.
    """
    last = entry(targets, "last", "the place of each sequence's last token (see last_tokens)")
    return values[torch.arange(len(values), device=values.device), last]


def classification(*, regression: bool = False) -> SequenceLoss:
    """For sequence classifiers: a loss of the scores at the last token, as transformers computes it. Targets: a dict
    with ``classes``, (batch,) of torch.int64, or of floating point for regression; and ``last``, see ``last_tokens``.

    Args:
        regression: Whether it is the squared error of one score, not the cross-entropy of classes.
    """

    def fn(values: Tensor, targets: Targets) -> Tensor:
        last, classes = at_last(values, targets), entry(targets, "classes", "the class of each sequence")
        if regression:
            return F.mse_loss(last.squeeze(-1), classes.to(last.dtype))
        return F.cross_entropy(last, classes)

    return SequenceLoss(fn, scores)


# Preferences


def interleave(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Joins two batches to one of pairs: the first row of ``chosen``, the first of ``rejected``, the second ...

    Args:
        chosen: (pairs, tokens).
        rejected: As many rows of the same length.
    """
    if chosen.shape != rejected.shape:
        raise ValueError(
            f"chosen and rejected must have the same shape, got {tuple(chosen.shape)} and {tuple(rejected.shape)}; "
            "pad the shorter on the right"
        )
    return torch.stack([chosen, rejected], 1).flatten(0, 1)


def _pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """The values of chosen sequences, and of rejected ones."""
    if len(values) % 2:
        raise ValueError(
            f"a microbatch of pairs must have an even number of sequences, each chosen one followed by its rejected "
            f"one, got {len(values)}; make microbatches of the plan even, or take over='batch'"
        )
    return values[0::2], values[1::2]


def _reference(targets: Targets) -> Tensor:
    """The reference model's log-probability of each sequence, (rows,); of tokens they are summed."""
    what = "the reference model's log-probabilities (compute them with Pipeline.log_probs before training)"
    log_probs = entry(targets, "reference", what)
    return log_probs if log_probs.ndim == 1 else sequence_sum(log_probs, targets)


def _rewards(chosen: Tensor, rejected: Tensor) -> Metrics:
    """Computes rewards, margins and accuracies, as TRL's trainers log them."""
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "rewards/accuracies": (chosen > rejected).to(chosen.dtype).mean(),
    }


def dpo(*, beta: float = 0.1, label_smoothing: float = 0.0, over: Over = "microbatch") -> SequenceLoss:
    """Direct preference optimization (Rafailov et al., 2023). Targets have ``labels`` and ``reference``.

    Args:
        beta: How much a log-ratio to the reference model counts as reward.
        label_smoothing: The share of pairs whose order is taken to be wrong (conservative DPO).
        over: What one loss is computed of: each "microbatch", or the whole "batch".
    """

    def fn(log_probs: Tensor, targets: Targets) -> tuple[Tensor, Metrics]:
        ratios = sequence_sum(log_probs, targets) - _reference(targets)
        chosen, rejected = _pairs(beta * ratios)
        margins = chosen - rejected
        losses = -(1 - label_smoothing) * F.logsigmoid(margins) - label_smoothing * F.logsigmoid(-margins)
        return losses.mean(), _rewards(chosen, rejected)

    return SequenceLoss(fn, over=over)


def simpo(*, beta: float = 2.0, gamma: float = 1.0, over: Over = "microbatch") -> SequenceLoss:
    """SimPO (Meng et al., 2024): the reward is the average log-probability of a sequence, without a reference model.

    Args:
        beta: How much a log-probability counts as reward.
        gamma: The margin by which chosen sequences are to be ahead.
        over: What one loss is computed of: each "microbatch", or the whole "batch".
    """

    def fn(log_probs: Tensor, targets: Targets) -> tuple[Tensor, Metrics]:
        chosen, rejected = _pairs(beta * sequence_average(log_probs, targets))
        return -F.logsigmoid(chosen - rejected - gamma).mean(), _rewards(chosen, rejected)

    return SequenceLoss(fn, over=over)


def orpo(*, beta: float = 0.1, over: Over = "microbatch") -> SequenceLoss:
    """ORPO (Hong et al., 2024): cross-entropy of the chosen sequences, and a loss of the odds ratio of each pair.

    Args:
        beta: The weight of the odds ratio.
        over: What one loss is computed of: each "microbatch", or the whole "batch".
    """

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

    Args:
        beta: How much a log-ratio to the reference model counts as reward.
        desirable: The weight of desirable sequences.
        undesirable: The weight of the others.
        over: What one loss is computed of: each "microbatch", or the whole "batch".
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
    """The Bradley-Terry loss of reward models: sequence classifiers with one class. Targets: a dict with ``last``, see
    ``last_tokens``, and maybe ``margin``, (batch,), of which those of chosen rows count.

    Args:
        over: What one loss is computed of: each "microbatch", or the whole "batch".
    """

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


# Policies


def _surrogate(log_probs: Tensor, targets: Mapping[str, Any], low: float, high: float) -> tuple[Tensor, Metrics]:
    """The clipped loss of each token, and the share of tokens that were clipped."""
    advantages = entry(targets, "advantages", "the advantage of each sequence or token")
    old = targets.get("old", log_probs.detach())
    if advantages.ndim == 1:
        advantages = advantages[:, None]
    ratios = (log_probs - old).exp()
    clipped = ratios.clamp(1 - low, 1 + high)
    losses = -torch.min(ratios * advantages, clipped * advantages)
    is_clipped = ((ratios < 1 - low) & (advantages < 0)) | ((ratios > 1 + high) & (advantages > 0))
    mask = mask_of(targets)
    return losses, {"clip_ratio": (is_clipped & mask).sum() / mask.sum().clamp(min=1)}


def _normalize(losses: Tensor, targets: Targets, by: Normalization, length: int) -> Tensor:
    """Makes one number of the tokens' losses; see ``Normalization``."""
    mask = mask_of(targets)
    if by == "sequence":
        return sequence_average(losses, targets).mean()
    total = mask.sum().clamp(min=1) if by == "token" else len(mask) * length
    return (losses * mask).sum() / total


def grpo(
    *,
    beta: float = 0.0,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    normalize: Normalization = "sequence",
    max_length: int = 0,
    correct_kl: bool = False,
    over: Over = "microbatch",
) -> SequenceLoss:
    """Group-relative policy optimization (Shao et al., 2024). Targets have ``labels``, ``advantages``, maybe ``old``,
    and with ``beta`` also ``reference``.

    Args:
        beta: The weight of the divergence from the reference policy.
        epsilon: How far the ratio of the new to the old policy may fall below 1 before it is clipped.
        epsilon_high: How far it may rise above 1; by default as far.
        normalize: What the sum over tokens is divided by: "sequence" as in GRPO, "token" (BNPO), or "constant"
            ``max_length`` (Dr. GRPO).
        max_length: For "constant" only.
        correct_kl: Whether the divergence is weighted by the ratio of the new to the old policy (TRL's
            ``use_bias_correction_kl``, which is on by default there).
        over: What one loss is computed of: each "microbatch", or the whole "batch".
    """
    if normalize == "constant" and max_length < 1:
        raise ValueError(f"normalize='constant' divides by max_length, which must be at least 1, got {max_length}")

    def fn(log_probs: Tensor, targets: Targets) -> tuple[Tensor, Metrics]:
        high = epsilon if epsilon_high is None else epsilon_high
        losses, metrics = _surrogate(log_probs, targets, epsilon, high)
        if beta:
            distance = entry(targets, "reference", "the reference policy's log-probabilities") - log_probs
            divergence = distance.exp() - distance - 1
            if correct_kl:
                divergence = divergence * (log_probs - targets.get("old", log_probs.detach())).exp()
            losses = losses + beta * divergence
            metrics["kl"] = _normalize(divergence.detach(), targets, "token", 0)
        return _normalize(losses, targets, normalize, max_length), metrics

    return SequenceLoss(fn, over=over)


def ppo_clip(*, epsilon: float = 0.2, entropy: float = 0.0, over: Over = "microbatch") -> SequenceLoss:
    """PPO's clipped surrogate (Schulman et al., 2017), as a mean over tokens. Targets as for ``grpo``.

    Args:
        epsilon: How far the ratio of the new to the old policy may be from 1 before it is clipped.
        entropy: The weight of the tokens' entropy, which is subtracted.
        over: What one loss is computed of: each "microbatch", or the whole "batch".
    """

    def per_token(logits: Tensor, targets: Targets) -> dict[str, Tensor]:
        log_probs = {"log_probs": token_log_probs(logits, targets)}
        return log_probs | ({"entropy": token_entropies(logits)} if entropy else {})

    def fn(values: dict[str, Tensor], targets: Targets) -> tuple[Tensor, Metrics]:
        losses, metrics = _surrogate(values["log_probs"], targets, epsilon, epsilon)
        if entropy:
            losses = losses - entropy * values["entropy"]
            metrics["entropy"] = _normalize(values["entropy"].detach(), targets, "token", 0)
        return _normalize(losses, targets, "token", 0), metrics

    return SequenceLoss(fn, per_token, over)
