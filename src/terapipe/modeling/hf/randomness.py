"""What a model draws at random in training, what of it slices cannot have, and losses of whole batches, likewise."""

import copy
import re
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from terapipe.modeling.hf.structure import text_config

ATTENTION_DROPOUT = "^(local_|lsh_)?att[a-z_]*drop"  # not what comes after attention
# All else that a decoder draws.
OTHER = "^(?!att|local_att|lsh_att|.*layerdrop|encoder|classifier|summary).*(drop|jitter)"


def untrainable(model: PreTrainedModel) -> str:
    """Why a step in training mode would not be the model's own, with the remedy; or nothing."""
    numbers = {**_numbers(text_config(model.config)), **_dropouts(model)}
    for name, value in numbers.items():
        if value and re.search(ATTENTION_DROPOUT, name):
            return f"dropout in attention is not supported, got {value} ({name}); set it to 0, or call eval()"
    return ""


def drawing(config: PretrainedConfig, probability: float = 0.1) -> PretrainedConfig:
    """The same configuration with all dropout and jitter that slices may have."""
    config = copy.deepcopy(config)
    for part in (config, *(part for part in vars(config).values() if isinstance(part, PretrainedConfig))):
        for name in _numbers(part):
            if re.search(OTHER, name) and hasattr(part, name):
                setattr(part, name, probability)
    return config


def auxiliary_loss(config: PretrainedConfig) -> str:
    """Why a model with auxiliary losses is refused, with the remedy; or nothing."""
    if getattr(text_config(config), "output_router_logits", False):
        return "auxiliary losses are functions of whole batches; set output_router_logits to False to leave them out"
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
