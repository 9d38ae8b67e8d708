"""Plans within a memory budget: bytes that are counted in a real step, and gradients of the plain model."""

from typing import Any

import pytest
import torch
from torch import Tensor

from terapipe.runtime.memory_counter import MemoryCounter
from terapipe.trainers import PipelineConfig, pipelined

pytestmark = pytest.mark.usefixtures("quiet_models")
TOKENS = 192


def model() -> Any:
    """With a head that is large beside its layers, as those of real models are."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    config = AutoConfig.for_model(
        "llama", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=512,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).double()


def ids(rows: int = 1, tokens: int = TOKENS) -> Tensor:
    return torch.randint(3, 512, (rows, tokens), generator=torch.Generator().manual_seed(1))


def state(model: Any) -> int:
    """Bytes of AdamW's two moments."""
    return sum(2 * p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def counted(owner: Any, model: Any, batch: Tensor) -> int:
    """The most bytes in a step, with the state that AdamW would have."""
    owner.planner.plan_for(*batch.shape)  # outside of the counter, which would take fake tensors for real ones
    with MemoryCounter(torch.device("cpu")) as counter:
        counter.count(owner.pipe)
        model(input_ids=batch, labels=batch).loss.backward()
    return counter.peak + state(model)


def test_a_step_stays_within_the_budget_and_is_exact() -> None:
    """By the first batch's shape. A shorter one takes that plan; for a larger one there is none."""
    plain, small, budget = model(), model(), 3 * 2**20
    owner = pipelined(small, memory=budget)
    assert counted(owner, small, ids()) <= budget
    plain(input_ids=ids(), labels=ids(), use_cache=False).loss.backward()
    for wanted, (name, p) in zip(plain.parameters(), small.named_parameters(), strict=True):
        assert (p.grad - wanted.grad).abs().max() <= 2e-7 * wanted.grad.abs().max().clamp(min=1e-3), name
    first = owner.planner.plan_for(1, TOKENS)
    assert len(first.lengths[0]) > 1
    assert owner.planner.plan_for(1, TOKENS - 40) == first.resize(1, TOKENS - 40)
    with pytest.raises(ValueError, match=r"a step of 9 x 192 tokens needs at least .* MiB .* MiB more"):
        model_step(small, ids(9))
    with torch.no_grad():
        small(input_ids=ids(9))  # has no gradients to hold


def model_step(model: Any, batch: Tensor) -> None:
    model(input_ids=batch, labels=batch).loss.backward()


def test_what_does_not_fit_is_refused_when_the_length_is_told() -> None:
    with pytest.raises(ValueError, match=r"memory='1MiB' is too little: a step of 1 x 192 tokens needs at least"):
        pipelined(model(), memory="1MiB", seq_len=TOKENS)


def test_frozen_weights_have_no_gradients_and_no_state() -> None:
    small = model()
    small.requires_grad_(False)
    small.model.layers[-1].requires_grad_(True)
    owner, budget = pipelined(small, memory=2 * 2**20), 2 * 2**20
    assert counted(owner, small, ids()) <= budget


def test_a_budget_is_for_one_device_and_one_place() -> None:
    config = PipelineConfig(memory="1GiB")
    with pytest.raises(ValueError, match=r"memory='1GiB' alone plans for one device, got dp 1 x pp 2 x tp 1"):
        config.layout(2)
    with pytest.raises(ValueError, match="memory are short for a config"):
        pipelined(model(), memory="1GiB", config=config)
    with pytest.raises(ValueError, match="offload say what to plan for; they need plan='auto', or on one device"):
        PipelineConfig(offload="auto")


def test_weights_of_torchao_are_counted_by_their_bytes() -> None:
    """In a budget that is less than what the weights would take without quantization."""
    peft, torchao = pytest.importorskip("peft"), pytest.importorskip("torchao.quantization")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, vocab_size=512,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    whole = AutoModelForCausalLM.from_config(config)
    budget = sum(p.nbytes for p in whole.parameters())
    torchao.quantize_(whole.model, torchao.Int8WeightOnlyConfig())
    adapted = peft.get_peft_model(whole, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    owner = pipelined(adapted, memory=budget)
    assert 0.4 * budget < counted(owner, adapted, ids()) <= budget
