"""What is said about a plan."""

from dataclasses import replace

from terapipe import PRESETS
from terapipe.planning.hardware import Cluster
from terapipe.planning.layout import Layout
from terapipe.reporting.plans import reasons
from terapipe.search.evaluator import PlanEvaluator
from terapipe.search.request import Request
from terapipe.search.result import PlanResult
from terapipe.search.source import ClusterSource


def test_whole_sequences_are_not_called_a_negative_per_cent_faster() -> None:
    """A runner-up may be a little faster where slicing is not worth it: "-0.4% faster than the next best order"."""
    source = ClusterSource(replace(PRESETS["gpt3-1b"], layers=2), Cluster("dgx-a100:1"))
    bench = PlanEvaluator(source, Request(batch_size=1, seq_len=64, tile=8), Layout(pp=2), "none")
    whole = bench.evaluate(bench.plan("gpipe", 1, (64,)))
    sliced = replace(bench.evaluate(bench.plan("terapipe", 1, (32, 32))), step_time=0.996 * whole.step_time)
    said = " ".join(reasons(PlanResult(whole, (sliced,), bench.request)))
    assert "terapipe would be 0.4% faster" in said
    assert "-0.4%" not in said
