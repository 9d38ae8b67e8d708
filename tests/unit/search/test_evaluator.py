"""What the search counts for one plan."""

import pytest

import terapipe
from terapipe import PRESETS, GPTConfig
from terapipe.planning.hardware import Cluster
from terapipe.planning.layout import Layout
from terapipe.search.evaluator import PlanEvaluator
from terapipe.search.request import Request
from terapipe.search.source import ClusterSource


def test_a_pipeline_of_one_rank_sends_nothing() -> None:
    """The formula charged two transfers per slice however few ranks there were, so that search stopped too early."""
    source = ClusterSource(PRESETS["gpt3-1b"], Cluster("p3.16xlarge:2"))  # transfers there hold their sender up
    request = Request(batch_size=1, seq_len=2048)

    def sent(pipe: int) -> float:
        bench = PlanEvaluator(source, request, Layout(pp=pipe), "none")
        part, cost = bench.slowest_stage, bench.cost
        return float(bench.seconds(1, 512, 0) - cost.forward(part, 1, 512, 0) - cost.backward(part, 1, 512, 0))

    assert sent(1) == pytest.approx(0.0, abs=1e-12)
    assert sent(3) == pytest.approx(2 * sent(2))


def test_more_stages_than_layers_leave_the_ends_alone() -> None:
    """The planner raised an error: a stage in the middle had no layer."""
    config = GPTConfig(layers=6, hidden=256, heads=4)
    request = Request(4, 512, pp=4, chunks=2, bare_ends=True)
    evaluator = PlanEvaluator(ClusterSource(config, Cluster("dgx-a100:1")), request, Layout(1, 4, 1), "none")
    assert evaluator.even_boundaries(2) == (0, 0, 1, 2, 3, 4, 5, 6, 6)
    best = terapipe.plan(
        config, "dgx-a100:1", batch_size=4, seq_len=512, pp=4, dp=1, tp=1, order="interleaved", chunks=2
    )
    assert best.estimate.plan.has_bare_ends
