"""Objectives: what a ``Pipeline`` is trained for, by ``Pipeline(model, plan, loss_fn=...)``.

A ``loss_fn`` is a function ``(logits, targets) -> sum over the tokens of a slice``, a ``HiddenLoss`` or a
``SequenceLoss``. The functions here make some of each::

    pipe = tp.Pipeline(model, plan, loss_fn=tp.losses.dpo(beta=0.1))
    reference = pipe.log_probs(ids, labels)                               before training
    pipe.step(ids, {"labels": labels, "reference": reference})

Targets are cut along tokens as the batch is. A ``SequenceLoss`` may also have entries with one number for each
sequence.
"""

from terapipe.losses.objective import HiddenLoss, SequenceLoss
from terapipe.losses.sequences import (
    classification,
    dpo,
    grpo,
    interleave,
    kto,
    last_tokens,
    orpo,
    ppo_clip,
    reward_pairs,
    sequence_mean,
    simpo,
)
from terapipe.losses.tokens import cross_entropy, distillation, token_log_probs

__all__ = [
    "HiddenLoss",
    "SequenceLoss",
    "classification",
    "cross_entropy",
    "distillation",
    "dpo",
    "grpo",
    "interleave",
    "kto",
    "last_tokens",
    "orpo",
    "ppo_clip",
    "reward_pairs",
    "sequence_mean",
    "simpo",
    "token_log_probs",
]
