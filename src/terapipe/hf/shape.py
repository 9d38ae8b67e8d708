"""What a planner wants to know of a Hugging Face model: a GPT of the same size, and how much work each layer is.

The planner's formulas (costs, memory) are those of a GPT. Any decoder costs about what the GPT costs that multiplies a
token by as many parameters and caches as many numbers for it, so that GPT stands for it.
"""

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from terapipe.extras import import_extra
from terapipe.hf.quantized import has_quantized, method_of, option_of, quantization_of, torchao_config
from terapipe.hf.structure import AFTER, ModelStructure, text_config
from terapipe.modeling.quantized import bytes_of, count_weights, is_quantized
from terapipe.planning.presets import FrozenLayers, GPTConfig

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")


def shape_of(model: PreTrainedModel, structure: ModelStructure) -> GPTConfig:
    """The GPT with as many parameters per layer and token; of a layer's experts, only those that a token visits count.

    - Parameters of a layer's matrices beyond a GPT's attention count as feed-forward: a gated one of width f becomes
      one of width 1.5 f.
    - Latent attention has fewer parameters than its heads would need. There the GPT gets heads that are together as
      wide as the hidden states, with keys and values of the right size, or the nearest to it (see ``_heads``). The
      difference in parameters goes to the feed-forward.
    - ``max_seq_len`` does not limit sequences: it is the number of rows of other parameters before the layers, each as
      wide as the hidden states. These are learned positions if there are any, else 1.

    Args:
        model: A decoder, which may be on the meta device.
        structure: Where its layers are.
    """
    config, layers = text_config(model.config), _layers(model, structure)
    hidden, vocab, tied = int(config.hidden_size), int(config.vocab_size), bool(structure.tied)
    heads, kv_heads, head_dim = _heads(config, hidden)
    attention = 2 * hidden * (heads + kv_heads) * (head_dim or hidden // heads)
    matrices = sum(_visited_parameters(layer, config, least_dims=2) for layer in layers) / len(layers)
    ffn = max(1, round((matrices - attention) / (2 * hidden)))
    ends = ((1 if tied else 2) * vocab + 2) * hidden  # embedding, head, and the norm before it
    inside = {p for layer in layers for p in layer.parameters()}
    outside = sum(count_weights(p) for p in model.parameters() if p not in inside)
    rows = max(1, (outside - ends) // hidden)
    windows = _windows(config, len(layers))
    return GPTConfig(len(layers), hidden, heads, kv_heads, ffn, vocab, rows, tied, head_dim, windows)


# Kinds of layers that see some tokens only, each with the name of their number in configurations.
LIMITS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


def _windows(config: Any, layers: int) -> tuple[int, ...]:
    """How many tokens each layer sees at most, 0 for all; empty if all layers see all. Without a list of kinds, a
    window is that of all layers."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    windows = tuple(_number(config, LIMITS[kind]) if kind in LIMITS else 0 for kind in kinds[:layers])
    return windows if any(windows) and len(windows) == layers else ()


def work_of(model: PreTrainedModel, structure: ModelStructure) -> tuple[list[float], float]:
    """The number of parameters by which a token is multiplied: in each layer, and after the layers."""
    config = text_config(model.config)
    layers = [_visited_parameters(layer, config) for layer in _layers(model, structure)]
    names = (name for name, p in model.named_parameters(remove_duplicate=False))
    after = (name for name in names if structure.place(name.rpartition(".")[0]) == AFTER)
    return layers, float(sum(count_weights(model.get_parameter(name)) for name in after))


def frozen_layers(model: PreTrainedModel, structure: ModelStructure) -> FrozenLayers | None:
    """What layers take in memory of which more than half of the weights are frozen; None for others.

    Args:
        model: A decoder; on the meta device, with the quantization that its weights will be read with.
        structure: Where its layers are.
    """
    inside = {p for layer in _layers(model, structure) for p in layer.parameters()}
    trained = sum(p.numel() for p in inside if p.requires_grad)
    if 2 * trained > sum(map(count_weights, inside)):
        return None
    layers, quantization = len(_layers(model, structure)), quantization_of(model)
    frozen = sum(_frozen_bytes(p, quantization) for p in inside if not p.requires_grad)
    ends = any(p.requires_grad for p in model.parameters() if p not in inside)
    return FrozenLayers(frozen / layers, trained / layers, ends, has_quantized(model))


def _frozen_bytes(parameter: Tensor, quantization: Any) -> float:
    """Bytes of a frozen parameter with its scales: as it is, or as a matrix on the meta device will be quantized."""
    if quantization is None or is_quantized(parameter) or not parameter.is_meta or parameter.ndim != 2:
        return float(bytes_of(parameter))
    if method_of(quantization) == "torchao":
        return float(_torchao_bytes(parameter, torchao_config(quantization)))
    if option_of(quantization, "load_in_8bit"):
        return parameter.numel() + 4.0 * parameter.shape[0]
    scales = 1 / 64 + 4 / (64 * 256) if option_of(quantization, "bnb_4bit_use_double_quant") else 4 / 64
    return parameter.numel() * (0.5 + scales)


def _torchao_bytes(parameter: Tensor, config: Any) -> int:
    """Bytes of a weight as torchao quantizes it, which is tried without numbers."""
    quantization: Any = import_extra("torchao.quantization", "quantized", "a model that torchao quantizes")
    outputs, inputs = parameter.shape
    layer = nn.Linear(inputs, outputs, bias=False, device="meta", dtype=parameter.dtype)
    config = copy.copy(config)
    config.set_inductor_config = False  # of the whole process
    quantization.quantize_(layer, config)
    return bytes_of(layer.weight)


def _layers(model: PreTrainedModel, structure: ModelStructure) -> list[nn.Module]:
    return list(model.get_submodule(structure.layers).children())


def _visited_parameters(layer: nn.Module, config: Any, *, least_dims: int = 0) -> float:
    """Parameters of a layer that a token uses: of experts, the share that it is routed to."""
    experts = next((n for key in EXPERTS if (n := getattr(config, key, 0))), 0)
    share = float(getattr(config, "num_experts_per_tok", experts) / experts) if experts else 1.0
    return sum(
        count_weights(p) * (share if ".experts." in f".{name}." else 1.0)
        for name, p in layer.named_parameters()
        if p.ndim >= least_dims
    )


def _heads(config: Any, hidden: int) -> tuple[int, int, int | None]:
    """Numbers of heads of queries, and of keys and values; and their size, if it is not hidden / heads.

    For latent attention: a GPT with hidden size h and a heads has heads of size h / a, so with b heads of keys and
    values it caches 2 h b / a numbers per token. We need 2 kv_heads * width: the pair (a, b) with b / a nearest to
    kv_heads * width / h, where a divides h and b divides a. Among equals, the numbers nearest to the model's own.
    """
    heads = _number(config, "num_attention_heads") or 1
    # SliceCache holds the inputs of attention, also for latent attention, which could keep less.
    latent = _number(config, "qk_nope_head_dim") + _number(config, "qk_rope_head_dim")
    width = latent or _number(config, "head_dim") or hidden // heads
    kv_heads = next((n for name in KV_HEADS if (n := _number(config, name))), heads)
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1  # whatever else the configuration of a Falcon says
    if not latent and heads % kv_heads == 0:
        return heads, kv_heads, None if heads * width == hidden else width
    ratio = min(1.0, kv_heads * width / hidden)
    heads, kv_heads = min(
        ((a, b) for a in _divisors(hidden) for b in _divisors(a)),
        key=lambda pair: (abs(pair[1] / pair[0] - ratio), abs(pair[1] - kv_heads), abs(pair[0] - heads)),
    )
    return heads, kv_heads, None


def _number(config: Any, name: str) -> int:
    """The largest, if layers differ."""
    value = getattr(config, name, None) or 0
    return int(max(value) if isinstance(value, Sequence) else value)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
