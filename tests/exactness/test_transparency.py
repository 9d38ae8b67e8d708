"""The signature test: loss and every gradient equal those of the plain model in one process."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from terapipe import GPTConfig, Plan, Slice
from terapipe.modeling.key_values import KeyValueStore
from terapipe.runtime.loss_head import TokenLoss
from tests.support.models import make_batch, piped, plain, variant, worst_error
from tests.support.plans import examples, plans
from tests.support.ranks import Ranks

BOUND = {torch.float64: 1e-10, torch.float32: 2e-5}


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=plans(max_ranks=4, max_microbatches=4), data=st.data())
def test_any_plan(ranks: Callable[[int], Ranks], plan: Plan, data: st.DataObject) -> None:
    config = variant(layers=plan.num_layers, tied=data.draw(st.booleans()), kv_heads=data.draw(st.sampled_from([4, 2])))
    ids, labels = make_batch(config, plan.batch_size, plan.seq_len, ignored=data.draw(st.booleans()))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float64, torch.float32]))
    found = ranks(plan.num_ranks)(piped, config, plan, ids, labels, dtype)
    assert worst_error(plain(config, ids, labels, dtype), found, config) <= BOUND[dtype]


UNEVEN = Plan((1, 2), ((9, 1, 12, 7), (20, 9)), (0, 1, 3, 4), "terapipe-1f1b")


@pytest.mark.parametrize(
    ("order", "recompute"),
    [("terapipe-1f1b", False), ("terapipe-zb", False), ("terapipe-zb", True), ("terapipe-zb2", False)],
)
def test_known_plan_at_rounding_level(ranks: Callable[[int], Ranks], order: str, recompute: bool) -> None:
    """Far tighter than the promise: errors of 1e-15 are what rounding leaves."""
    config, plan = variant(), replace(UNEVEN, order=order, recompute=recompute)
    ids, labels = make_batch(config, plan.batch_size, plan.seq_len, ignored=True)
    found = ranks(3)(piped, config, plan, ids, labels, torch.float64)
    assert worst_error(plain(config, ids, labels, torch.float64), found, config) < 1e-13


def test_bfloat16_stays_close_to_the_plain_model(ranks: Callable[[int], Ranks]) -> None:
    """Rounding of 2**-9 at every step; what matters is that no sum or scale is done in it."""
    config = variant()
    ids, labels = make_batch(config, UNEVEN.batch_size, UNEVEN.seq_len, ignored=True)
    found = ranks(3)(piped, config, UNEVEN, ids, labels, torch.bfloat16)
    truth = plain(config, ids, labels, torch.float64)
    wide = [(loss, {name: g.double() for name, g in part.items()}) for loss, part in found]
    assert worst_error(truth, wide, config) < 0.1


def forgetful(*args: object) -> object:
    """As ``piped``, but gradients of keys and values do not reach earlier slices."""
    nothing = torch.zeros(())
    kept, KeyValueStore.grad = KeyValueStore.grad, lambda self, start, end: (nothing, nothing)  # type: ignore[method-assign, return-value]
    try:
        return piped(*args)  # type: ignore[arg-type]
    finally:
        KeyValueStore.grad = kept  # type: ignore[method-assign]


def careless(*args: object) -> object:
    """As ``piped``, but one slice's gradient is lost on the last stage."""
    kept = TokenLoss.gradient

    def lose(self: TokenLoss, s: Slice, hidden: torch.Tensor) -> torch.Tensor:
        found = kept(self, s, hidden)
        return torch.zeros_like(found) if s.number == 1 else found

    TokenLoss.gradient = lose  # type: ignore[method-assign]
    try:
        return piped(*args)  # type: ignore[arg-type]
    finally:
        TokenLoss.gradient = kept  # type: ignore[method-assign]


@pytest.mark.parametrize("broken", [forgetful, careless])
def test_this_suite_can_fail(ranks: Callable[[int], Ranks], broken: Callable[..., object]) -> None:
    config = variant()
    ids, labels = make_batch(config, UNEVEN.batch_size, UNEVEN.seq_len, ignored=False)
    found = ranks(3)(broken, config, UNEVEN, ids, labels, torch.float64)
    assert worst_error(plain(config, ids, labels, torch.float64), found, config) > 1e-2


def test_tied_weights_without_their_sum_are_noticed() -> None:
    """worst_error compares both copies of a tied weight with the plain model's one."""
    config: GPTConfig = variant()
    ids, labels = make_batch(config, 1, 8, ignored=False)
    loss, gradients = plain(config, ids, labels, torch.float64)
    halved = {name: g / 2 if name == "embedding.weight" else g for name, g in gradients.items()}
    assert worst_error((loss, gradients), [(loss, halved)], config) > 0.1
