"""The shape of a Hugging Face decoder, as the planner is told it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from terapipe.hf import Decoder
from terapipe.planning.presets import PRESETS, GPTConfig
from tests.support.hf_models import TORCHAO, quantization_config, quantized, save_base

SIZES: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 101}
GATED = {**SIZES, "hidden_size": 64, "intermediate_size": 160, "num_key_value_heads": 2}


def decoder(kind: str, **options: Any) -> Decoder:
    return Decoder.from_config(CONFIG_MAPPING[kind](**options), backend="attention")


def numbers(made: Decoder) -> int:
    return sum(p.numel() for p in made.model.parameters())


@pytest.mark.parametrize(
    ("kind", "options", "shape"),
    [
        ("llama", GATED, GPTConfig(3, 64, 4, 2, 240, 101, 1, tied=False)),
        ("llama", {**GATED, "tie_word_embeddings": True}, GPTConfig(3, 64, 4, 2, 240, 101, 1)),
        ("gpt2", {**SIZES, "n_embd": 64, "n_positions": 50}, GPTConfig(3, 64, 4, 4, 256, 101, 50)),
        (
            "gpt_neox",
            {**SIZES, "hidden_size": 64, "intermediate_size": 200},
            GPTConfig(3, 64, 4, 4, 200, 101, 1, tied=False),
        ),
        # Heads that are together twice as wide as the hidden states.
        ("qwen3", {**GATED, "head_dim": 32}, GPTConfig(3, 64, 4, 2, 240, 101, 1, tied=False, head_dim=32)),
        ("falcon", {**SIZES, "hidden_size": 64}, GPTConfig(3, 64, 4, 1, 256, 101, 1)),
    ],
)
def test_a_dense_model_has_as_many_parameters(kind: str, options: dict[str, Any], shape: GPTConfig) -> None:
    made = decoder(kind, **options)
    assert made.shape == shape
    assert shape.parameters == pytest.approx(numbers(made), rel=0.05)


def test_heads_may_be_wider_than_the_hidden_states() -> None:
    """Attention was taken to be as wide as they are, of Qwen3-0.6B half of what it is."""
    shape = decoder("qwen3", **{**GATED, "head_dim": 64, "num_key_value_heads": 4}).shape
    assert (shape.attention_width, shape.num_kv_heads * shape.head_size) == (256, 256)


def test_experts_count_as_many_as_a_token_visits() -> None:
    made = decoder("mixtral", **GATED, num_local_experts=8, num_experts_per_tok=2)
    router = 8 * 64 / (2 * 64)
    assert made.shape.ffn == 2 * 240 + router
    assert made.shape.parameters < numbers(made) / 2


def test_a_large_model_is_never_made_real() -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "num_hidden_layers": 32}
    shape = decoder("llama", **sizes, num_attention_heads=32, num_key_value_heads=8).shape
    preset = PRESETS["llama3-8b"]
    assert shape == GPTConfig(32, 4096, 32, 8, preset.ffn, 128256, 1, tied=False)


@pytest.mark.parametrize("kind", ["nf4", "nf4-double", "int8", *TORCHAO])
def test_frozen_layers_are_counted_before_they_are_read(kind: str, tmp_path: Path) -> None:
    """As they will be quantized: the bytes of the model on the meta device are those of the one in memory, but for
    tables of 4 bits, which are the same for all layers."""
    from peft import LoraConfig

    adapter = LoraConfig(r=2, target_modules=["q_proj", "o_proj", "down_proj"])
    quantization = quantization_config(kind)
    base = save_base(tmp_path)
    real = Decoder(quantized(base, kind), backend="attention").planning_spec().frozen
    meta = (
        Decoder.from_pretrained(
            base, torch.float32, backend="attention", adapter=adapter, quantization_config=quantization
        )
        .planning_spec()
        .frozen
    )
    assert real is not None
    assert meta is not None
    assert (meta.trained, meta.quantized, meta.ends_trained) == (real.trained, True, False)
    tables = 7 * 4 * {"nf4": 16, "nf4-double": 16 + 256 + 1, "int8": 0}.get(kind, 0)
    assert meta.layer_bytes == pytest.approx(real.layer_bytes - tables, rel=0.02)


def test_a_model_of_which_all_is_trained_has_no_frozen_layers() -> None:
    assert decoder("llama", **GATED).planning_spec().frozen is None
