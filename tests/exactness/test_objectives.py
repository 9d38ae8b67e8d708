"""Any objective: loss and every gradient equal those of plain PyTorch code that sees whole sequences."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map

from terapipe import GPTConfig, Layout, Pipeline, Plan, losses
from terapipe.modeling.stage import IGNORE
from terapipe.runtime import MemoryCounter
from tests.support.models import TINY, gradients, make_batch, make_model, mesh_of, worst_error
from tests.support.objectives import OBJECTIVES, log_probs_of, plain_mean, some
from tests.support.plans import examples, plans
from tests.support.ranks import Ranks

Result = tuple[float, dict[str, Tensor]]
ROWS, TOKENS = 4, 29
UNEVEN = Plan((2, 2), ((9, 1, 12, 7), (20, 9)), (0, 1, 4))
SEVERAL = (
    replace(UNEVEN, boundaries=(0, 4)),
    UNEVEN,
    replace(UNEVEN, recompute=True),
    replace(UNEVEN, boundaries=(0, 1, 3, 4), order="terapipe-1f1b"),
    replace(UNEVEN, order="terapipe-deferred"),
    replace(UNEVEN, boundaries=(0, 1, 2, 3, 4), order="terapipe-v", chunks=2),
    replace(UNEVEN, boundaries=(0, 1, 2, 3, 4), order="interleaved", chunks=2, recompute=True),
    Plan((2, 2), ((29,), (29,)), (0, 2, 4), "1f1b"),
)
FLUSH = tuple(plan for plan in SEVERAL if "1f1b" not in plan.order and plan.order != "interleaved")


def labels_of(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """With prompts of different lengths left out, and padding at the end of some."""
    ids, labels = make_batch(TINY, rows, TOKENS, ignored=False)
    for row in range(rows):
        labels[row, : 3 + 2 * row] = IGNORE
        labels[row, TOKENS - row :] = IGNORE
    return ids, labels


def _targets(name: str, labels: Tensor) -> Any:
    per_token, rows = labels.shape, len(labels)
    extra: dict[str, dict[str, Tensor]] = {
        "weighted": {"weights": some(*per_token).abs()},
        "distillation": {"teacher_logits": some(*per_token, TINY.vocab)},
        "dpo": {"reference": -60 + some(rows)},
        "kto": {"reference": -80 + some(rows), "desirable": torch.arange(rows) % 2 == 0},
        "grpo": {"old": -3 + some(*per_token), "reference": -3 + some(*per_token, seed=2), "advantages": some(rows)},
        "ppo": {"old": -3 + some(*per_token), "advantages": some(*per_token, seed=2)},
    }
    name = name.removesuffix(" over the batch")
    return {"labels": labels, **extra[name]} if name in extra else labels


ANY_PLAN = ["label smoothing", "z-loss", "weighted", "distillation", "fused", "sequence mean", "grpo"]


def plain(name: str, ids: Tensor, targets: Any, config: GPTConfig = TINY) -> Result:
    model = make_model(config)
    loss = OBJECTIVES[name][1](model.logits(model(ids)), targets)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def piped(
    name: str, plan: Plan, layout: Layout, ids: Tensor, targets: Any, shard: bool = False, config: GPTConfig = TINY
) -> Result:
    pipe = Pipeline(make_model(config), plan, loss_fn=OBJECTIVES[name][0], mesh=mesh_of(layout), shard=shard)
    rows = slice(pipe.dp_rank * plan.batch_size, (pipe.dp_rank + 1) * plan.batch_size)
    mine = tree_map(lambda x: x[rows], targets)
    evaluated = pipe.evaluate(ids[rows] if pipe.is_first else None, mine if pipe.is_last else None)
    loss = pipe.step(ids[rows] if pipe.is_first else None, mine if pipe.is_last else None)
    assert torch.equal(evaluated, loss)
    return loss.item(), gradients(pipe)


def cases() -> list[Any]:
    found = []
    for i, name in enumerate(OBJECTIVES):
        plans = FLUSH if name.endswith("over the batch") else SEVERAL
        for j, plan in enumerate(plans):
            marks = () if j == i % len(plans) else (pytest.mark.exhaustive,)
            found.append(pytest.param(name, plan, marks=marks, id=f"{name}-{plan.order}-{plan.num_stages}"))
    return found


@pytest.mark.parametrize(("name", "plan"), cases())
def test_gradients_are_those_of_plain_code(ranks: Callable[[int], Ranks], name: str, plan: Plan) -> None:
    ids, labels = labels_of()
    targets = _targets(name, labels)
    found = ranks(plan.num_ranks)(piped, name, plan, Layout(1, plan.num_ranks, 1), ids, targets)
    assert worst_error(plain(name, ids, targets), found, TINY) < 1e-12


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=plans(max_ranks=3, max_microbatches=3), name=st.sampled_from(ANY_PLAN))
def test_any_plan(ranks: Callable[[int], Ranks], plan: Plan, name: str) -> None:
    """Objectives that see one token or one sequence at a time, so that microbatches may have any size."""
    config = replace(TINY, layers=plan.num_layers)
    ids, labels = make_batch(config, plan.batch_size, plan.seq_len, ignored=True)
    targets = _targets(name, labels)
    found = ranks(plan.num_ranks)(piped, name, plan, Layout(1, plan.num_ranks, 1), ids, targets, False, config)
    assert worst_error(plain(name, ids, targets, config), found, config) < 1e-10


@pytest.mark.parametrize("name", ["weighted", "dpo", "sequence mean"])
@pytest.mark.parametrize(("layout", "shard"), [(Layout(2, 1, 1), True), (Layout(1, 1, 2), False)], ids=str)
def test_replicas_and_tensor_parallel(ranks: Callable[[int], Ranks], name: str, layout: Layout, shard: bool) -> None:
    plan = Plan((2, 2), ((8, 2, 12, 6), (20, 8)), (0, 4))
    ids, labels = labels_of(plan.batch_size * layout.dp)
    ids, labels = ids[:, :28], labels[:, :28]
    targets = _targets(name, labels)
    found = ranks(2)(piped, name, plan, layout, ids, targets, shard)
    assert worst_error(plain(name, ids, targets), found, TINY) < 1e-12


# Weights of losses


def test_the_three_ways_to_normalize() -> None:
    """By tokens, by sequences, by a given number."""
    ids, labels = labels_of()
    model = make_model(TINY)
    log_probs = log_probs_of(model.logits(model(ids)), labels)
    plan = replace(UNEVEN, boundaries=(0, 4))

    def loss(loss_fn: Any = None, **options: Any) -> float:
        return Pipeline(make_model(TINY), plan, loss_fn=loss_fn).step(ids, labels, **options).item()

    def near(value: Tensor) -> Any:
        return pytest.approx(value.item(), rel=1e-12)

    assert loss() == loss(losses.cross_entropy()) == near(-log_probs.sum() / (labels != IGNORE).sum())
    assert loss(losses.sequence_mean()) == near(plain_mean(model.logits(model(ids)), labels))
    assert loss(losses.cross_entropy(), total=7.0) == near(-log_probs.sum() / 7)
    twice = losses.sequence_mean()
    assert loss(twice, total=2 * ROWS) == near(plain_mean(model.logits(model(ids)), labels) / 2)


def test_targets_without_labels_count_all_tokens() -> None:
    ids, plan = labels_of()[0], replace(UNEVEN, boundaries=(0, 4))
    wanted = some(ROWS, TOKENS, TINY.vocab)
    pipe = Pipeline(make_model(TINY), plan, loss_fn=lambda logits, t: (logits - t[0]["values"]).square().sum())
    model = make_model(TINY)
    truth = (model.logits(model(ids)) - wanted).square().sum() / (ROWS * TOKENS)
    assert pipe.step(ids, ({"values": wanted},)).item() == pytest.approx(truth.item(), rel=1e-12)


def test_labels_are_counted_wherever_they_are_among_targets() -> None:
    ids, labels = labels_of()
    wanted = Pipeline(make_model(TINY), replace(UNEVEN, boundaries=(0, 4))).step(ids, labels).item()

    def nested(logits: Tensor, t: Any) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), t[1]["lm"]["labels"].flatten(), reduction="sum")

    pipe = Pipeline(make_model(TINY), replace(UNEVEN, boundaries=(0, 4)), loss_fn=nested)
    assert pipe.step(ids, (some(ROWS, TOKENS), {"lm": {"labels": labels}})).item() == pytest.approx(wanted, rel=1e-12)


def test_metrics_are_those_of_the_whole_batch(ranks: Callable[[int], Ranks]) -> None:
    ids, labels = labels_of()
    targets = _targets("dpo", labels)
    model = make_model(TINY)
    ratios = 0.3 * (log_probs_of(model.logits(model(ids)), labels).sum(1) - targets["reference"])
    for found in ranks(2)(metrics, ids, targets):
        assert found["rewards/margins"] == pytest.approx((ratios[0::2] - ratios[1::2]).mean().item(), rel=1e-12)
        assert set(found) == {f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")}


def metrics(ids: Tensor, targets: Any) -> dict[str, float]:
    pipe = Pipeline(make_model(TINY), UNEVEN, loss_fn=losses.dpo(beta=0.3))
    pipe.step(ids, targets)
    return pipe.metrics()


class LargestLogits(MemoryCounter):
    """The most tokens that a tensor as wide as the vocabulary has."""

    tokens = 0

    def _add(self, x: Tensor) -> None:
        if x.ndim > 1 and x.shape[-1] == TINY.vocab:
            self.tokens = max(self.tokens, x.numel() // TINY.vocab)


@pytest.mark.parametrize("name", ["dpo", "grpo", "ppo over the batch", "distillation", "label smoothing"])
def test_only_the_logits_of_one_slice_exist(name: str) -> None:
    """TINY's embedding is as wide as its hidden size, so what is as wide as the vocabulary is logits, or the head."""
    ids, labels = labels_of()
    targets = _targets(name, labels)
    pipe = Pipeline(make_model(TINY), replace(UNEVEN, boundaries=(0, 4)), loss_fn=OBJECTIVES[name][0])
    counter = LargestLogits(torch.device("cpu"))
    with counter:
        pipe.step(ids, targets)
    longest = max(map(max, UNEVEN.lengths))
    given = ROWS * TOKENS if name == "distillation" else 0  # what the caller made, whole
    assert 0 < counter.tokens <= max(2 * longest, given)


# Log-probabilities


def scored(plan: Plan, layout: Layout, ids: Tensor, labels: Tensor) -> Tensor:
    pipe = Pipeline(make_model(TINY), plan, mesh=mesh_of(layout))
    if ids.shape == (plan.batch_size, plan.seq_len):
        return pipe.log_probs(ids if pipe.is_first else None, labels if pipe.is_last else None)
    return pipe.log_probs(ids, labels)


@pytest.mark.parametrize(
    ("plan", "layout", "shape"),
    [
        (UNEVEN, Layout(1, 2, 1), (ROWS, TOKENS)),
        (replace(UNEVEN, order="terapipe-v", boundaries=(0, 1, 2, 3, 4), chunks=2), Layout(1, 2, 1), (3, 40)),
        (Plan((2,), ((8, 2, 12, 6),), (0, 4)), Layout(1, 1, 2), (5, 11)),
        (Plan((2,), ((8, 2, 12, 6),), (0, 4)), Layout(2, 1, 1), (1, 1)),
    ],
    ids=str,
)
def test_log_probs_on_every_rank(
    ranks: Callable[[int], Ranks], plan: Plan, layout: Layout, shape: tuple[int, int]
) -> None:
    ids, labels = make_batch(TINY, *shape, ignored=True)
    model = make_model(TINY)
    wanted = log_probs_of(model.logits(model(ids)), labels)
    for found in ranks(layout.devices)(scored, plan, layout, ids, labels):
        assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)


# Misuse


@pytest.mark.parametrize(
    ("loss_fn", "targets", "message"),
    [
        (losses.dpo(), torch.zeros(3, TOKENS), r"targets must be tensors that begin with \(4,\).*got \(3, 29\)"),
        (losses.cross_entropy(), {"labels": torch.zeros(4, 28)}, r"begin with \(4, 29\), .* got \(4, 28\) .*'labels'"),
        (losses.cross_entropy(), {"labels": 3}, r"got int at \['labels'\]"),
        (losses.cross_entropy(), None, "the objective needs targets where the last stage is, got None"),
        (lambda logits, t: logits.sum(-1), None, r"must return a scalar tensor.* got a tensor of shape \(1, 2\)"),
        (lambda logits, t: 3.0, None, "must return a scalar tensor.* got float"),
        (lambda logits, t: logits.detach().sum(), None, "must return a loss with a gradient"),
        (losses.SequenceLoss(lambda v, t: v), None, r"must return a scalar tensor.* got a tensor of shape \(2, 29\)"),
        (
            losses.SequenceLoss(lambda v, t: v.sum(), lambda x, t: x.sum()),
            None,
            r"per_token must return tensors .*\(1, 2",
        ),
        (losses.dpo(), None, "the reference model's log-probabilities .* under 'reference'"),
        ("cross_entropy", None, "loss_fn must be a function .* got str"),
        (
            losses.dpo,
            None,
            "which dpo does not take; if it makes a loss function, call it",
        ),
        (losses.grpo(), None, "targets must be a dict that has the advantage of each sequence or token under 'advan"),
        (
            losses.distillation(),
            None,
            "a dict that has the teacher's logits under 'teacher_logits', got Tensor",
        ),
        (lambda logits, t: (logits.sum(), {"x": logits}), None, "the metric 'x' must be one number, got shape"),
        (lambda logits, t: logits.sum((1, 2)), None, r"must return a scalar tensor.* got a tensor of shape \(1,\)"),
    ],
    ids=lambda x: x[:40] if isinstance(x, str) else "",
)
def test_misuse_is_one_message_before_anything_is_computed(loss_fn: Any, targets: Any, message: str) -> None:
    ids, labels = labels_of()
    given = labels if targets is None and "needs targets" not in message else targets
    model = make_model(TINY)
    with pytest.raises(ValueError, match=message):
        Pipeline(model, replace(UNEVEN, boundaries=(0, 4)), loss_fn=loss_fn).step(ids, given)
    assert not any(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("loss_fn", [None, losses.cross_entropy(), losses.sequence_mean()])
def test_labels_that_were_not_shifted_are_refused(loss_fn: Any) -> None:
    ids = labels_of()[0]
    pipe = Pipeline(make_model(TINY), replace(UNEVEN, boundaries=(0, 4)), loss_fn=loss_fn)
    for targets in (ids, *(({"labels": ids},) if loss_fn else ())):
        with pytest.raises(ValueError, match="labels must be the tokens to predict, got the input_ids themselves"):
            pipe.step(ids, targets)


def refused(plan: Plan) -> str:
    with pytest.raises(ValueError, match="whole batch") as error:
        Pipeline(make_model(TINY), plan, loss_fn=losses.kto())
    return str(error.value)


def test_a_whole_batch_under_1f1b_is_refused_on_all_ranks(ranks: Callable[[int], Ranks]) -> None:
    for order, chunks in (("terapipe-1f1b", 1), ("interleaved", 2)):
        plan = replace(UNEVEN, order=order, chunks=chunks, boundaries=(0, 1, 2, 3, 4)[:: 3 - chunks])
        for message in ranks(2)(refused, plan):
            assert "loss_fn needs the whole batch" in message
            assert f"'{order}'" in message
            assert "take over='microbatch'" in message
    one = replace(plan, sizes=(4,), lengths=UNEVEN.lengths[:1])
    ranks(2)(accepted, one)


def accepted(plan: Plan) -> None:
    """With one microbatch, all forwards come first in any order."""
    Pipeline(make_model(TINY), plan, loss_fn=losses.kto())


def test_padding_does_not_know_targets() -> None:
    with pytest.raises(ValueError, match="vary='pad' fills up labels with -100"):
        Pipeline(make_model(TINY), replace(UNEVEN, boundaries=(0, 4)), loss_fn=losses.cross_entropy(), vary="pad")


# Found by review: each was wrong once


def test_metrics_outlive_other_forwards_and_are_there_before_any_step() -> None:
    ids, labels = labels_of()
    pipe = Pipeline(make_model(TINY), replace(UNEVEN, boundaries=(0, 4)), loss_fn=losses.cross_entropy(z_loss=0.1))
    assert pipe.metrics() == {}
    pipe.step(ids, labels)
    pipe.log_probs(ids, labels)
    assert pipe.metrics().keys() == {"z_loss"}


@pytest.mark.parametrize("loss_fn", [None, losses.cross_entropy(), losses.sequence_mean()])
def test_evaluation_needs_no_gradient(loss_fn: Any) -> None:
    ids, labels = labels_of()
    pipe = Pipeline(make_model(TINY), replace(UNEVEN, boundaries=(0, 4)), loss_fn=loss_fn)
    with torch.inference_mode():
        evaluated = pipe.evaluate(ids, labels).item()
    assert pipe.step(ids, labels).item() == pytest.approx(evaluated, rel=1e-12)


def test_an_objective_without_a_gradient_can_be_evaluated() -> None:
    ids, labels = labels_of()

    def correct(logits: Tensor, t: Tensor) -> Tensor:
        return (logits.argmax(-1) == t).sum().double()

    pipe = Pipeline(make_model(TINY), replace(UNEVEN, boundaries=(0, 4)), loss_fn=correct)
    model = make_model(TINY)
    wanted = (model.logits(model(ids)).argmax(-1) == labels).sum() / (labels != IGNORE).sum()
    assert pipe.evaluate(ids, labels).item() == pytest.approx(wanted.item())
    with pytest.raises(ValueError, match="must return a loss with a gradient"):
        pipe.step(ids, labels)


def test_labels_outside_the_vocabulary_are_refused_before_the_step() -> None:
    ids, labels = labels_of()
    labels[2, 20] = TINY.vocab
    for loss_fn in (losses.cross_entropy(), losses.sequence_mean()):
        pipe = Pipeline(make_model(TINY), replace(UNEVEN, boundaries=(0, 4)), loss_fn=loss_fn)
        with pytest.raises(ValueError, match="labels must be tokens of the model's vocabulary, 0 to 18"):
            pipe.step(ids, {"labels": labels})


def test_an_odd_microbatch_of_pairs_is_refused_before_the_step() -> None:
    ids, labels = labels_of(5)
    plan = Plan((2, 3), UNEVEN.lengths, (0, 4))
    model = make_model(TINY)
    with pytest.raises(ValueError, match="a microbatch of pairs must have an even number"):
        Pipeline(model, plan, loss_fn=losses.dpo()).step(ids, {"labels": labels, "reference": torch.zeros(5)})
    assert not any(p.grad is not None for p in model.parameters())


def test_a_batch_of_another_shape_goes_by_its_labels(ranks: Callable[[int], Ranks]) -> None:
    ids, labels = make_batch(TINY, 2, 13, ignored=False)
    assert len(set(ranks(2)(replanned, ids, {"advantages": some(2), "labels": labels}))) == 1


def replanned(ids: Tensor, targets: Any) -> float:
    pipe = Pipeline(make_model(TINY), UNEVEN, loss_fn=losses.grpo(), vary="replan")
    return pipe.step(ids if pipe.is_first else None, targets if pipe.is_last else None).item()
