from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terapipe import ORDERS, Op, Plan, Schedule, schedule, validate
from terapipe.scheduling.actions import COMPUTE
from terapipe.scheduling.orders import computations
from terapipe.scheduling.simulator import makespan
from tests.support.costs import SimpleCost
from tests.support.plans import examples, plans


@settings(max_examples=examples(700))
@given(plans())
def test_every_order_is_whole_and_cannot_block(plan: Plan) -> None:
    made = schedule(plan)
    validate(made)
    for rank, actions in enumerate(made.ranks):
        counts = Counter(actions)
        for k in plan.stages_of(rank):
            for s in plan.slices:
                assert counts[Op.F, k, s] == counts[Op.B, k, s] + counts[Op.I, k, s] == 1  # type: ignore[index]


@settings(max_examples=examples(300))
@given(plans())
def test_orders_are_pure_functions_of_the_plan(plan: Plan) -> None:
    assert schedule(plan) == schedule(Plan.from_json(plan.to_json()))


def peak(made: Schedule, rank: int) -> int:
    """The most slices that a rank has forwarded and not yet backwarded."""
    alive = most = 0
    for action in made.ranks[rank]:
        alive += {Op.F: 1, Op.B: -1}.get(action.op, 0)
        most = max(most, alive)
    return most


def uniform(order: str, stages: int, batch: int, slices: int, chunks: int = 1) -> Plan:
    return Plan.uniform(
        batch_size=batch,
        seq_len=60,
        num_slices=slices,
        boundaries=range(stages * chunks + 1),
        order=order,
        chunks=chunks,
    )


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_slices_in_flight(stages: int, batch: int) -> None:
    for rank in range(stages):
        behind = stages - 1 - rank
        assert peak(schedule(uniform("gpipe", stages, batch, 1)), rank) == batch
        assert peak(schedule(uniform("1f1b", stages, batch, 1)), rank) == min(batch, 1 + behind)
        assert peak(schedule(uniform("terapipe", stages, batch, 5)), rank) == 5 * batch
        assert peak(schedule(uniform("terapipe-1f1b", stages, batch, 5)), rank) == min(5 * batch, 5 + behind)


@pytest.mark.parametrize(("stages", "slices", "chunks"), [(2, 4, 2), (4, 4, 2), (4, 8, 3), (3, 6, 2)])
def test_sliced_interleaved_keeps_little_more_than_one_microbatch(stages: int, slices: int, chunks: int) -> None:
    made = schedule(uniform("interleaved", stages, 6, slices, chunks))
    for rank in range(stages):
        assert peak(made, rank) == chunks * slices + 2 * (stages - 1 - rank)


def test_memory_stays_level_when_microbatches_are_cut_differently() -> None:
    """Many slices in the first microbatch must not keep many large slices of the later ones alive."""
    plan = Plan((1,) * 6, ((10,) * 8, *(((40, 40),) * 5)), (0, 1, 2), "terapipe-1f1b")
    for actions in schedule(plan).ranks:
        alive = most = 0
        for action in actions:
            alive += {Op.F: 1, Op.B: -1}.get(action.op, 0) * action.slice.length
            most = max(most, alive)
        assert most <= 2 * 80


def test_microbatches_first_in_first_out_slices_last_in_first_out() -> None:
    made = schedule(uniform("terapipe-1f1b", 2, 2, 2))
    backwards = [str(a.slice) for a in made.ranks[0] if a.op is Op.B]
    assert backwards == ["0.1", "0.0", "1.1", "1.0"]


def test_the_paper_runs_all_forwards_first() -> None:
    made = schedule(uniform("terapipe", 2, 1, 3))
    assert [f"{a.op}{a.slice.number}" for a in made.ranks[1] if a.op in (Op.F, Op.B)] == [
        "F0",
        "F1",
        "F2",
        "B2",
        "B1",
        "B0",
    ]


@pytest.mark.parametrize("order", sorted(ORDERS))
@settings(max_examples=20)
@given(stages=st.integers(1, 5), batch=st.integers(1, 3))
def test_fewer_microbatches_than_stages(order: str, stages: int, batch: int) -> None:
    chunks = 2 if order in ("interleaved", "terapipe-v") else 1
    made = schedule(uniform(order, stages, batch, 1, chunks))
    validate(made)
    assert len(made.ranks) == stages


def test_deferred_weights_come_last() -> None:
    made = schedule(uniform("terapipe-deferred", 2, 1, 3))
    for actions in made.ranks:
        assert "".join(a.op for a in actions if a.op in COMPUTE) == "FFFIIIWWW"


def test_a_folded_order_goes_there_and_back() -> None:
    plan = uniform("terapipe-v", 3, 1, 4, chunks=2)
    assert [plan.rank_of(k) for k in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [plan.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert plan.last_rank == 0
    assert all(a.op is Op.W for row in computations(plan) for a in row[-4:])
    told = [" ".join(f"{a.op}{a.stage}.{a.slice.number}" for a in row[:-4]) for row in computations(plan)]
    assert told == [
        "F0.0 F0.1 F0.2 F0.3 F5.0 F5.1 F5.2 F5.3 I5.3 I5.2 I5.1 I5.0 W5.3 W5.2 W5.1 W5.0 I0.3 I0.2 I0.1 I0.0",
        "F1.0 F1.1 F1.2 F4.0 F1.3 F4.1 F4.2 F4.3 I4.3 I4.2 I4.1 I1.3 I4.0 I1.2 W4.3 I1.1 W4.2 I1.0 W4.1 W4.0",
        "F2.0 F3.0 F2.1 F3.1 F2.2 F3.2 F2.3 F3.3 I3.3 I2.3 I3.2 I2.2 I3.1 I2.1 I3.0 I2.0 W3.3 W3.2 W3.1 W3.0",
    ]


@pytest.mark.parametrize(
    ("ranks", "lengths"),
    [(2, (4,) * 8), (4, (4,) * 12), (8, (4,) * 20), (2, (1, 2, 4, 4, 4, 4, 2, 1)), (2, (3, 6, 12, 9, 10, 12, 6, 3))],
    ids=str,
)
def test_a_folded_order_waits_only_for_the_first_and_the_last_slice(ranks: int, lengths: tuple[int, ...]) -> None:
    plan = Plan((1,), (lengths,), tuple(range(2 * ranks + 1)), "terapipe-v", 2)
    assert makespan(plan, SimpleCost())[0] == 6 * sum(lengths) + (ranks - 1) * (lengths[0] + 2 * lengths[-1])


def test_what_an_order_cannot_do_is_said() -> None:
    sliced = uniform("terapipe", 2, 2, 3)
    with pytest.raises(ValueError, match=r"'gpipe' takes one slice per microbatch, got \[3, 3\]; use order 'terapipe'"):
        schedule(replace(sliced, order="gpipe"))
    with pytest.raises(ValueError, match="use order 'terapipe-1f1b'"):
        schedule(replace(sliced, order="1f1b"))
    with pytest.raises(ValueError, match="use order 'interleaved'"):
        schedule(uniform("terapipe-1f1b", 2, 2, 3, chunks=2))
    with pytest.raises(ValueError, match="'terapipe-v' takes 2 chunks of layers per rank, got 1; set chunks to 2"):
        schedule(uniform("terapipe-v", 2, 2, 3))
    with pytest.raises(ValueError, match=r"unknown order 'gpip'; did you mean 'gpipe'\? the orders are gpipe, 1f1b"):
        schedule(replace(sliced, order="gpip"))
