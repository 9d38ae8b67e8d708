import pytest
from hypothesis import given

from terapipe import Action, Op, Plan, Schedule, dependencies, schedule
from tests.support.plans import plans

PLAN = Plan((1, 1), ((2, 3), (5,)), (0, 1, 2))
A, B = PLAN.grid[0]
(C,) = PLAN.grid[1]


@pytest.mark.parametrize(
    ("action", "needs"),
    [
        (Action(Op.F, 0, A), []),
        (Action(Op.F, 0, B), [Action(Op.F, 0, A)]),
        (Action(Op.F, 1, B), [Action(Op.RECV_F, 1, B), Action(Op.F, 1, A)]),
        (Action(Op.F, 0, C), []),
        (Action(Op.B, 1, B), [Action(Op.F, 1, B)]),
        (Action(Op.B, 1, A), [Action(Op.F, 1, A), Action(Op.B, 1, B)]),
        (Action(Op.I, 0, A), [Action(Op.F, 0, A), Action(Op.RECV_B, 0, A), Action(Op.B, 0, B)]),
        (Action(Op.W, 0, A), [Action(Op.B, 0, A)]),
        (Action(Op.SEND_F, 0, A), [Action(Op.F, 0, A)]),
        (Action(Op.RECV_F, 1, A), [Action(Op.SEND_F, 0, A)]),
        (Action(Op.SEND_B, 1, A), [Action(Op.B, 1, A)]),
        (Action(Op.RECV_B, 0, A), [Action(Op.SEND_B, 1, A)]),
    ],
)
def test_the_rule_of_precedence(action: Action, needs: list[Action]) -> None:
    assert list(dependencies(action, PLAN)) == needs


def test_stages_on_the_same_rank_hand_over_without_a_transfer() -> None:
    plan = Plan((1,), ((4,),), (0, 1, 2), "interleaved", chunks=2)
    (s,) = plan.slices
    assert dependencies(Action(Op.F, 1, s), plan) == (Action(Op.F, 0, s),)
    assert dependencies(Action(Op.B, 0, s), plan) == (Action(Op.F, 0, s), Action(Op.B, 1, s))


@given(plans(max_ranks=3, max_microbatches=3))
def test_json_round_trip(plan: Plan) -> None:
    made = schedule(plan)
    assert Schedule.from_json(made.to_json()) == made


@pytest.mark.parametrize("text", ["F 0", "X 0 0.0", "F 5 0.0", "F 0 9.0", "F 0 0.-1", ""])
def test_an_action_outside_the_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="lies in the plan"):
        Action.from_text(text, PLAN)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"plan": {}}'])
def test_a_malformed_schedule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"'plan' and 'ranks'"):
        Schedule.from_json(text)
