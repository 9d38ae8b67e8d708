"""Wrong constants, and rough estimates of alternatives."""

from dataclasses import replace

import pytest

from terapipe import GPTConfig
from terapipe.planning.hardware import Cluster
from terapipe.search.estimates import estimates
from terapipe.search.request import Request
from terapipe.search.sensitivity import CONSTANTS, FACTORS, mistakes, wrong_host
from terapipe.search.source import ClusterSource

SOURCE = ClusterSource(GPTConfig(layers=8, hidden=2048, heads=16, max_seq_len=65536), Cluster("dgx-a100:1"))


def test_a_wrong_constant_never_beats_the_right_one_by_much() -> None:
    """The search is no exact optimiser, so a mistake may find a slightly better plan, but not a much better one."""
    request = Request(batch_size=1, seq_len=2048, dp=1, pp=4, tp=2, order="terapipe", chunks=1)
    found = list(mistakes(SOURCE, request))
    assert len(found) == len(CONSTANTS) * len(FACTORS)
    assert all(-0.02 < mistake.regret < 1.0 for mistake in found)
    assert any(mistake.regret > 0.001 for mistake in found)


@pytest.mark.parametrize("constant", CONSTANTS)
def test_each_constant_is_changed_alone(constant: str) -> None:
    host = SOURCE.cluster.host
    wrong = wrong_host(host, constant, 2.0)
    assert wrong != host
    assert wrong_host(wrong, constant, 0.5) == host


def test_sharding_is_estimated_with_or_without_a_ring() -> None:
    (alone,) = estimates(SOURCE, Request(batch_size=8, seq_len=4096))
    (ring,) = estimates(SOURCE, Request(batch_size=1, seq_len=65536))
    assert alone.name == "FSDP (estimate)"
    assert ring.name == "FSDP, rings of 8 (estimate)"
    assert estimates(SOURCE, Request(batch_size=3, seq_len=4096)) == []
    assert 0 < alone.step_time < estimates(SOURCE, Request(batch_size=16, seq_len=4096))[0].step_time
    slow = replace(SOURCE, cluster=Cluster("p3.16xlarge:8"))
    (bound,) = estimates(slow, Request(batch_size=1, seq_len=65536))
    assert bound.peak_bytes > 0
