"""Quantized models: which are refused, and what becomes of their layers in stages."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from terapipe import Pipeline
from terapipe.hf import Decoder, UnsupportedModelError, save_pretrained
from terapipe.hf.quantized import (
    bitsandbytes_layers,
    move_quantized,
    refuse_inexact,
    settle_scales,
    torchao_config,
    torchao_layers,
)
from terapipe.hf.structure import owned_copy
from terapipe.modeling.quantized import scales_of
from terapipe.runtime.gradient_sync import Sharded
from tests.support.hf_models import (
    FLOAT32_ROUNDING,
    batch,
    plain_gradients,
    quantized,
    save_base,
    small,
    stages_here,
    step_gradients,
    worst_difference,
)

pytestmark = pytest.mark.usefixtures("quiet_models")
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True}
AO = {"quant_method": "torchao"}
EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({"quant_method": "gptq"}, "quantized weights of gptq, .* take bitsandbytes, in 4 bits"),
        (AO | {"quant_type": {"default": {"_type": "Int8DynamicActivationInt8WeightConfig", "_data": {}}}},
         r"by Int8DynamicActivationInt8WeightConfig, which rounds activations, .*Int8WeightOnlyConfig\(\)"),
        (AO | {"quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {}}}},
         "whose packed products have no gradients"),
        (AO | {"quant_type": {"default": {"_type": "FqnToConfig", "_data": {"fqn_to_config": {
            "model.layers.0.mlp.up_proj": None, "_default": {"_type": "Strange", "_data": {}}}}}}},
         "of torchao by Strange, which is not known to be exact"),
        (AO | {"include_input_output_embeddings": True}, r"quantized embeddings \(include_input"),
        (EIGHT, r"llm_int8_threshold=6\.0: .* over all tokens of a call.* load it with .*llm_int8_threshold=0\.0"),
        (EIGHT | {"llm_int8_threshold": 0.0, "llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight=True"),
        (FOUR | {"bnb_4bit_quant_storage": "bfloat16"}, r"stored as torch\.bfloat16, .*quant_storage=torch\.uint8"),
        (FOUR | {"bnb_4bit_compute_dtype": "float16"}, r"computes in float16 .*compute_dtype=torch\.bfloat16"),
    ],
)  # fmt: skip
def test_what_is_not_exact_is_refused_by_name(quantization: dict[str, Any], reason: str) -> None:
    model = small()
    model.config.quantization_config = quantization
    with pytest.raises(UnsupportedModelError, match=reason):
        Decoder(model)


def test_outliers_are_chosen_over_all_tokens_of_a_call() -> None:
    """Why a threshold is refused: a large value in one token changes what other tokens are multiplied with. Without
    one, parts of a sequence are equal to the whole to the bit."""
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    x = torch.randn(1, 8, 64)
    x[0, 6, 5] = 20.0
    for threshold, exact in ((6.0, False), (0.0, True)):
        layer = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False, threshold=threshold).eval()
        layer.weight = bnb.nn.Int8Params(torch.randn(64, 64), requires_grad=False, has_fp16_weights=False).to("cpu")
        with torch.no_grad():
            whole, parts = layer(x), torch.cat([layer(x[:, :5]), layer(x[:, 5:])], 1)
        assert torch.equal(whole, parts) == exact


def test_configurations_of_single_modules_are_looked_into() -> None:
    """As an object and as a file has it."""
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    weights, both = torchao.Int8WeightOnlyConfig(), torchao.Int8DynamicActivationInt8WeightConfig()
    quantization = TorchAoConfig(torchao.FqnToConfig({"re:.*up_proj": both, "lm_head": None, "_default": weights}))
    model = small()
    for form in (quantization, quantization.to_dict()):
        model.config.quantization_config = form
        with pytest.raises(UnsupportedModelError, match="by Int8DynamicActivationInt8WeightConfig"):
            refuse_inexact(model)
        assert type(torchao_config(form)) is type(weights)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda q: q.Int8DynamicActivationInt8WeightConfig(), r"q_proj\.weight .* rounds activations, too \(act_quant"),
        (lambda q: q.Int8DynamicActivationIntxWeightConfig(), r"rounds activations, too \(activation_quantization\)"),
    ],
)
def test_activations_that_torchao_rounds_are_refused(make: Any, reason: str) -> None:
    """Its rounding has no gradient: the plain model trains by wrong ones."""
    torchao = pytest.importorskip("torchao.quantization")
    model = small(hidden_size=64, intermediate_size=96, head_dim=16).float()
    torchao.quantize_(model, make(torchao))
    with pytest.raises(UnsupportedModelError, match=reason):
        Decoder(model, backend="attention")
    assert not model.model.layers[0].mlp.up_proj(torch.randn(5, 64, requires_grad=True)).requires_grad


def test_what_torchao_quantized_by_itself() -> None:
    """Without a configuration: tensor classes say what they are."""
    torchao = pytest.importorskip("torchao.quantization")
    model = small(hidden_size=64, intermediate_size=96, head_dim=16).float()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    wanted = plain_gradients(model)
    assert "model.norm.weight" in wanted
    decoder = Decoder(model, backend="attention")
    assert worst_difference(step_gradients(Pipeline(decoder, stages_here(0, 4))), wanted) < FLOAT32_ROUNDING
    decoder.model.model.embed_tokens.weight = model.lm_head.weight
    with pytest.raises(UnsupportedModelError, match=r"embed_tokens\.weight .* frozen weights of linear layers only"):
        Decoder(model, backend="attention")


def test_a_model_that_says_nothing_of_its_quantization_is_refused(base: Path) -> None:
    model = quantized(base, lora=False)
    del model.config.quantization_config
    model.hf_quantizer = None
    with pytest.raises(UnsupportedModelError, match="does not say which"):
        Decoder(model, backend="attention")


def test_a_copy_shares_weights_of_torchao_and_moves_alone(base: Path) -> None:
    model = quantized(base, "torchao-int8", lora=False)
    copy = owned_copy(model)
    assert all(a.weight is b.weight for a, b in zip(torchao_layers(model), torchao_layers(copy), strict=True))
    move_quantized(copy, torch.device("meta"))
    copy.to("meta")
    assert {layer.weight.qdata.device.type for layer in torchao_layers(copy)} == {"meta"}
    assert {layer.weight.qdata.device.type for layer in torchao_layers(model)} == {"cpu"}
    assert model(batch()[0]).logits.isfinite().all()


@pytest.mark.parametrize("kind", ["nf4-double", "int8"])
def test_a_copy_shares_weights_and_scales_and_moves_alone(kind: str, base: Path) -> None:
    """``Module.to`` moved the scales of the model itself, and lost those of 8 bits. Meta stands for a GPU."""
    model = quantized(base, kind, lora=False)
    copy = owned_copy(model)
    for original, layer in zip(bitsandbytes_layers(model), bitsandbytes_layers(copy), strict=True):
        assert layer is not original
        assert layer.weight is original.weight
        assert not getattr(layer, "support_avx512bf16_for_cpu", False), "or it would repack shared weights"
    move_quantized(copy, torch.device("meta"))
    for original, layer in zip(bitsandbytes_layers(model), bitsandbytes_layers(copy), strict=True):
        for weight, device in ((original.weight, "cpu"), (layer.weight, "meta")):
            assert {x.device.type for x in (weight, *scales_of(weight).values())} == {device}
    settle_scales(model)
    assert model(batch()[0]).logits.isfinite().all()


def test_what_a_pipeline_refuses(base: Path, tmp_path: Path) -> None:
    decoder = Decoder(quantized(base), backend="attention")
    stage = decoder.stage(0, 4, torch.device("cpu"))
    assert stage.hidden_dtype is torch.float32
    with pytest.raises(UnsupportedModelError, match="cannot be tensor parallel; take tp 1"):
        decoder._check_tp(SimpleNamespace(mesh=SimpleNamespace(size=lambda: 2)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"cannot be sharded over replicas, got model\.layers\.0"):
        Sharded(stage, None)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="leave compiling off"):
        stage.wrap_compiled(lambda: None)
    pipe = Pipeline(decoder, stages_here(0, 4))
    with pytest.raises(ValueError, match="a quantized model is not written again"):
        save_pretrained(pipe, tmp_path)
    next(bitsandbytes_layers(decoder.model)).weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(UnsupportedModelError, match=r"was repacked for inference .* load the model again"):
        pipe.step(*batch())
