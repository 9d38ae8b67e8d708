"""Offload changes no number: gradients equal the plain model's, and to the bit those of a plan without offload."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from terapipe import ORDERS, Layout, Pipeline, Plan, losses
from terapipe.modeling import offload
from terapipe.planning.order import order_named
from terapipe.planning.recompute import MODES
from terapipe.scheduling.actions import Op
from terapipe.scheduling.orders import schedule
from tests.exactness.test_layouts import BOUNDARIES, combinations
from tests.support.models import gradients, laid_out, make_batch, make_model, piped, plain, variant, worst_error
from tests.support.plans import examples, plans
from tests.support.ranks import Ranks

BOUND = 1e-12
MANY = ((9, 1, 4, 3, 2, 3, 4, 3), (10, 2, 3, 4, 4, 6))
EVEN = ((6, 2, 4, 4, 2, 4, 4, 2), (10, 2, 4, 4, 2, 6))  # devices may share out their tokens
LAYOUTS = [Layout(1, 2, 1), Layout(1, 3, 1), Layout(2, 2, 1), Layout(1, 1, 2), Layout(1, 2, 2)]


def plan_for(layout: Layout, order: str, recompute: str) -> Plan:
    """Enough slices that some are worth moving on every rank."""
    chunks = 2 if order_named(order).chunks == 2 or order == "interleaved" else 1
    boundaries = BOUNDARIES[layout.pp * chunks]
    lengths = EVEN if layout.tp > 1 else MANY
    if order_named(order).sliced:
        return Plan((1, 2), lengths, boundaries, order, chunks, recompute, True, True)
    whole = (sum(lengths[0]),)
    return Plan((1,) * 8, (whole,) * 8, boundaries, order, chunks, recompute, True)


@pytest.mark.gpu_seldom("full|dp 2|tp 2")
@pytest.mark.parametrize(("layout", "order", "recompute"), combinations(LAYOUTS, sorted(ORDERS), MODES), ids=str)
def test_every_layout_order_and_mode(ranks: Callable[[int], Ranks], layout: Layout, order: str, recompute: str) -> None:
    plan = plan_for(layout, order, recompute)
    if order != "1f1b":  # which never has so many in flight
        assert all(any(a.op is Op.OUT for a in actions) for actions in schedule(plan).ranks)
    if "1f1b" not in order and "zb" not in order and order != "gpipe":
        assert any(a.op is Op.KV_OUT for actions in schedule(plan).ranks for a in actions)
    config = variant(layers=plan.num_layers, tied=True, kv_heads=2)
    ids, labels = make_batch(config, plan.batch_size * layout.dp, plan.seq_len, ignored=True)
    found = ranks(layout.devices)(laid_out, config, layout, plan, ids, labels, torch.float64, False)
    assert worst_error(plain(config, ids, labels, torch.float64), found, config) < BOUND


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_to_the_bit(ranks: Callable[[int], Ranks], recompute: str, shard: bool, dtype: torch.dtype) -> None:
    layout, config = Layout(2, 2, 1), variant(tied=False, kv_heads=2)
    plan = Plan((1, 2), MANY, (0, 1, 4), "terapipe", recompute=recompute)
    batch = make_batch(config, plan.batch_size * layout.dp, plan.seq_len, ignored=True)
    moved = replace(plan, offload=((True, False) * 7, True), offload_kv=True)
    wanted, found = (ranks(4)(laid_out, config, layout, p, *batch, dtype, shard) for p in (plan, moved))
    for (loss, same), (other, grads) in zip(wanted, found, strict=True):
        assert loss == other
        assert all(torch.equal(grad, same[name]) for name, grad in grads.items())


def values_of(plan: Plan, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Gradients of a loss that the caller computes from values of tokens, then of one of sequences."""
    pipe = Pipeline(make_model(variant()), plan, timeout=300.0)
    rows = (ids if pipe.is_first else None, labels if pipe.is_last else None)
    values = pipe.token_outputs(*rows, per_token=losses.token_log_probs)
    values.square().sum().backward()
    first = {name: grad.clone() for name, grad in gradients(pipe).items()}
    pipe.zero_grad()
    objective = losses.SequenceLoss(lambda values, targets: (values.sum(1) / 100).exp().sum())
    other = Pipeline(make_model(variant()), plan, loss_fn=objective, timeout=300.0)
    other.step(*rows)
    return first | {f"sequences.{name}": grad for name, grad in gradients(other).items()}


@pytest.mark.parametrize("recompute", MODES)
def test_losses_of_values_and_of_sequences(ranks: Callable[[int], Ranks], recompute: str) -> None:
    plan = Plan((1, 2), MANY, (0, 1, 4), "terapipe", recompute=recompute)
    batch = make_batch(variant(), plan.batch_size, plan.seq_len, ignored=True)
    wanted, found = (ranks(2)(values_of, p, *batch) for p in (plan, replace(plan, offload=True, offload_kv=True)))
    for same, grads in zip(wanted, found, strict=True):
        assert set(same) == set(grads)
        assert all(torch.equal(grad, same[name]) for name, grad in grads.items())


def forgetful(*args: Any) -> Any:
    """As ``piped``, but what comes back from the host is zero."""
    restore = offload._Saved.restore

    def forget(self: offload._Saved) -> Tensor:
        return restore(self) if self.tensor is not None else torch.zeros_like(restore(self))

    offload._Saved.restore = forget  # type: ignore[method-assign]
    try:
        return piped(*args)
    finally:
        offload._Saved.restore = restore  # type: ignore[method-assign]


@pytest.mark.parametrize("recompute", MODES)
def test_this_suite_can_fail(ranks: Callable[[int], Ranks], recompute: str) -> None:
    config, plan = variant(), plan_for(Layout(1, 2, 1), "terapipe", recompute)
    ids, labels = make_batch(config, plan.batch_size, plan.seq_len, ignored=True)
    found = ranks(2)(forgetful, config, plan, ids, labels, torch.float64)
    assert worst_error(plain(config, ids, labels, torch.float64), found, config) > 0.01


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=plans(max_ranks=1, max_microbatches=4), data=st.data())
def test_any_plan_in_one_process(plan: Plan, data: st.DataObject) -> None:
    config = variant(layers=plan.num_layers, tied=data.draw(st.booleans()), kv_heads=data.draw(st.sampled_from([4, 2])))
    plan = replace(plan, recompute=data.draw(st.sampled_from(MODES)), offload=True, offload_kv=True)
    ids, labels = make_batch(config, plan.batch_size, plan.seq_len, ignored=data.draw(st.booleans()))
    found = [piped(config, plan, ids, labels, torch.float64)]
    assert worst_error(plain(config, ids, labels, torch.float64), found, config) < BOUND
