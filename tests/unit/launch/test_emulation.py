"""A plan on emulated devices: processes, messages and counts. Nothing here asserts how long anything took."""

import pytest

from terapipe import Plan
from terapipe.launch.emulation import emulate, stretch_of
from terapipe.runtime.emulation import predict
from tests.support.costs import SimpleCost

COST = SimpleCost(token=1e-3, sent=1e-4)


def test_four_ranks_do_what_the_simulator_says() -> None:
    """That every slice went through every stage is checked inside."""
    plan = Plan.uniform(batch_size=1, seq_len=8, num_slices=4, boundaries=range(5), order="terapipe-zb")
    run = emulate(plan, COST, steps=2, stretch=1.0)
    order = [[event.action for event in rank] for rank in run.predicted.by_rank]
    assert [[event.action for event in rank] for rank in run.measured.by_rank] == order
    assert run.measured.makespan >= run.predicted.makespan > 0
    assert [len(report.steps) for report in run.reports] == [2] * 4
    assert run.overhead > 0
    assert run.ready > 0


def test_short_computations_are_stretched() -> None:
    plan = Plan.uniform(batch_size=1, seq_len=8, num_slices=4, boundaries=range(3), order="terapipe")
    short, long = predict(plan, SimpleCost(token=1e-6)), predict(plan, SimpleCost(token=10.0))
    assert stretch_of(short) > 100
    assert stretch_of(long) == 1


def test_one_step_is_not_enough() -> None:
    with pytest.raises(ValueError, match="at least 2, got 1"):
        emulate(Plan((1,), ((8,),), (0, 1)), COST, steps=1)


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 256 ranks are emulated on one machine, got 300"):
        emulate(Plan((1,), ((8,),), tuple(range(301))), COST)
