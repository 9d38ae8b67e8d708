"""Runs and transfers as pages show them."""

import pytest

from terapipe import Event, Op, Plan, Timeline
from terapipe.reporting.view import RunView, transfers
from tests.unit.reporting.runs import DELAY, stepped, view

PLAN = Plan((1,), ((3, 1),), (0, 1, 2))


def test_a_transfer_begins_with_its_send_and_ends_with_its_receive() -> None:
    step = list(transfers(stepped(PLAN)))
    assert [t.is_forward for t in step].count(True) == [t.is_forward for t in step].count(False) == 2
    assert all(t.send and t.receive and t.end - t.start == DELAY for t in step)


@pytest.mark.parametrize("missing", [Op.SEND_F, Op.RECV_F])
def test_half_a_transfer_says_what_it_brings(missing: Op) -> None:
    whole = stepped(PLAN)
    half = Timeline.of(PLAN, [event for event in whole.events if event.action.op is not missing])
    forwards = [t for t in transfers(half) if t.is_forward]
    assert len(forwards) == 2
    assert {t.arrival for t in forwards} == {t.arrival for t in transfers(whole) if t.is_forward}
    assert all((t.send is None) == (missing is Op.SEND_F) for t in forwards)


def test_a_clock_that_is_behind_does_not_make_time_run_backwards() -> None:
    early = [
        Event(e.rank, e.action, e.start - 9, e.end - 9) if e.action.op is Op.RECV_F else e for e in stepped(PLAN).events
    ]
    assert all(t.end >= t.start for t in transfers(Timeline.of(PLAN, early)))


def test_peaks_are_the_highest_points_of_the_curves() -> None:
    assert view("predicted", stepped(PLAN)).peaks == [4.0, 4.0]
    assert RunView.of("predicted", stepped(PLAN)).peaks == []
    assert RunView.of("predicted", stepped(PLAN)).peak(0) == 0.0
