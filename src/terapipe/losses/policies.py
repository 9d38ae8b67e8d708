"""Policy-gradient objectives: GRPO and PPO's clipped surrogate.

Targets are a dict with ``labels``, in which prompts and padding are -100; ``advantages``, (batch,) or (batch, seq_len);
and optional log-probabilities per token, as ``Pipeline.log_probs`` returns them: ``old``, of the policy that made the
completions (by default the one that is trained), and ``reference``.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from terapipe.losses.objective import Over, SequenceLoss, Targets, entry
from terapipe.losses.sequences import counted, sequence_average
from terapipe.losses.tokens import token_entropies, token_log_probs

Metrics = dict[str, Tensor]
# What the sum over tokens is divided by: each sequence's own tokens, all tokens, or sequences times a given length.
Normalization = Literal["sequence", "token", "constant"]


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
    mask = counted(targets)
    return losses, {"clip_ratio": (is_clipped & mask).sum() / mask.sum().clamp(min=1)}


def _normalized(losses: Tensor, targets: Targets, by: Normalization, length: int) -> Tensor:
    mask = counted(targets)
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
    """Group-relative policy optimization (Shao et al., 2024). ``beta`` weighs the divergence from the reference policy.
    ``normalize``: by "sequence" as in GRPO, by "token" (BNPO), or by "constant" ``max_length`` (Dr. GRPO). With
    ``correct_kl`` the divergence is weighted by the ratio of the new to the old policy (TRL's
    ``use_bias_correction_kl``, which is on by default there)."""
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
            metrics["kl"] = _normalized(divergence.detach(), targets, "token", 0)
        return _normalized(losses, targets, normalize, max_length), metrics

    return SequenceLoss(fn, over=over)


def ppo_clip(*, epsilon: float = 0.2, entropy: float = 0.0, over: Over = "microbatch") -> SequenceLoss:
    """PPO's clipped surrogate (Schulman et al., 2017) as a mean over tokens, minus ``entropy`` times their entropy."""

    def per_token(logits: Tensor, targets: Targets) -> dict[str, Tensor]:
        found = {"log_probs": token_log_probs(logits, targets)}
        return found | ({"entropy": token_entropies(logits)} if entropy else {})

    def fn(values: dict[str, Tensor], targets: Targets) -> tuple[Tensor, Metrics]:
        losses, metrics = _surrogate(values["log_probs"], targets, epsilon, epsilon)
        if entropy:
            losses = losses - entropy * values["entropy"]
            metrics["entropy"] = _normalized(values["entropy"].detach(), targets, "token", 0)
        return _normalized(losses, targets, "token", 0), metrics

    return SequenceLoss(fn, per_token, over)
