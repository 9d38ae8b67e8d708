"""Bytes over time: the published peaks, and that the count by order equals the one over a timeline."""

import itertools

import pytest
from hypothesis import given, settings

from terapipe import Plan, schedule
from terapipe.scheduling.footprint import curves, peaks
from terapipe.scheduling.simulator import program, simulate
from tests.support.costs import SimpleCost, SimpleMemory
from tests.support.plans import examples, plans, uniform


def peak(order: str, ranks: int, batch: int, slices: int, chunks: int = 1) -> float:
    """In microbatches on one rank."""
    plan = uniform(order, ranks, batch, slices, chunks)
    return max(peaks(program(plan), plan, SimpleMemory())) / (slices * 4 * chunks)


def test_published_peaks() -> None:
    k, n, m = 4, 8, 8
    assert peak("gpipe", k, n, 1) == n
    assert peak("terapipe", k, n, m) == n
    assert peak("1f1b", k, n, 1) == k
    assert peak("1f1b", k, 2, 1) == 2
    assert peak("terapipe-1f1b", k, n, m) == 1 + (k - 1) / m
    assert peak("interleaved", k, n, 1, 2) == k + (k - 1) / 2
    assert peak("interleaved", k, n, m, 2) == 1 + 2 * (k - 1) / (2 * m)


@settings(max_examples=examples(100))
@given(plan=plans())
def test_the_curve_peaks_where_the_count_does_and_ends_where_it_began(plan: Plan) -> None:
    memory = SimpleMemory(1.0, 0.5, 0.25, 3.0, 2.0)
    steps = curves(simulate(schedule(plan), SimpleCost(sent=0.5)), memory)
    assert [max(y for _, y in rank) for rank in steps] == pytest.approx(peaks(program(plan), plan, memory), abs=1.0)
    for rank in steps:
        assert rank[0][1] == pytest.approx(rank[-1][1])
        assert all(a <= b for (a, _), (b, _) in itertools.pairwise(rank))


def test_weight_halves_hold_what_they_are_owed() -> None:
    plan = Plan((1,), ((4, 4),), (0, 1), "terapipe-deferred")
    assert peaks(program(plan), plan, SimpleMemory(1.0, owing=10.0)) == [4 + 40 + 40]


def test_logits_exist_on_the_last_stage_only_and_slice_by_slice() -> None:
    plan = Plan((1,), ((4, 4),), (0, 1, 2), "terapipe")
    assert peaks(program(plan), plan, SimpleMemory(0.0, extra=5.0)) == [0, 20]
