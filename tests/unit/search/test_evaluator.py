"""What the search counts for one plan."""

from dataclasses import replace
from itertools import pairwise

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


@pytest.mark.parametrize(("layers", "first", "last"), [(8, (0, 1), (7, 8)), (7, (0, 1), (7, 7)), (6, (0, 0), (6, 6))])
def test_even_stages_with_fewer_layers_leave_the_ends_alone(
    layers: int, first: tuple[int, int], last: tuple[int, int]
) -> None:
    """126 layers on 128 stages: a stage in the middle got none, and planning 405B on 4,096 GPUs failed."""
    source = ClusterSource(replace(PRESETS["gpt3-1b"], layers=layers), Cluster("dgx-a100:1"))
    evaluator = PlanEvaluator(source, Request(8, 2048, pp=4, dp=1, tp=2), Layout(1, 4, 2), "none")
    edges = evaluator.even_boundaries(2)
    assert (edges[:2], edges[-2:], len(edges)) == (first, last, 9)
    assert all(a < b for a, b in pairwise(edges[1:-1]))
