"""What a Hugging Face model may have been made into that stages would get wrong: refused by name."""

import weakref
from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.generation.utils import GenerationMixin

from terapipe.modeling.hf.attention_backend import UnsupportedModelError

FLAG = "gradient_checkpointing"
LAYERDROP = ("layerdrop", "decoder_layerdrop")


def refuse_unfit(model: Any) -> None:
    """Before anything is made of the model."""
    _refuse_compiled(model)
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"a Decoder takes a PreTrainedModel of transformers, got {name}")
    _refuse_headless(model)
    if getattr(model, "hf_quantizer", None) or getattr(model.config, "quantization_config", None):
        raise UnsupportedModelError(
            f"{name} has quantized weights, which are not supported; load it without quantization, and save it again "
            "or remove quantization_config from its configuration"
        )
    drop = max([0.0, *(getattr(m, key, 0.0) or 0.0 for m in _and_config(model) for key in LAYERDROP)])
    if drop:
        raise UnsupportedModelError(
            f"{name} leaves out whole layers at random (layerdrop {drop}), each slice others; set layerdrop to 0 in "
            "its configuration before the model is made"
        )
    for at, module in model.named_modules():
        if not isinstance(module.__dict__.get("forward", None), MethodType | None):
            raise UnsupportedModelError(
                f"the forward of {at or name} was replaced, by torch.compile, accelerate or the like; pass the model "
                "as transformers makes it"
            )


def _refuse_headless(model: PreTrainedModel) -> None:
    """In transformers, what predicts tokens can also generate them, and no other model can."""
    if not isinstance(model, GenerationMixin):
        raise UnsupportedModelError(
            f"a Decoder takes a causal LM, which {type(model).__name__} is not; load it with AutoModelForCausalLM"
        )


def _and_config(model: PreTrainedModel) -> list[Any]:
    return [model.config.get_text_config(decoder=True), *model.modules()]


def _refuse_compiled(model: nn.Module) -> None:
    for at, module in model.named_modules():
        if "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None):
            raise UnsupportedModelError(
                f"{at or type(model).__name__} was compiled; pass the model as it was before torch.compile, and "
                "compile the layers of stages with terapipe's compile_layers"
            )


def refuse_reentrant(model: nn.Module) -> None:
    """A checkpoint that is reentrant sees a layer's arguments alone, and so no gradient for what a stage received."""
    for module in model.modules():
        again = getattr(module, "_gradient_checkpointing_func", None)
        if (
            getattr(module, FLAG, False)
            and again is not None
            and getattr(again, "keywords", {}).get("use_reentrant", True)
        ):
            raise UnsupportedModelError(
                f"gradient checkpointing of {type(model).__name__} is reentrant, which stages cannot be; enable it "
                'with gradient_checkpointing_kwargs={"use_reentrant": False}'
            )


class LateCheckpointing:
    """Notices gradient checkpointing that is switched on, in a stage or in the model that it was made of, after the
    stage was made: it was not proved then, and the model's own does not reach its stages."""

    def __init__(self, source: nn.Module, stage: nn.Module) -> None:
        # Transformers sets it in all modules that know of it, so one of each model tells, quickly.
        knowing = (next((m for m in model.modules() if hasattr(m, FLAG)), None) for model in (source, stage))
        self._known = any(getattr(module, FLAG, False) for module in stage.modules())
        self._watched = [weakref.ref(module) for module in knowing if module is not None]

    def refuse(self) -> None:
        if not self._known and any(getattr(module(), FLAG, False) for module in self._watched):
            raise UnsupportedModelError(
                "gradient checkpointing was switched on after the pipeline was made; switch it on before, or call "
                "Decoder.recompute_layers()"
            )
