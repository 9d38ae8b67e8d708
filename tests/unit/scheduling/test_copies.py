"""Copies of offloaded slices: where they are listed, what is proved about them, and what they take."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given

from terapipe import ORDERS, Plan
from terapipe.planning.cost import StageSpec, copy_time
from terapipe.planning.memory import ShapeMemory
from terapipe.planning.presets import GPTConfig
from terapipe.scheduling.actions import COPIES, Action, Op, Schedule
from terapipe.scheduling.footprint import host_peaks, peaks
from terapipe.scheduling.orders import schedule
from terapipe.scheduling.simulator import makespan, program, simulate
from terapipe.scheduling.validation import validate, validated_actions
from tests.support.costs import SimpleCost
from tests.support.plans import plans, uniform

CONFIG = GPTConfig(layers=2, hidden=8, heads=2, vocab=16, max_seq_len=64)


def flush(slices: int, offload: object = True) -> Plan:
    return replace(uniform("terapipe", 1, 1, slices), offload=offload)


def shown(plan: Plan) -> str:
    return " ".join(f"{a.op}{a.slice.number}" for a in schedule(plan).ranks[0])


def test_where_they_are_listed() -> None:
    assert shown(flush(6)) == "F0 F1 F2 OUT0 F3 OUT1 F4 OUT2 F5 B5 BACK2 B4 BACK1 B3 BACK0 B2 B1 B0"
    assert shown(flush(3)) == "F0 F1 F2 B2 B1 B0", "whose backwards come too soon"


def test_a_slice_alone_has_a_third_of_its_time_each_way() -> None:
    alone = flush(8, ((True, *(False,) * 7),))
    assert shown(alone) == "F0 F1 F2 F3 F4 OUT0 F5 F6 F7 B7 B6 BACK0 B5 B4 B3 B2 B1 B0"


@given(plan=plans())
def test_every_order_is_valid_with_them(plan: Plan) -> None:
    plan = replace(plan, offload=True, offload_kv=True)
    made = schedule(plan)
    validate(made)
    for rank, actions in enumerate(made.ranks):
        assert validated_actions(plan, rank) == actions
        without = schedule(replace(plan, offload=False, offload_kv=False)).ranks[rank]
        assert tuple(a for a in actions if a.op not in COPIES) == without, "nothing else changes place"
        away: set[tuple[int, object]] = set()
        caches: set[tuple[int, int]] = set()
        for op, k, s in actions:
            if op in (Op.F, Op.B, Op.I):
                assert (k, s) not in away
                assert (k, s.microbatch) not in caches
            away ^= {(k, s)} if op in (Op.OUT, Op.BACK) else set()
            caches ^= {(k, s.microbatch)} if op in (Op.KV_OUT, Op.KV_BACK) else set()
        assert not away
        assert not caches


def test_keys_and_values_of_a_microbatch_that_waits() -> None:
    plan = Plan((1, 1, 1), ((4, 4),) * 3, (0, 1), offload_kv=True)
    shown = [f"{a.op}{a.slice}" for a in schedule(plan).ranks[0]]
    assert " ".join(shown) == ("F0.0 F0.1 F1.0 F1.1 KV_OUT0.1 F2.0 F2.1 B2.1 KV_BACK0.1 B2.0 B1.1 B1.0 B0.1 B0.0")
    memory = ShapeMemory(CONFIG, state=0)
    pairs = int(memory.kv_cache(StageSpec(1, True, True), 1, 8))
    assert host_peaks(program(plan), plan, memory) == [pairs]
    plain = replace(plan, offload_kv=False)
    assert peaks(program(plan), plan, memory)[0] == peaks(program(plain), plain, memory)[0] - pairs


def changed(plan: Plan, *swaps: tuple[int, int]) -> Schedule:
    made = schedule(plan)
    actions = list(made.ranks[0])
    for a, b in swaps:
        actions[a], actions[b] = actions[b], actions[a]
    return Schedule(plan, (tuple(actions),))


def test_wrong_copies_are_refused() -> None:
    plan, order = flush(6), "forward, OUT, BACK and backward in this order"
    made = schedule(plan).ranks[0]
    place = {str(a): i for i, a in enumerate(made)}
    out, back = (place[f"{op}(stage 0, microbatch 0, slice 0)"] for op in ("OUT", "BACK"))
    with pytest.raises(ValueError, match=order):
        validate(changed(plan, (0, out)))
    with pytest.raises(ValueError, match=order):
        validate(changed(plan, (out, back)))
    with pytest.raises(ValueError, match=order):
        validate(changed(plan, (back, len(made) - 1)))
    with pytest.raises(ValueError, match=order):  # that comes back without having been out
        validate(Schedule(plan, (tuple(a for i, a in enumerate(made) if i != out),)))
    with pytest.raises(ValueError, match="does an OUT of a slice twice"):
        validate(Schedule(plan, ((*made[: out + 1], made[out], *made[out + 1 :]),)))
    other = replace(plan, offload=((False, *(True,) * 5),))
    with pytest.raises(ValueError, match=r"copy no other, which it does not with slice 0\.0 of stage 0"):
        validate(Schedule(other, (made,)))


def test_copies_run_beside_computations_and_make_them_wait() -> None:
    plan, cost = flush(6), SimpleCost(copied=0.01)
    plain, _ = makespan(replace(plan, offload=False), cost)
    assert makespan(plan, cost)[0] == plain
    timeline = simulate(schedule(plan), cost)
    assert timeline.makespan == pytest.approx(plain)
    events = {(e.action.op, e.action.slice.number): e for e in timeline.events}
    assert events[Op.OUT, 0].start == events[Op.F, 0].end, "behind its forward, not where it is waited for"
    assert events[Op.BACK, 2].start == pytest.approx(events[Op.B, 4].start)
    cost = SimpleCost(copied=1000.0)
    slow = simulate(schedule(plan), cost)
    times = {(e.action.op, e.action.slice.number): e for e in slow.events}
    for (_, a), (_, b) in pairwise(sorted((e.start, e.end) for e in slow.copies if e.action.op is Op.OUT)):
        assert b >= a, "one engine copies one slice after the other"
    assert times[Op.F, 3].start >= times[Op.OUT, 0].end
    assert times[Op.B, 2].start >= times[Op.BACK, 2].end
    assert slow.makespan == pytest.approx(makespan(plan, cost)[0])
    assert slow.idle > 0.9


def test_a_cpu_copies_by_itself() -> None:
    plan, cost = flush(6), SimpleCost(copied=0.25, copies_block=True)
    assert makespan(plan, cost)[0] == pytest.approx(makespan(replace(plan, offload=False), cost)[0] + 6 * 0.25)


def test_costs_without_copies_say_so() -> None:
    class Old:
        """A cost model of a time before offload."""

    with pytest.raises(ValueError, match="must say what copies to the host take, Old does not"):
        copy_time(Old(), StageSpec(1), 1, 1, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [name for name in ORDERS if name != "1f1b"])
def test_memory_of_device_and_host(order: str) -> None:
    """What leaves one is in the other, and the device's peak falls by nearly as much."""
    chunks = ORDERS[order].chunks or 1
    sliced = ORDERS[order].sliced
    plan = uniform(order, 2, 2 if sliced else 24, 12 if sliced else 1, chunks)
    memory, moved = ShapeMemory(CONFIG, state=0), replace(plan, offload=True)
    for rank in range(2):
        before, after = peaks(program(plan), plan, memory)[rank], peaks(program(moved), moved, memory)[rank]
        assert after < before
        host = host_peaks(program(moved), moved, memory)[rank]
        assert host > 0
        if order == "terapipe":
            stage = StageSpec(1, rank == 0, rank == 1)
            slices = 24 - 3  # of which the last three are not worth it
            assert host == slices * int(memory.offloaded(stage, 1, 4))


def test_actions_as_text() -> None:
    plan = flush(6)
    action = Action(Op.BACK, 0, plan.slices[2])
    assert Action.from_text(action.to_text(), plan) == action
    assert Schedule.from_json(schedule(plan).to_json()) == schedule(plan)
