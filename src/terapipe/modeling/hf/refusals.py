"""Features of a model that no small copy proves, or that slices cannot have: why they are refused."""

import re
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from terapipe.modeling.hf.anatomy import text_config

ATTENTION_DROPOUT = "att[a-z_]*drop"
LAYERDROP = "^(decoder_)?layerdrop$"


def unprovable(config: PretrainedConfig) -> str:
    """Why a model of this configuration is refused whatever its small copy does, with the remedy; or nothing."""
    if getattr(config, "quantization_config", None):
        return "its weights are quantized; save it dequantized"
    if getattr(text_config(config), "output_router_logits", False):
        return "auxiliary losses are functions of whole batches; set output_router_logits to False to leave them out"
    return ""


def untrainable(model: PreTrainedModel) -> str:
    """Why a step in training mode would not be the model's own, with the remedy; or nothing."""
    numbers = {**_numbers(text_config(model.config)), **_dropouts(model)}
    for name, value in numbers.items():
        if value and re.search(ATTENTION_DROPOUT, name):
            return f"dropout in attention is not supported, got {value} ({name}); set it to 0, or call eval()"
        if value and re.search(LAYERDROP, name):
            return (
                f"slices of a sequence would skip different layers, got {value} ({name}); set it to 0, or call eval()"
            )
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
