"""Models that stages would get wrong, refused with the reason and a remedy.

``Decoder`` calls these before and after it looks at a small copy; trainers call some of them earlier, so that a run
ends when its trainer is made and not at its first step. What is here can be read off the model itself. What must be
computed to be known (is this type exact?) is asked in verify/.

    refuse_unfit          what the Decoder takes at all: class, head, quantization, layerdrop, replaced forwards
    refuse_reentrant      gradient checkpointing, if it is on when the Decoder is made
    LateCheckpointing     the same, if it is switched on later: asked in each forward of a stage
    untrainable           dropout in attention, if the step is one in training mode
    without_wrapper       adapters of peft, and the model inside of them
"""

import copy
import re
import weakref
from collections.abc import Mapping
from types import MethodType
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.generation.utils import GenerationMixin

from terapipe.hf.backends import UnsupportedModelError
from terapipe.hf.quantized import refuse_inexact
from terapipe.hf.structure import is_classifier, text_config

FLAG = "gradient_checkpointing"
LAYERDROP = ("layerdrop", "decoder_layerdrop")
ATTENTION_DROPOUT = "^(local_|lsh_)?att[a-z_]*drop"  # not dropout after attention
OTHER_RANDOMNESS = "^(?!att|local_att|lsh_att|.*layerdrop|encoder|classifier|summary).*(drop|jitter)"
# Adapters of peft that change single modules, token by token: verified against the whole model in float64.
LOCAL_ADAPTERS = """BOFT C3A DELORA FOURIERFT GLORA GRALORA HIRA HRA IA3 LN_TUNING LOHA LOKR LORA MISS OFT RANDLORA ROAD
    SHIRA TRAINABLE_TOKENS VERA WAVEFT"""
# Options of LoRA that depend on the whole sequence or on all adapters.
GLOBAL_ADAPTER_OPTIONS = ("alora_invocation_tokens", "arrow_config")


def refuse_unfit(model: Any) -> None:
    """Refuses what no Decoder can be made of. Called before anything is made of the model.

    Args:
        model: Whatever the user passed, without a wrapper of peft.

    Raises:
        UnsupportedModelError: It is no PreTrainedModel, has no head, was compiled, is quantized in a way that is not
            exact in slices, drops layers at random, or one of its modules has a forward that is not a method.
    """
    _refuse_compiled(model)
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"a Decoder takes a PreTrainedModel of transformers, got {name}")
    _refuse_headless(model)
    refuse_inexact(model)
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
    """Refuses models without a head, such as ``AutoModel`` makes. In transformers, exactly those that predict tokens
    can generate."""
    if not isinstance(model, GenerationMixin) and not is_classifier(model):
        raise UnsupportedModelError(
            f"a Decoder takes a causal LM or a sequence classifier, which {type(model).__name__} is not; load it with "
            "AutoModelForCausalLM or AutoModelForSequenceClassification"
        )


def _and_config(model: PreTrainedModel) -> list[Any]:
    """Where a probability may stand: the configuration, and modules that copied it when they were made."""
    return [model.config.get_text_config(decoder=True), *model.modules()]


def _refuse_compiled(model: nn.Module) -> None:
    """Compiled code has the whole layer list in its graph, and cannot be cut. Stages compile their own layers."""
    for at, module in model.named_modules():
        if "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None):
            raise UnsupportedModelError(
                f"{at or type(model).__name__} was compiled; pass the model as it was before torch.compile, and "
                "compile the layers of stages with terapipe's compile_layers"
            )


def is_checkpointing(model: nn.Module) -> bool:
    """Whether transformers' activation checkpointing is on, under either of the names that it has had."""
    return any(getattr(module, FLAG, False) for module in model.modules())


def switch_checkpointing(model: Any, on: bool) -> None:
    """Switches transformers' activation checkpointing on or off.

    The old names of these methods are deprecated since transformers 5.23, and the new ones are not in 5.22.

    Args:
        model: A PreTrainedModel.
        on: Whether layers are to be checkpointed.
    """
    verb = "enable" if on else "disable"
    old, new = f"{FLAG}_{verb}", f"activation_checkpointing_{verb}"
    getattr(model, new if hasattr(model, new) else old)()


def refuse_reentrant(model: nn.Module) -> None:
    """Refuses reentrant checkpoints.

    They compute gradients of a layer's arguments only. A stage gives its first layer the hidden states by a hook, after
    the arguments are fixed, so they would get no gradient, and all stages before would learn nothing.

    Args:
        model: With checkpointing on or off.
    """
    for module in model.modules():
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        reentrant = checkpoint is not None and getattr(checkpoint, "keywords", {}).get("use_reentrant", True)
        if getattr(module, FLAG, False) and reentrant:
            raise UnsupportedModelError(
                f"gradient checkpointing of {type(model).__name__} is reentrant, which stages cannot be; enable it "
                'with gradient_checkpointing_kwargs={"use_reentrant": False}'
            )


class LateCheckpointing:
    """Refuses gradient checkpointing that was enabled, in a stage or its model, after the stage was made.

    It was not verified then, and enabling it in the model does not reach the stage.

    Args:
        source: The user's model. It is not kept alive by this.
        stage: The stage's copy of it.
    """

    def __init__(self, source: nn.Module, stage: nn.Module) -> None:
        # Transformers sets the flag in all modules that have it, so looking at one module per model is enough.
        flagged = (next((m for m in model.modules() if hasattr(m, FLAG)), None) for model in (source, stage))
        self._enabled = any(getattr(module, FLAG, False) for module in stage.modules())
        self._watched = [weakref.ref(module) for module in flagged if module is not None]

    def refuse(self) -> None:
        """Called in every forward of a stage: looks at two flags."""
        if not self._enabled and any(getattr(module(), FLAG, False) for module in self._watched):
            raise UnsupportedModelError(
                "gradient checkpointing was switched on after the pipeline was made; switch it on before, or make a "
                'plan with recompute="full"'
            )


# Randomness


def untrainable(model: PreTrainedModel, dropouts: Mapping[str, nn.Dropout]) -> str:
    """Why a step in training mode would not be exact, with the remedy; empty if it is.

    Dropout elsewhere acts on tokens one by one, so slices drop other ones but with the same distribution. In attention
    it acts on pairs of tokens, in kernels that have no place for it here.

    Args:
        model: Whose configuration is read.
        dropouts: Those of ``find_dropouts``, whose probabilities may have been changed since the model was made. Found
            once by the caller, as every step asks.
    """
    numbers = _numbers(text_config(model.config)) | {
        name.rpartition(".")[2]: module.p for name, module in dropouts.items() if module.p
    }
    for name, value in numbers.items():
        if value and re.search(ATTENTION_DROPOUT, name):
            return f"dropout in attention is not supported, got {value} ({name}); set it to 0, or call eval()"
    return ""


def with_dropout(config: PretrainedConfig, probability: float = 0.1) -> PretrainedConfig:
    """A copy of the configuration with all dropout and jitter that is not refused, to verify recomputation.

    Args:
        config: Of a small copy, in which all of it is 0.
        probability: What to set it to.
    """
    config = copy.deepcopy(config)
    for part in (config, *(part for part in vars(config).values() if isinstance(part, PretrainedConfig))):
        for name in _numbers(part):
            if re.search(OTHER_RANDOMNESS, name) and hasattr(part, name):
                setattr(part, name, probability)
    return config


def _numbers(config: PretrainedConfig) -> dict[str, float]:
    """The numbers in a configuration and its sub-configurations, by name."""
    numbers: dict[str, float] = {}
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            numbers |= _numbers(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name] = value
    return numbers


def find_dropouts(model: nn.Module) -> dict[str, nn.Dropout]:
    """All dropout modules by name; dropout by function is in the configuration only."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Dropout)}


# Adapters of peft


def without_wrapper(model: Any) -> Any:
    """The model inside a ``PeftModel``, with the adapters in its modules; any other model as it is.

    The wrapper's own forward only adds virtual tokens, for adapters that are refused here.

    Args:
        model: A PreTrainedModel, a ``PeftModel``, or anything else, which ``refuse_unfit`` is for.
    """
    adapters = getattr(model, "peft_config", None)
    for adapter in adapters.values() if isinstance(adapters, dict) else ():
        _refuse_adapter(adapter)
    return model.get_base_model() if adapters and hasattr(model, "get_base_model") else model


def _refuse_adapter(adapter: Any) -> None:
    """Refuses kinds and options of adapters that do more than change single modules token by token."""
    kind = str(getattr(adapter.peft_type, "value", adapter.peft_type))
    if getattr(adapter, "is_prompt_learning", False):
        raise UnsupportedModelError(
            f"peft's {kind} adds virtual tokens in front of the sequence, which stages do not have; take an "
            "adapter of modules, such as LORA"
        )
    if kind not in LOCAL_ADAPTERS.split():
        raise UnsupportedModelError(
            f"peft's {kind} is not known to be exact in stages; take one of {', '.join(LOCAL_ADAPTERS.split())}"
        )
    used = [option for option in GLOBAL_ADAPTER_OPTIONS if getattr(adapter, option, None)]
    if used:
        raise UnsupportedModelError(f"peft's {kind} with {' and '.join(used)} is not exact in stages; leave that out")
