"""A validator is only as good as what it refuses: each test damages a good schedule in one way."""

import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terapipe import Action, Op, Plan, Schedule, schedule, validate
from terapipe.scheduling import validation as proof
from tests.support.plans import examples, plans

PLAN = Plan.uniform(batch_size=2, seq_len=12, num_slices=3, boundaries=(0, 1, 2, 3), order="terapipe-1f1b")


def with_rank(made: Schedule, rank: int, actions: list[Action]) -> Schedule:
    return replace(made, ranks=tuple(tuple(actions) if r == rank else a for r, a in enumerate(made.ranks)))


def test_a_skipped_slice() -> None:
    made = schedule(PLAN)
    actions = [a for a in made.ranks[1] if not (a.op is Op.F and a.slice == PLAN.grid[1][2])]
    with pytest.raises(ValueError, match=r"rank 1 never does F\(stage 1, microbatch 1, slice 2\)"):
        validate(with_rank(made, 1, actions))


def test_a_slice_done_twice() -> None:
    made = schedule(PLAN)
    with pytest.raises(ValueError, match=r"rank 0 does B\(.*too often"):
        validate(with_rank(made, 0, [*made.ranks[0], made.ranks[0][-1]]))


def test_an_action_of_another_rank() -> None:
    made = schedule(PLAN)
    with pytest.raises(ValueError, match="not that rank's to do"):
        validate(with_rank(made, 0, [*made.ranks[0], Action(Op.F, 1, PLAN.slices[0])]))


def test_an_action_outside_the_plan() -> None:
    made = schedule(PLAN)
    longer = PLAN.slices[0]._replace(length=5)
    with pytest.raises(ValueError, match=r"rank 0 does F\(stage 0, .*\), which is not in the plan"):
        validate(with_rank(made, 0, [*made.ranks[0], Action(Op.F, 0, longer)]))
    with pytest.raises(ValueError, match=r"SEND_F\(stage 9, .*\), which is not in the plan"):
        validate(with_rank(made, 0, [*made.ranks[0], Action(Op.SEND_F, 9, PLAN.slices[0])]))


def test_swapped_sends() -> None:
    made = schedule(PLAN)
    actions = list(made.ranks[0])
    i, j = [n for n, a in enumerate(actions) if a.op is Op.SEND_F][:2]
    shift_cuts = actions[j]
    del actions[j]
    actions.insert(i, shift_cuts)
    with pytest.raises(
        ValueError, match=r"same order: where rank 0 has SEND_F\(.*slice 1\), rank 1 has RECV_F\(.*slice 0\)"
    ):
        validate(with_rank(made, 0, actions))


def test_a_backward_before_its_forward_names_the_cycle() -> None:
    made = schedule(Plan((1,), ((4,),), (0, 1)))
    with pytest.raises(ValueError, match=r"rank 0 is at B\(.*waits for F\(.*later in its own list"):
        validate(with_rank(made, 0, list(reversed(made.ranks[0]))))


def test_a_cycle_over_two_ranks_is_reported_whole() -> None:
    """Rank 0 wants a gradient before it sends the second slice, which rank 1 needs for that gradient."""
    plan = Plan((1,), ((2, 2),), (0, 1, 2))
    a, b = plan.slices
    first = [
        (Op.F, 0, a), (Op.SEND_F, 0, a), (Op.F, 0, b), (Op.RECV_B, 0, b), (Op.B, 0, b), (Op.SEND_F, 0, b),
        (Op.RECV_B, 0, a), (Op.B, 0, a),
    ]  # fmt: skip
    second = [
        (Op.RECV_F, 1, a), (Op.F, 1, a), (Op.SEND_B, 1, b), (Op.RECV_F, 1, b), (Op.F, 1, b), (Op.B, 1, b),
        (Op.B, 1, a), (Op.SEND_B, 1, a),
    ]  # fmt: skip
    made = Schedule(plan, tuple(tuple(Action(*x) for x in rank) for rank in (first, second)))
    with pytest.raises(ValueError, match=r"deadlocks: rank 1 is at SEND_B\(.*waits for B\(.*later in its own list"):
        validate(made)


def test_transfers_that_block_each_other() -> None:
    """Both ranks send first and receive second: fine with buffers, a deadlock without."""
    plan = Plan((1, 1), ((2,), (2,)), (0, 1, 2), "1f1b")
    a, b = plan.slices
    first = [
        (Op.F, 0, a), (Op.SEND_F, 0, a), (Op.F, 0, b), (Op.SEND_F, 0, b), (Op.RECV_B, 0, a), (Op.B, 0, a),
        (Op.RECV_B, 0, b), (Op.B, 0, b),
    ]  # fmt: skip
    second = [
        (Op.RECV_F, 1, a), (Op.F, 1, a), (Op.B, 1, a), (Op.SEND_B, 1, a), (Op.RECV_F, 1, b), (Op.F, 1, b),
        (Op.B, 1, b), (Op.SEND_B, 1, b),
    ]  # fmt: skip
    made = Schedule(plan, tuple(tuple(Action(*x) for x in rank) for rank in (first, second)))
    with pytest.raises(ValueError, match="neighbors must list their shared transfers in the same order"):
        validate(made)


def test_three_ranks_in_a_ring_of_waits() -> None:
    """Every pair agrees on its own transfers, and still everybody waits for the next: only the walk finds it."""
    plan = Plan((1,) * 3, ((2,),) * 3, tuple(range(7)), "interleaved", chunks=2)
    made = schedule(plan)
    shift_cuts = []
    for actions in made.ranks:
        sends = [a for a in actions if a.op is Op.SEND_F]
        rest = [a for a in actions if a.op is not Op.SEND_F]
        last = max(i for i, a in enumerate(rest) if a.op is Op.F)
        shift_cuts.append(tuple(rest[: last + 1] + sends + rest[last + 1 :]))
    with pytest.raises(ValueError, match=r"deadlocks|same order"):
        validate(Schedule(plan, tuple(shift_cuts)))


def test_a_split_backward_is_whole_too() -> None:
    made = schedule(PLAN)
    split = [
        [b for a in rank for b in ([Action(Op.I, *a[1:]), Action(Op.W, *a[1:])] if a.op is Op.B else [a])]
        for rank in made.ranks
    ]
    validate(Schedule(PLAN, tuple(map(tuple, split))))
    without = [a for a in split[0] if a.op is not Op.W]
    with pytest.raises(ValueError, match="never does W"):
        validate(Schedule(PLAN, (tuple(without), *map(tuple, split[1:]))))


def test_the_wrong_number_of_ranks() -> None:
    made = schedule(PLAN)
    with pytest.raises(ValueError, match="for 3 ranks, the schedule has 2"):
        validate(Schedule(PLAN, made.ranks[:2]))


@settings(max_examples=examples(200))
@given(plans(), st.data())
def test_moving_any_computation_before_its_needs_is_refused(plan: Plan, data: st.DataObject) -> None:
    made = schedule(plan)
    rank = data.draw(st.integers(0, plan.num_ranks - 1))
    actions = list(made.ranks[rank])
    place = data.draw(st.sampled_from([i for i, a in enumerate(actions) if a.op in (Op.B, Op.I)]))
    action = actions.pop(place)
    actions.insert(actions.index(Action(Op.F, action.stage, action.slice)), action)
    with pytest.raises(ValueError, match=r"deadlocks|same order|in this order"):
        validate(with_rank(made, rank, actions))


def lines_per_action(plan: Plan) -> float:
    """How many lines of Python ``validate`` runs, over the number of actions: its work without a clock."""
    made, lines, before = schedule(plan), 0, sys.gettrace()

    def watch(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return watch

    sys.settrace(watch)
    try:
        validate(made)
    finally:
        sys.settrace(before)
    return lines / sum(map(len, made.ranks))


def test_validating_takes_as_long_per_action_however_large_the_plan() -> None:
    """Ranks that had stopped were woken many times over: 36, 94, 217 us per action with 8, 16, 32 microbatches."""
    cut = {"seq_len": 64, "num_slices": 8, "boundaries": range(9), "order": "terapipe-1f1b"}
    small, large = (lines_per_action(Plan.uniform(batch_size=batch, **cut)) for batch in (4, 32))
    assert large < 1.2 * small


@pytest.mark.parametrize(("order", "chunks"), [("terapipe-1f1b", 1), ("terapipe-v", 2), ("interleaved", 2)])
def test_plans_that_differ_in_lengths_only_are_proved_once(
    order: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every new batch shape was validated again, on every rank."""
    proof._of_shape.cache_clear()
    validated = []
    check = proof.validate_numbers
    monkeypatch.setattr(proof, "validate_numbers", lambda *lists: validated.append(lists) or check(*lists))
    plan = Plan((1, 2), ((4, 3, 2), (5, 4)), tuple(range(2 * chunks + 1)), order, chunks)
    other = replace(plan, sizes=(3, 1), lengths=((1, 17, 2), (1, 19)))
    for each in (plan, other):
        assert proof.validated_actions(each, 1) == schedule(each).ranks[1]
    assert len(validated) == 1
