"""What once went wrong in planning, scheduling and the command line: one short story each."""

import sys
from dataclasses import replace
from typing import Any

import pytest

from terapipe import PRESETS, Plan, schedule, validate
from terapipe.planning.analytic import AnalyticCost
from terapipe.planning.cost import Part
from terapipe.planning.fitted import FittedCost
from terapipe.planning.hardware import cluster
from terapipe.planning.layout import Layout
from terapipe.scheduling import proof
from terapipe.search.choice import Bench
from terapipe.search.request import ClusterSource, ProfileSource, Request
from tests.planning.test_fitted import made


def calls_per_action(plan: Plan) -> float:
    """How many Python functions ``validate`` calls, over the number of actions: its work without a clock."""
    made, calls = schedule(plan), 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        validate(made)
    finally:
        sys.setprofile(None)
    return calls / sum(map(len, made.ranks))


def test_validating_takes_as_long_per_action_however_large_the_plan() -> None:
    """Ranks that had stopped were woken many times over: 36, 94, 217 us per action with 8, 16, 32 microbatches."""
    cut = {"tokens": 64, "slices": 8, "boundaries": range(9), "order": "terapipe-1f1b"}
    small, large = (calls_per_action(Plan.uniform(batch=batch, **cut)) for batch in (4, 32))
    assert large < 1.2 * small


@pytest.mark.parametrize(("order", "chunks"), [("terapipe-1f1b", 1), ("terapipe-v", 2), ("interleaved", 2)])
def test_plans_that_differ_in_lengths_only_are_proved_once(
    order: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every new batch shape was validated again, on every rank."""
    proof._of_shape.cache_clear()
    validated = []
    monkeypatch.setattr(proof, "validate", lambda made: validated.append(made) or validate(made))
    plan = Plan((1, 2), ((4, 3, 2), (5, 4)), tuple(range(2 * chunks + 1)), order, chunks)
    other = replace(plan, sizes=(3, 1), lengths=((1, 17, 2), (1, 19)))
    for each in (plan, other):
        assert proof.proved(each, 1) == schedule(each).ranks[1]
    assert len(validated) == 1


def test_a_profile_in_bfloat16_is_planned_with_its_own_bytes() -> None:
    """Messages, sums over replicas, weights and activations of every profile were taken to be float32."""
    wide = made()
    half = replace(wide, machine={**wide.machine, "dtype": "bfloat16"})
    two = Layout(data=2)
    costs = [FittedCost(profile, layout=two) for profile in (wide, half)]
    message = [cost.transfer(0, 1, 2, 512) for cost in costs]
    assert message[1] == pytest.approx(costs[0].transfer(0, 1, 1, 512))
    assert costs[1]._reduction(1000) == pytest.approx(costs[0]._reduction(500))
    float32, bfloat16 = (ProfileSource(profile, 2).memory(Layout(), False) for profile in (wide, half))
    assert bfloat16.cache(Part(3), 1, 512) == float32.cache(Part(3), 1, 512) / 2
    assert bfloat16.static(Part(3)) == float32.static(Part(3))  # 2 + 2 bytes and 12 of state; 4 + 4 and 8
    with pytest.raises(ValueError, match="a profile is of one of"):
        replace(wide, machine={"dtype": "int3"})


def test_a_pipeline_of_one_rank_sends_nothing() -> None:
    """The formula charged two transfers per slice however few ranks there were, so that search stopped too early."""
    source = ClusterSource(PRESETS["gpt3-1b"], cluster("p3.16xlarge:2"))  # transfers there hold their sender up
    request = Request(batch=1, tokens=2048)

    def sent(pipe: int) -> float:
        bench = Bench(source, request, Layout(pipe=pipe), recompute=False)
        part, cost = bench.dearest, bench.cost
        return float(bench.seconds(1, 512, 0) - cost.forward(part, 1, 512, 0) - cost.backward(part, 1, 512, 0))

    assert sent(1) == pytest.approx(0.0, abs=1e-12)
    assert sent(3) == pytest.approx(2 * sent(2))


def test_a_described_cluster_exchanges_a_tied_weight_too() -> None:
    """Measured costs had the exchange of a tied weight's gradient, described ones left it out."""
    tied = PRESETS["gpt3-1b"]
    host = cluster("dgx-a100:2")
    layout = Layout(pipe=2, tensor=8)  # one stage on each host
    costs = [AnalyticCost(config, host, layout) for config in (tied, replace(tied, tied=False))]
    added = costs[0].once([Part(12, first=True)]) - costs[1].once([Part(12, first=True)])
    assert added == pytest.approx(host.host.outside.seconds(tied.vocab * tied.hidden * 2))
    assert costs[0].once([Part(24)]) == costs[1].once([Part(24)])
