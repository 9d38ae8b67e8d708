"""Utilization, days and cost."""

import pytest

from terapipe import Layout
from terapipe.search.evaluator import PlanEstimate, PlanEvaluator
from terapipe.search.request import Request
from terapipe.search.throughput import parse_tokens
from tests.unit.search.test_sensitivity import SOURCE


def test_tokens_read_as_papers_write_them() -> None:
    assert parse_tokens("50B") == parse_tokens(50e9) == parse_tokens("50000000000") == 50e9
    assert parse_tokens("1.5T") == 1.5e12
    assert parse_tokens("300M") == 3e8
    for wrong in ("", "0", "-5B", "50 tokens", "5X", "nan", "inf"):
        with pytest.raises(ValueError, match="reads like 50B"):
            parse_tokens(wrong)


def estimate_of(layout: Layout) -> PlanEstimate:
    bench = PlanEvaluator(SOURCE, Request(batch_size=8, seq_len=2048), layout, "none")
    return bench.evaluate(bench.plan("1f1b", 1, (2048,)))


def test_mfu_is_the_share_of_the_peak_that_the_model_needs() -> None:
    estimate, config = estimate_of(Layout(2, 2, 1)), SOURCE.config
    flops = 6 * 8 * 2048 * (8 * config.layer_parameters + config.vocab * config.hidden + 8 * 2048 * config.hidden)
    assert estimate.mfu == pytest.approx(flops / (estimate.step_time * 4 * 312e12))
    assert 0 < (estimate.mfu or 0) < 1
    assert estimate.to_dict()["mfu"] == estimate.mfu


def test_days_and_cost_follow_from_the_step() -> None:
    estimate = estimate_of(Layout(2, 2, 1))
    assert estimate.tokens_per_day == pytest.approx(8 * 2048 / estimate.step_time * 86400)
    assert estimate.days("10B") == pytest.approx(1e10 / estimate.tokens_per_day)
    assert estimate.cost("10B", 2.5) == pytest.approx(estimate.days("10B") * 24 * 4 * 2.5)
