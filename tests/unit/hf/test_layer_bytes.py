"""What layers of Hugging Face models keep for their backward, in plans and in dry runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import terapipe
from terapipe.cli import main
from terapipe.hf import Decoder
from terapipe.planning.memory import ShapeMemory

pytestmark = pytest.mark.usefixtures("quiet_models")
SIZES = {"hidden_size": 256, "intermediate_size": 896, "num_hidden_layers": 3, "vocab_size": 512}


def decoder(kind: str, **named: Any) -> Decoder:
    config = AutoConfig.for_model(
        kind, **SIZES, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192, **named
    )
    return Decoder.from_config(config, dtype=torch.bfloat16)


@pytest.mark.exhaustive_ids("^(qwen3|gemma3_text-(light|block|full)|llama-(block|full))")
@pytest.mark.parametrize("recompute", ["none", "light", "block", "full"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_bytes_of_a_dry_run_are_the_planners(kind: str, recompute: Any) -> None:
    """Without recomputation a step of Llama needed 14 % more than planned, one of Gemma 3 58 %: gated MLPs, and norms
    in float32."""
    model = decoder(kind)
    options: dict[str, Any] = {"batch_size": 1, "seq_len": 8192, "num_slices": 6, "order": "terapipe"}
    result = terapipe.plan(
        model, "dgx-a100:1", pp=1, dp=1, tp=1, offload="none", optimizer="sgd", recompute=recompute, **options
    )
    run = terapipe.dry_run(model, result)
    assert run.predicted is not None
    assert run.peak == pytest.approx(run.predicted, rel=0.06)
    assert all(p.is_meta for p in model.model.parameters()), "the model is as it was"
    assert terapipe.PlanResult.from_json(result.to_json()).peak_bytes == result.peak_bytes


def test_more_than_a_gpt_of_the_same_size() -> None:
    spec = decoder("llama").planning_spec()
    assert spec.layer_bytes is not None
    kept, plain = spec.layer_bytes(2, False), ShapeMemory(spec.config, 2)
    assert kept is not None
    assert 1.2 < kept.none / float(plain._layer(1, 1)) < 2
    assert kept.light < 0.7 * kept.none
    wide, cast = spec.layer_bytes(4, False), spec.layer_bytes(2, True)
    assert wide is not None
    assert cast is not None
    assert kept.none < cast.none < wide.none


def test_layers_that_ask_for_numbers_are_counted_as_a_gpts() -> None:
    """Routers of experts choose by values, which fake tensors do not have."""
    config = AutoConfig.for_model("mixtral", **SIZES, num_attention_heads=4, num_key_value_heads=2)
    spec = Decoder.from_config(config).planning_spec()
    assert spec.layer_bytes is not None
    assert spec.layer_bytes(4, False) is None


def test_the_command_runs_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ended in a traceback: copies of models without weights were made of fake tensors."""
    AutoConfig.for_model("llama", **SIZES, num_attention_heads=4, num_key_value_heads=2).save_pretrained(tmp_path)
    command = ["plan", "--model", str(tmp_path), "--cluster", "dgx-a100:1", "--batch-size", "1", "--seq-len", "512"]
    assert main([*command, "--pp", "2", "--dp", "1", "--tp", "1", "--dry-run"]) == 0
    assert "Dry run of rank" in capsys.readouterr().out
