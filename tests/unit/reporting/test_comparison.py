"""What is said about a comparison."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

import terapipe as tp
from terapipe.planning.hardware import DEVICES, HOSTS, PAPERS, SHEETS
from terapipe.reporting.comparison import comparison_chart, comparison_page, constants, verdict
from terapipe.search.result import Comparison


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return tp.compare("layers=8,hidden=2048,heads=16", "dgx-a100:1", batch_size=8, seq_len=1024, pp=2)


def test_a_rival_that_is_faster_is_recommended(comparison: Comparison) -> None:
    rival = min((r for r in comparison.rivals if r.fits), key=lambda r: r.step_time)
    pipeline = comparison.pipeline
    assert pipeline is not None
    fast = replace(comparison, rivals=(replace(rival, step_time=pipeline.step_time / 2),))
    assert f"Do not use a pipeline here: {rival.title} takes" in verdict(fast)
    assert "2.00 times that" in verdict(fast)
    slow = replace(comparison, rivals=(replace(rival, step_time=pipeline.step_time * 2),))
    assert "Do not use" not in verdict(slow)
    assert f"2.00 times as long as {pipeline.title}" in verdict(slow)
    large = replace(comparison, rivals=(replace(rival, fits=False),))
    assert "Do not use" not in verdict(large)


def test_rivals_are_marked_as_estimates(comparison: Comparison) -> None:
    text = str(comparison)
    assert "FSDP2 ~" in text
    assert "~ not ours, and not simulated" in text
    same = tp.compare("gpt3-1b", "dgx-a100:1", batch_size=8, seq_len=1024, dp=1, pp=4, tp=2, same_layout=True)
    assert not same.rivals
    assert "~" not in str(same)


def test_the_chart_leaves_out_rivals_that_do_not_fit(comparison: Comparison) -> None:
    far = tuple(replace(rival, peak_bytes=10**15, fits=False) for rival in comparison.rivals)
    ET.fromstring(comparison_chart(comparison))
    assert "~" in comparison_chart(comparison)
    assert "~" not in comparison_chart(replace(comparison, rivals=far))


def test_a_page_names_the_sources_of_its_constants(comparison: Comparison) -> None:
    written = comparison_page([comparison], "a small GPT")
    for word in ("a small GPT", "dgx-a100:1", "simulated", "8 seq of 1024 tokens", "A100 data sheet", "312 TFLOP/s"):
        assert word in written, word


def test_every_device_and_host_has_sources() -> None:
    assert set(SHEETS) == set(DEVICES)
    assert {device.architecture for device in DEVICES.values()} <= set(PAPERS)
    for name, host in HOSTS.items():
        for constant, value, source in constants(tp.Cluster(f"{name}:2")):
            assert value, (name, constant)
            assert "by the user" not in source, (name, constant)
        assert host.devices
    own = constants(tp.Cluster("mine", replace(HOSTS["dgx-a100"], device=replace(DEVICES["a100"], peak=1e12)), 2))
    assert "by the user" in own[0][2]
