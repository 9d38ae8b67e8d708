"""Modes of recomputation by stage and slice: how they are written, and what they cost."""

from dataclasses import replace

import pytest

from terapipe import Plan
from terapipe.planning.cost import Cost
from terapipe.planning.hardware import Cluster
from terapipe.planning.layout import Layout
from terapipe.planning.presets import PRESETS
from terapipe.planning.recompute import modes_in, recompute_title
from terapipe.scheduling.footprint import curves, peaks
from terapipe.scheduling.orders import schedule
from terapipe.scheduling.simulator import makespan, program, simulate
from terapipe.search.source import ClusterSource

PLAN = Plan((1, 1), ((9, 8), (17,)), (0, 1, 4))
SOURCE = ClusterSource(PRESETS["gpt3-1b"], Cluster("dgx-a100:1"))


def test_the_shortest_form_is_taken() -> None:
    mixed = replace(PLAN, recompute=(("none", "full", "none"), ("full", "full", "full")))
    assert mixed.recompute == (("none", "full", "none"), "full")
    assert replace(PLAN, recompute=[["full"] * 3, "full"]) == replace(PLAN, recompute=True)
    assert PLAN.recompute == "none"
    assert mixed.recompute_of(0) == ("none", "full", "none")
    assert mixed.recompute_of(1) == ("full",) * 3
    assert mixed.recompute_modes == modes_in(mixed.recompute) == ("none", "full")
    assert recompute_title(mixed.recompute) == "none and full"


def test_it_is_saved_and_read() -> None:
    for recompute in ("none", "block", (("none", "full", "none"), "block")):
        plan = replace(PLAN, recompute=recompute)
        assert Plan.from_json(plan.to_json()) == plan
    old = PLAN.to_dict()
    assert Plan.from_dict({**old, "recompute": True}).recompute == "full"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("some", "recompute is one of none, light, block, full, got 'some'"),
        (1, "recompute is one of none, .*, got 1"),
        (("none",), "each of the 2 stages"),
        ((("none", "full"), "none"), "one for each of the 3 slices, got"),
        ((("none", "full", "all"), "none"), "got 'all'"),
    ],
)
def test_bad_modes_are_refused(given: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(PLAN, recompute=given)


def test_other_slices_take_the_mode_that_keeps_least() -> None:
    plan = replace(PLAN, recompute=(("none", "block", "none"), "none"))
    assert plan.resize(2, 34).recompute == plan.recompute
    assert plan.resize(1, 17).recompute == ("block", "none")


def test_each_slice_costs_what_its_mode_does() -> None:
    layout, plan = Layout(1, 2, 1), Plan((1,), ((256,) * 8,), (0, 12, 24), "terapipe")
    cost, memory = SOURCE.cost(layout), SOURCE.memory(layout)
    modes = ("none", "light", "block", "full")
    uniform = {mode: replace(plan, recompute=mode) for mode in modes}
    times = {mode: makespan(each, cost)[0] for mode, each in uniform.items()}
    bytes_ = {mode: peaks(program(plan), each, memory) for mode, each in uniform.items()}
    assert times["none"] < times["light"] < times["block"] < times["full"]
    assert bytes_["none"][0] > bytes_["light"][0] > bytes_["block"][0] > bytes_["full"][0]
    mixed = replace(plan, recompute=("full", ("none", "block") * 4))
    mine = seconds(mixed, cost)
    for mode, stage, number in (("full", 0, 0), ("full", 0, 1), ("none", 1, 0), ("block", 1, 1)):
        alone = seconds(uniform[mode], cost)
        for op in "FB":
            assert mine[op, stage, number] == pytest.approx(alone[op, stage, number])
    found = peaks(program(plan), mixed, memory)
    assert found[0] == bytes_["full"][0]
    assert bytes_["block"][1] < found[1] < bytes_["none"][1]
    drawn = curves(simulate(schedule(mixed), cost), memory)
    assert [round(max(level for _, level in curve)) for curve in drawn] == found


def seconds(plan: Plan, cost: Cost) -> dict[tuple[str, int, int], float]:
    """Of each computation, by op, stage and slice."""
    events = [event for rank in simulate(schedule(plan), cost).by_rank for event in rank]
    return {(str(e.action.op), e.action.stage, e.action.slice.number): e.end - e.start for e in events}
