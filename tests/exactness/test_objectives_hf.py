"""Objectives of Hugging Face models: losses of routers, heads of classifiers, losses that multiply by the head."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terapipe import Layout, Pipeline, Plan, losses
from terapipe.hf import Decoder, UnsupportedModelError
from terapipe.hf.routers import with_balance
from terapipe.hf.verify.small_model import small_model
from terapipe.modeling.stage import IGNORE
from tests.support.hf_models import small_config
from tests.support.models import gradients, mesh_of
from tests.support.ranks import Ranks

Found = tuple[float, dict[str, Tensor]]
pytestmark = pytest.mark.usefixtures("quiet_models")
TWO = Plan((2, 1), ((9, 1, 12, 7), (20, 9)), (0, 1, 4))  # microbatches of different sizes


def batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids, labels = (torch.randint(90, (rows, 29), generator=generator) for _ in range(2))
    labels[:, :3] = IGNORE
    return ids, labels


def model_of(name: str, classes: int = 0, balance: float = 0.5) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = small_config(name)
        if classes:
            from transformers import AutoModelForSequenceClassification as Auto

            config.num_labels, config.pad_token_id = classes, 0
            return small_model(config, kind=type(Auto.from_config(config)))
        if balance and hasattr(config, "output_router_logits"):
            config.output_router_logits = True
        return with_balance(small_model(config), balance)


def worst(wanted: Found, found: list[Found]) -> float:
    """Relative to the largest gradient of the model."""
    largest = max(g.abs().max().item() for g in wanted[1].values())
    errors = [abs(loss - wanted[0]) / abs(wanted[0]) for loss, _ in found]
    seen = set()
    for _, part in found:
        for name, gradient in part.items():
            seen.add(name)
            errors.append((gradient - wanted[1][name]).abs().max().item() / largest)
    assert seen == {name for name, g in wanted[1].items()}
    return max(errors)


def result(loss: Tensor, model: nn.Module) -> Found:
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# Routers


def balanced(router_logits: list[Tensor], experts: int, chosen: int) -> Tensor:
    """The loss of transformers, in float64."""
    rows = torch.cat([logits.flatten(0, -2) for logits in router_logits])
    probabilities = torch.softmax(rows, -1)
    picked = F.one_hot(probabilities.topk(chosen, -1).indices, experts).sum(1).to(rows.dtype)
    return experts * (picked.mean(0) * probabilities.mean(0)).sum()


def by_transformers(name: str, sizes: tuple[int, ...]) -> Found:
    """Microbatch by microbatch with transformers' own loss, weighted by sequences."""
    model, (ids, labels) = model_of(name), batch(sum(sizes))
    total = torch.zeros((), dtype=torch.float64)
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    for a, b in pairwise(edges):
        out = model(input_ids=ids[a:b], use_cache=False)
        shifted = F.cross_entropy(out.logits.flatten(0, 1), labels[a:b].flatten(), reduction="sum")
        total = total + shifted / (labels != IGNORE).sum() + 0.5 * out.aux_loss * (b - a) / edges[-1]
    return result(total, model)


def over_the_batch(name: str, rows: int, z: float = 0.0) -> Found:
    """In one piece, with the loss of routers in float64."""
    model, (ids, labels) = model_of(name), batch(rows)
    out = model(input_ids=ids, use_cache=False)
    experts = out.router_logits[0].shape[-1]
    cross_entropy = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
    squares = torch.cat([x.flatten(0, -2) for x in out.router_logits]).logsumexp(-1).square().mean()
    chosen = model.num_experts_per_tok
    return result(cross_entropy + 0.5 * balanced(out.router_logits, experts, chosen) + z * squares, model)


def routed(name: str, plan: Plan, layout: Layout, options: dict[str, Any]) -> Found:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        decoder = Decoder(model_of(name), backend="attention", **options)
        pipe = Pipeline(decoder, plan, mesh=mesh_of(layout))
        ids, labels = batch(plan.batch_size * layout.dp)
        mine = slice(plan.batch_size * pipe.dp_rank, plan.batch_size * (pipe.dp_rank + 1))
        evaluated = pipe.evaluate(ids[mine], labels[mine])
        loss = pipe.step(ids[mine], labels[mine])
        assert torch.allclose(evaluated, loss, rtol=1e-12)
        assert pipe.metrics()["router_aux_loss"] > 0
        return loss.item(), gradients(pipe)


MORE = pytest.mark.exhaustive
KINDS = ["mixtral", "qwen3_moe", "olmoe", "gpt_oss"]


@pytest.mark.exhaustive_ids("qwen3_moe|olmoe")
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("mixtral", TWO),
        ("gpt_oss", replace(TWO, order="terapipe-1f1b", boundaries=(0, 1, 2, 4), recompute=True)),
        pytest.param("qwen3_moe", replace(TWO, order="interleaved", chunks=2, boundaries=(0, 1, 2, 3, 4))),
        pytest.param("olmoe", TWO, marks=MORE),
        pytest.param("qwen3_moe", TWO, marks=MORE),
        pytest.param("gpt_oss", TWO, marks=MORE),
        pytest.param("olmoe", replace(TWO, order="terapipe-v", chunks=2, boundaries=(0, 1, 2, 3, 4))),
    ],
    ids=lambda x: x if isinstance(x, str) else x.order,
)
def test_balance_of_each_microbatch_is_transformers_own(ranks: Callable[[int], Ranks], name: str, plan: Plan) -> None:
    """Which is computed in float32, whatever the model's dtype."""
    found = ranks(plan.num_ranks)(routed, name, plan, Layout(1, plan.num_ranks, 1), {})
    assert worst(by_transformers(name, plan.sizes), found) < 1e-6


@pytest.mark.parametrize(
    ("name", "layout", "options"),
    [
        ("mixtral", Layout(1, 2, 1), {"router_loss_over": "batch"}),
        pytest.param("gpt_oss", Layout(1, 2, 1), {"router_loss_over": "batch"}, marks=MORE),
        pytest.param("qwen3_moe", Layout(1, 2, 1), {"router_loss_over": "batch"}, marks=MORE),
        pytest.param("olmoe", Layout(1, 2, 1), {"router_loss_over": "batch"}, marks=MORE),
        ("olmoe", Layout(2, 1, 1), {"router_loss_over": "replicas", "router_z_loss": 0.1}),
    ],
    ids=str,
)
def test_balance_of_batches_at_rounding_level(
    ranks: Callable[[int], Ranks], name: str, layout: Layout, options: dict[str, Any]
) -> None:
    plan = TWO if layout.pp == 2 else replace(TWO, boundaries=(0, 4))
    found = ranks(layout.devices)(routed, name, plan, layout, options)
    wanted = over_the_batch(name, plan.batch_size * layout.dp, options.get("router_z_loss", 0.0))
    assert worst(wanted, found) < 1e-12


def test_layers_computed_again_count_once() -> None:
    model = model_of("mixtral")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    pipe = Pipeline(Decoder(model), replace(TWO, boundaries=(0, 4)))
    loss = pipe.step(*batch(3))
    assert worst(by_transformers("mixtral", (2, 1)), [(loss.item(), gradients(pipe))]) < 1e-6


@pytest.mark.exhaustive
def test_routers_with_tensor_parallel(ranks: Callable[[int], Ranks]) -> None:
    plan = replace(TWO, boundaries=(0, 4))
    found = ranks(2)(routed, "mixtral", plan, Layout(1, 1, 2), {"router_loss_over": "batch"})
    assert worst(over_the_batch("mixtral", 3), found) < 1e-6  # its tensor parallel routers are in float32


def test_a_batch_under_1f1b_is_refused_by_name() -> None:
    decoder = Decoder(model_of("mixtral"), backend="attention", router_loss_over="batch")
    plan = replace(TWO, boundaries=(0, 4), order="terapipe-1f1b")
    with pytest.raises(ValueError, match=r"router_aux_loss needs the whole batch .* 'terapipe-1f1b'.*take over='micro"):
        Pipeline(decoder, plan)


def test_a_capacity_is_refused_by_name() -> None:
    model = model_of("mixtral", balance=0.0)
    model.config.expert_capacity = 4
    with pytest.raises(UnsupportedModelError, match=r"experts of MixtralForCausalLM have a capacity \(expert_capacity"):
        Decoder(model)


# Classifiers


def classified(name: str, plan: Plan, objective: str) -> Found:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        classes = 1 if objective == "pairs" else 3
        loss_fn = losses.reward_pairs() if objective == "pairs" else losses.classification()
        pipe = Pipeline(Decoder(model_of(name, classes), backend="attention"), plan, loss_fn=loss_fn)
        ids = padded()
        targets = {"last": losses.last_tokens(ids, 0), "classes": torch.tensor([1, 0, 2, 1])}
        loss = pipe.step(ids, targets)
        return loss.item(), gradients(pipe)


def padded() -> Tensor:
    ids = batch(4)[0] + 1
    ids[1, 20:] = ids[2, 13:] = 0
    return ids


@pytest.mark.parametrize(("name", "objective"), [("llama", "classes"), ("gpt2", "pairs"), ("qwen3", "pairs")])
def test_classifiers_are_exact(ranks: Callable[[int], Ranks], name: str, objective: str) -> None:
    model, ids = model_of(name, 1 if objective == "pairs" else 3), padded()
    if objective == "pairs":
        scores = model(input_ids=ids, use_cache=False).logits.squeeze(-1)
        wanted = result(-F.logsigmoid(scores[0::2] - scores[1::2]).mean(), model)
    else:
        wanted = result(model(input_ids=ids, labels=torch.tensor([1, 0, 2, 1]), use_cache=False).loss, model)
    plan = Plan((2, 2), ((9, 1, 12, 7), (20, 9)), (0, 1, 4), "terapipe-1f1b")
    assert worst(wanted, ranks(2)(classified, name, plan, objective)) < 1e-10


@pytest.mark.parametrize("classes", [1, 3])
def test_classifiers_are_verified(classes: int) -> None:
    """With one class, cross-entropy is always zero: nothing could be compared."""
    assert Decoder(model_of("llama", classes)).backend == "attention"


def test_a_reward_model_has_one_score() -> None:
    pipe = Pipeline(
        Decoder(model_of("llama"), backend="attention"),
        replace(TWO, boundaries=(0, 4), sizes=(2, 2)),
        loss_fn=losses.reward_pairs(),
    )
    with pytest.raises(ValueError, match="a reward model has one score, got"):
        pipe.step(batch(4)[0], {"last": torch.tensor([28] * 4)})


def test_a_classifier_is_read_from_its_folder(tmp_path: Any) -> None:
    model = model_of("llama", 3).float()
    model.save_pretrained(tmp_path)
    decoder = Decoder.from_pretrained(tmp_path)
    assert type(decoder.model) is type(model)
    pipe = Pipeline(decoder, replace(TWO, boundaries=(0, 4)), loss_fn=losses.classification())
    assert torch.equal(pipe.get_parameter("score.weight"), model.score.weight)


def test_a_classifier_without_its_loss_is_refused() -> None:
    with pytest.raises(ValueError, match=r"LlamaForSequenceClassification predicts no tokens; take loss_fn="):
        Pipeline(Decoder(model_of("llama", 3), backend="attention"), replace(TWO, boundaries=(0, 4)))


# Losses that multiply by the head


def linear(hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
    weight: Any = head.weight
    return F.linear_cross_entropy(hidden.flatten(0, 1), weight, labels.flatten(), reduction="sum")  # type: ignore[attr-defined,no-any-return]


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has none")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_fused_loss_of_hidden_states(name: str) -> None:
    """torch's own linear cross-entropy, which makes the logits of some tokens at a time."""
    ids, labels = batch(3)
    model = model_of(name)
    logits = model(input_ids=ids, use_cache=False).logits
    wanted = result(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), model)
    plan = replace(TWO, boundaries=(0, 4))
    pipe = Pipeline(Decoder(model_of(name), backend="attention"), plan, loss_fn=losses.HiddenLoss(linear))
    loss = pipe.step(ids, labels)
    assert worst(wanted, [(loss.item(), gradients(pipe))]) < 1e-12


def test_a_softcap_after_the_head_is_refused() -> None:
    pipe = Pipeline(
        Decoder(model_of("gemma2"), backend="attention"),
        replace(TWO, boundaries=(0, 4)),
        loss_fn=losses.HiddenLoss(linear),
    )
    with pytest.raises(UnsupportedModelError, match="Gemma2ForCausalLM changes logits after its head"):
        pipe.step(*batch(3))
