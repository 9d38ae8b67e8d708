"""As much is kept as fits: fewer slices recompute than all or none."""

import pytest

from terapipe.planning.hardware import Cluster
from terapipe.planning.presets import PRESETS
from terapipe.scheduling.footprint import peaks
from terapipe.scheduling.simulator import program
from terapipe.search.choose import choose
from terapipe.search.request import Request
from terapipe.search.source import ClusterSource

SOURCE = ClusterSource(PRESETS["gpt3-1b"], Cluster("dgx-a100:1"))
REQUEST = Request(8, 2048, dp=1, pp=4, tp=1, order="terapipe", chunks=1, num_slices=8, microbatch_size=1)
REQUEST = REQUEST.fixed(offload="none")


@pytest.mark.parametrize(("light", "heavy"), [("none", "light"), ("none", "block"), ("block", "full")])
def test_modes_are_mixed_between_two_budgets(light: str, heavy: str) -> None:
    """The budget is halfway between what two modes need."""
    more, less = (choose(SOURCE, REQUEST.fixed(recompute=mode)).estimate for mode in (light, heavy))
    budget = (more.peak_bytes + less.peak_bytes) // 2
    mixed = choose(SOURCE, REQUEST.fixed(memory=budget)).estimate
    assert light in mixed.plan.recompute_modes  # with one that keeps less, which need not be the heavy one
    assert len(mixed.plan.recompute_modes) > 1
    assert mixed.step_time < less.step_time
    found = peaks(program(mixed.plan), mixed.plan, SOURCE.memory(mixed.layout))
    assert mixed.peak_bytes == max(found) <= budget
    # The budget is used: a rank with one more slice that keeps more would not fit.
    per_slice = (more.peak_bytes - less.peak_bytes) / 8
    assert mixed.peak_bytes > budget - 2 * per_slice


def test_whole_sequences_are_mixed_by_microbatch() -> None:
    """1F1B holds few of its microbatches at a time, so memory for some of them is left between two modes. The last
    microbatch, with which the step ends, keeps its activations on every rank."""
    request = REQUEST.fixed(order="1f1b", num_slices=None, batch_size=16)
    more, less = (choose(SOURCE, request.fixed(recompute=mode)).estimate for mode in ("none", "block"))
    request = request.fixed(recompute_modes=("none", "block", "full"))
    mixed = choose(SOURCE, request.fixed(memory=(more.peak_bytes + less.peak_bytes) // 2)).estimate
    first = mixed.plan.recompute_of(0)
    assert {*first} == {"none", "block"}
    assert first[-1] == "none"
    assert mixed.step_time < less.step_time


def test_what_the_request_fixes_is_not_mixed() -> None:
    full = choose(SOURCE, REQUEST.fixed(recompute="full")).estimate
    assert full.plan.recompute == "full"


def test_one_device_within_a_budget() -> None:
    """Slices and recomputation for a single device: less memory, more of both."""
    source = ClusterSource(PRESETS["gpt-small"], Cluster("dgx-a100:1"))
    request = Request(1, 8192, dp=1, pp=1, tp=1, offload="none")
    free = choose(source, request).estimate
    assert free.plan.recompute == "none"
    least = choose(source, request.fixed(recompute="full", num_slices=64)).estimate.peak_bytes
    budgets = [int(least + share * (free.peak_bytes - least)) for share in (0.8, 0.4, 0.02)]
    tight = [choose(source, request.fixed(memory=budget)).estimate for budget in budgets]
    for estimate, budget in zip(tight, budgets, strict=True):
        assert estimate.peak_bytes <= budget
    times = [free.step_time, *(estimate.step_time for estimate in tight)]
    assert times == sorted(times)
    assert tight[-1].plan.recompute != "none"
    assert tight[-1].sliced
