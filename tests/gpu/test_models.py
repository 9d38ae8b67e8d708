"""Models on a GPU compute what they compute on the CPU, and never make the host wait for the device within a step."""

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.utils import logging

from terapipe import GPT, GPTConfig, Pipeline, Plan, next_token_labels
from terapipe.hf import Decoder
from terapipe.planning.recompute import Recompute
from tests.pretend.operators import calls
from tests.pretend.waits import counting_waits

SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "max_position_embeddings": 128, "pad_token_id": 0,
    "attn_pdrop": 0.0, "attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Grouped heads; a window; a softcap and a window; tied weights; experts; sinks, a window and experts; and more.
TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 20},
    "gemma2": {"sliding_window": 20, "query_pre_attn_scalar": 16},
    "gpt2": {},
    "mixtral": EXPERTS,
    "gpt_oss": {"sliding_window": 20, **EXPERTS},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "llama4_text": {"attention_chunk_size": 16, **EXPERTS},
}
DOCUMENTS = ((0, 20, 41), (0, 7))
CONFIG = GPTConfig(layers=4, hidden=64, heads=4, kv_heads=2, vocab=97, max_seq_len=64)
IDS = torch.stack([torch.arange(64) % 97, (torch.arange(64) * 3) % 97])


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "attention in torch.float32 .* uses plain matrix products")  # softcaps
        yield
    logging.set_verbosity(level)


@cache
def decoder(name: str, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder.from_config(AutoConfig.for_model(name, **{**SMALL, **TYPES[name]}), seed=0, dtype=dtype)


def piped(model: Any, device: str | None, order: str = "terapipe", recompute: Recompute = "none") -> Pipeline:
    lengths = ((24, 24, 16), (10, 1, 37, 16))
    half = model.num_layers // 2
    return Pipeline(model, Plan((1, 1), lengths, (0, half, model.num_layers), order, 2, recompute), device=device)


def gradients(pipe: Pipeline, documents: Any) -> dict[str, Tensor]:
    pipe.zero_grad()
    pipe.step(IDS, next_token_labels(IDS), documents)
    return {name: p.grad.float().cpu() for name, p in pipe.named_parameters() if p.grad is not None}


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    largest = max(g.abs().max().item() for g in wanted.values())
    assert found.keys() == wanted.keys()
    return max((found[name] - g).abs().max().item() for name, g in wanted.items()) / largest


@pytest.mark.gpu_seldom("^(qwen3_moe|mixtral|gemma2)")
@pytest.mark.parametrize("name", TYPES)
def test_gradients_of_hugging_face_models_are_the_cpus(name: str) -> None:
    on_gpu, on_cpu = piped(decoder(name), None), piped(decoder(name), "cpu")
    assert on_gpu.device == torch.device("cuda", 0)
    assert error(gradients(on_gpu, None), gradients(on_cpu, None)) < 2e-5
    if name != "llama4_text":  # which refuses packed documents
        assert error(gradients(on_gpu, DOCUMENTS), gradients(on_cpu, DOCUMENTS)) < 2e-5


@pytest.mark.gpu_seldom("^gpt2")
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_half_precision_is_as_good_as_the_cpus(name: str) -> None:
    wanted = gradients(piped(decoder(name), "cpu"), DOCUMENTS)
    before = calls["_flash_attention_forward"]
    found = error(gradients(piped(decoder(name, torch.bfloat16), None), DOCUMENTS), wanted)
    assert found < max(0.02, 2 * error(gradients(piped(decoder(name, torch.bfloat16), "cpu"), DOCUMENTS), wanted))
    assert calls["_flash_attention_forward"] > before, "FlashAttention was never used in half precision"


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_a_gpt_never_waits(dtype: torch.dtype, documents: Any) -> None:
    assert waits(GPT(CONFIG).to(dtype), documents) == []


@pytest.mark.parametrize("order", ["terapipe-deferred", "terapipe-v"])
def test_nor_in_other_orders(order: str) -> None:
    assert waits(GPT(CONFIG), DOCUMENTS, order) == []


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2"])
def test_nor_does_a_step_of_a_hugging_face_model(name: str, documents: Any) -> None:
    """Positions of documents, searches for packed rows and padding, masks of windows: each waited in every slice."""
    assert waits(decoder(name), documents) == []


@pytest.mark.parametrize("mode", ["light", "block", "full"])
def test_nor_do_layers_that_are_computed_again(mode: Recompute) -> None:
    for model in (GPT(CONFIG), decoder("llama")):
        assert waits(model, DOCUMENTS, "terapipe-deferred", mode) == []


def waits(model: Any, documents: Any, order: str = "terapipe", recompute: Recompute = "none") -> list[Any]:
    """Of the second step: the first compares the clocks of host and device, and tests the kernels."""
    pipe = piped(model, None, order, recompute)
    for _ in range(2):
        with counting_waits() as found:
            pipe.step(IDS, next_token_labels(IDS), documents)
        pipe.zero_grad()
    return found


def test_reading_the_timeline_waits_once() -> None:
    pipe = piped(GPT(CONFIG), None)
    pipe.step(IDS, next_token_labels(IDS))
    with counting_waits() as found:
        timeline = pipe.timeline()
    assert len(found) == 2  # for the device, and to compare the clocks again
    assert timeline.makespan > 0


def test_batches_of_one_shape_keep_their_buffers() -> None:
    """Fresh memory of a GPU costs nothing, and memory is scarce."""
    pipe = Pipeline(GPT(CONFIG), Plan((2,), ((24, 40),), (0, 4)), vary="replan")
    pipe.step(IDS, next_token_labels(IDS))
    pipe.step(IDS[:, :40], next_token_labels(IDS[:, :40]))
    assert pipe._executors.pool.shapes == {(2, 40)}


def test_float16_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"float16 needs a loss scale .* use bfloat16 or float32"):
        piped(GPT(CONFIG).half(), None).step(IDS, next_token_labels(IDS))
    pipe = piped(GPT(CONFIG), None)
    with torch.autocast("cuda", torch.float16), pytest.raises(ValueError, match="got autocast to float16"):
        pipe.step(IDS, next_token_labels(IDS))
    pipe.step(IDS, next_token_labels(IDS))


def test_autocast_on_a_gpu() -> None:
    wanted = gradients(piped(GPT(CONFIG), "cpu"), None)
    pipe = piped(GPT(CONFIG), None)
    with torch.autocast("cuda", torch.bfloat16):
        found = gradients(pipe, None)
    assert 1e-5 < error(found, wanted) < 0.03
