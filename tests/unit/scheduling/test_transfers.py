"""Where sends and receives stand among the computations of every order."""

from hypothesis import given, settings

from terapipe import Op, Plan, schedule
from terapipe.scheduling.actions import COMPUTE
from terapipe.scheduling.transfers import with_early_receives
from tests.support.plans import examples, plans


@settings(max_examples=examples(300))
@given(plans())
def test_no_receive_is_posted_later_than_it_must(plan: Plan) -> None:
    """Each is listed before the computation ahead of the one that needs it, unless its turn had not come by then."""
    for actions in schedule(plan).ranks:
        for place, action in enumerate(actions):
            if action.op in (Op.RECV_F, Op.RECV_B):
                needs = {Op.RECV_F: (Op.F,), Op.RECV_B: (Op.B, Op.I)}[action.op]
                user = next(i for i, a in enumerate(actions) if a.op in needs and a[1:] == action[1:])
                early = any(a.op in COMPUTE for a in actions[place + 1 : user])
                blocked = place > 0 and actions[place - 1].op not in COMPUTE
                assert early or blocked or place == 0


@settings(max_examples=examples(300))
@given(plans())
def test_a_send_follows_what_it_sends_at_once(plan: Plan) -> None:
    for actions in schedule(plan).ranks:
        for place, action in enumerate(actions):
            if action.op in (Op.SEND_F, Op.SEND_B):
                before = next(a for a in reversed(actions[:place]) if a.op in COMPUTE)
                assert before.op in ((Op.F,) if action.op is Op.SEND_F else (Op.B, Op.I))
                assert before[1:] == action[1:]


@settings(max_examples=examples(200))
@given(plan=plans())
def test_early_receives_change_no_order_but_their_place(plan: Plan) -> None:
    """For gloo: sends and receives each stay in order, computations too, and no receive comes later than before."""
    for actions in schedule(plan).ranks:
        early = with_early_receives(actions)
        receives = [a for a in actions if a.op in (Op.RECV_F, Op.RECV_B)]
        assert [a for a in early if a in set(receives)] == receives
        assert [a for a in early if a not in set(receives)] == [a for a in actions if a not in set(receives)]
        assert all(early.index(a) <= actions.index(a) for a in receives)
