"""Documents packed into one row: the same gradients as each of them alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from terapipe import DocumentPlanner, GPTConfig, Layout, Pipeline, Plan
from terapipe.modeling.stage import IGNORE
from terapipe.planning import DocumentCosts
from terapipe.runtime import action_lists
from terapipe.scheduling import validation
from terapipe.scheduling.validation import Shape
from tests.support.models import gradients, make_batch, make_model, mesh_of, worst_error
from tests.support.ranks import Ranks

CONFIG = GPTConfig(layers=3, hidden=16, heads=4, kv_heads=2, vocab=19, max_seq_len=512)
STARTS = (0, 37, 180, 181, 400)
PLAN = Plan((1, 1), ((100, 200, 51, 161), (400, 112)), (0, 1, 3), "terapipe-1f1b")


def alone(
    rows: list[tuple[Tensor, Tensor, tuple[int, ...]]], config: GPTConfig = CONFIG
) -> tuple[float, dict[str, Tensor]]:
    """Each document by itself through the plain model."""
    model = make_model(config)
    total = torch.zeros((), dtype=torch.float64)
    for ids, labels, starts in rows:
        for first, last in zip(starts, [*starts[1:], len(ids)], strict=True):
            total = total + model.loss(model(ids[None, first:last]), labels[None, first:last])
    loss = total / sum((labels != IGNORE).sum() for _, labels, _ in rows)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def packed(ids: Tensor, labels: Tensor, documents: tuple[tuple[int, ...], ...]) -> tuple[float, dict[str, Tensor]]:
    pipe = Pipeline(make_model(CONFIG), PLAN, timeout=300.0)
    pipe.step(ids, labels)  # as one document each: nothing of that may stay
    pipe.zero_grad()
    evaluated = pipe.evaluate(ids, labels, documents).item()
    loss = pipe.step(ids, labels, documents).item()
    assert evaluated == pytest.approx(loss, rel=1e-12)
    return loss, gradients(pipe)


@pytest.mark.gpu_seldom
def test_five_documents_in_a_row_of_512_tokens(ranks: Callable[[int], Ranks]) -> None:
    ids, labels = make_batch(CONFIG, 2, 512, ignored=True)
    documents = (STARTS, (0, 256))
    wanted = alone([(ids[i], labels[i], documents[i]) for i in range(2)])
    assert worst_error(wanted, ranks(2)(packed, ids, labels, documents), CONFIG) < 1e-11


@pytest.mark.parametrize("documents", [((0,),), ((1,), (0,)), ((0, 5, 5), (0,)), ((0, 512), (0,))])
def test_starts_that_make_no_sense_are_refused(documents: tuple[tuple[int, ...], ...]) -> None:
    plan = Plan((1, 1), ((512,), (512,)), (0, 3))
    pipe = Pipeline(make_model(CONFIG), plan)
    with pytest.raises(ValueError, match="documents must be, for each of the 2 sequences"):
        pipe.step(*make_batch(CONFIG, 2, 512, ignored=False), documents)


# Plans by documents

BATCHES = (
    (STARTS, (0, 256)),
    ((0,), tuple(range(0, 512, 7))),
    (tuple(range(0, 512, 5)), tuple(range(0, 512, 4))),
)
PLANS = {
    "1f1b": PLAN,
    "v": Plan((1, 1), ((240, 96, 72, 64, 40), (264, 96, 80, 72)), (0, 1, 2, 3, 4), "terapipe-v", 2),
    "both sequences": Plan((2,), ((208, 120, 96, 88),), (0, 1, 2), "terapipe-deferred"),
}


def config_of(plan: Plan) -> GPTConfig:
    return replace(CONFIG, layers=plan.num_layers)


def planner_of(plan: Plan) -> DocumentPlanner:
    return DocumentPlanner(plan, DocumentCosts(token=50, slice=700 if plan.chunks > 1 else 4000))


def steps(plan: Plan, batches: list[tuple[Tensor, Tensor]]) -> list[tuple[float, dict[str, Tensor]]]:
    """Of every batch the loss and gradients, all by one pipeline."""
    pipe = Pipeline(make_model(config_of(plan)), plan, timeout=300.0)
    planner, found = planner_of(plan), []
    for (ids, labels), documents in zip(batches, BATCHES, strict=True):
        plan = planner.plan_for(documents)
        loss = pipe.step(ids, labels, documents, plan=plan).item()
        assert pipe.timeline().plan == plan
        found.append((loss, gradients(pipe)))
        pipe.zero_grad()
    return found


@pytest.mark.gpu_seldom("^(1f1b|both)")
@pytest.mark.parametrize("name", PLANS)
def test_every_batch_is_cut_by_its_documents(ranks: Callable[[int], Ranks], name: str) -> None:
    plan = PLANS[name]
    config = config_of(plan)
    batches = [make_batch(config, 2, 512, ignored=True, seed=seed) for seed in range(len(BATCHES))]
    cuts = {planner_of(plan).plan_for(documents) for documents in BATCHES}
    assert len(cuts) == len(BATCHES)
    assert len({Shape.of(cut) for cut in cuts}) > 1
    found = ranks(2)(steps, plan, batches)
    for number, ((ids, labels), documents) in enumerate(zip(batches, BATCHES, strict=True)):
        wanted = alone([(ids[i], labels[i], documents[i]) for i in range(2)], config)
        assert worst_error(wanted, [rank[number] for rank in found], config) < 1e-11


def replicas(shard: bool, batches: list[tuple[Tensor, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    """Each replica has a batch of its own, cut into its own number of slices."""
    plan = PLANS["v"]
    pipe = Pipeline(make_model(config_of(plan)), plan, mesh=mesh_of(Layout(2, 2)), shard=shard, timeout=300.0)
    (ids, labels), documents = batches[pipe.dp_rank], BATCHES[pipe.dp_rank]
    loss = pipe.step(ids, labels, documents, plan=planner_of(plan).plan_for(documents)).item()
    return loss, gradients(pipe)


@pytest.mark.parametrize("shard", [False, True])
def test_replicas_may_be_cut_in_different_ways(ranks: Callable[[int], Ranks], shard: bool) -> None:
    config, planner = config_of(PLANS["v"]), planner_of(PLANS["v"])
    batches = [make_batch(config, 2, 512, ignored=True, seed=seed) for seed in range(2)]
    assert Shape.of(planner.plan_for(BATCHES[0])) != Shape.of(planner.plan_for(BATCHES[1]))
    rows = [(batches[b][0][i], batches[b][1][i], BATCHES[b][i]) for b in range(2) for i in range(2)]
    assert worst_error(alone(rows, config), ranks(4)(replicas, shard, batches), config) < 1e-11


def counted(plan: Plan, batches: list[tuple[Tensor, Tensor]]) -> list[int]:
    """How often something was scheduled, proved, listed or made, after each of some steps. All cuts have one shape."""
    calls: list[str] = []

    def counting(owner: Any, name: str) -> None:
        plain = getattr(owner, name)
        patch.setattr(owner, name, lambda *args: (calls.append(name), plain(*args))[1])

    with pytest.MonkeyPatch.context() as patch:
        counting(action_lists, "with_early_receives")
        for name in ("list_actions", "validate_numbers"):
            counting(validation, name)
        validation._of_shape.cache_clear()
        action_lists._lists_of_shape.cache_clear()
        pipe = Pipeline(make_model(config_of(plan)), plan, timeout=300.0)
        for stage in pipe.stages.values():
            counting(stage, "make_cache")
        planner, found = DocumentPlanner(plan, DocumentCosts(token=50)), []
        for (ids, labels), documents in zip(batches, BATCHES, strict=True):
            pipe.step(ids, labels, documents, plan=planner.plan_for(documents))
            found.append(len(calls))
    assert {"list_actions", "validate_numbers", "make_cache"} <= set(calls)  # receives come early on CPUs only
    assert len({planner.plan_for(documents) for documents in BATCHES}) == len(BATCHES)
    return found


def test_other_cuts_of_the_same_shape_need_no_proof_no_list_and_no_memory(ranks: Callable[[int], Ranks]) -> None:
    batches = [make_batch(CONFIG, 2, 512, ignored=True, seed=seed) for seed in range(len(BATCHES))]
    for found in ranks(2)(counted, PLAN, batches):
        assert set(found) == {found[0]}
