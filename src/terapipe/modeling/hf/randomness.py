"""What of a model's training cannot be cut into slices: some of its randomness, and losses of whole batches."""

import re
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from terapipe.modeling.hf.anatomy import text_config

ATTENTION_DROPOUT = "att[a-z_]*drop"
LAYERDROP = "^(decoder_)?layerdrop$"
AUXILIARY_LOSS = "aux_loss_coef|z_loss"


def untrainable(model: PreTrainedModel) -> str:
    """Why a step in training mode would not be the model's own, with the remedy; nothing if it would be."""
    config = text_config(model.config)
    numbers = {**_numbers(config), **_dropouts(model)}
    for name, value in numbers.items():
        got = f"got {value} ({name})"
        if value and re.search(ATTENTION_DROPOUT, name):
            return f"dropout in attention is not supported, {got}; set it to 0, or call eval()"
        if value and re.search(LAYERDROP, name):
            return f"slices of a sequence would skip different layers, {got}; set it to 0, or call eval()"
        if value and re.search(AUXILIARY_LOSS, name) and getattr(config, "output_router_logits", False):
            return f"auxiliary losses of whole batches are left out, {got}; set output_router_logits=False"
    return ""


def _numbers(config: PretrainedConfig) -> dict[str, float]:
    """By name, those of its parts too."""
    found: dict[str, float] = {}
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            found |= _numbers(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = value
    return found


def _dropouts(model: nn.Module) -> dict[str, Any]:
    modules = ((name, m.p) for name, m in model.named_modules() if isinstance(m, nn.Dropout))
    return {name.rpartition(".")[2]: p for name, p in modules if p}
