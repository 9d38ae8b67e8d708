"""What a called model returns, made from values of each token that the pipeline computed.

Three kinds of models are called: a causal LM with labels or without, one that TRL gave a fused head, which returns
values of tokens, and a sequence classifier, which returns the scores at one token of each row.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import ModelOutput

from terapipe.hf.attention_backend import UnsupportedModelError
from terapipe.losses.objective import Targets
from terapipe.losses.tokens import labels_of
from terapipe.modeling.stage import IGNORE

TESTED = "tested with transformers 5.22, accelerate 1.15 and TRL 1.16"
HEAD = "score"  # of transformers' sequence classifiers


@dataclass
class PipelineOutput(ModelOutput):
    """What transformers' causal LMs return, and what those return that TRL gave a fused head."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None


# TRL's fused head


def token_scores(logits: Tensor, targets: Targets, *, temperature: float, wanted: Sequence[str]) -> dict[str, Tensor]:
    """Fields of TRL's fused head for the tokens of a slice, (size, length) each: 0 where the label is -100.

    ``log_sum_sq_probs``, ``mean_logits`` and ``is_top1`` have no gradient. Numbers are float32 whatever the model is,
    as in TRL, whose trainers rely on it: a filter by entropies compares them with a quantile of them in float32.

    Args:
        logits: Of the slice, (size, length, vocabulary).
        targets: The labels.
        temperature: What logits are divided by.
        wanted: Names of fields beside ``log_probs``, which is always there.
    """
    labels = labels_of(targets)
    counts = labels != IGNORE
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = scaled if temperature == 1.0 else scaled / temperature
    log_probs = torch.log_softmax(scaled, -1)
    fields = {"log_probs": log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]}
    if "entropy" in wanted:
        fields["entropy"] = -(log_probs.exp() * log_probs).sum(-1)
    with torch.no_grad():
        if "log_sum_sq_probs" in wanted:
            fields["log_sum_sq_probs"] = (2 * log_probs).logsumexp(-1)
        if "mean_logits" in wanted:
            fields["mean_logits"] = scaled.mean(-1)
        if "is_top1" in wanted:
            fields["is_top1"] = scaled.argmax(-1) == labels
    values = {name: value.float() if value.is_floating_point() else value for name, value in fields.items()}
    return {name: value.masked_fill(~counts, 0) for name, value in values.items()}


def fused_head(forward: Callable[..., Any]) -> Callable[[Tensor, Targets], dict[str, Tensor]]:
    """What the head computes that TRL's ``add_fused_lm_head`` put into a model's forward. Its temperature and fields
    are in the variables of that function only."""
    variables = inspect.getclosurevars(getattr(forward, "__func__", forward)).nonlocals
    if not {"temperature", "outputs", "cast_lm_head_to_fp32"} <= variables.keys():
        raise ValueError(
            "the model was called with fused_lm_head=True, but its forward is not that of TRL's add_fused_lm_head; "
            f"{TESTED}"
        )
    if variables["cast_lm_head_to_fp32"]:
        raise ValueError("cast_lm_head_to_fp32=True is not supported; leave it off")
    return partial(token_scores, temperature=float(variables["temperature"]), wanted=tuple(variables["outputs"]))


# Sequence classifiers. Which token's scores count, and which loss, the model's own forward says. It is called with
# everything before its head left out: the layers compute nothing, and the head returns the pipeline's scores.


class _Answer(nn.Module):
    """A module that returns the same thing whatever it is called with."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.answer


def classify(model: PreTrainedModel, scores: Tensor, inputs: dict[str, Any]) -> ModelOutput:
    """What the model returns for ``inputs``, which its forward was called with, if its head makes these ``scores``,
    (rows, tokens, classes)."""
    backbone = model.base_model_prefix
    if backbone not in model._modules:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no module {backbone!r} before its head {HEAD!r}; compute the loss of "
            "terapipe.Pipeline with losses.classification()"
        )
    shell = copy.copy(model)
    answers = {backbone: _Answer(BaseModelOutputWithPast(last_hidden_state=scores)), HEAD: _Answer(scores)}  # type: ignore[arg-type]
    shell.__dict__ = {**model.__dict__, "_modules": {**model._modules, **answers}}
    named = {name: value for name, value in inputs.items() if name not in ("use_cache", "return_dict")}
    output: ModelOutput = type(model).forward(shell, **named)
    return output
