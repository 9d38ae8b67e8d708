"""Hugging Face models cut into stages and slices: exact, or refused by name."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from terapipe.hf import Decoder, UnsupportedModelError, split_layers
from terapipe.hf.refusals import switch_checkpointing
from terapipe.hf.shape import work_of
from terapipe.hf.structure import find_structure
from terapipe.hf.verify.reference import Batch, SlicedModel, errors, reference, uneven_lengths
from terapipe.hf.verify.small_model import small_model
from terapipe.hf.verify.verification import ModelVerifier
from terapipe.modeling.key_values import KeyValueStore
from terapipe.planning.slices import Plan
from terapipe.runtime.pipeline import Pipeline
from tests.support.hf_models import small_config
from tests.support.models import gradients

FAST = [
    "llama", "gpt2", "gemma2", "gemma3_text", "mistral", "qwen3_moe", "gpt_neox", "opt", "phi", "gpt_oss",
    "deepseek_v3", "llama4_text", "olmo2", "cohere",
]  # fmt: skip
GENERAL = ["bloom", "falcon", "gptj", "qwen3_next", "bamba"]


pytestmark = pytest.mark.usefixtures("quiet_models")


@pytest.mark.parametrize("name", FAST)
def test_families_that_take_their_attention_from_the_interface(name: str) -> None:
    result = ModelVerifier(name, small_config(name), num_stages=3).verify()
    assert (result.backend, result.exact) == ("attention", True), result.reason


@pytest.mark.parametrize("name", GENERAL)
def test_families_that_are_cut_through_their_cache(name: str) -> None:
    result = ModelVerifier(name, small_config(name)).verify()
    assert (result.backend, result.exact) == ("cache", True), result.reason


class _Float64Torch:
    """The torch module, in which float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen4_exp"])
def test_gated_delta_rules_differ_by_their_rounding_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their code computes in float32 whatever the model's dtype, so cut and whole differ by 1e-6 to 5e-5. With the same
    code in float64 they differ by 1e-14."""
    model = small_model(small_config(name))
    batch, structure = Batch.of(model), find_structure(copy.deepcopy(model))

    def error() -> float:
        sliced = SlicedModel(model, structure, "cache")
        return max(errors(reference(model, batch), sliced(batch, uneven_lengths(4, 2))).values())

    assert 1e-7 < error() < 1e-4
    monkeypatch.setattr(f"{type(model).__module__}.torch", _Float64Torch())
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    assert error() < 1e-12


@pytest.mark.parametrize("name", ["mamba", "rwkv"])
def test_models_that_cannot_be_cut_are_refused_with_a_reason(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"cannot be cut exactly: attention backend: .*; cache backend: "):
        Decoder(small_model(small_config(name)))


def test_layers_that_ask_for_token_ids_are_refused() -> None:
    """DeepSeek V4 routes by token ids in its first layers. In two stages its small copy was exact; in three, a later
    stage had none."""
    with pytest.raises(UnsupportedModelError, match="'NoneType' object has no attribute 'reshape'"):
        Decoder(small_model(small_config("deepseek_v4")))


def test_the_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = torch.zeros(())
    monkeypatch.setattr(KeyValueStore, "grad", lambda self, start, end: (nothing, nothing))
    result = ModelVerifier("llama", small_config("llama")).verify()
    assert result.backend == "cache"  # which does not use it


def test_names_that_transformers_has_given_up_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since 5.23 gradient checkpointing is activation checkpointing, and every Decoder warned of the old name."""

    def warn(*arguments: object) -> None:
        raise FutureWarning("deprecated")

    called = list[str]()
    monkeypatch.setattr(PreTrainedModel, "is_gradient_checkpointing", property(warn))
    for verb, on in (("enable", True), ("disable", False)):
        monkeypatch.setattr(PreTrainedModel, f"gradient_checkpointing_{verb}", warn)
        new = f"activation_checkpointing_{verb}"
        monkeypatch.setattr(PreTrainedModel, new, lambda self, name=new: called.append(name), raising=False)
        model = small_model(small_config("llama"))
        Decoder(model, backend="attention")
        switch_checkpointing(model, on)
    assert called == ["activation_checkpointing_enable", "activation_checkpointing_disable"]


PLAN = Plan((1, 1), ((9, 1, 12, 7), (20, 9)), (0, 1, 4), "terapipe", 2)  # both stages in this process


def batch(tokens: int = 29, rows: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids, labels = (torch.randint(90, (rows, tokens), generator=generator) for _ in range(2))
    return ids, labels


def plainly(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    logits = model(input_ids=ids, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1).double(), labels.flatten()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def cut(decoder: Decoder, ids: Tensor, labels: Tensor, plan: Plan = PLAN) -> dict[str, Tensor]:
    pipe = Pipeline(decoder, plan)
    pipe.step(ids, labels)
    return gradients(pipe)


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert set(found) == set(wanted)
    largest = max(g.abs().max().item() for g in wanted.values())
    return max((found[n] - g).abs().max().item() / max(g.abs().max().item(), 1e-3 * largest) for n, g in wanted.items())


def llama(**changes: object) -> PreTrainedModel:
    config = small_config("llama")
    config.num_hidden_layers = 4
    for name, value in changes.items():
        setattr(config, name, value)
    return small_model(config)


@pytest.mark.parametrize("recompute", [False, True])
def test_whole_layers_may_be_recomputed(recompute: bool) -> None:
    model, ids_labels = llama(), batch()
    wanted = plainly(copy.deepcopy(model), *ids_labels)
    plan = Plan(PLAN.sizes, PLAN.lengths, PLAN.boundaries, "terapipe", 2, recompute)
    assert worst(cut(Decoder(model), *ids_labels, plan), wanted) < 1e-12


def test_gradient_checkpointing_of_layers() -> None:
    model, ids_labels = llama(), batch()
    wanted = plainly(copy.deepcopy(model), *ids_labels)
    model.gradient_checkpointing_enable()
    model.train()
    assert worst(cut(Decoder(model), *ids_labels), wanted) < 1e-12


def test_the_cache_backend_refuses_to_compute_again() -> None:
    model = small_model(small_config("bloom"))
    plan = Plan(PLAN.sizes, PLAN.lengths, (0, 1, Decoder(model).num_layers), "terapipe", 2, True)
    with pytest.raises(UnsupportedModelError, match="leave recomputation off"):
        cut(Decoder(model), *batch(), plan)


@pytest.mark.parametrize(
    "frozen", [["embed", "layers.0."], ["model."], ["layers.1.", "layers.2.", "layers.3.", "head"]]
)
def test_frozen_parameters(frozen: list[str]) -> None:
    """A stage may have nothing to train, the first one too; gradients still pass."""
    model = llama(tie_word_embeddings=False)
    for name, p in model.named_parameters():
        p.requires_grad_(not any(part in name for part in frozen))
    wanted = plainly(copy.deepcopy(model), *batch())
    assert worst(cut(Decoder(model), *batch()), wanted) < 1e-12


def test_lora() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    options = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(llama(), options).double()
    truth = copy.deepcopy(model).get_base_model()
    wanted = plainly(truth, *batch())
    assert all("lora" in name for name in wanted)
    assert worst(cut(Decoder(model), *batch()), wanted) < 1e-12


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_depend_on_the_length(kind: str) -> None:
    """Past the original length, those of the whole sequence count, not those of a slice."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    half = small_config("llama").head_dim // 2
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * half, "long_factor": [3.0] * half}
    model = llama(rope_parameters=rope, max_position_embeddings=16)
    wanted = plainly(copy.deepcopy(model), *batch())
    assert worst(cut(Decoder(model, backend="attention"), *batch()), wanted) < 1e-12


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_documents_in_a_row(name: str) -> None:
    config = small_config(name)
    model = small_model(config)
    ids, labels = batch(64)
    starts = ((0, 10, 11, 40), (0, 30))
    truth = copy.deepcopy(model)
    total = torch.zeros((), dtype=torch.float64)
    for i, row in enumerate(starts):
        for first, last in pairwise([*row, 64]):
            logits = truth(input_ids=ids[i : i + 1, first:last], use_cache=False).logits
            total = total + F.cross_entropy(logits.flatten(0, 1), labels[i, first:last], reduction="sum")
    (total / labels.numel()).backward()
    wanted = {n: p.grad for n, p in truth.named_parameters() if p.grad is not None}
    decoder = Decoder(model)
    pipe = Pipeline(decoder, Plan((2,), ((20, 1, 30, 13),), (0, 1, decoder.num_layers), "terapipe", 2))
    pipe.step(ids, labels, starts)
    assert worst(gradients(pipe), wanted) < 1e-11


def test_attention_dropout_is_refused() -> None:
    model = llama(attention_dropout=0.5)
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    with pytest.raises(UnsupportedModelError, match=r"dropout in attention is not supported, got 0\.5"):
        cut(Decoder(model, backend="attention"), *batch())


def test_stages_are_balanced_with_the_head_counted_in() -> None:
    wide = Decoder(llama(vocab_size=90), backend="attention")
    layers, head = work_of(wide.model, wide.structure)
    assert len(layers) == 4
    assert len(set(layers)) == 1
    assert 0 < head < layers[0]
    assert split_layers(wide, 2) == (0, 2, 4)
    mixtral = Decoder(small_model(small_config("mixtral")), backend="attention")
    experts, _ = work_of(mixtral.model, mixtral.structure)
    whole = sum(p.numel() for p in small_model(small_config("mixtral")).model.layers[0].parameters())
    assert experts[0] < 0.8 * whole  # a token is sent to some of the experts


def test_slices_too_short_for_a_model_are_refused_before_the_first_step() -> None:
    decoder = Decoder(small_model(small_config("qwen3_next")))
    assert (decoder.backend, decoder.min_slice) == ("cache", 2)
    plan = Plan((2,), ((28, 1),), (0, 1, decoder.num_layers), "terapipe", 2)
    with pytest.raises(UnsupportedModelError, match="must have at least 2 tokens, got one of 1"):
        Pipeline(decoder, plan)
