"""Documents packed into one row: the same gradients as each of them alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from terapipe import GPTConfig, Pipeline, Plan
from terapipe.modeling.stage import IGNORE
from terapipe.planning.cost import StageSpec
from terapipe.planning.solver import document_lengths
from tests.costs import SimpleCost
from tests.models import gradients, make_batch, make_model, worst_error
from tests.ranks import Ranks

CONFIG = GPTConfig(layers=3, hidden=16, heads=4, kv_heads=2, vocab=19, max_seq_len=512)
STARTS = (0, 37, 180, 181, 400)
PLAN = Plan((1, 1), ((100, 200, 51, 161), (400, 112)), (0, 1, 3), "terapipe-1f1b")


def alone(rows: list[tuple[Tensor, Tensor, tuple[int, ...]]]) -> tuple[float, dict[str, Tensor]]:
    """Each document by itself through the plain model."""
    model = make_model(CONFIG)
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


def replanned(ids: Tensor, labels: Tensor, documents: tuple[tuple[int, ...], ...], plan: Plan) -> object:
    pipe = Pipeline(make_model(CONFIG), PLAN, timeout=300.0)
    loss = pipe.step(ids, labels, documents, plan=plan).item()
    with pytest.raises(ValueError, match="must leave the stages on their ranks"):
        pipe._admission._inputs.own_plan(Plan((2,), ((512,),), (0, 2, 3)))
    return loss, gradients(pipe)


def test_a_batch_may_be_cut_by_the_cost_of_its_documents(ranks: Callable[[int], Ranks]) -> None:
    ids, labels = make_batch(CONFIG, 2, 512, ignored=True)
    documents = (STARTS, (0, 256))
    rows = [document_lengths(SimpleCost(score=0.01), StageSpec(1), starts, 512, 4, tile=8) for starts in documents]
    plan = Plan((1, 1), tuple(rows), PLAN.boundaries, "terapipe-1f1b")
    wanted = alone([(ids[i], labels[i], documents[i]) for i in range(2)])
    assert worst_error(wanted, ranks(2)(replanned, ids, labels, documents, plan), CONFIG) < 1e-11


def test_cuts_follow_the_documents() -> None:
    """One long document gets shorter slices towards its end; many short ones of equal length get equal slices."""
    cost = SimpleCost(score=0.01)
    whole = document_lengths(cost, StageSpec(1), (0,), 512, 4)
    assert list(whole) == sorted(whole, reverse=True)
    assert whole[0] > whole[-1] + 50
    assert document_lengths(cost, StageSpec(1), tuple(range(0, 512, 32)), 512, 4) == (128, 128, 128, 128)
    late = document_lengths(cost, StageSpec(1), tuple(range(0, 256, 16)), 512, 4)  # short ones, then one of 256 tokens
    assert late[0] > late[-1]
    assert all(n % 8 == 0 for n in document_lengths(cost, StageSpec(1), STARTS, 512, 4, tile=8))
    with pytest.raises(ValueError, match="documents begin at 0"):
        document_lengths(cost, StageSpec(1), (1,), 512, 4)
