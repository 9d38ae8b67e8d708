"""Adding an order takes one function and one entry; validation, simulation, drawing, planning and execution follow."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import terapipe as tp
from terapipe import ORDERS, Action, Op, Order, Plan
from tests.support.models import TINY, make_batch, piped, plain, worst_error
from tests.support.ranks import Ranks


def build(plan: Plan) -> list[list[Action]]:
    """All forwards, then backwards, one microbatch after the other: the first microbatch is finished first."""
    lists = []
    for rank in range(plan.num_ranks):
        (stage,) = plan.stages_of(rank)
        forwards = [Action(Op.F, stage, s) for s in plan.slices]
        lists.append(forwards + [Action(Op.B, stage, s) for row in plan.grid for s in reversed(row)])
    return lists


@contextmanager
def registered() -> Iterator[None]:
    tp.register(Order("first-first", "first microbatch first", build, chunks=1))
    try:
        yield
    finally:
        del ORDERS["first-first"]


def executed(plan: str) -> tuple[float, dict[str, Tensor]]:
    """On a rank of its own, which registers the order as a user's module would at import."""
    with registered():
        read = Plan.from_json(plan)
        return piped(TINY, read, *make_batch(TINY, read.batch_size, read.seq_len, ignored=False), torch.float64)


def test_a_new_order_is_one_function_and_one_entry(ranks: Callable[[int], Ranks]) -> None:
    with registered():
        plan = Plan((1, 2), ((9, 1, 6), (10, 6)), (0, 1, 4), "first-first")
        tp.validate(tp.schedule(plan))
        result = tp.plan("gpt-tiny", "p3.16xlarge:1", batch_size=4, seq_len=512, pp=4, dp=1, tp=1, order="first-first")
        timeline = result.simulate()
        assert result.plan.order == "first-first"
        assert timeline.makespan <= result.step_time
        assert "first-first" in str(result)
        rows = tp.compare("gpt-tiny", "p3.16xlarge:1", batch_size=4, seq_len=512, pp=4, dp=1, tp=1)
        assert "first-first" in [row.name for row in rows.rows]
        assert tp.simulate(result).makespan == timeline.makespan
        ids, labels = make_batch(TINY, plan.batch_size, plan.seq_len, ignored=False)
        saved = plan.to_json()
    found = ranks(2)(executed, saved)
    assert worst_error(plain(TINY, ids, labels, torch.float64), found, TINY) < 1e-12


def test_an_unknown_or_taken_name_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown order 'first-first'; the orders are gpipe"):
        Plan((1,), ((8,),), (0, 1), "first-first")
    with pytest.raises(ValueError, match="there is an order 'gpipe' already"):
        tp.register(Order("gpipe", "again", build))
