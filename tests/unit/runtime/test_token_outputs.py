"""Values of tokens as a differentiable operation: any loss of them has the gradients of plain PyTorch code."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from terapipe import Layout, Pipeline, Plan
from tests.support.models import TINY, gradients, make_batch, make_model, mesh_of, worst_error
from tests.support.ranks import Ranks

Result = tuple[float, dict[str, Tensor]]
UNEVEN = Plan((2, 2), ((9, 1, 12, 7), (20, 9)), (0, 1, 4))
PLANS = (
    replace(UNEVEN, boundaries=(0, 4)),
    UNEVEN,
    replace(UNEVEN, recompute="full"),
    replace(UNEVEN, recompute="block", order="terapipe-deferred"),
    replace(UNEVEN, recompute="light"),
    replace(UNEVEN, boundaries=(0, 1, 3, 4), order="gpipe", lengths=((29,), (29,))),
    replace(UNEVEN, boundaries=(0, 1, 2, 3, 4), order="terapipe-v", chunks=2),
)


def values(logits: Tensor, labels: Any) -> dict[str, Tensor]:
    log_probs = F.log_softmax(logits, -1)
    return {
        "log_probs": log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0].masked_fill(labels < 0, 0),
        "entropy": -(log_probs.exp() * log_probs).sum(-1),
        "is_top1": logits.argmax(-1) == labels,
    }


def loss_of(found: dict[str, Tensor]) -> Tensor:
    """Of whole sequences, over the batch: no sum over tokens."""
    sums = found["log_probs"].sum(1)
    weights = 1 + found["is_top1"].sum(1)
    return -F.logsigmoid(0.1 * (sums[0] - sums[1:])).mean() + (weights * found["entropy"].sum(1).square()).mean() / 1e3


def plainly(rows: int = 4) -> Result:
    ids, labels = make_batch(TINY, rows, 29, ignored=True)
    model = make_model(TINY)
    losses = [
        loss_of(values(model.logits(model(part)), theirs))
        for part, theirs in zip(ids.split(4), labels.split(4), strict=True)
    ]
    loss = torch.stack(losses).sum()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def piped(plan: Plan, layout: Layout | None, shard: bool) -> Result:
    mesh = None if layout is None else mesh_of(layout)
    pipe = Pipeline(make_model(TINY), plan, mesh=mesh, shard=shard, timeout=300.0)
    ids, labels = make_batch(TINY, 4 * (1 if layout is None else layout.dp), 29, ignored=True)
    mine = slice(4 * pipe.dp_rank, 4 * pipe.dp_rank + 4)
    for _ in range(2):
        found = pipe.token_outputs(ids[mine], labels[mine], values)
        with torch.no_grad():  # as a reference model does, between forward and backward
            again = pipe.token_outputs(ids[mine][:, :13], labels[mine][:, :13], values)
            same = pipe.token_outputs(ids[mine], labels[mine], values)
        assert torch.equal(same["log_probs"], found["log_probs"])
        assert torch.allclose(again["entropy"], found["entropy"][:, :13])
        loss = loss_of(found)
        (0.5 * loss).backward()  # both halves are added up
    total = pipe.transport.all_reduce(loss.detach().clone(), "dp")
    return total.item(), gradients(pipe)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_any_loss(plan: Plan, ranks: Callable[[int], Ranks]) -> None:
    assert worst_error(plainly(), ranks(plan.num_ranks)(piped, plan, None, False), TINY) < 1e-12


@pytest.mark.parametrize(
    ("layout", "shard"), [(Layout(2, 2, 1), False), (Layout(2, 1, 1), True), (Layout(1, 2, 2), False)], ids=str
)
def test_layouts(layout: Layout, shard: bool, ranks: Callable[[int], Ranks]) -> None:
    """Gradients are summed over replicas. With tensor parallel, slices of odd lengths are not shared out."""
    plan = UNEVEN if layout.pp > 1 else replace(UNEVEN, boundaries=(0, 4))
    assert worst_error(plainly(4 * layout.dp), ranks(layout.devices)(piped, plan, layout, shard), TINY) < 1e-12


def test_what_is_refused() -> None:
    ids, labels = make_batch(TINY, 4, 29, ignored=True)
    pipe = Pipeline(make_model(TINY), replace(UNEVEN, boundaries=(0, 4), order="terapipe-1f1b"))
    with pytest.raises(ValueError, match="needs all forwards before the first backward"):
        pipe.token_outputs(ids, labels)
    pipe = Pipeline(make_model(TINY), replace(UNEVEN, boundaries=(0, 4)))
    first = pipe.token_outputs(ids, labels)
    pipe.token_outputs(ids, labels).sum().backward()
    with pytest.raises(ValueError, match="another batch since the forward of this one"):
        first.sum().backward()


def twice(how: str) -> Result:
    """A second backward, then a forward and a backward as if nothing had been."""
    ids, labels = make_batch(TINY, 4, 29, ignored=True)
    pipe = Pipeline(make_model(TINY), UNEVEN, timeout=300.0)
    scores = pipe.token_outputs(ids, labels)
    loss = scores.sum()
    loss.backward(retain_graph=True)
    pipe.zero_grad()
    if how == "after another":
        pipe.token_outputs(ids, labels).sum().backward()
        pipe.zero_grad()
    with pytest.raises(ValueError, match=r"backward\(\) of these values ran already.*call backward\(\) once"):
        (scores.square().sum() if how == "of another loss" else loss).backward()
    assert not gradients(pipe)
    loss = loss_of(pipe.token_outputs(ids, labels, values))
    loss.backward()
    return loss.item(), gradients(pipe)


@pytest.mark.parametrize("how", ["of the same loss", "of another loss", "after another"])
def test_a_second_backward_is_refused_and_leaves_the_pipeline_as_it_was(
    how: str, ranks: Callable[[int], Ranks]
) -> None:
    assert worst_error(plainly(), ranks(2)(twice, how), TINY) < 1e-12


def different(compared: bool) -> None:
    pipe = Pipeline(make_model(TINY), UNEVEN)
    if compared:
        pipe.compare_data()
    pipe.step(*make_batch(TINY, 4, 29, ignored=True, seed=pipe.rank))


def test_ranks_with_different_data_are_refused(ranks: Callable[[int], Ranks]) -> None:
    ranks(2)(different, False)  # the first rank's ids and the last one's labels: legal, if each has only its own
    with pytest.raises(ValueError, match="all ranks of a pipeline must"):
        ranks(2)(different, True)
