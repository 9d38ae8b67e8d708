"""Which slices the planner offloads, and what it gains by it."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

import terapipe
from terapipe import Plan
from terapipe.planning.hardware import Cluster, Host
from terapipe.search.evaluator import PlanEvaluator
from terapipe.search.offload import WORTH, offload_few, offload_share
from terapipe.search.request import Request
from terapipe.search.source import ClusterSource

MODEL = "llama3-8b"
SEQ = 1 << 17


def planned(**fixed: Any) -> terapipe.PlanResult:
    options: dict[str, Any] = {"batch_size": 1, "seq_len": SEQ, "dp": 1, "tp": 1, "pp": 8, "order": "terapipe"}
    return terapipe.plan(MODEL, "dgx-h100:1", **(options | fixed))


@pytest.fixture(scope="module")
def roomy() -> terapipe.PlanResult:
    return planned(offload="none", num_slices=32, chunks=1, recompute="none", memory="500GiB")


def evaluator(plan: Plan, memory: str, **fixed: Any) -> PlanEvaluator:
    result = planned(offload="none", num_slices=32, chunks=1, recompute="none", memory="500GiB")
    assert isinstance(result.source, ClusterSource)
    request = Request(1, SEQ, memory=memory, **fixed)
    return PlanEvaluator(result.source, request, result.layout, "none")


def test_a_share_is_spread_evenly(roomy: terapipe.PlanResult) -> None:
    plan = offload_share(roomy.plan, 0.5)
    for k in range(plan.num_stages):
        moved = [i for i, flag in enumerate(plan.offload_of(k)) if flag]
        assert len(moved) in (14, 15)  # of the first 29: the last three are not worth it
        assert {b - a for a, b in pairwise(moved)} <= {2, 3}
    assert offload_share(roomy.plan, 0.0) == roomy.plan
    assert sum(offload_share(roomy.plan, 1.0).offload_of(0)) == 29


def test_as_few_as_it_takes(roomy: terapipe.PlanResult) -> None:
    """Each rank has as many as it needs; with one less it would not fit."""
    judge = evaluator(roomy.plan, "70GiB")
    plan = offload_few(judge, roomy.plan)
    counts = [sum(plan.offload_of(k)) for k in range(plan.num_stages)]
    assert len(set(counts)) > 1, "ranks differ"
    assert all(needs.device <= (judge.budget or 0) for needs in judge.needs_by_rank(plan))
    assert judge.evaluate(plan).fits
    assert not judge.evaluate(roomy.plan).fits
    assert judge.evaluate(plan).host_bytes > 0


def test_auto_computes_less_again() -> None:
    """One sequence of a million tokens on eight H100s: offload takes the place of recomputation."""
    options: dict[str, Any] = {"batch_size": 1, "seq_len": 1 << 20, "pp": 1, "dp": 1, "tp": 8, "num_slices": 128}
    without = terapipe.plan(MODEL, "dgx-h100:1", offload="none", **options)
    auto = terapipe.plan(MODEL, "dgx-h100:1", offload="auto", **options)
    ideal = terapipe.plan(MODEL, "dgx-h100:1", offload="none", memory="2000GiB", **options)
    assert auto.step_time < 0.9 * without.step_time
    assert auto.step_time < 1.1 * ideal.step_time
    assert auto.plan.offloads
    assert not without.plan.offloads
    assert "waits in the host's memory" in str(auto)
    again = terapipe.PlanResult.from_json(auto.to_json())
    assert again.plan == auto.plan
    assert again.estimate.host_bytes == auto.estimate.host_bytes > 0


def test_without_being_asked_where_it_is_faster() -> None:
    """A plan that fits and computes as little again as it may has no copies. Of a host in words, whose memory is an
    assumption, plans have copies only where nothing fits without."""
    tight: dict[str, Any] = {"num_slices": 64, "chunks": 1, "recompute": "block"}
    assert not planned(**tight, memory="60GiB").plan.offloads
    free: dict[str, Any] = {"num_slices": 64, "chunks": 1, "memory": "40GiB"}
    again, auto = planned(**free, offload="none"), planned(**free)
    assert auto.plan.offloads
    assert auto.step_time < again.step_time / WORTH
    options: dict[str, Any] = {"batch_size": 1, "seq_len": SEQ, "dp": 1, "tp": 1, "pp": 8, "order": "terapipe", **free}
    assert not terapipe.plan(MODEL, "h100:8", **options).plan.offloads
    assert terapipe.plan(MODEL, "h100:8", **options, offload="auto").plan.offloads
    least = planned(**tight, offload="none", memory="60GiB").peak_bytes
    small = f"{least / 2**30 - 2:.1f}GiB"
    with pytest.raises(ValueError, match="offload='auto' keeps what slices need in the host's memory"):
        planned(**tight, offload="none", memory=small)
    result = planned(**tight, memory=small)
    assert result.plan.offloads
    assert result.estimate.fits


def test_the_memory_of_the_host_is_a_limit() -> None:
    tight: dict[str, Any] = {"num_slices": 64, "chunks": 1, "recompute": "block"}
    least = planned(**tight, offload="none", memory="60GiB").peak_bytes
    small = f"{least / 2**30 - 2:.1f}GiB"
    with pytest.raises(ValueError, match="no plan fits"):
        planned(**tight, memory=small, host_memory="1MiB")


def test_a_cpu_gains_nothing() -> None:
    """Its memory is that of the host, so what is offloaded still counts."""
    plan = terapipe.plan("gpt-tiny", "cpu", batch_size=1, seq_len=256, dp=1, pp=1, tp=1, num_slices=8, offload=1.0)
    other = terapipe.plan("gpt-tiny", "cpu", batch_size=1, seq_len=256, dp=1, pp=1, tp=1, num_slices=8, offload="none")
    assert plan.plan.offloads
    assert plan.peak_bytes >= 0.99 * other.peak_bytes, "only outputs are gone"
    assert not terapipe.plan("gpt-tiny", "cpu", batch_size=1, seq_len=256, offload="auto").plan.offloads


@pytest.mark.parametrize("offload", ["some", 1.5, -0.1, True, "nan"])
def test_what_is_no_share_is_refused(offload: object) -> None:
    with pytest.raises(ValueError, match="offload is none, auto or a share of the slices between 0 and 1, got"):
        Request(1, 64, offload=offload)  # type: ignore[arg-type]
    assert Request(1, 64, offload="0.5").offload == 0.5
    assert Request(1, 64, offload=0).offload == "none"


def test_hosts_of_older_files_have_the_usual_copies() -> None:
    host = Cluster("dgx-h100:1").host
    fields = host.to_dict()
    assert Host.from_dict(fields) == host
    old = {key: value for key, value in fields.items() if key not in ("copies", "memory")}
    assert Host.from_dict(old) == replace(
        host, copies=Host(host.device, 8, host.intra_node, host.inter_node).copies, memory=0
    )


def test_keys_and_values_too_if_nothing_fits_without() -> None:
    """Eight stages of one sequence of a million tokens: keys and values are half of what is needed."""
    options: dict[str, Any] = {"batch_size": 1, "seq_len": 1 << 20, "pp": 8, "order": "terapipe", "num_slices": 256}
    options["memory"] = "60GiB"
    with pytest.raises(ValueError, match="no plan fits"):
        terapipe.plan(MODEL, "dgx-h100:1", offload="auto", offload_kv=False, **options)
    result = terapipe.plan(MODEL, "dgx-h100:1", offload="auto", **options)
    assert result.plan.offload_kv
    assert "and keys and values" in str(result)


def test_one_device_takes_several_stages_so_that_keys_and_values_can_wait() -> None:
    plan = terapipe.plan(MODEL, "h200:1", batch_size=1, seq_len=1 << 18, num_slices=128, offload="auto").plan
    assert plan.num_ranks == 1
    assert plan.chunks > 1
    assert plan.offload_kv
