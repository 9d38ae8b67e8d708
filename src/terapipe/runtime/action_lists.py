"""The actions that one rank performs in a step, in order, worked out from the plan before the step."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple, Self

from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import FORWARD, Action, Op
from terapipe.scheduling.transfers import with_early_receives
from terapipe.scheduling.validation import Shape, validated_actions

Run = tuple[Action, ...]  # one action, or weight halves that are done together


class ActionLists(NamedTuple):
    """The actions that one rank performs, in order."""

    training: tuple[Run, ...]
    forwards: tuple[Run, ...]  # what evaluation runs
    completing: frozenset[Action]  # the last backward of each stage, or the last of their weight halves

    @classmethod
    def of(cls, plan: Plan, rank: int, *, early: bool) -> Self:
        """Plans of one shape differ in the lengths of their slices only, so their lists are worked out once.

        Args:
            plan: what is to be run.
            rank: of the pipeline.
            early: whether receives come earlier, see ``with_early_receives``.

        Raises:
            ValueError: if the schedule is not complete or could deadlock.
        """
        grid = plan.grid
        training, forwards, completing = _lists_of_shape(Shape.of(plan), rank, early)

        def of_plan(run: Run) -> Run:
            return tuple([Action(op, k, grid[s.microbatch][s.number]) for op, k, s in run])

        return cls(tuple(map(of_plan, training)), tuple(map(of_plan, forwards)), frozenset(of_plan(tuple(completing))))


@lru_cache(maxsize=64)
def _lists_of_shape(shape: Shape, rank: int, early: bool) -> ActionLists:
    actions = validated_actions(shape.plan(), rank)
    listed = with_early_receives if early else tuple[Action, ...]
    completing = {a.stage: a for a in actions if a.op in (Op.B, Op.W)}
    forwards = [a for a in actions if a.op in FORWARD]
    return ActionLists(_runs(listed(actions)), _runs(listed(forwards)), frozenset(completing.values()))


def _runs(actions: Sequence[Action]) -> tuple[Run, ...]:
    """The actions one by one, except that weight halves that follow each other on one stage are done together."""
    numbered = enumerate(actions)
    key = lambda item: (item[1].stage, -1) if item[1].op is Op.W else item  # noqa: E731
    return tuple(tuple(action for _, action in group) for _, group in groupby(numbered, key))


def communicating_ranks(plan: Plan) -> set[tuple[int, int]]:
    """The pairs of ranks that send each other something, which must be connected before the first step.

    Those of neighboring stages send hidden states and gradients. Those of the first and the last stage sum the gradient
    of a parameter that both hold, such as an embedding that is also the head.

    Args:
        plan: which stages are on which ranks.
    """
    ranks = [plan.rank_of(k) for k in range(plan.num_stages)]
    return {*pairwise(ranks), (ranks[0], ranks[-1])}
