"""Small copies of Hugging Face models: the features of the original, with few and narrow layers.

A copy is built and run in a moment, so a model can be verified before it is loaded.

    config of the original --_shallow--> few layers, one of each kind --_narrow--> small sizes --> config of the copy

What a copy has in another form than the original, and what follows for the proof:

    weights                  random, with a spread that makes attention far from uniform
    dtype                    float64; float32 if the model knows no float64. Rounding proves nothing
    sizes                    at least one layer of each kind, proportions as they are; windows and chunks of 8
                             tokens, so that sequences of 29 go beyond them
    RoPE by length           changes beyond 16 tokens, and is tested with 29, 23 and 11, one after the other
    scales of attention      for wide heads: those for narrow ones, which would otherwise see everything alike
    token ids                within a vocabulary of 97
    dropout and jitter       none, in training mode. Dropout in attention and layerdrop are refused in training mode;
                             other dropout draws anew for each slice
    auxiliary losses         none; the routers' loss is a check of its own, with a coefficient of 1
    quantized weights        none; changes.py tries the layers of the model itself
    kernels                  of attention sdpa (the attention backend brings its own), of experts eager
    images and sound         none: text only
    adapters, frozen weights none
    changes by hand          none: modules, parametrizations and hooks that were added later are checked in changes.py
    gradient checkpointing   none; a check of its own where it is switched on
"""

import copy
import re
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from terapipe.hf.weights import model_maker, read_config

Scope = Mapping[str, Any]  # the original's values, also by common names, and those of enclosing configurations
Rule = Callable[[Any, Scope], Any]

LAYERS, HIDDEN, HEADS, POSITIONS, VOCAB = 4, 64, 4, 256, 97
HEAD = HIDDEN // HEADS
ROPE = 8  # in latent attention, the part of a head with rotary positions
SPREAD = 0.15  # least standard deviation of matrices, so attention is far from uniform
NOISE = 0.1  # standard deviation added to constant weights, such as those of norms

# The rules below are tables from a rule to the names of values that it is for: types call the same thing by many names.
# fmt: off
# Upper bounds. What is missing, None or smaller stays as it is. Periods of layers are at most the copy's layers.
AT_MOST = {
    POSITIONS: (
        "max_position_embeddings", "n_ctx", "max_seq_len", "max_source_positions", "max_target_positions", "rel_extent",
    ),
    VOCAB: ("encoder_hash_byte_group_vocab", "ngram_vocab_size_base", "position_bias_max_distance"),
    64: (
        "intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "n_inner", "d_inner",
        "dff", "dim_ff", "feed_forward_size", "dense_intermediate_size", "prefix_dense_intermediate_size",
        "intermediate_size_mlp",
    ),
    32: (
        "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
        "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size", "router_hidden_size", "moe_latent_size",
        "q_lora_rank", "o_lora_rank", "mem_len",
    ),
    16: (
        "kv_lora_rank", "hidden_size_per_layer_input", "block_multiple_of", "ffn_round_up_to_multiple_of",
        "axial_pos_shape",
    ),
    8: (
        "sliding_window", "attention_chunk_size", "window_size", "local_attention", "keep_window_size", "floor_scale",
        "chunk_size", "mamba_chunk_size", "block_size", "local_attn_chunk_length", "lsh_attn_chunk_length",
        "index_topk", "indexer_budget", "heavily_compressed_attention", "mamba_d_state", "ssm_state_size", "state_size",
        "mamba_dt_rank", "time_step_rank", "linear_key_head_dim", "linear_head_dim", "adapter_rank", "laurel_rank",
        "gated_norm_rank", "hc_lowrank",
    ),
    4: (
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "index_block_size",
        "indexer_compress_ratio", "attn_layer_period", "expert_layer_period", "decoder_sparse_step",
        "moe_layer_interval",
    ),
    3: ("attn_layer_offset", "expert_layer_offset"),
    2: (
        "num_experts_per_tok", "moe_k", "moe_top_k", "moe_topk", "top_k_experts", "n_group", "num_expert_group",
        "zero_expert_num", "n_groups", "mamba_n_groups", "o_groups", "index_n_heads", "indexer_n_heads",
        "index_topk_blocks", "split_ngram_parts",
    ),
    1: ("topk_group", "num_nextn_predict_layers", "num_mtp_layers"),
}
# Values that scale with the number of heads, with their size, and with the width of the model.
HEAD_COUNTS = (
    "num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "num_encoder_attention_heads",
    "num_decoder_attention_heads", "attention_heads", "swa_num_attention_heads", "num_query_groups", "linear_num_heads",
    "linear_num_value_heads",
)
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads")
HEAD_SIZES = ("head_dim", "attention_head_dim", "attention_head_size", "kv_channels", "d_head", "dim_head")
HEAD_PARTS = (
    "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim", "swa_head_dim", "index_head_dim",
    "indexer_head_dim", "rotary_dim",
)
WIDTHS = (
    "hidden_size", "d_model", "embedding_dim", "embedding_size", "input_embedding_size", "output_embedding_size",
    "lru_width", "word_embed_proj_dim", "attention_hidden_size", "ple_embed_dim", "axial_pos_embds_dim",
)
MAMBA_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
MAMBA_SIZES = ("mamba_d_head", "mamba_head_dim")
# Values about layers: their count, lists of their numbers, how many come first, how many come last.
DEPTHS = (
    "num_hidden_layers", "encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers", "num_layers",
    "num_blocks", "n_layer", "n_layers",
)
LISTED = (
    "mlp_only_layers", "moe_layers", "attn_layer_indices", "full_attn_idxs", "hybrid_layer_ids",
    "cross_attention_layers",
)
FIRST = ("first_k_dense_replace", "max_window_layers", "num_dense_layers", "moe_layer_start_index")
LAST = ("num_kv_shared_layers",)
# Not copied: values about the original's weights, and values that follow from others.
UNSET = (
    "quantization_config", "dtype", "torch_dtype", "transformers_version", "num_layers_per_stack", "mamba_headdim",
)
# fmt: on

# Values that the default configurations of these types need for a model to be built, or to have attention.
_INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048}
LACKING: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_theta": 1e4, "mrope_section": [24, 20, 20]}},
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"text_config": {**_INDEXER, "indexer_compress_ratio": 4}},
    "qwen4_exp_text": {**_INDEXER, "indexer_compress_ratio": 4},
    "xmod": {"default_language": "en_XX"},
}


def causal_lm_types() -> list[str]:
    """All model types for which transformers has a causal LM, sorted: what ``terapipe verify --all`` asks of."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def default_config(model_type: str) -> PretrainedConfig:
    """The default configuration of a type, as a decoder (for BERT and similar).

    Args:
        model_type: One of ``causal_lm_types``.
    """
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"transformers has no causal language model of type {model_type!r}; see causal_lm_types()")
    config = CONFIG_MAPPING[model_type](**LACKING.get(model_type, {}))
    for part in (config, getattr(config, "text_config", None)):
        for name in ("is_decoder", "causal"):
            if hasattr(part, name):
                setattr(part, name, True)  # otherwise BERT and similar models see later tokens
    return config


def config_of(model: str) -> PretrainedConfig:
    """The configuration of a small copy of a model.

    Args:
        model: The path of a model's folder or of its config.json; else a model type, which has its default
            configuration.
    """
    path = Path(model)
    if path.exists():
        return shrink_config(read_config(path))
    if model not in causal_lm_types():
        raise ValueError(f"{model!r} is no file or folder here, and no causal-LM type of the installed transformers")
    return shrink_config(default_config(model))


def small_model(
    config: PretrainedConfig,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    kind: type[PreTrainedModel] | None = None,
) -> PreTrainedModel:
    """A model with random weights, in training mode.

    Args:
        config: A small configuration, which is copied.
        dtype: Of the weights.
        seed: Of the random weights.
        kind: The class of the model; by default the configuration's causal LM.
    """
    make = model_maker(kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # The default implementation of experts does not run in float64.
        model = make(copy.deepcopy(config), dtype=dtype, experts_implementation="eager").train()
        for parameter in model.parameters():
            _spread(parameter.data)
    assert isinstance(model, PreTrainedModel)
    return model


def _spread(weight: Tensor) -> None:
    """Scales up random weights, and adds noise to constant ones, such as norms.

    With a usual initialization, scores of attention are all about 0, and every token sees the mean of those before it.
    A mask that is wrong in one place would then change nothing that could be told from rounding.
    """
    std = weight.std().item() if weight.dim() > 1 else 0.0
    if 0 < std < SPREAD:
        weight.mul_(SPREAD / std)
    else:
        weight.add_(torch.randn_like(weight), alpha=NOISE)


def shrink_config(config: PretrainedConfig, *, layers: int | None = None) -> PretrainedConfig:
    """A small copy of a model's configuration: the same architecture and features, few and narrow layers.

    Args:
        config: The model's configuration, which stays as it is.
        layers: The least number of layers, by default 4. The copy has at least one of each kind that the model has.
    """
    if layers is not None and layers < 1:
        raise ValueError(f"a model has at least 1 layer, got layers={layers}")
    return _shrink(config, {}, layers or LAYERS)


def _shrink(config: PretrainedConfig, enclosing: Scope, layers: int) -> PretrainedConfig:
    """The copy of a configuration or sub-configuration, given the values of those around it.

    ``scope`` is what rules look sizes up in: the values under the type's own names (``n_head``) and under those that
    transformers has for all types (``num_attention_heads``), also of the configurations around this one.
    """
    common = {own: name for name, own in config.attribute_map.items()}
    values = {name: value for name, value in config.to_dict().items() if name not in UNSET}
    scope = {**enclosing, **values, **{common[name]: value for name, value in values.items() if name in common}}
    small = {name: _narrow(name, value, scope, common) for name, value in _shallow(values, layers).items()}
    parts = {name: part for name, part in vars(config).items() if isinstance(part, PretrainedConfig)}
    return type(config).from_dict(small | {name: _shrink(part, scope, layers) for name, part in parts.items()})


def _shallow(values: dict[str, Any], layers: int) -> dict[str, Any]:
    """All values, for few layers that are as wide as before.

    A Gemma 3 of 26 layers, whose every sixth sees all tokens, and of which 4 are wanted:

        layer_types   s s s s s f s s s s s f ...      _layers_to_keep: 0, 1, 5, 11
                      s s       f           f          the copy's: s s f f; num_hidden_layers 4
    """
    counts = [values[name] for name in DEPTHS if values.get(name)]
    depth = counts[0] if counts else len(values.get("layers_block_type", ()))
    numbers = _layers_to_keep(values, depth, layers)
    return {name: for_layers(name, value, numbers, depth) for name, value in values.items()}


def _layers_to_keep(values: dict[str, Any], depth: int, layers: int) -> list[int]:
    """Numbers of the layers to keep, sorted: the first of each kind, then the second of each, and so on.

    Two layers are of one kind if all values agree for a model that has only one or the other. Numbers repeat if the
    model has fewer layers than the copy.
    """
    seen: Counter[str] = Counter()
    ranked = []
    for layer in range(depth):
        kind = repr([for_layers(name, value, [layer], depth) for name, value in values.items()])
        ranked.append((seen[kind], layer))
        seen[kind] += 1
    return sorted(islice(cycle(layer for _, layer in sorted(ranked)), max(layers, len(seen))))


def for_layers(name: str, value: Any, numbers: list[int], depth: int) -> Any:
    """A value of a configuration for a model that has only some of its layers.

    Stages use it too, for the configuration of their own layers (own_layers.py). With layers 2 and 3 of 6:

        num_hidden_layers       6                    ->  2            DEPTHS
        layer_types             [a, b, a, b, a, b]   ->  [a, b]       a list with one item for each layer
        mlp_only_layers         [0, 3]               ->  [1]          LISTED: numbers of layers
        first_k_dense_replace   3                    ->  1            FIRST: how many come first
        hidden_size             64                   ->  64           not about layers

    Args:
        name: Of the value.
        value: In the whole model.
        numbers: Of the layers that are left.
        depth: How many layers the whole model has.
    """
    if name == "per_layer_config":
        return {new: value[old] for new, layer in enumerate(numbers) for old in value if int(old) == layer}
    if name in LISTED and value:
        return [new for new, layer in enumerate(numbers) if layer in value]
    if isinstance(value, list) and len(value) == depth and re.search("layer|types|pattern|size", name):
        return [value[layer] for layer in numbers]
    if name in DEPTHS and value:
        return len(numbers)
    if name in FIRST and value:
        return sum(layer < value for layer in numbers)
    if name in LAST and value:
        return sum(layer >= depth - value for layer in numbers)
    return value


def _narrow(name: str, value: Any, scope: Scope, common: Mapping[str, str]) -> Any:
    """A value for narrow layers.

    A number is mapped by the rule for its name, or for its common name in transformers (``n_head`` is
    ``num_attention_heads``). Dicts and lists are mapped item by item; a dict's own values are in scope for its items.
    Names without a rule, and everything that is not a number, stay as they are.
    """
    if isinstance(value, dict):
        inner = {**scope, **value}
        return {key: _narrow(str(key), item, inner, common) for key, item in value.items()}
    if name in LIST_RULES and value is not None:
        return LIST_RULES[name](value, scope)
    if isinstance(value, list):
        return [_narrow(name, item, scope, common) for item in value]
    rule = _rule(name) or _rule(common.get(name, ""))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return rule(value, scope) if rule and is_number else value


def _rule(name: str) -> Rule | None:
    """The rule for a name: one of its own, else the first whose pattern it matches."""
    return RULES.get(name) or next((rule for pattern, rule in PATTERNS.items() if re.search(pattern, name)), None)


def _scale(part: int, whole: int, small: int) -> int:
    """``small * part / whole`` in steps of 8, and equal to ``small`` only if ``part`` equals ``whole``."""
    size = max(8, 8 * round(part * small / whole / 8))
    return size if size != small or part == whole else size + (8 if part > whole else -8)


def _width(value: int, scope: Scope) -> int:
    """Widths that equal the hidden size stay equal to it, others stay different, in about the same proportion."""
    return _scale(value, scope.get("hidden_size") or value, HIDDEN)


def _head_size(value: int, scope: Scope) -> int:
    """Heads that are together as wide as the hidden states stay so; others stay wider or narrower. Latent attention's
    heads are scaled by their rotary part."""
    if scope.get("qk_rope_head_dim"):
        return value * ROPE // int(scope["qk_rope_head_dim"])
    heads, hidden = scope.get("num_attention_heads"), scope.get("hidden_size")
    return _scale(value * heads, hidden, HEAD) if heads and hidden else HEAD


def _part_of_head(value: int, scope: Scope) -> int:
    """Parts of a head (rotary dimensions, say) keep their share of it."""
    if scope.get("qk_rope_head_dim"):
        return _head_size(value, scope)
    head = scope.get("head_dim") or scope["hidden_size"] // scope["num_attention_heads"]
    return value * _head_size(head, scope) // int(head)


def _kv_heads(value: int, scope: Scope) -> int:
    """As many as heads of queries if they were as many; else 1 stays 1, and more become 2: grouped queries stay so."""
    return HEADS if value >= (scope.get("num_attention_heads") or value) else min(value, 2)


def _mamba_width(value: int, scope: Scope) -> int:
    return int(HIDDEN * scope.get("mamba_expand", scope.get("expand", 2)))


def _mamba_heads(value: int, scope: Scope) -> int:
    return _mamba_width(value, scope) // HEAD


def _original_positions(value: int, scope: Scope) -> int:
    """The length before scaling keeps its proportion to the longest one."""
    return max(1, value * POSITIONS // max(POSITIONS, int(scope.get("max_position_embeddings") or 0)))


def _sections(value: list[int], scope: Scope) -> list[int]:
    """Parts of the rotary dimensions for time, height and width: about equal, and together a small head's."""
    total = _part_of_head(sum(value), scope)
    return [total // len(value) + (i < total % len(value)) for i in range(len(value))]


def _at_most(size: int) -> Rule:
    """A rule that leaves smaller values as they are."""
    return lambda value, scope: min(value, size)


def _exactly(size: int) -> Rule:
    return lambda value, scope: size


RULES: dict[str, Rule] = {
    **{name: _at_most(size) for size, names in AT_MOST.items() for name in names},
    **dict.fromkeys(HEAD_COUNTS, _exactly(HEADS)),
    **dict.fromkeys(KV_HEADS, _kv_heads),
    **dict.fromkeys(HEAD_SIZES, _head_size),
    **dict.fromkeys(HEAD_PARTS, _part_of_head),
    **dict.fromkeys(WIDTHS, _width),
    **dict.fromkeys(MAMBA_HEADS, _mamba_heads),
    **dict.fromkeys(MAMBA_SIZES, _exactly(HEAD)),
    "hidden_size_global": _exactly(HIDDEN),
    "mamba_d_ssm": _mamba_width,
    "num_heads": lambda value, scope: _mamba_heads(value, scope) if "expand" in scope else HEADS,
    "num_attention_heads_per_layer": lambda value, scope: HEADS if value == scope["num_attention_heads"] else 2 * HEADS,
    "linear_num_key_heads": lambda value, scope: HEADS if value == scope["linear_num_value_heads"] else 2,
    "linear_value_head_dim": lambda value, scope: _scale(value, scope["linear_key_head_dim"], 8),
    "original_max_position_embeddings": _original_positions,
    # Scales for wide heads would make attention uniform.
    "query_pre_attn_scalar": _exactly(HEAD),
    "attention_multiplier": lambda value, scope: max(value, HEAD**-0.5),
    "qk_dim_factor": lambda value, scope: max(value, 1.0),  # xLSTM rounds smaller products up, but not everywhere
}
# Rules for whole lists; other lists are mapped item by item.
LIST_RULES: dict[str, Rule] = {
    "short_factor": lambda value, scope: value[: _part_of_head(len(value), scope)],
    "long_factor": lambda value, scope: value[: _part_of_head(len(value), scope)],
    "mrope_section": _sections,
}
# Rules by pattern: nothing random, no auxiliary loss, token ids within the vocabulary.
PATTERNS: dict[str, Rule] = {
    "drop|jitter|aux_loss|z_loss|loss_weight": lambda value, scope: type(value)(0),
    "vocab_size": _at_most(VOCAB),
    "_token_id$|_index$": _at_most(VOCAB - 1),
}
