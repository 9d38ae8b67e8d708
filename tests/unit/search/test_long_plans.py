"""Plans of many microbatches: what two shorter plans say of them, held against the whole."""

from dataclasses import replace

import pytest

from terapipe import ORDERS, Cluster, GPTConfig, Layout, Plan
from terapipe.planning.slices import even_lengths
from terapipe.search import long_plans
from terapipe.search.choose import choose
from terapipe.search.evaluator import PlanEvaluator
from terapipe.search.long_plans import extrapolate, shorten, shorter_counts
from terapipe.search.request import Request
from terapipe.search.source import ClusterSource

MODEL = GPTConfig(layers=16, hidden=2048, heads=16, max_seq_len=2**14)
SOURCE = ClusterSource(MODEL, Cluster("dgx-a100:1"))


def evaluator(batch_size: int = 49, seq_len: int = 16384, **fixed: object) -> PlanEvaluator:
    request = Request(batch_size, seq_len, **fixed)  # type: ignore[arg-type]
    return PlanEvaluator(SOURCE, request, Layout(1, 4, 2), "none")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_plans, "LONG", 100)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.usefixtures("short")
def test_the_whole_is_on_the_line(order: str) -> None:
    """With a last microbatch of one sequence, where the others have two."""
    judge, entry = evaluator(), ORDERS[order]
    lengths = even_lengths(16384, 12 if entry.sliced else 1, 128)
    plan = judge.plan(order, 2 if entry.sliced else 1, lengths, entry.chunks or min(4, entry.tried_chunks[-1]))
    assert shorter_counts(plan) or not entry.sliced or plan.chunks == 4
    guess = judge.evaluate(plan)
    whole = judge.confirm(guess)
    assert guess.step_time == pytest.approx(whole.step_time, rel=0.01)
    assert guess.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.01)
    assert guess.idle == pytest.approx(whole.idle, abs=0.01)


def test_what_is_short_or_uneven_is_simulated_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = evaluator()
    plan = judge.plan("terapipe-1f1b", 1, even_lengths(16384, 8, 128))
    assert shorter_counts(plan) is None
    monkeypatch.setattr(long_plans, "LONG", 100)
    counts = shorter_counts(plan)
    assert counts == (4, 8)
    uneven = replace(plan, lengths=(plan.lengths[0][::-1], *plan.lengths[1:-1], even_lengths(16384, 7, 128)))
    assert shorter_counts(uneven) is None
    half = tuple(("none",) * 196 + ("full",) * 196 for _ in range(4))
    assert shorter_counts(replace(plan, recompute=half)) is None
    alike = tuple((*("full",) * 3, *("none",) * 5) * 49 for _ in range(4))
    assert shorter_counts(replace(plan, recompute=alike)) == counts
    assert shorten(replace(plan, recompute=alike), 4) == replace(
        Plan((1,) * 4, plan.lengths[:4], plan.boundaries, plan.order), recompute=tuple(row[:32] for row in alike)
    )
    assert extrapolate((3, 6), (10.0, 16.0), 45) == 94.0


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("offload", ["none", "auto"])
def test_what_is_chosen_was_simulated_whole_and_fits(offload: str) -> None:
    """Where memory is short: recomputation and offload of all microbatches are alike, and the chosen plan fits."""
    request = Request(64, 16384, dp=1, pp=4, tp=2, memory="9GiB", offload=offload, microbatch_size=1)
    chosen = choose(SOURCE, request.fixed(order="terapipe-1f1b", num_slices=8, chunks=1)).estimate
    assert chosen.evaluator is not None
    assert chosen == chosen.evaluator.confirm(chosen)
    assert chosen.fits
    assert chosen.peak_bytes <= 9 * 2**30
