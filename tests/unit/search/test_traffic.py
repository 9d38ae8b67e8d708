"""Bytes on links."""

import pytest

from terapipe import GPTConfig, Layout
from terapipe.planning.hardware import Cluster
from terapipe.search.evaluator import PlanEvaluator
from terapipe.search.request import Request
from terapipe.search.source import ClusterSource
from terapipe.search.traffic import Traffic, all_to_all, ring

TWO = Cluster("dgx-a100:2")
SOURCE = ClusterSource(GPTConfig(layers=16, hidden=1024, heads=16, max_seq_len=2048), TWO)
HIDDEN = 8 * 2048 * 1024 * 2  # bytes of a batch's hidden states


def traffic(dp: int, pp: int, tp: int, *, mode: str = "none") -> Traffic:
    layout = Layout(dp, pp, tp)
    bench = PlanEvaluator(SOURCE, Request(batch_size=8, seq_len=2048), layout, mode)  # type: ignore[arg-type]
    sent = bench.evaluate(bench.plan("1f1b", 1, (2048,))).traffic
    assert sent is not None
    return sent


def test_a_ring_leaves_a_host_once() -> None:
    assert ring(TWO, 8.0, 8).traffic == Traffic(8.0, 0.0)
    assert ring(TWO, 8.0, 16).traffic == Traffic(7.0, 1.0)
    assert ring(TWO, 8.0, 4, inner=4).traffic == Traffic(4.0, 4.0)
    assert ring(TWO, 8.0, 2, inner=8).traffic == Traffic(0.0, 8.0)
    assert ring(TWO, 8.0, 1).seconds == 0
    apart, together = ring(TWO, 1e9, 2, inner=8).seconds, ring(TWO, 1e9, 16).seconds
    assert apart == pytest.approx(TWO.host.inter_node.seconds(8e9 / TWO.host.rings))
    assert together == pytest.approx(max(TWO.host.inter_node.seconds(1e9 / 0.9), TWO.host.intra_node.seconds(1e9)))


def test_all_to_all_keeps_a_part_at_home() -> None:
    assert all_to_all(TWO, 16.0, 16).traffic == Traffic(7.0, 8.0)
    assert all_to_all(TWO, 8.0, 8).traffic == Traffic(7.0, 0.0)
    assert all_to_all(TWO, 8.0, 1).traffic == Traffic()


def test_a_pipeline_sends_hidden_states_from_stage_to_stage() -> None:
    """Fifteen boundaries, one of them between hosts, each crossed by hidden states and by their gradients."""
    sent = traffic(1, 16, 1)
    assert sent.inside * 16 == pytest.approx(14 * 2 * HIDDEN)
    assert sent.between * 16 == pytest.approx(2 * HIDDEN)


def test_replicas_sum_their_gradients() -> None:
    """Two replicas of eight stages, each on its host: gradients of every device cross the network."""
    sent = traffic(2, 8, 1)
    ends = SOURCE.config.vocab * SOURCE.config.hidden  # the tied weight is on the first and on the last stage
    assert sent.inside * 16 == pytest.approx(2 * 7 * 2 * HIDDEN / 2)
    assert sent.between * 16 == pytest.approx(2 * 4 * (SOURCE.config.parameters + ends))


def test_tensor_parallel_ranks_reduce_in_every_layer() -> None:
    """Two all-reduces in forward and backward each; full recomputation has those of the forward again."""
    none, full = traffic(1, 2, 8), traffic(1, 2, 8, mode="full")
    reduce = 2 * 7 / 8 * HIDDEN
    assert none.inside == pytest.approx(4 * 8 * reduce)
    assert full.inside == pytest.approx(6 * 8 * reduce)
    assert none.between * 16 == pytest.approx(2 * HIDDEN)
