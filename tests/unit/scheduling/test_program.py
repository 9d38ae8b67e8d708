"""Numbers stand for actions: nothing is lost, and the rule of dependencies is the same."""

import numpy as np
import pytest
from hypothesis import given, settings

from terapipe import Action, Op, Plan, dependencies, schedule
from terapipe.scheduling import validation
from terapipe.scheduling.actions import COMPUTE, COPIES, RECEIVES, completes, counterpart
from terapipe.scheduling.orders import computations
from terapipe.scheduling.program import Ints, Numbering, compile_program
from tests.support.plans import examples, plans, uniform


def named(numbering: Numbering, columns: list[Ints], i: int) -> set[Action]:
    """The actions that the columns have for the i-th of those asked about."""
    return {numbering.action(column[i]) for column in columns if column[i] >= 0}


@settings(max_examples=examples(100))
@given(plan=plans(max_ranks=4, max_microbatches=3, max_slices=4))
def test_numbers_say_what_actions_say(plan: Plan) -> None:
    numbering = Numbering(plan)
    actions = [action for rank in schedule(plan).ranks for action in rank]
    numbers = numbering.numbers(actions)
    assert numbering.actions(numbers) == actions
    assert len(set(numbers.tolist())) == len(actions)
    assert numbering.actions(numbering.completes(numbers)) == list(map(completes, actions))
    assert numbering.ranks(numbers).tolist() == [plan.rank_of(action.stage) for action in actions]
    others, needs = numbering.counterparts(numbers), numbering.dependencies(numbers)
    for i, action in enumerate(actions):
        ends = set() if action.op in COMPUTE or action.op in COPIES else {counterpart(action)}
        assert named(numbering, [others], i) == ends
        assert named(numbering, needs, i) == set(dependencies(action, plan))


@settings(max_examples=examples(100))
@given(plan=plans(max_ranks=4, max_microbatches=3, max_slices=4))
def test_a_program_waits_for_what_the_rule_says(plan: Plan) -> None:
    """In its order everything comes after what it depends on, and a need is the computation that a receive is of."""
    program = compile_program(plan, computations(plan))
    place = {completes(action): i for i, action in enumerate(program.actions)}
    for i, action in enumerate(program.actions):
        needed = dependencies(action, plan)
        received = [counterpart(need) for need in needed if need.op in RECEIVES]
        remote = [place[need] for send in received for need in dependencies(send, plan)]
        assert (remote or [-1]) == [program.needs[i]]
        assert all(place[need] < i for need in needed if need.op in COMPUTE)
        assert program.needs[i] < i
    assert [len(rank) for rank in program.lists] == np.bincount(program.ranks).tolist()


def test_what_is_not_in_the_plan_has_no_number() -> None:
    plan = uniform("terapipe", 2, 1, 3)
    strange = [Action(Op.F, 2, plan.slices[0]), Action(Op.F, 0, plan.slices[0]._replace(length=9))]
    assert Numbering(plan).numbers(strange).tolist() == [-1, -1]
    with pytest.raises(ValueError, match=r"F\(stage 2, .*\) is not in the plan"):
        compile_program(plan, [strange, []])


def test_a_rank_makes_actions_of_its_own_list_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 96 ranks and 1,000 slices, those of all ranks were a million objects, made on every one of them."""
    plan, made = uniform("terapipe-1f1b", 5, 2, 6), []
    plainly = Numbering.actions
    monkeypatch.setattr(Numbering, "actions", lambda self, numbers: made.append(len(numbers)) or plainly(self, numbers))
    validation._of_shape.cache_clear()
    found = validation.validated_actions(plan, 2)
    assert made == [len(found)]
    assert found == schedule(plan).ranks[2]
