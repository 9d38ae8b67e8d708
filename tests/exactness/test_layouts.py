"""Transparency for replicas, stages and split operators together: gradients equal those of the plain model."""

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

from terapipe import ORDERS, GPTConfig, Layout, Plan
from terapipe.planning.order import order_named
from terapipe.runtime import gradient_sync
from tests.support.models import laid_out, make_batch, plain, variant, worst_error
from tests.support.ranks import Ranks

BOUND = 1e-12
LAYOUTS = [
    Layout(data, pipe, tensor)
    for data in (1, 2)
    for pipe in (1, 2, 3)
    for tensor in (1, 2)
    if 1 < data * pipe * tensor <= 8
]


BOUNDARIES = {1: (0, 4), 2: (0, 1, 4), 3: (0, 1, 3, 4), 4: (0, 1, 2, 3, 4), 6: (0, 1, 2, 3, 4, 5, 6)}
ODD, EVEN = ((9, 1, 12, 7), (20, 9)), ((10, 2, 12, 4), (20, 8))  # even slices let devices share out their tokens


def combinations(*choices: Iterable[object]) -> list[Any]:
    """All, those off a diagonal marked: `make test` tries every layout and every order, but not each with each."""
    found = []
    for picks in product(*(list(enumerate(choice)) for choice in choices)):
        marks = [pytest.mark.exhaustive] if sum(index for index, _ in picks) % 10 else []
        found.append(pytest.param(*(value for _, value in picks), marks=marks))
    return found


def plan_for(layout: Layout, order: str, lengths: tuple[tuple[int, ...], ...] = ODD) -> Plan:
    chunks = (
        2 if order_named(order).chunks == 2 or (order in ("interleaved", "terapipe-deferred") and layout.pp < 3) else 1
    )
    if order in ("gpipe", "1f1b"):
        lengths = tuple((sum(row),) for row in lengths)
    return Plan((1, 2), lengths, BOUNDARIES[layout.pp * chunks], order, chunks)


def error(ranks: Ranks, layout: Layout, plan: Plan, config: GPTConfig, shard: bool = False) -> float:
    ids, labels = make_batch(config, plan.batch_size * layout.dp, plan.seq_len, ignored=True)
    found = ranks(laid_out, config, layout, plan, ids, labels, torch.float64, shard)
    return worst_error(plain(config, ids, labels, torch.float64), found, config)


@pytest.mark.gpu_seldom("dp 2 x pp 2 x tp 2|pp 3 x tp 2")
@pytest.mark.exhaustive_ids("^dp 2 x pp 2 x tp 2")
@pytest.mark.parametrize(("layout", "order"), combinations(LAYOUTS, sorted(ORDERS)), ids=str)
def test_every_layout_in_every_order(ranks: Callable[[int], Ranks], layout: Layout, order: str) -> None:
    plan = plan_for(layout, order)
    config = variant(layers=plan.num_layers, tied=True, kv_heads=2)
    assert error(ranks(layout.devices), layout, plan, config) < BOUND


@pytest.mark.gpu_seldom("dp 2 x pp 2 x tp 2|pp 3 x tp 2")
@pytest.mark.exhaustive_ids("^dp 2 x pp 2 x tp 2")
@pytest.mark.parametrize(
    ("layout", "order"), combinations((layout for layout in LAYOUTS if layout.tp > 1), sorted(ORDERS)), ids=str
)
def test_tokens_shared_out_between_operators(ranks: Callable[[int], Ranks], layout: Layout, order: str) -> None:
    plan = plan_for(layout, order, EVEN)
    config = variant(layers=plan.num_layers, tied=False, kv_heads=2)
    assert error(ranks(layout.devices), layout, plan, config) < BOUND


@pytest.mark.gpu_seldom("dp 2 x pp 2 x tp 2")
@pytest.mark.parametrize(
    ("layout", "lengths", "order"),
    combinations(
        (layout for layout in LAYOUTS if layout.dp > 1),
        (ODD, EVEN),
        # both halves, chunks, deferral, the fold, halves between forwards
        ("1f1b", "interleaved", "terapipe-deferred", "terapipe-v", "terapipe-zb"),
    ),
    ids=str,
)
def test_shared_state(
    ranks: Callable[[int], Ranks], layout: Layout, lengths: tuple[tuple[int, ...], ...], order: str
) -> None:
    plan = plan_for(layout, order, lengths)
    config = variant(layers=plan.num_layers, tied=lengths is ODD, kv_heads=4)
    assert error(ranks(layout.devices), layout, plan, config, shard=True) < BOUND


def in_small_buckets(bucket: int, *given: Any) -> Any:
    with mock.patch.object(gradient_sync, "BUCKET", bucket):
        return laid_out(*given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_large_gradients_are_summed_in_place(ranks: Callable[[int], Ranks], dtype: torch.dtype) -> None:
    """Copies of all gradients took as much memory again. The same sums, to the bit, however they are grouped."""
    layout, config = Layout(2, 2, 1), variant(tied=True)
    plan = plan_for(layout, "terapipe")
    batch = make_batch(config, plan.batch_size * layout.dp, plan.seq_len, ignored=True)
    found, wanted = (
        ranks(4)(in_small_buckets, bucket, config, layout, plan, *batch, dtype)
        for bucket in (512, gradient_sync.BUCKET)
    )
    for (loss, gradients), (same_loss, same) in zip(found, wanted, strict=True):
        assert loss == same_loss
        assert all(torch.equal(g, same[name]) for name, g in gradients.items())
