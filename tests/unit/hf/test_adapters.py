"""Adapters of models that are read stage by stage."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from terapipe import Pipeline
from terapipe.hf import Decoder, UnsupportedModelError, save_adapter
from terapipe.modeling.quantized import is_composed
from tests.support.hf_models import (
    FLOAT32_ROUNDING,
    plain_gradients,
    quantization_config,
    quantized,
    save_base,
    stages_here,
    step_gradients,
    two_stages,
    worst_difference,
)

peft: Any = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("quiet_models")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


def lora(**options: Any) -> Any:
    return peft.LoraConfig(**{"r": 2, "target_modules": "all-linear", **options})


def read(folder: Path, kind: str = "", seed: int = 3) -> Decoder:
    options: dict[str, Any] = {"adapter": lora(), "seed": seed, "backend": "attention"}
    if kind:
        options["quantization_config"] = quantization_config(kind)
    return Decoder.from_pretrained(folder, torch.float32, **options)


def trained(pipe: Pipeline) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in pipe.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    "kind",
    [
        "", "nf4", "fp4", "int8", "torchao-int8", "torchao-float8",
        "saved nf4-double", "saved int8", "saved torchao-int8", "saved torchao-float8",
    ],
)  # fmt: skip
def test_what_peft_loads_is_what_was_trained(kind: str, base: Path, tmp_path: Path) -> None:
    """Gradients of the adapters are those of the plain model with the adapters that were saved. A folder that was saved
    quantized is read as it is."""
    folder = base
    if kind.startswith("saved"):
        folder = tmp_path / "base"
        quantized(base, kind.removeprefix("saved "), lora=False).save_pretrained(folder)
        kind = ""
    decoder = read(folder, kind)
    pipe = Pipeline(decoder, two_stages(decoder))
    pipe.train()
    with torch.no_grad():
        for p in trained(pipe).values():
            assert p.isfinite().all()
        for p in (p for p in pipe.parameters() if p.requires_grad):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())), alpha=0.1)
    computed = step_gradients(pipe)
    save_adapter(pipe, tmp_path / "adapter")
    model = quantized(folder, kind, lora=False)
    plain = peft.PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True)
    wanted = {name.removeprefix("base_model.model."): g for name, g in plain_gradients(plain).items()}
    assert worst_difference(computed, wanted) < FLOAT32_ROUNDING
    assert len(wanted) == 2 * 4 * 7


def test_adapters_are_the_same_in_any_split(base: Path) -> None:
    decoder = read(base)
    one, two = Pipeline(decoder, stages_here(0, 4)), Pipeline(decoder, two_stages(decoder))
    assert trained(one).keys() == trained(two).keys()
    assert all(torch.equal(trained(one)[name], p) for name, p in trained(two).items())
    others = trained(Pipeline(read(base, seed=4), stages_here(0, 4)))
    name = "model.layers.0.mlp.up_proj.lora_A.default.weight"
    assert not torch.equal(trained(one)[name], others[name])
    assert not trained(one)[name.replace("lora_A", "lora_B")].any()


def test_a_rank_quantizes_only_its_own_part(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    calls, quantize = [], functional.quantize_4bit
    monkeypatch.setattr(functional, "quantize_4bit", lambda *a, **k: calls.append(0) or quantize(*a, **k))
    decoder = read(base, "nf4")
    decoder.stage(1, 2, torch.device("cpu"))
    assert len(calls) == 7


def test_a_rank_quantizes_only_its_own_part_by_torchao(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same layers as in the whole model, whichever parameter is the last one of a stage."""
    torchao = pytest.importorskip("torchao.quantization")
    calls, quantize = [], torchao.quantize_
    monkeypatch.setattr(torchao, "quantize_", lambda *a, **k: calls.append(0) or quantize(*a, **k))
    decoder = read(base, "torchao-int8")
    stages = [decoder.stage(1, 2, torch.device("cpu")), decoder.stage(3, 4, torch.device("cpu"))]
    assert len(calls) == 14
    assert [sum(map(is_composed, stage.parameters())) for stage in stages] == [7, 7]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"init_lora_weights": "pissa"}, "with init_lora_weights True, False or 'gaussian', got LORA with 'pissa'"),
        ({"target_modules": ["embed_tokens"]}, r"must be in its layers, got model\.embed_tokens"),
    ],
)
def test_adapters_that_need_the_whole_model_are_refused(options: dict[str, Any], reason: str, base: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        Decoder.from_pretrained(base, adapter=lora(**options), backend="attention")


def test_a_pipeline_without_adapters_saves_none(base: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    with pytest.raises(ValueError, match="a pipeline with adapters of peft is needed, got one with none"):
        save_adapter(Pipeline(Decoder(model, backend="attention"), stages_here(0, 4)), tmp_path)


def test_random_weights_are_not_quantized(base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    decoder = Decoder.from_config(model.config, backend="attention")
    with pytest.raises(UnsupportedModelError, match=r"which random ones are not; take Decoder\.from_pretrained"):
        decoder.stage(0, 1, torch.device("cpu"))
