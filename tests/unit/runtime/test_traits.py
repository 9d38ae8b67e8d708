"""Ranks that do not fit: refused on all of them when the Pipeline is made, with the rank that differs and in what."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.own_model import Decoder as OwnModel
from terapipe import GPT, Layout, Pipeline, Plan
from terapipe.losses import dpo
from terapipe.runtime.traits import flatten
from tests.support.models import TINY, gradients, make_batch, make_model, mesh_of, plain
from tests.support.ranks import Ranks

PLAN = Plan.uniform(batch_size=2, seq_len=12, num_slices=3, boundaries=(0, 2, 4))
CASES = {
    "dtype": "dtype (torch.bfloat16 instead of torch.float32)",
    "hidden": "config.hidden (32 instead of 16)",
    "heads": "config.heads (2 instead of 4)",
    "ffn": "config.ffn (20 instead of None)",
    "vocab": "config.vocab (23 instead of 19)",
    "tied": "tied ([] instead of ['embedding.weight', 'head.weight'])",
    "class": "model class (Another instead of GPT)",
    "eps": "layers.0.norm1 (LayerNorm((16,), eps=0.001, ",
    "layers": "layers (5 instead of 4)",
    "recompute": "plan.recompute (full instead of none)",
    "loss_fn": "loss_fn (second_loss instead of first_loss)",
    "beta": "loss_fn.fn.beta (0.5 instead of 0.1)",
    "vary": "vary (replan instead of refuse)",
    "fused": "fused_weight_grads (False instead of True)",
    "own dtype": "dtype (torch.float64 instead of torch.float32)",
    "own width": "embedding.weight ((300, 64) of torch.float32 instead of (257, 64) of torch.float32)",
    "own config": "config.window (8 instead of 4)",
}


class Another(GPT):
    pass


@dataclass
class OwnConfig:
    window: int


def first_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def second_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.square().sum()


def unfit(case: str, odd: bool) -> tuple[Any, Plan, dict[str, Any]]:
    """What one rank is given, and as it would be given if it were not ``odd``."""
    changes: dict[str, Any] = {
        "hidden": {"hidden": 32}, "heads": {"heads": 2}, "ffn": {"ffn": 20}, "vocab": {"vocab": 23},
        "tied": {"tied": False}, "layers": {"layers": 5},
    }  # fmt: skip
    options: dict[str, Any] = {}
    if case.startswith("own"):
        own: Any = OwnModel()
        if case == "own config":
            own.config = OwnConfig(8 if odd else 4)
        if case == "own width" and odd:
            own.embedding = nn.Embedding(300, 64)
        return own.double() if case == "own dtype" and odd else own, PLAN, options
    config = replace(TINY, **changes.get(case, {})) if odd else TINY
    model = (Another if case == "class" and odd else GPT)(config)
    if case == "eps" and odd:
        model.layers["0"].norm1 = nn.LayerNorm(16, eps=1e-3)
    if case == "vary" and odd:
        options["vary"] = "replan"
    if case == "fused" and odd:
        options["fused_weight_grads"] = False
    if case == "loss_fn":
        options["loss_fn"] = second_loss if odd else first_loss
    if case == "beta":
        options["loss_fn"] = dpo(beta=0.5 if odd else 0.1)
    plan = replace(PLAN, recompute="full") if case == "recompute" and odd else PLAN
    return model.to(torch.bfloat16 if case == "dtype" and odd else torch.float32), plan, options


def refusals(odd: int) -> tuple[dict[str, str], list[float]]:
    """What each case is answered, and the losses of steps afterwards: nothing is broken by a refusal."""
    answers = {}
    for case in CASES:
        model, plan, options = unfit(case, dist.get_rank() == odd)
        try:
            pipe = Pipeline(model, plan, timeout=300.0, **options)
            answers[case] = f"{pipe.step(*make_batch(TINY, 2, 12, ignored=False)).item()}"
        except ValueError as error:
            answers[case] = str(error)
    loss = Pipeline(make_model(TINY), PLAN, timeout=300.0).step(*make_batch(TINY, 2, 12, ignored=False))
    return answers, [loss.item()]


def test_a_rank_that_differs_is_named_on_all_ranks(ranks: Callable[[int], Ranks]) -> None:
    (answers, losses), (others, _) = ranks(2)(refusals, 1)
    assert answers == others
    start = "all ranks must have the same model, plan and options, rank 1 differs from rank 0 in "
    for case, difference in CASES.items():
        assert answers[case].startswith(start), case
        assert difference in answers[case], case
    wanted, _ = plain(TINY, *make_batch(TINY, 2, 12, ignored=False), torch.float64)
    assert losses == [pytest.approx(wanted, rel=1e-12)]


def one_of_three() -> str:
    config = replace(TINY, heads=2 if dist.get_rank() == 0 else 4)
    with pytest.raises(ValueError, match="all ranks must have the same model") as refused:
        Pipeline(GPT(config), replace(PLAN, boundaries=(0, 1, 2, 4)), timeout=300.0)
    return str(refused.value)


def test_the_odd_one_out_is_named_not_the_others(ranks: Callable[[int], Ranks]) -> None:
    for answer in ranks(3)(one_of_three):
        assert "rank 0 differs from rank 1 in config.heads (2 instead of 4)" in answer


HF_CASES = {
    "heads": "config.num_attention_heads (8 instead of 4)",
    "theta": "config.rope_parameters.rope_theta (500000.0 instead of 10000.0)",
    "class": "model (MistralForCausalLM instead of LlamaForCausalLM)",
    "scale": "adapters.default.lora_alpha (16 instead of 8)",
    "rank": "adapters.default.r (4 instead of 8)",
}


def decoder(case: str, odd: bool) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from terapipe.hf import Decoder

    changes = {"theta": {"rope_theta": 5e5}}.get(case, {}) if odd else {}
    config = AutoConfig.for_model(
        "mistral" if case == "class" and odd else "llama", hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=8 if case == "heads" and odd else 4, vocab_size=19, num_key_value_heads=2,
        _name_or_path=f"folder-{odd}", **changes,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config)
    if case in ("scale", "rank"):
        alpha, rank = (16 if case == "scale" and odd else 8), (4 if case == "rank" and odd else 8)
        model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, target_modules=["q_proj"]))
    return Decoder(model, backend="attention")


def hf_refusals() -> dict[str, str]:
    answers = {}
    for case in ("none", *HF_CASES):
        try:
            Pipeline(decoder(case, dist.get_rank() == 1), PLAN, timeout=300.0)
            answers[case] = "accepted"
        except ValueError as error:
            answers[case] = str(error)
    return answers


@pytest.mark.usefixtures("quiet_models")
def test_hugging_face_models_that_differ_are_refused(ranks: Callable[[int], Ranks]) -> None:
    answers, others = ranks(2)(hf_refusals)
    assert answers == others
    assert answers.pop("none") == "accepted", "folders may have different names"
    for case, difference in HF_CASES.items():
        assert f"rank 1 differs from rank 0 in {difference}" in answers[case]


def replicas(how: str, layout: Layout) -> str:
    """The last rank is a replica, or tensor parallel rank, of another, and holds another stage than that."""
    odd, model = dist.get_rank() == layout.devices - 1, make_model(TINY)
    if odd and how == "at once":
        model.layers["0"].requires_grad_(False)
    if odd and how == "other values":
        with torch.no_grad():
            model.layers["1"].up.weight[0, 0] += 1e-7
    plan = replace(PLAN, boundaries=(0, 2, 4) if layout.pp == 2 else (0, 4))
    try:
        pipe = Pipeline(model, plan, mesh=mesh_of(layout), timeout=300.0)
        if odd and how == "later":
            pipe.get_submodule("layers.0").requires_grad_(False)
        pipe.step(*make_batch(TINY, 2, 12, ignored=False, seed=pipe.dp_rank))
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("layout", [Layout(2, 1, 1), Layout(1, 1, 2)], ids=str)
@pytest.mark.parametrize("how", ["at once", "later"])
def test_ranks_of_the_same_stage_train_the_same_parameters(
    how: str, layout: Layout, ranks: Callable[[int], Ranks]
) -> None:
    for answer in ranks(2)(replicas, how, layout):
        assert "rank 1 differs from rank 0 in layers.0." in answer
        assert "frozen instead of " in answer


def test_replicas_begin_with_the_same_weights(ranks: Callable[[int], Ranks]) -> None:
    for answer in ranks(2)(replicas, "other values", Layout(2, 1, 1)):
        assert "rank 1 differs from rank 0 in values of layers.1.up.weight (" in answer
        assert "same seed" in answer


def test_stages_may_be_frozen_differently(ranks: Callable[[int], Ranks]) -> None:
    """Only on the rank that holds them: others need not be told."""
    for loss, found in ranks(2)(frozen_where_held):
        assert loss > 0
        assert not any(name.startswith("layers.3.") for name in found)


def frozen_where_held() -> tuple[float, dict[str, Tensor]]:
    model = make_model(TINY)
    if dist.get_rank() == 1:
        model.layers["3"].requires_grad_(False)
    pipe = Pipeline(model, PLAN, timeout=300.0)
    return pipe.step(*make_batch(TINY, 2, 12, ignored=False)).item(), gradients(pipe)


def test_what_a_function_of_ones_own_remembers_is_not_compared() -> None:
    def loss_of(rank: int) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda logits, targets: logits.sum() * (rank >= 0)

    assert flatten({"loss_fn": loss_of(0)}) == flatten({"loss_fn": loss_of(1)})
    assert flatten({"loss_fn": dpo(beta=0.1)}) != flatten({"loss_fn": dpo(beta=0.2)})
