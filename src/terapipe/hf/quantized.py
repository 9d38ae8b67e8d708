"""Quantized models: which are exact in slices, and how their layers are copied and moved.

bitsandbytes replaces linear layers by its own, whose frozen weights are whole numbers with scales (``Linear4bit``,
``Linear8bitLt``). They multiply each token alone, so a model that is exact in slices stays so::

    4 bits (NF4, FP4)      out = x W, where W is made of the whole numbers in each call       each token alone
    8 bits, threshold 0    x is rounded to 8 bits by the largest value of its own token       each token alone
    8 bits, threshold 6    columns with a value over 6 *in any token of the call* are         slices find other columns:
                           multiplied without rounding                                        refused

torchao keeps linear layers, and replaces their weights by tensor classes::

    weights only (int8, float8, 1 to 8 bits)   out = x W, where W is made in each call        each token alone
    activations, too, dynamic or static        x is rounded, which has no gradient: that of
                                               x through the base is zero or worse            refused
    packed 4 bits                              a kernel that has no backward                  refused

``check_changes`` (verify/changes.py) tries the layers of the model itself, whole and in parts. What is here is what it
could not see: a threshold that no value of a short check reaches.

**Copies.** Stages have modules of their own and share the model's tensors. A layer of bitsandbytes has tensors that are
no parameters, and moves them in place, or takes them from its parameter in its first call: a copy made before that call
would be left without. ``settle_scales`` puts them where all copies find them, ``share_scales`` lists them for
``copy.deepcopy``, ``move_quantized`` gives a stage on another device its own. Weights of torchao are parameters as any,
but ``Module.to`` would move them in place, for all that share them.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel, TorchAoConfig
from transformers.quantizers.base import get_keys_to_not_convert

from terapipe.hf.backends import UnsupportedModelError
from terapipe.modeling.quantized import is_composed

PACKAGE = "bitsandbytes."
EXACT_8_BIT = "BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)"
PACKED = "packing_format_for_cpu"  # of a quant_state whose weights were repacked for inference
REPACKS = "support_avx512bf16_for_cpu"  # of a layer that does so in its first call without gradients

WEIGHT_ONLY = ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig")  # configurations of torchao
CLASSES = ("Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor")  # of weights that these make
ROUNDS_INPUT = ("act_quant_kwargs", "activation_quantization", "act_pre_scale")  # of a weight that rounds its input
EXACT_TORCHAO = "TorchAoConfig(Int8WeightOnlyConfig()) or Float8WeightOnlyConfig()"


def quantization_of(model: nn.Module) -> Any:
    """The quantization that a model's configuration names, a dictionary or an object of transformers; else None.

    Args:
        model: Quantized already, or on the meta device and to be quantized when its weights are read.
    """
    return getattr(getattr(model, "config", None), "quantization_config", None)


def option_of(quantization: Any, name: str, default: Any = None) -> Any:
    """One entry of a quantization.

    Args:
        quantization: As ``quantization_of`` returns it.
        name: Of the entry.
        default: If it is not there.
    """
    if isinstance(quantization, dict):
        return quantization.get(name, default)
    return getattr(quantization, name, default)


def method_of(quantization: Any) -> str:
    """The package that a quantization is made by, as transformers calls it.

    Args:
        quantization: As ``quantization_of`` returns it.
    """
    method = option_of(quantization, "quant_method", "unknown")
    return str(getattr(method, "value", method))


def refuse_inexact(model: PreTrainedModel) -> None:
    """Refuses quantizations that are not exact in slices, or of which nothing is known.

    Args:
        model: Any; one without quantization passes.

    Raises:
        UnsupportedModelError: Named with what to load the model with instead.
    """
    quantization, name = quantization_of(model), type(model).__name__
    _refuse_classes(model)
    if quantization is None:
        if getattr(model, "hf_quantizer", None) or next(bitsandbytes_layers(model), None):
            raise UnsupportedModelError(
                f"{name} has quantized weights, but its configuration does not say which; load it with a "
                "quantization_config"
            )
        return
    method = method_of(quantization)
    if method == "torchao":
        _refuse_inexact_torchao(quantization, name)
        return
    if method != "bitsandbytes":
        raise UnsupportedModelError(
            f"{name} has quantized weights of {method}, which are not known to be exact in slices; take bitsandbytes, "
            f"in 4 bits or by {EXACT_8_BIT}, or torchao by {EXACT_TORCHAO}"
        )
    if option_of(quantization, "load_in_8bit") or option_of(quantization, "_load_in_8bit"):
        _refuse_inexact_8_bit(quantization, name)
    else:
        _refuse_inexact_4_bit(quantization, name)


def _refuse_inexact_8_bit(quantization: Any, name: str) -> None:
    threshold = option_of(quantization, "llm_int8_threshold", 6.0)
    if threshold:
        raise UnsupportedModelError(
            f"{name} has quantized weights in 8 bits with llm_int8_threshold={threshold}: columns that are multiplied "
            f"without rounding are chosen over all tokens of a call, and slices would choose others; load it with "
            f"{EXACT_8_BIT}"
        )
    if option_of(quantization, "llm_int8_has_fp16_weight"):
        raise UnsupportedModelError(
            f"{name} has llm_int8_has_fp16_weight=True, which quantizes trained weights in each call; load it with "
            f"{EXACT_8_BIT}"
        )


def _refuse_inexact_4_bit(quantization: Any, name: str) -> None:
    storage = _dtype(option_of(quantization, "bnb_4bit_quant_storage", torch.uint8))
    if storage != torch.uint8:
        raise UnsupportedModelError(
            f"{name} has quantized weights in 4 bits that are stored as {storage}, and would be taken for plain ones; "
            "load it with bnb_4bit_quant_storage=torch.uint8"
        )
    if _dtype(option_of(quantization, "bnb_4bit_compute_dtype", torch.float32)) == torch.float16:
        raise UnsupportedModelError(
            f"{name} computes in float16 (bnb_4bit_compute_dtype), whose small gradients are lost without a loss "
            "scale, which a pipeline does not have; load it with bnb_4bit_compute_dtype=torch.bfloat16"
        )


def _refuse_inexact_torchao(quantization: Any, name: str) -> None:
    if option_of(quantization, "include_input_output_embeddings"):
        raise UnsupportedModelError(
            f"{name} has quantized embeddings (include_input_output_embeddings), which are not known in a pipeline; "
            "load it without them"
        )
    for kind in _torchao_kinds(option_of(quantization, "quant_type")):
        if kind not in WEIGHT_ONLY:
            raise UnsupportedModelError(f"{name} has quantized weights of torchao by {_why_not(kind)}")


def _why_not(kind: str) -> str:
    """Why a configuration of torchao is refused, and what to take."""
    reason = "which is not known to be exact in slices"
    if "Activation" in kind:
        reason = "which rounds activations, too, and so has no gradients of what is below"
    elif "Int4" in kind:
        reason = "whose packed products have no gradients"
    return f"{kind}, {reason}; load it with {EXACT_TORCHAO}, or in 4 bits of bitsandbytes"


def torchao_config(quantization: Any) -> Any:
    """torchao's own configuration in a quantization of transformers, as an object; of an ``FqnToConfig`` its
    ``_default``, or else the first that is not None.

    Args:
        quantization: As ``quantization_of`` returns it, with the method torchao.
    """
    if isinstance(quantization, dict):
        quantization = TorchAoConfig.from_dict(quantization)  # type: ignore[no-untyped-call]
    config = quantization.quant_type
    of_modules = getattr(config, "fqn_to_config", None)
    if of_modules:
        return of_modules.get("_default") or next(one for one in of_modules.values() if one is not None)
    return config


def _torchao_kinds(quant_type: Any) -> Iterator[str]:
    """The names of the classes in a configuration of torchao, an object or a dictionary of a file: its own, or those
    that it has for single modules (FqnToConfig)."""
    if isinstance(quant_type, dict) and "_type" not in quant_type:
        quant_type = quant_type.get("default")  # as transformers writes it
    values = quant_type.get("_data", {}) if isinstance(quant_type, dict) else vars(quant_type or object)
    inner = values.get("fqn_to_config")
    if inner is None:
        yield quant_type["_type"] if isinstance(quant_type, dict) else type(quant_type).__name__
        return
    for one in inner.values():
        if one is not None:
            yield from _torchao_kinds(one)


def _is_of_other_tensors(parameter: Any) -> bool:
    return is_traceable_wrapper_subclass(parameter) and not isinstance(parameter, DTensor)


def _refuse_classes(model: PreTrainedModel) -> None:
    """Refuses tensor classes among the weights but those that are known to be exact, whatever made them."""
    for path, module in model.named_modules():
        parameters: dict[str, Any] = module._parameters
        for key, p in parameters.items():
            if not _is_of_other_tensors(p):
                continue
            where, kind = f"{path}.{key}".strip("."), type(p).__name__
            rounds = next((option for option in ROUNDS_INPUT if getattr(p, option, None) is not None), "")
            if kind not in CLASSES or not is_composed(p):
                reason = f"is of the class {kind}, which is not known to be exact in slices"
            elif rounds:
                reason = f"rounds activations, too ({rounds}), and so has no gradients of what is below"
            elif type(module) is not nn.Linear or key != "weight" or p.requires_grad:
                reason = "is quantized, which is known for frozen weights of linear layers only"
            else:
                continue
            raise UnsupportedModelError(
                f"{where} of {type(model).__name__} {reason}; quantize it by {EXACT_TORCHAO}, or leave it as it is"
            )


def skip_modules(quantization: Any, model: PreTrainedModel, names: list[str]) -> Any:
    """A copy of a quantization that leaves further modules as they are: those of other stages, which are not read.

    Args:
        quantization: A dictionary, or an object of transformers.
        model: The whole model. By default transformers leaves its head, and looks for it among the parameters, of which
            a stage's part has not all; so the head is named here.
        names: Of the modules.
    """
    quantization = copy.deepcopy(quantization)
    entry = "modules_to_not_convert" if method_of(quantization) == "torchao" else "llm_int8_skip_modules"
    skipped = option_of(quantization, entry)
    skipped = get_keys_to_not_convert(model) if skipped is None else skipped
    if isinstance(quantization, dict):
        quantization[entry] = [*skipped, *names]
    else:
        setattr(quantization, entry, [*skipped, *names])
    return quantization


def _dtype(value: Any) -> Any:
    """A dtype, which files have by its name."""
    return getattr(torch, value.removeprefix("torch."), value) if isinstance(value, str) else value


def has_quantized(model: nn.Module) -> bool:
    """Whether a model has quantized layers, or will have them when its weights are read.

    Args:
        model: Any; of transformers, or a part of such a model.
    """
    layers = (bitsandbytes_layers(model), torchao_layers(model))
    return quantization_of(model) is not None or any(next(kind, None) is not None for kind in layers)


def torchao_layers(model: nn.Module) -> Iterator[Any]:
    """The layers of a model with weights of torchao.

    Args:
        model: Any.
    """
    for module in model.modules():
        weight: Tensor | None = module._parameters.get("weight")
        if weight is not None and is_composed(weight):
            yield module


def bitsandbytes_layers(model: nn.Module) -> Iterator[Any]:
    """The layers of bitsandbytes in a model.

    Args:
        model: Any.
    """
    for module in model.modules():
        if any(kind.__module__.startswith(PACKAGE) for kind in type(module).__mro__):
            yield module


def _is_4_bit(layer: Any) -> bool:
    return hasattr(layer, "quant_storage")


# Copies


def settle_scales(model: nn.Module) -> None:
    """Puts the scales of each quantized layer both where the layer computes with them and on its parameter.

    An 8-bit layer takes them off its parameter in its first call; copies of the layer, which share the parameter, would
    then quantize whole numbers once more. A 4-bit parameter that was moved by torch has lost them, and the layer has
    them. Results stay as they are.

    Args:
        model: Changed in place; calling it twice changes nothing.
    """
    for layer in bitsandbytes_layers(model):
        weight = layer.weight
        if weight.is_meta:
            continue
        if _is_4_bit(layer):
            if getattr(weight, "quant_state", None) is None:
                weight.quant_state = layer.quant_state
            layer.quant_state = weight.quant_state
            continue
        if getattr(weight, "CB", None) is not None:
            layer.init_8bit_state()
        if layer.state.CB is not None:
            weight.data, weight.SCB = layer.state.CB, layer.state.SCB


def share_scales(model: nn.Module) -> dict[int, Any]:
    """What ``copy.deepcopy`` is to share beside parameters, for its ``memo``.

    Args:
        model: One that ``settle_scales`` has seen.
    """
    shared: dict[int, Any] = {}
    for layer in bitsandbytes_layers(model):
        if _is_4_bit(layer):
            shared[id(layer.quant_state)] = layer.quant_state
        else:
            shared |= {id(x): x for x in (layer.state.CB, layer.state.SCB) if x is not None}
    return shared


def move_quantized(model: nn.Module, device: torch.device) -> None:
    """Moves quantized weights and their scales to a device, on which copies of the model stay apart from it.

    ``Module.to`` would do it in place: the scales of the model itself would be moved, and those of 8 bits lost.

    Args:
        model: A copy, changed in place.
        device: Where to. Weights that are there already stay shared.
    """
    for layer in torchao_layers(model):
        if layer.weight.device != device and not layer.weight.is_meta:
            layer._parameters["weight"] = nn.Parameter(layer.weight.to(device), requires_grad=False)
    for layer in bitsandbytes_layers(model):
        weight: Any = layer._parameters.get("weight")
        if weight is None or weight.is_meta or weight.device == device:
            continue
        clone = copy.copy(weight) if _is_4_bit(layer) else weight
        if _is_4_bit(layer):
            clone.quant_state = copy.deepcopy(weight.quant_state)
        moved = clone.to(device)
        layer._parameters["weight"] = moved
        if _is_4_bit(layer):
            layer.quant_state = moved.quant_state
        else:
            layer.state.CB = layer.state.SCB = None
    settle_scales(model)


# Inference on the CPU


def keep_unpacked(model: nn.Module) -> None:
    """Tells 4-bit layers not to repack their weights for inference on the CPU.

    A layer in evaluation mode would do so in its first call without gradients, for good: scales are rounded to
    bfloat16, and calls after that, also in training mode, have no gradient.

    Args:
        model: Changed in place.
    """
    for layer in bitsandbytes_layers(model):
        if getattr(layer, REPACKS, False):
            setattr(layer, REPACKS, False)


def why_packed(model: nn.Module) -> str:
    """Why a step would have no gradients, empty if it would.

    Args:
        model: Whose parameters stages share.
    """
    for name, parameter in model.named_parameters():
        if getattr(getattr(parameter, "quant_state", None), PACKED, False):
            return (
                f"{name} was repacked for inference on the CPU, by a call of the model itself in evaluation mode, "
                "after which bitsandbytes computes no gradients; load the model again, and call it through the pipeline"
            )
    return ""
