"""Plans by wrong constants."""

import pytest

from terapipe import GPTConfig
from terapipe.planning.hardware import Cluster
from terapipe.search.request import Request
from terapipe.search.sensitivity import CONSTANTS, FACTORS, sensitivities, wrong_host
from terapipe.search.source import ClusterSource

SOURCE = ClusterSource(GPTConfig(layers=8, hidden=2048, heads=16, max_seq_len=65536), Cluster("dgx-a100:1"))


def test_a_wrong_constant_never_beats_the_right_one_by_much() -> None:
    """The search is no exact optimiser, so a mistake may find a slightly better plan, but not a much better one."""
    request = Request(batch_size=1, seq_len=2048, dp=1, pp=4, tp=2, order="terapipe", chunks=1)
    found = list(sensitivities(SOURCE, request))
    assert len(found) == len(CONSTANTS) * len(FACTORS)
    assert all(-0.02 < mistake.regret < 1.0 for mistake in found)
    assert any(mistake.regret > 0.001 for mistake in found)


@pytest.mark.parametrize("constant", CONSTANTS)
def test_each_constant_is_changed_alone(constant: str) -> None:
    host = SOURCE.cluster.host
    wrong = wrong_host(host, constant, 2.0)
    assert wrong != host
    assert wrong_host(wrong, constant, 0.5) == host
