"""Terms of the loss that layers add: functions of sums over tokens, layers and stages."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from terapipe import GPT, Layout, Pipeline, PipelineModel, Plan, SliceCache
from terapipe.modeling.gpt import Block
from terapipe.modeling.stage import IGNORE, AuxiliaryLoss
from tests.exactness.test_objectives import labels_of
from tests.support.models import TINY, gradients, make_model, mesh_of, worst_error
from tests.support.ranks import Ranks

Result = tuple[float, dict[str, Tensor]]


def balance(sums: Tensor) -> Tensor:
    """Not a sum over tokens: the square of a mean."""
    return 0.3 * (sums[:-1] / sums[-1]).square().sum()


class WatchedBlock(Block):
    def forward(self, x: Tensor, cache: SliceCache | None) -> Tensor:
        out = super().forward(x, cache)
        sums = torch.cat([out.flatten(0, 1).sum(0), out.new_full((1,), out.shape[0] * out.shape[1])])
        if cache is None:
            self.seen = sums
        else:
            cache.add_sums("balance", sums)
        return out


def watched() -> GPT:
    model = make_model(TINY)
    for block in model.layers.values():
        block.__class__ = WatchedBlock
    return model


class WatchedGPT(GPT):
    over: Any = "microbatch"

    @property
    def auxiliary_losses(self) -> dict[str, AuxiliaryLoss]:
        return {"balance": AuxiliaryLoss(TINY.hidden + 1, balance, self.over)}


class Whole(PipelineModel):
    def __init__(self, kind: type[GPT] = WatchedGPT) -> None:
        self._model, self._kind = watched(), kind
        self.num_layers, self.tied = TINY.layers, self._model.tied

    def stage(self, first: int, last: int, device: torch.device, tp: Any = None) -> GPT:
        part = self._model.stage(first, last, device, tp)
        part.__class__ = self._kind
        return part


def balanced(plan: Plan, layout: Layout, over: Any) -> Result:
    WatchedGPT.over = over
    pipe = Pipeline(Whole(), plan, mesh=mesh_of(layout))
    ids, labels = labels_of(plan.batch_size * layout.dp)
    mine = slice(pipe.dp_rank * plan.batch_size, (pipe.dp_rank + 1) * plan.batch_size)
    loss = pipe.step(ids[mine], labels[mine])
    assert pipe.metrics()["balance"] > 0
    return loss.item(), gradients(pipe)


def plainly_balanced(groups: list[slice], rows: int, shares: list[float] | None = None) -> Result:
    """With the term of each group of rows, weighted by their number, or as is said."""
    model, (ids, labels) = watched(), labels_of(rows)
    total = model.loss(model(ids), labels) / (labels != IGNORE).sum()
    for i, group in enumerate(groups):
        model(ids[group])
        seen = torch.stack([block.seen for block in model.layers.values()]).sum(0)  # type: ignore[misc]
        total = total + balance(seen) * (shares[i] if shares else len(ids[group]) / rows)
    total.backward()
    return total.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


UNEQUAL = Plan((3, 1), ((9, 1, 12, 7), (20, 9)), (0, 1, 4))
FOLDED = replace(UNEQUAL, order="terapipe-v", boundaries=(0, 1, 2, 3, 4), chunks=2)
WHOLE = replace(UNEQUAL, boundaries=(0, 4))
APART = [slice(0, 3), slice(3, 4)]


@pytest.mark.gpu_seldom("deferred|dp 2 x pp 1 x tp 1-batch")
@pytest.mark.parametrize(
    ("plan", "layout", "over", "groups"),
    [
        (UNEQUAL, Layout(1, 2, 1), "microbatch", APART),
        (replace(UNEQUAL, order="terapipe-1f1b", recompute=True), Layout(1, 2, 1), "microbatch", APART),
        (replace(UNEQUAL, order="terapipe-deferred"), Layout(1, 2, 1), "batch", [slice(0, 4)]),
        (FOLDED, Layout(1, 2, 1), "batch", [slice(0, 4)]),
        (WHOLE, Layout(2, 1, 1), "batch", [slice(0, 4), slice(4, 8)]),
        (WHOLE, Layout(2, 1, 1), "replicas", [slice(0, 8)]),
    ],
    ids=str,
)
def test_a_term_of_a_layer(
    ranks: Callable[[int], Ranks], plan: Plan, layout: Layout, over: str, groups: list[slice]
) -> None:
    found = ranks(layout.devices)(balanced, plan, layout, over)
    assert worst_error(plainly_balanced(groups, plan.batch_size * layout.dp), found, TINY) < 1e-12


def test_accumulated_batches_add_up_to_one_term() -> None:
    """With the labels of all as ``total``, each batch's term weighs as its labels do."""
    WatchedGPT.over = "microbatch"
    ids, labels = labels_of(8)
    half = replace(WHOLE, sizes=(4,), lengths=WHOLE.lengths[:1])
    pipe = Pipeline(Whole(), half)
    total = float((labels != IGNORE).sum())
    found = sum(pipe.step(ids[rows], labels[rows], total=total).item() for rows in (slice(0, 4), slice(4, 8)))
    shares = [int((labels[rows] != IGNORE).sum()) / total for rows in (slice(0, 4), slice(4, 8))]
    wanted = plainly_balanced([slice(0, 4), slice(4, 8)], 8, shares)
    assert worst_error(wanted, [(found, gradients(pipe))], TINY) < 1e-12


def test_sums_of_the_wrong_size_are_named() -> None:
    class Wrong(WatchedGPT):
        @property
        def auxiliary_losses(self) -> dict[str, AuxiliaryLoss]:
            return {"balance": AuxiliaryLoss(3, balance)}

    ids, labels = labels_of(4)
    pipe = Pipeline(Whole(Wrong), WHOLE)
    with pytest.raises(ValueError, match=r"sums of 'balance' must be of shape \(3,\), .* got \(17,\)"):
        pipe.step(ids, labels)


class Checkpointed(WatchedBlock):
    """Computed again within its backward."""

    def forward(self, x: Tensor, cache: SliceCache | None) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, cache, use_reentrant=False)
        return out


def test_layers_computed_again_do_not_count_again() -> None:
    WatchedGPT.over = "microbatch"
    model, (ids, labels) = Whole(), labels_of(4)
    for block in model._model.layers.values():
        block.__class__ = Checkpointed
    pipe = Pipeline(model, WHOLE)
    wanted = plainly_balanced(APART, 4)
    for _ in range(2):
        pipe.zero_grad()
        loss = pipe.step(ids, labels).item()
        assert worst_error(wanted, [(loss, gradients(pipe))], TINY) < 1e-12
    assert pipe.evaluate(ids, labels).item() == pytest.approx(wanted[0], rel=1e-12)


def shared_out(plan: Plan) -> str:
    with pytest.raises(ValueError, match="are of all tokens") as error:
        Pipeline(Whole(), plan, mesh=mesh_of(Layout(1, 1, 2)))
    return str(error.value)


def test_tokens_that_ranks_share_out_are_refused(fresh_ranks: Callable[[int], Ranks]) -> None:
    for message in fresh_ranks(2)(shared_out, Plan((4,), ((8, 20),), (0, 4))):
        assert "sums of auxiliary losses (balance)" in message
