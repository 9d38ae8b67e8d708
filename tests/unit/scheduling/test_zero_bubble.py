"""The zero-bubble orders over slices: what they list, how long they take, and how much they hold."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terapipe import PRESETS, Action, Op, Plan, schedule, validate
from terapipe.planning.memory import ShapeMemory
from terapipe.planning.order import InFlight, order_named
from terapipe.planning.slices import Slice
from terapipe.scheduling.actions import COMPUTE
from terapipe.scheduling.footprint import peaks
from terapipe.scheduling.orders import computations
from terapipe.scheduling.simulator import makespan, program, simulate
from terapipe.scheduling.validation import validated_actions
from terapipe.search.choose import choose
from terapipe.search.request import Request
from tests.support.costs import SimpleCost, SimpleMemory, SimpleSource
from tests.support.plans import examples, plans, uniform

LEADS = {"terapipe-zb": 1, "terapipe-zb2": 2}
SIZES = [(2, 2, 1), (2, 4, 3), (3, 2, 3), (4, 3, 2), (4, 8, 4), (5, 9, 1), (8, 2, 16), (8, 16, 8), (6, 3, 7)]


def told(plan: Plan) -> list[str]:
    return [" ".join(f"{a.op}{a.slice}" for a in row) for row in computations(plan)]


def test_weight_halves_are_deferred_for_longer_on_later_ranks() -> None:
    assert told(uniform("terapipe-zb", 3, 2, 2)) == [
        "F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0",
        "F0.0 F0.1 F1.0 I0.1 W0.1 F1.1 I0.0 W0.0 I1.1 I1.0 W1.1 W1.0",
        "F0.0 F0.1 I0.1 F1.0 I0.0 W0.1 F1.1 I1.1 I1.0 W0.0 W1.1 W1.0",
    ]
    assert told(uniform("terapipe-zb2", 2, 3, 2)) == [
        "F0.0 F0.1 F1.0 F1.1 B0.1 F2.0 B0.0 F2.1 B1.1 B1.0 B2.1 B2.0",
        "F0.0 F0.1 I0.1 F1.0 I0.0 W0.1 F1.1 I1.1 W0.0 F2.0 I1.0 W1.1 F2.1 I2.1 I2.0 W1.0 W2.1 W2.0",
    ]


def test_with_recomputation_no_more_than_needed_wait() -> None:
    """A deferred half takes the memory of whole layers then, its slice's input next to nothing."""
    plan = replace(uniform("terapipe-zb", 3, 2, 2), recompute=True)
    assert told(plan) == [
        "F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0",
        "F0.0 F0.1 F1.0 I0.1 W0.1 F1.1 I0.0 W0.0 I1.1 W1.1 I1.0 W1.0",
        "F0.0 F0.1 I0.1 F1.0 I0.0 W0.1 F1.1 I1.1 W0.0 I1.0 W1.1 W1.0",
    ]
    assert [[a.op for a in row] for row in computations(plan)] == [
        [a.op for a in row if a.op in COMPUTE] for row in (validated_actions(plan, rank) for rank in range(3))
    ]


@pytest.mark.parametrize("order", LEADS)
def test_different_numbers_of_slices(order: str) -> None:
    plan = Plan((1, 2, 1), ((9, 1, 12, 7), (29,), (20, 9)), (0, 1, 2, 3), order)
    validate(schedule(plan))
    for rank, row in enumerate(computations(plan)):
        weights = [a.slice for a in row if a.op is Op.W]
        inputs = [a.slice for a in row if a.op is Op.I]
        assert weights == inputs  # in the same order
        assert len(inputs) == (7 if rank else 0)


@pytest.mark.parametrize("order", LEADS)
def test_one_rank_has_whole_backwards(order: str) -> None:
    plan = uniform(order, 1, 3, 4)
    assert computations(plan) == computations(replace(plan, order="terapipe-1f1b"))


@pytest.mark.parametrize(("ranks", "batch", "slices"), SIZES)
def test_the_time_with_equal_slices(ranks: int, batch: int, slices: int) -> None:
    """A forward and both halves of a backward take one unit each. 1F1B waits 3(K - 1) units, zero bubble K or K - 1: no
    order takes less than K - 1, which the first slice needs to the last rank."""
    work = 3 * batch * slices

    def waits(order: str) -> float:
        return makespan(uniform(order, ranks, batch, slices), SimpleCost(token=0.25))[0] - work

    assert waits("terapipe-1f1b") == 3 * (ranks - 1)
    assert waits("terapipe-zb") == ranks
    if (batch - 1) * slices >= 2 * (ranks - 1):  # enough slices for twice the lead
        assert waits("terapipe-zb2") == ranks - 1


@settings(max_examples=examples(120))
@given(plans(), st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 0.1]))
def test_no_forward_or_gradient_is_later_than_under_1f1b(plan: Plan, sent: float, score: float) -> None:
    """Weight halves only move back, so nothing that others wait for can be later. Not so with slices of different
    sizes: the half of a large one may come before the gradient of a small one."""
    lengths = ((1,) * max(map(len, plan.lengths)),) * len(plan.sizes)
    plan = replace(plan, order="terapipe-zb", chunks=1, sizes=(1,) * len(plan.sizes), lengths=lengths, offload=False)
    cost = SimpleCost(sent=sent, score=score)

    def starts(order: str) -> dict[tuple[bool, int, Slice], float]:
        events = simulate(schedule(replace(plan, order=order)), cost).events
        return {(a.op is Op.F, a.stage, a.slice): start for _, a, start, _ in events if a.op in (Op.F, Op.B, Op.I)}

    before, after = starts("terapipe-1f1b"), starts("terapipe-zb")
    assert before.keys() == after.keys()
    assert all(after[key] <= before[key] * (1 + 1e-12) for key in before)


def held(actions: list[Action]) -> int:
    """The most slices of which a rank holds activations or a deferred weight half; both, during an input half."""
    now = most = 0
    for action in actions:
        most = max(most, now + (action.op in (Op.F, Op.I)))
        now += {Op.F: 1, Op.B: -1, Op.W: -1}.get(action.op, 0)
    return most


@settings(max_examples=examples(200))
@given(plans(), st.sampled_from(sorted(LEADS)))
def test_no_rank_holds_more_slices_than_promised(plan: Plan, order: str) -> None:
    plan = replace(plan, order=order, chunks=1)
    most = max(map(len, plan.lengths)) + LEADS[order] * (plan.num_ranks - 1)
    assert max(map(held, computations(plan))) <= min(most, len(plan.slices) + 1)


@pytest.mark.parametrize(("ranks", "batch", "slices"), SIZES)
def test_the_largest_rank_holds_what_that_of_1f1b_holds(ranks: int, batch: int, slices: int) -> None:
    rows = {order: uniform(order, ranks, batch, slices) for order in ("terapipe-1f1b", *LEADS)}
    most = {order: max(map(held, computations(plan))) for order, plan in rows.items()}
    whole = (batch - 1) * slices < ranks - 1  # all slices are in flight at once: then it is one slice more
    assert most["terapipe-zb"] == most["terapipe-1f1b"] + whole
    for order, lead in LEADS.items():
        formula = order_named(order).in_flight(InFlight(batch, slices, ranks, 1))
        assert formula == min(batch, 1 + lead * (ranks - 1) / slices)
        assert most[order] <= formula * slices + 1
    assert held(computations(rows["terapipe-zb"])[0]) == held(computations(rows["terapipe-1f1b"])[0])


@pytest.mark.parametrize(("model", "seq_len"), [("gpt3-44b", 2048), ("gpt3-44b", 8192), ("llama3-70b", 32768)])
def test_the_peak_in_bytes_is_not_above_that_of_1f1b(model: str, seq_len: int) -> None:
    config = PRESETS[model]
    cuts = tuple(config.layers * k // 8 for k in range(9))
    memory = ShapeMemory(config, element=2, state=12, tp=8)
    plan = Plan.uniform(batch_size=16, seq_len=seq_len, num_slices=8, boundaries=cuts, order="terapipe-1f1b")

    def peak(order: str) -> int:
        other = replace(plan, order=order)
        return max(peaks(program(other), other, memory))

    assert peak("terapipe-zb") <= peak("terapipe-1f1b")
    assert peak("terapipe-1f1b") < peak("terapipe-zb2") < peak("terapipe-deferred")


@pytest.mark.parametrize(("budget", "order"), [(88, "terapipe-zb"), (111, "terapipe-zb"), (112, "terapipe-zb2")])
def test_the_planner_spends_the_memory_that_there_is(budget: int, order: str) -> None:
    """Slices of 8 tokens and as many bytes: M + K - 1 of them are 88 bytes, M + 2(K - 1) are 112."""
    source = SimpleSource(SimpleCost(), SimpleMemory(owing=1.0), layers=4, devices=4, budget=budget)
    request = Request(batch_size=8, seq_len=64, dp=1, pp=4, tp=1, num_slices=8, microbatch_size=1, recompute=False)
    assert choose(source, request).estimate.plan.order == order
