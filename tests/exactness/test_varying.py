"""Batches of other shapes than the plan's: run by the same plan resized, or filled up; exact either way."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from terapipe import Pipeline, PipelineError, Plan
from terapipe.runtime.preflight import Inputs
from tests.support.models import TINY, make_batch, make_model, plain, worst_error
from tests.support.plans import plans
from tests.support.ranks import Ranks

PLAN = Plan((1, 2), ((9, 1, 12, 7), (20, 9)), (0, 1, 4), "terapipe-1f1b")
SHAPES = [(3, 29), (2, 40), (4, 3), (1, 1), (3, 29), (2, 40)]


def steps(vary: str, batches: list[tuple[Tensor, Tensor]]) -> list[tuple[float, dict[str, Tensor]]]:
    pipe = Pipeline(make_model(TINY), PLAN, vary=vary, timeout=300.0)  # type: ignore[arg-type]
    found = []
    for ids, labels in batches:
        loss = pipe.step(ids, labels).item()
        found.append((loss, {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}))
        assert pipe.timeline().makespan > 0
        pipe.zero_grad()
    return found


@pytest.mark.parametrize(
    ("vary", "shapes"), [("replan", SHAPES), ("pad", [(3, 29), (2, 20), (1, 1), (3, 28)])], ids=["replan", "pad"]
)
def test_every_shape_is_exact(ranks: Callable[[int], Ranks], vary: str, shapes: list[tuple[int, int]]) -> None:
    batches = [make_batch(TINY, *shape, ignored=True, seed=i) for i, shape in enumerate(shapes)]
    found = ranks(2)(steps, vary, batches)
    for i, batch in enumerate(batches):
        wanted = plain(TINY, *batch, torch.float64)
        assert worst_error(wanted, [rank[i] for rank in found], TINY) < 1e-12


def unequal(rank: int) -> str:
    pipe = Pipeline(make_model(TINY), PLAN, vary="replan", timeout=300.0)
    ids, labels = make_batch(TINY, 2, 40, ignored=False)
    try:
        pipe.step(*((None, None) if pipe.rank == rank else (ids, labels)))
    except (ValueError, PipelineError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_the_batch_stops_all(fresh_ranks: Callable[[int], Ranks], rank: int) -> None:
    for message in fresh_ranks(2)(unequal, rank):
        assert f"every rank must be given input_ids or labels, (batch, tokens), rank {rank} got None" in message


def test_too_large_a_batch_cannot_be_filled_up() -> None:
    pipe = Pipeline(make_model(TINY), Plan((1,), ((8,),), (0, 4)), vary="pad")
    with pytest.raises(ValueError, match=r"input_ids on rank 0 must be \(1, 8\)"):
        pipe.step(*make_batch(TINY, 1, 9, ignored=False))


@given(plan=plans(), batch=st.integers(1, 9), tokens=st.integers(1, 40), tile=st.sampled_from([1, 2, 8]))
def test_a_plan_can_be_resized(plan: Plan, batch: int, tokens: int, tile: int) -> None:
    resized = plan.resize(batch, tokens * tile, tile)
    assert (resized.batch_size, resized.seq_len) == (batch, tokens * tile)
    assert all(n % tile == 0 for row in resized.lengths for n in row)
    assert plan.resize(plan.batch_size, plan.seq_len) == plan


@pytest.mark.parametrize(
    ("change", "said"),
    [({"boundaries": (0, 1, 3, 4, 5)}, r"got \(0, 1, 3, 4, 5\), 2"), ({"order": "terapipe-v"}, "2 and 'terapipe-v'")],
)
def test_a_batchs_own_plan_leaves_the_stages_where_they_are(change: dict[str, Any], said: str) -> None:
    plan = Plan((1,), ((16, 8),), (0, 1, 2, 3, 5), "terapipe-deferred", 2)
    intake = Inputs(plan, "refuse", 1, 0, torch.device("cpu"))
    other = replace(plan, lengths=((4, 20),), order="terapipe")
    ids = torch.zeros(1, 24, dtype=torch.int64)
    assert intake.take(ids, None, None, other).plan == other
    with pytest.raises(ValueError, match=said):
        intake.take(ids, None, None, replace(other, **change))
