"""What the search counts for one plan."""

import pytest

from terapipe import PRESETS
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
