"""Small Hugging Face models, their plain gradients, and how far others are from these."""

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from terapipe import Pipeline, Plan
from terapipe.hf import Decoder
from terapipe.hf.verify.small_model import default_config, shrink_config, small_model
from tests.support.models import gradients

LENGTHS = ((9, 1, 12, 7), (20, 9))
CPU = torch.device("cpu")


def stages_here(*boundaries: int, chunks: int | None = None) -> Plan:
    """Two microbatches; all stages are in this process."""
    return Plan((1, 1), LENGTHS, boundaries, "terapipe", chunks or len(boundaries) - 1)


def two_stages(decoder: Decoder, lengths: tuple[tuple[int, ...], ...] = ((9, 1, 12, 7),), rows: int = 2) -> Plan:
    """The first stage has one layer, the second all others; both are in this process."""
    return Plan((rows // len(lengths),) * len(lengths), lengths, (0, 1, decoder.num_layers), "terapipe", 2)


def batch(tokens: int = 29, rows: int = 2) -> tuple[Tensor, Tensor]:
    """Token ids, and labels that have nothing to do with them."""
    generator = torch.Generator().manual_seed(2)
    ids, labels = (torch.randint(90, (rows, tokens), generator=generator) for _ in range(2))
    return ids, labels


def small_config(model_type: str) -> PretrainedConfig:
    """The default configuration of a type, made small; of a multimodal model, its text part."""
    config = default_config(model_type)
    text = getattr(config, "text_config", None)
    return shrink_config(text if text is not None and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING else config)


def small(kind: str = "llama", **changes: Any) -> PreTrainedModel:
    """A small model of this type, whose configuration has these values."""
    config = small_config(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    return small_model(config)


def adapted(kind: str = "LoraConfig", tied: bool = False, **options: Any) -> Any:
    """A small Llama with adapters of peft, which are far from their initialization."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    if kind == "LoraConfig":
        options = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False, **options}
    model = peft.get_peft_model(small(tie_word_embeddings=tied), getattr(peft, kind)(**options)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1 if p.requires_grad else 0.0)
    return model


QUANTIZATIONS: dict[str, Any] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
}
TORCHAO: dict[str, Callable[[Any], Any]] = {
    "torchao-int8": lambda q: q.Int8WeightOnlyConfig(),
    "torchao-int8-tensor": lambda q: q.Int8WeightOnlyConfig(granularity=q.PerTensor()),
    "torchao-int8-group": lambda q: q.Int8WeightOnlyConfig(granularity=q.PerGroup(32)),
    "torchao-float8": lambda q: q.Float8WeightOnlyConfig(),
    "torchao-intx4": lambda q: q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=q.PerGroup(32)),
}


def save_base(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Saves a small Llama in float32, whose layers are wide enough to be quantized in blocks."""
    config = small_config("llama")
    for name, value in {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, **changes}.items():
        setattr(config, name, value)
    small_model(config, torch.float32, seed).save_pretrained(folder)
    return folder


def quantization_config(kind: str) -> Any:
    """What transformers is given to quantize a model as it is loaded."""
    transformers = pytest.importorskip("transformers")
    if kind in TORCHAO:
        return transformers.TorchAoConfig(TORCHAO[kind](pytest.importorskip("torchao.quantization")))
    pytest.importorskip("bitsandbytes")
    return transformers.BitsAndBytesConfig(**QUANTIZATIONS[kind])


def quantized(folder: Path, kind: str = "nf4", *, lora: bool = True, **options: Any) -> Any:
    """The model of ``save_base``, quantized as it is loaded, in training mode. With adapters that are far from their
    initialization, unless they are left out."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    options = {"dtype": torch.float32, **options}
    if kind:
        options["quantization_config"] = quantization_config(kind)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).train()
    if not lora:
        return model
    torch.manual_seed(1)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj", "down_proj"], init_lora_weights=False)
    )


def plain_gradients(
    model: nn.Module, ids: Tensor | None = None, labels: Tensor | None = None, positions: Tensor | None = None
) -> dict[str, Tensor]:
    """Gradients of the model's own forward and backward, without slices; by default of ``batch()``."""
    if ids is None or labels is None:
        ids, labels = batch()
    more = {} if positions is None else {"position_ids": positions}
    logits = model(input_ids=ids, use_cache=False, **more).logits
    F.cross_entropy(logits.flatten(0, 1).double(), labels.flatten()).backward()
    copies = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return copies


def gradients_of_documents(
    model: PreTrainedModel, ids: Tensor, labels: Tensor, documents: tuple[tuple[int, ...], ...]
) -> dict[str, Tensor]:
    """Gradients where the plain model sees each document by itself."""
    whole, total = copy.deepcopy(model), torch.zeros((), dtype=torch.float64)
    for i, row in enumerate(documents):
        for a, b in pairwise([*row, ids.shape[1]]):
            logits = whole(input_ids=ids[i : i + 1, a:b], use_cache=False).logits
            total = total + F.cross_entropy(logits.flatten(0, 1), labels[i, a:b], reduction="sum")
    (total / labels.numel()).backward()
    return {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}


def step_gradients(pipe: Pipeline) -> dict[str, Tensor]:
    """Gradients of one step with ``batch()``; the pipeline has none afterwards."""
    pipe.step(*batch())
    copies = {name: gradient.clone() for name, gradient in gradients(pipe).items()}
    pipe.zero_grad()
    return copies


# Of gradients in float32, relative to the largest. CPUs round products differently: 7e-6 on one with AVX2, 17e-6 on
# others with AVX-512. What a mistake does begins at 1e-4.
FLOAT32_ROUNDING = 4e-5


def worst_difference(gradients: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Relative to the largest of all gradients: some are zero but for rounding."""
    assert gradients.keys() == wanted.keys()
    largest = max(g.abs().max().item() for g in wanted.values())
    return max((gradients[name] - g).abs().max().item() for name, g in wanted.items()) / largest
