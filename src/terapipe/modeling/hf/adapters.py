"""Adapters by ``peft``: those of modules work in stages; those that change the sequence or the loss are refused."""

from typing import Any

from terapipe.modeling.hf.attention_backend import UnsupportedModelError

# Each changes what single modules do with each token: tried against the whole model in float64.
LOCAL = """BOFT C3A DELORA FOURIERFT GLORA GRALORA HIRA HRA IA3 LN_TUNING LOHA LOKR LORA MISS OFT RANDLORA ROAD SHIRA
    TRAINABLE_TOKENS VERA WAVEFT"""
# Options of a LoRA that look at the whole sequence, or at all adapters.
GLOBAL_OPTIONS = ("alora_invocation_tokens", "arrow_config")


def without_wrapper(model: Any) -> Any:
    """The model inside a ``PeftModel``, which has the adapters in its modules; any other as it is."""
    found = getattr(model, "peft_config", None)
    for adapter in found.values() if isinstance(found, dict) else ():
        _refuse(adapter)
    return model.get_base_model() if found and hasattr(model, "get_base_model") else model


def _refuse(adapter: Any) -> None:
    kind = str(getattr(adapter.peft_type, "value", adapter.peft_type))
    if getattr(adapter, "is_prompt_learning", False):
        raise UnsupportedModelError(
            f"peft's {kind} adds virtual tokens in front of the sequence, which stages know nothing of; take an "
            "adapter of modules, such as LORA"
        )
    if kind not in LOCAL.split():
        raise UnsupportedModelError(
            f"peft's {kind} is not known to be exact in stages; take one of {', '.join(LOCAL.split())}"
        )
    used = [option for option in GLOBAL_OPTIONS if getattr(adapter, option, None)]
    if used:
        raise UnsupportedModelError(f"peft's {kind} with {' and '.join(used)} is not exact in stages; leave that out")
