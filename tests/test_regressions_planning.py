"""What once went wrong in planning, scheduling and the command line: one short story each."""

import sys
from dataclasses import replace
from typing import Any

import pytest

from terapipe import Plan, schedule, validate
from terapipe.scheduling import proof


def calls_per_action(plan: Plan) -> float:
    """How many Python functions ``validate`` calls, over the number of actions: its work without a clock."""
    made, calls = schedule(plan), 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        validate(made)
    finally:
        sys.setprofile(None)
    return calls / sum(map(len, made.ranks))


def test_validating_takes_as_long_per_action_however_large_the_plan() -> None:
    """Ranks that had stopped were woken many times over: 36, 94, 217 us per action with 8, 16, 32 microbatches."""
    cut = {"tokens": 64, "slices": 8, "boundaries": range(9), "order": "terapipe-1f1b"}
    small, large = (calls_per_action(Plan.uniform(batch=batch, **cut)) for batch in (4, 32))
    assert large < 1.2 * small


@pytest.mark.parametrize(("order", "chunks"), [("terapipe-1f1b", 1), ("terapipe-v", 2), ("interleaved", 2)])
def test_plans_that_differ_in_lengths_only_are_proved_once(
    order: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every new batch shape was validated again, on every rank."""
    proof._of_shape.cache_clear()
    validated = []
    monkeypatch.setattr(proof, "validate", lambda made: validated.append(made) or validate(made))
    plan = Plan((1, 2), ((4, 3, 2), (5, 4)), tuple(range(2 * chunks + 1)), order, chunks)
    other = replace(plan, sizes=(3, 1), lengths=((1, 17, 2), (1, 19)))
    for each in (plan, other):
        assert proof.proved(each, 1) == schedule(each).ranks[1]
    assert len(validated) == 1
