"""The actions of a rank: worked out once for plans that differ in their lengths only."""

import terapipe as tp
from terapipe import Op
from terapipe.runtime.action_lists import ActionLists, communicating_ranks
from terapipe.scheduling.actions import COMPUTE

PLAN = tp.Plan((1, 1), ((8, 4, 4), (16,)), (0, 1, 2), "terapipe-deferred")


def test_lists_hold_the_schedule_with_the_plans_own_lengths() -> None:
    for rank, actions in enumerate(tp.schedule(PLAN).ranks):
        lists = ActionLists.of(PLAN, rank, early=False)
        assert [action for run in lists.training for action in run] == list(actions)
        other = ActionLists.of(tp.Plan((1, 1), ((5, 5, 6), (16,)), (0, 1, 2), PLAN.order), rank, early=False)
        assert [[a[:2] for a in run] for run in other.training] == [[a[:2] for a in run] for run in lists.training]
        assert other.training != lists.training


def test_weight_halves_in_a_row_are_one_run() -> None:
    lists = ActionLists.of(PLAN, 0, early=False)
    halves = [run for run in lists.training if run[0].op is Op.W]
    assert any(len(run) > 1 for run in halves)
    assert all(len(run) == 1 for run in lists.training if run[0].op is not Op.W)
    assert len(lists.completing) == 1
    assert {a.op for a in lists.completing} <= {Op.W, Op.B}


def test_evaluation_runs_forwards_only() -> None:
    lists = ActionLists.of(PLAN, 0, early=True)
    assert {run[0].op for run in lists.forwards if run[0].op in COMPUTE} == {Op.F}
    assert len([run for run in lists.forwards if run[0].op is Op.F]) == 4


def test_neighbors_and_both_ends_are_connected() -> None:
    assert communicating_ranks(tp.Plan.uniform(batch_size=1, seq_len=8, num_slices=2, boundaries=(0, 1, 2, 3))) == {
        (0, 1),
        (1, 2),
        (0, 2),
    }
