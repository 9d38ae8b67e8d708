"""Rough estimates of alternatives."""

from dataclasses import replace

from terapipe.planning.hardware import Cluster
from terapipe.published.estimates import estimate_fsdp, estimates
from terapipe.search.request import Request
from tests.unit.search.test_sensitivity import SOURCE


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


def test_offloading_takes_the_inputs_of_layers_off_the_device() -> None:
    request = Request(batch_size=1, seq_len=65536)
    here, away = (estimate_fsdp(SOURCE, request, 1, 8, offload=offload) for offload in (False, True))
    inputs = 8 * 8192 * 2048 * 2  # layers, tokens of a device, hidden size, bytes
    assert here.peak_bytes - away.peak_bytes == inputs
    assert here.step_time == away.step_time
