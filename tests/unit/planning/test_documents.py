"""Plans of batches by their documents: even costs, few shapes, the base plan's limits, and what simulation says."""

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest

import terapipe as tp
from terapipe.planning import DocumentCosts, DocumentPlanner, Plan
from terapipe.planning.cost import StageSpec
from terapipe.planning.presets import GPTConfig
from terapipe.scheduling.simulator import makespan
from tests.support.costs import SimpleCost

TOKENS = 2048
COSTS = DocumentCosts(token=100, slice=60000)  # with two stages, the best number of slices of one document is 6
# Of one document of 2048 tokens: slices of about equal cost, and slices whose costs rise and fall.
EVEN = (584, 280, 216, 184, 152, 152, 128, 128, 112, 112)
RAMP = (136, 216, 336, 384, 408, 304, 184, 80)
Documents = tuple[tuple[int, ...], ...]


def plan_of(lengths: tuple[int, ...], batch: int = 1, size: int = 1, order: str = "terapipe", **more: Any) -> Plan:
    sizes = (size,) * (batch // size)
    return Plan(sizes, (lengths,) * len(sizes), more.pop("boundaries", (0, 1, 2)), order, **more)


def stream(batches: int, rows: int, median: float = 60.0, seed: int = 0) -> list[Documents]:
    """Sequences filled with documents of log-normal lengths."""
    generator = np.random.default_rng(seed)

    def row() -> tuple[int, ...]:
        lengths = np.maximum(1, generator.lognormal(np.log(median), 1.3, size=TOKENS)).astype(int)
        return tuple(start for start in accumulate(lengths.tolist(), initial=0) if start < TOKENS)

    return [tuple(row() for _ in range(rows)) for _ in range(batches)]


def pairs(starts: tuple[int, ...], first: int, last: int) -> int:
    """One by one: how many tokens each token sees."""
    return sum(place - max(start for start in starts if start <= place) + 1 for place in range(first, last))


def slice_costs(lengths: tuple[int, ...], rows: Documents) -> list[int]:
    edges = list(accumulate(lengths, initial=0))
    return [sum(COSTS.token * (b - a) + pairs(starts, a, b) for starts in rows) for a, b in pairwise(edges)]


# Cuts


@pytest.mark.parametrize("lengths", [EVEN, RAMP])
def test_whole_documents_are_cut_as_in_the_plan(lengths: tuple[int, ...]) -> None:
    plan = plan_of(lengths, 2)
    planner = DocumentPlanner(plan, COSTS)
    assert planner.plan_for(((0,), (0,))) == plan
    assert planner.plan_for(None) == planner.plan_for(()) == plan


@pytest.mark.parametrize("size", [1, 2])
def test_slices_cost_the_same_whatever_the_documents(size: int) -> None:
    planner = DocumentPlanner(plan_of(EVEN, 2, size), COSTS)
    for documents in stream(6, 2, median=120.0):
        plan = planner.plan_for(documents)
        assert (plan.sizes, plan.boundaries, plan.order) == (planner.plan.sizes, planner.plan.boundaries, "terapipe")
        for m, lengths in enumerate(plan.lengths):
            costs = slice_costs(lengths, documents[m * size : (m + 1) * size])
            tile = max(slice_costs((8,) * (TOKENS // 8), documents[m * size : (m + 1) * size]))
            free = [cost for cost, length in zip(costs, lengths, strict=True) if length < max(EVEN)]
            assert max(costs) - min(free) <= 3 * tile  # both ends to the nearest tile, and so in the plan
            assert all(length % 8 == 0 for length in lengths)
            assert max(lengths) <= max(EVEN)


def test_costs_keep_the_shape_that_they_have_in_the_plan() -> None:
    """V-shaped orders want short slices first and last."""
    planner = DocumentPlanner(plan_of(RAMP, boundaries=(0, 1, 2, 3, 4)), COSTS._replace(slice=0))
    (lengths,) = planner.plan_for((tuple(range(0, TOKENS, 16)),)).lengths
    shares = np.array(slice_costs(RAMP, ((0,),))) / sum(slice_costs(RAMP, ((0,),)))
    assert np.array(lengths) / TOKENS == pytest.approx(shares, abs=8 / TOKENS)


def test_slices_of_equal_length_get_equal_costs_and_stay_short() -> None:
    planner = DocumentPlanner(plan_of((256,) * 8), COSTS)
    assert planner.counts == ((8,), (6,))
    (lengths,) = planner.plan_for(((0,),)).lengths
    assert lengths[0] == 2 * 256
    costs = slice_costs(lengths, ((0,),))
    assert max(costs[1:]) < 1.1 * min(costs[1:]), "what the first could not have, all others share"
    short_first = (*range(0, 1600, 2), 1600)
    assert max(map(max, planner.plan_for((short_first,)).lengths)) <= 2 * 256


def test_tiles_that_leave_a_rest() -> None:
    planner = DocumentPlanner(Plan((1,), ((40, 30, 33),), (0, 2)), COSTS, tile=16)
    for starts in ((0,), (0, 1, 2, 3), (0, 100), tuple(range(103))):
        (lengths,) = planner.plan_for((starts,)).lengths
        assert sum(lengths) == 103
        assert all(length % 16 == 0 for length in lengths[:-1])


# Numbers of slices


def test_less_work_means_fewer_slices_and_few_shapes() -> None:
    planner = DocumentPlanner(plan_of(EVEN, 2), COSTS)
    assert planner.counts == ((10, 10), (7, 7), (6, 6))  # with fewer they could not be shorter than the plan's longest
    short = planner.plan_for((tuple(range(0, TOKENS, 8)),) * 2)
    assert [len(row) for row in short.lengths] == [6, 6]
    seen = {tuple(map(len, planner.plan_for(d).lengths)) for d in stream(200, 2, median=150.0)}
    assert seen <= set(planner.counts)
    assert len(seen) > 1


def test_the_number_of_slices_follows_the_square_root_of_the_work() -> None:
    """Two stages, a plan that is the best for whole sequences: W = 20 * 4096 + 4096^2 / 2, N = sqrt(W / s) = 16."""
    tokens, steps = 4096, 16
    work = 20 * tokens + tokens * (tokens + 1) // 2
    plan = Plan((1,), ((tokens - 15 * 128, *(128,) * 15),), (0, 1, 2))
    for parts, slices in ((1, 16), (2, 11), (4, 8), (8, 6)):
        row = (tuple(range(0, tokens, tokens // parts)),)
        best = DocumentPlanner(plan, DocumentCosts(20, work // steps**2)).plan_for(row)
        assert len(best.lengths[0]) == slices
        cheap = DocumentPlanner(plan, DocumentCosts(20, work // steps**2 // 100)).plan_for(row)
        assert len(cheap.lengths[0]) == 16, "the plan has fewer slices than would be best, for some reason"
    half = DocumentCosts(20, work // steps**2, 2 * work // steps**2 // tokens)  # the other half is of contexts, ...
    assert len(DocumentPlanner(plan, half).plan_for(row).lengths[0]) == 8  # ... which shrink as the work does


def test_chunks_of_layers_get_whole_groups_of_slices() -> None:
    interleaved = plan_of((512, 256, 256, 256, 256, 256, 128, 128), order="interleaved", chunks=2, boundaries=range(9))
    counts = DocumentPlanner(interleaved, COSTS).counts
    assert counts == ((8,),)
    twice = replace(interleaved, lengths=((512, *(102,) * 14, 108),))
    assert DocumentPlanner(twice, COSTS).counts == ((16,), (12,), (8,))
    one_chunk = replace(interleaved, order="terapipe", chunks=1)
    assert DocumentPlanner(one_chunk, COSTS).counts == ((8,), (6,))


# Costs


def test_costs_are_found_in_a_cost_model() -> None:
    cost = SimpleCost(fixed=3.0, token=0.7, score=0.001, head=0.2)
    plan = Plan((2,), ((2048, 2048),), (0, 1, 2, 3, 5))
    found = DocumentCosts.of(cost, plan)
    pair = 3 * 5 * 0.001
    assert found.token == pytest.approx((3 * 5 * 0.7 + 0.2) / pair, rel=2e-3)
    assert found.slice == pytest.approx(3 * 5 * 3.0 / pair, rel=2e-3)
    assert found.context == 0
    assert DocumentCosts.of(SimpleCost(), plan).token == 2**31, "attention that costs nothing"


def test_costs_by_arithmetic() -> None:
    config = GPTConfig(layers=3, hidden=32, heads=2, vocab=64)
    assert DocumentCosts.of_shape(config) == (round((config.layer_parameters + 64 * 32 / 3) / 64), 0, 0)


def test_a_planner_from_what_a_plan_was_made_with() -> None:
    best = tp.plan("gpt3-1b", "dgx-h100:1", batch_size=1, seq_len=8192, pp=2, dp=1, tp=1, order="terapipe")
    planner = tp.document_planner(best)
    assert planner.plan == best.plan
    again = tp.document_planner(best.plan, "dgx-h100:1", model="gpt3-1b")
    documents = (tuple(range(0, 8192, 600)),)
    assert again.plan_for(documents) == planner.plan_for(documents) != best.plan
    assert all(length % 128 == 0 for length in planner.plan_for(documents).lengths[0])
    with pytest.raises(ValueError, match="the costs of this plan are not in the file"):
        tp.document_planner(best.plan)


@pytest.mark.parametrize(
    "documents", [((0,),), ((1,), (0,)), ((0, 5, 5), (0,)), ((0, TOKENS), (0,)), ((), (0,)), ((0,),) * 3]
)
def test_starts_that_make_no_sense_are_refused(documents: Documents) -> None:
    planner = DocumentPlanner(plan_of(EVEN, 2), COSTS)
    with pytest.raises(ValueError, match="documents must be, for each of the 2 sequences"):
        planner.plan_for(documents)


def test_costs_and_tiles_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="a token costs at least 1 pair"):
        DocumentPlanner(plan_of(EVEN), DocumentCosts(0))
    with pytest.raises(ValueError, match="tile must be a whole number of at least 1"):
        DocumentPlanner(plan_of(EVEN), COSTS, tile=0)


# Simulated


class PackedCost(SimpleCost):
    """Of one plan's slices, with these documents: their contexts are the tokens that they see on average."""

    plan: Plan
    documents: Documents

    @classmethod
    def of(cls, plan: Plan, documents: Documents) -> "PackedCost":
        cost = cls(fixed=1000.0, token=float(COSTS.token), score=1.0)
        object.__setattr__(cost, "plan", plan)
        object.__setattr__(cost, "documents", documents)
        return cost

    def forward(self, stage: StageSpec, size: Any, length: Any, context: Any) -> Any:
        assert len(length) == len(self.plan.slices)
        seen = [
            np.mean([pairs(row, s.context, s.end) for row in self.documents[s.row : s.row + s.size]])
            for s in self.plan.slices
        ]
        return super().forward(stage, size, length, np.array(seen) / length - length / 2)


@pytest.mark.parametrize(("order", "gain"), [("terapipe", 1.15), ("terapipe-1f1b", 1.15)])
def test_batches_take_less_time_by_simulation(order: str, gain: float) -> None:
    """Four stages; the plan for whole documents has slices of equal cost."""
    plan = plan_of(EVEN, order=order, boundaries=range(5))
    planner = DocumentPlanner(plan, COSTS)
    fixed = own = 0.0
    for documents in stream(6, 1, median=20.0):
        batch = planner.plan_for(documents)
        fixed += makespan(plan, PackedCost.of(plan, documents))[0]
        own += makespan(batch, PackedCost.of(batch, documents))[0]
    assert fixed > gain * own
