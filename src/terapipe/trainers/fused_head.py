"""TRL's fused LM head: values for each token that its trainers compute losses and metrics from."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from terapipe.losses.objective import Targets
from terapipe.losses.tokens import labels_of
from terapipe.modeling.stage import IGNORE

TESTED = "tested with transformers 5.22, accelerate 1.15 and TRL 1.16"


def scores(logits: Tensor, targets: Targets, *, temperature: float, wanted: Sequence[str]) -> dict[str, Tensor]:
    """The wanted fields, (size, length) each: 0 where the label is -100. ``log_sum_sq_probs``, ``mean_logits`` and
    ``is_top1`` have no gradient. Numbers are float32 whatever the model is, as in TRL, whose trainers rely on it: a
    filter by entropies compares them with a quantile of them in float32."""
    labels = labels_of(targets)
    counts = labels != IGNORE
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = scaled if temperature == 1.0 else scaled / temperature
    log_probs = torch.log_softmax(scaled, -1)
    found = {"log_probs": log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]}
    if "entropy" in wanted:
        found["entropy"] = -(log_probs.exp() * log_probs).sum(-1)
    with torch.no_grad():
        if "log_sum_sq_probs" in wanted:
            found["log_sum_sq_probs"] = (2 * log_probs).logsumexp(-1)
        if "mean_logits" in wanted:
            found["mean_logits"] = scaled.mean(-1)
        if "is_top1" in wanted:
            found["is_top1"] = scaled.argmax(-1) == labels
    values = {name: value.float() if value.is_floating_point() else value for name, value in found.items()}
    return {name: value.masked_fill(~counts, 0) for name, value in values.items()}


def fused_head(forward: Callable[..., Any]) -> Callable[[Tensor, Targets], dict[str, Tensor]]:
    """What the head computes that TRL's ``add_fused_lm_head`` put into a model's forward. Its temperature and fields
    are in the variables of that function only."""
    known = inspect.getclosurevars(getattr(forward, "__func__", forward)).nonlocals
    if not {"temperature", "outputs", "cast_lm_head_to_fp32"} <= known.keys():
        raise ValueError(
            "the model was called with fused_lm_head=True, but its forward is not that of TRL's add_fused_lm_head; "
            f"{TESTED}"
        )
    if known["cast_lm_head_to_fp32"]:
        raise ValueError("cast_lm_head_to_fp32=True is not supported; leave it off")
    return partial(scores, temperature=float(known["temperature"]), wanted=tuple(known["outputs"]))
