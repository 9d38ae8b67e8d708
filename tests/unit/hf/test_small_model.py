"""Small copies of Hugging Face models: that they run, and that they keep what makes a model special."""

import re
from typing import Any

import pytest
import torch
from transformers import (
    BambaConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3nTextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from terapipe.hf.verify import small_model as shrink
from terapipe.hf.verify.small_model import causal_lm_types, default_config, shrink_config, small_model
from tests.support.hf_models import small_config

FAMILIES = [
    *["bamba", "bert", "bloom", "deepseek_v3", "falcon", "gemma3", "gemma4_text", "gpt2", "gpt_oss", "jamba", "llama4"],
    *["mixtral", "mpt", "opt", "qwen3_next"],
]


def tokens(config: PretrainedConfig) -> torch.Tensor:
    return torch.randint(config.vocab_size, (2, 29), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_small_model_of_any_family_runs_forward_and_backward(model_type: str) -> None:
    config = small_config(model_type)
    model = small_model(config)
    assert sum(p.numel() for p in model.parameters()) < 1e6
    logits = model(input_ids=tokens(config)).logits
    assert logits.shape == (2, 29, config.vocab_size)
    logits.logsumexp(-1).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_all_types_are_listed() -> None:
    types = causal_lm_types()
    assert types == sorted(types)
    assert set(FAMILIES) < set(types)
    with pytest.raises(ValueError, match="no causal language model of type 'vit'"):
        small_config("vit")


@pytest.mark.parametrize(("heads", "kv_heads", "small"), [(32, 32, 4), (32, 8, 2), (64, 2, 2), (32, 1, 1)])
def test_how_heads_share_keys_is_kept(heads: int, kv_heads: int, small: int) -> None:
    config = shrink_config(LlamaConfig(num_attention_heads=heads, num_key_value_heads=kv_heads))
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, small)


def test_heads_fill_the_hidden_size_only_if_they_did() -> None:
    sizes = [(4096, 128, 16), (2560, 128, 24), (2048, 256, 64), (4608, 128, 8)]
    for hidden, head, small in sizes:
        config = shrink_config(Qwen3Config(hidden_size=hidden, num_attention_heads=32, head_dim=head))
        assert (config.hidden_size, config.head_dim) == (64, small)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_stay_tied(tied: bool) -> None:
    model = small_model(shrink_config(LlamaConfig(tie_word_embeddings=tied)))
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied


def test_windows_softcaps_and_kinds_of_layers_are_kept() -> None:
    config = shrink_config(Gemma2Config(final_logit_softcapping=20.0, attn_logit_softcapping=40.0, sliding_window=4096))
    assert config.layer_types == ["sliding_attention", "full_attention"] * 2
    assert (config.sliding_window, config.final_logit_softcapping, config.attn_logit_softcapping) == (8, 20.0, 40.0)


def test_every_kind_of_layer_is_there() -> None:
    shared = shrink_config(Gemma3nTextConfig())  # five layers a period; sparse at first; the last 15 of 35 share keys
    assert shared.layer_types == ["sliding_attention", "full_attention"] * 3
    assert shared.activation_sparsity_pattern == [0.95] * 2 + [0.0] * 4
    assert shared.num_kv_shared_layers == 2
    hybrid = shrink_config(BambaConfig(attn_layer_indices=[9, 18, 27]))
    assert hybrid.attn_layer_indices == [2, 3]
    windowed = shrink_config(Qwen2Config(num_hidden_layers=28, use_sliding_window=True, max_window_layers=21))
    assert windowed.layer_types == ["full_attention"] * 2 + ["sliding_attention"] * 2
    assert windowed.max_window_layers == 2


def test_layers_may_be_asked_for() -> None:
    assert shrink_config(GPT2Config(n_layer=2), layers=6).n_layer == 6
    assert shrink_config(LlamaConfig(), layers=1).num_hidden_layers == 1
    assert shrink_config(Gemma2Config(), layers=1).layer_types == ["sliding_attention", "full_attention"]
    with pytest.raises(ValueError, match="at least 1 layer, got layers=0"):
        shrink_config(LlamaConfig(), layers=0)


ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: str(rope["rope_type"]))
def test_rotations_are_kept(rope: dict[str, Any]) -> None:
    config = LlamaConfig(max_position_embeddings=131072, rope_parameters={"rope_theta": 5e5, **rope})
    small = shrink_config(config)
    expected = {**config.rope_parameters, "original_max_position_embeddings": 16}
    assert small.max_position_embeddings == 256
    assert small.rope_parameters == {name: expected[name] for name in config.rope_parameters}
    assert small_model(small)(input_ids=tokens(small)).logits.isfinite().all()


def test_factors_of_rotations_fit_the_small_heads() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    factors = {"short_factor": [1.0] * 48, "long_factor": [float(i) for i in range(1, 49)]}
    config = Phi3Config(
        num_attention_heads=24,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters={**rope, **factors},
    )
    small = shrink_config(config)
    assert small.rope_parameters["long_factor"] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert small.original_max_position_embeddings == 8
    assert small_model(small)(input_ids=tokens(small)).logits.isfinite().all()


def test_a_configuration_of_ones_own_keeps_its_features() -> None:
    config = DeepseekV3Config(
        first_k_dense_replace=1,
        q_lora_rank=None,
        v_head_dim=192,
        eos_token_id=[100, 5],
        attention_dropout=0.1,
        dtype="bfloat16",
        quantization_config={"quant_method": "fp8"},
        attn_implementation="sdpa",
    )
    before = config.to_dict()
    small = shrink_config(config)
    assert config.to_dict() == before
    assert (small.qk_nope_head_dim, small.qk_rope_head_dim, small.v_head_dim, small.q_lora_rank) == (16, 8, 24, None)
    assert (small.n_routed_experts, small.num_experts_per_tok, small.n_group, small.topk_group) == (4, 2, 2, 1)
    assert (small.first_k_dense_replace, small.num_hidden_layers, small.eos_token_id) == (1, 4, [96, 5])
    assert (small.attention_dropout, small.dtype, small._attn_implementation) == (0.0, None, None)
    assert not hasattr(small, "quantization_config")
    model = small_model(small)
    assert [type(layer.mlp).__name__ for layer in model.model.layers] == ["DeepseekV3MLP"] + ["DeepseekV3MoE"] * 3


def test_other_features_of_ones_own() -> None:
    granite = shrink_config(GraniteConfig(attention_multiplier=1 / 128, residual_multiplier=0.22, logits_scaling=16.0))
    assert (granite.attention_multiplier, granite.residual_multiplier, granite.logits_scaling) == (0.25, 0.22, 16.0)
    opt = shrink_config(OPTConfig(hidden_size=1024, word_embed_proj_dim=512, do_layer_norm_before=False))
    assert (opt.word_embed_proj_dim, opt.do_layer_norm_before) == (32, False)
    tiny = LlamaConfig(hidden_size=32, num_attention_heads=2, vocab_size=50, intermediate_size=48)
    assert (shrink_config(tiny).vocab_size, shrink_config(tiny).intermediate_size) == (50, 48)


def test_a_part_of_a_configuration_is_shrunken_too() -> None:
    whole = shrink_config(Gemma3Config())
    assert (whole.text_config.hidden_size, whole.vision_config.hidden_size) == (64, 64)
    assert whole.text_config.sliding_window == 8
    assert small_config("gemma3").model_type == "gemma3_text"
    assert small_config("dbrx").attn_config.kv_n_heads == 1


def test_a_small_model_depends_on_its_seed_alone() -> None:
    config = small_config("gpt2")
    torch.manual_seed(3)
    state = torch.get_rng_state()
    one, same, other = small_model(config), small_model(config), small_model(config, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    pairs = zip(one.parameters(), same.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(p, q) and not torch.equal(p, r) for p, q, r in pairs)


def test_training_and_evaluation_agree_and_attention_is_not_uniform() -> None:
    config = small_config("gpt2")  # by default it drops a tenth of everything
    model = small_model(config)
    model.set_attn_implementation("eager")
    trained = model.train()(input_ids=tokens(config), output_attentions=True)
    assert torch.equal(trained.logits, model.eval()(input_ids=tokens(config)).logits)
    last_rows = torch.stack(trained.attentions)[..., -1, :]
    assert last_rows.max(-1).values.mean() > 4 / 29  # uniform attention would give each token one of 29 parts


def test_the_dtype_is_that_asked_for() -> None:
    model = small_model(small_config("qwen3_moe"), dtype=torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.dtype for p in small_model(small_config("qwen3_moe")).parameters()} == {torch.float64}


def flat(values: dict[str, Any]) -> dict[str, Any]:
    values = {str(k): v for k, v in values.items()}
    parts = {k: flat(v) for k, v in values.items() if isinstance(v, dict)}
    return {k: v for k, v in values.items() if k not in parts} | {
        k: v for part in parts.values() for k, v in part.items()
    }


# What the docstring of small_model.py says beside the tables of names there: dtype, sizes, RoPE, scales, token ids,
# random numbers, auxiliary losses, quantized weights, and kernels.
SAID = (
    "dtype|layer|pattern|block|vocab_size|^(head_dim|hidden_size)$|original_max_position_embeddings|"
    "^(query_pre_attn_scalar|.*_multiplier)$|_token_id$|_index$|drop|jitter|aux_loss|z_loss|loss_weight|"
    "quantization_config|attn_implementation|experts_implementation"
)


@pytest.mark.usefixtures("quiet_models")
@pytest.mark.parametrize("name", ["gemma3_text", "deepseek_v3", "gpt2", "jamba", "phimoe", "mpt", "opt", "qwen3_next"])
def test_all_that_a_small_copy_has_otherwise_is_listed(name: str) -> None:
    """Dropout was set to zero without a word."""
    config = default_config(name)
    before, after = flat(config.to_dict()), flat(shrink_config(config).to_dict())
    layers = [*shrink.DEPTHS, *shrink.LISTED, *shrink.FIRST, *shrink.LAST]
    sizes = {*config.attribute_map, *config.attribute_map.values(), *layers}
    for key in before:
        known = key in shrink.RULES or key in shrink.LIST_RULES or key in sizes
        known = known or re.search(SAID, key) is not None
        assert before[key] == after.get(key) or known, key
