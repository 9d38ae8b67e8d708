import pytest

from terapipe import Action, Event, Op, Plan, Timeline

PLAN = Plan((1,), ((2, 2),), (0, 1, 2))
A, B = PLAN.slices


def example() -> Timeline:
    events = [
        Event(1, Action(Op.F, 1, A), 12.0, 14.0),
        Event(0, Action(Op.F, 0, A), 10.0, 12.0),
        Event(1, Action(Op.RECV_F, 1, A), 9.0, 12.0),
    ]
    return Timeline.of(PLAN, events)


def test_time_starts_with_the_first_computation() -> None:
    timeline = example()
    assert timeline.makespan == 4.0
    assert [e.start for e in timeline.computations] == [0.0, 2.0]
    assert timeline.idle == 0.5


def test_json_round_trip() -> None:
    assert Timeline.from_json(example().to_json()) == example()


def test_a_malformed_timeline_is_refused() -> None:
    with pytest.raises(ValueError, match="'plan' and 'events'"):
        Timeline.from_json("{}")
