"""The simulator against the formulas, and against the rule of precedence."""

import itertools
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terapipe import ORDERS, Op, Plan, Timeline, dependencies, schedule
from terapipe.planning.cost import Array, HostTime, LinkBehavior, Numbers, StageSpec
from terapipe.scheduling.actions import COPIES, RECEIVES, completes, counterpart
from terapipe.scheduling.simulator import makespan, simulate
from terapipe.scheduling.timeline import idle_by_cause
from tests.support.costs import HostedCost, SimpleCost
from tests.support.plans import examples, plans, uniform

COSTS = st.builds(
    SimpleCost,
    fixed=st.sampled_from([0.0, 3.0]),
    score=st.sampled_from([0.0, 0.1]),
    sent=st.sampled_from([0.0, 0.5]),
    head=st.sampled_from([0.0, 0.7]),
    overlapped=st.booleans(),
    latency=st.sampled_from([0.0, 2.0]),
)


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("slices", [1, 4])
def test_idle_shares_are_the_published_ones(ranks: int, batch: int, slices: int) -> None:
    whole = ["gpipe", "1f1b"] if slices == 1 else []
    for order in [*whole, "terapipe", "terapipe-1f1b"]:
        plan = uniform(order, ranks, batch, slices)
        wanted = (ranks - 1) / (batch * slices + ranks - 1)
        assert simulate(schedule(plan), SimpleCost()).idle == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(("ranks", "groups", "chunks"), [(2, 2, 2), (4, 2, 3), (3, 4, 2)])
def test_idle_share_of_interleaving(ranks: int, groups: int, chunks: int) -> None:
    batch = ranks * groups
    timeline = simulate(schedule(uniform("interleaved", ranks, batch, chunks=chunks)), SimpleCost())
    assert timeline.idle == pytest.approx((ranks - 1) / (chunks * batch + ranks - 1), abs=1e-12)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    ranks=st.integers(1, 6),
    cost=st.builds(SimpleCost, fixed=st.floats(0, 9), score=st.floats(0, 1), sent=st.floats(0, 2)),
)
def test_the_formula_holds_for_equal_stages(lengths: list[int], ranks: int, cost: SimpleCost) -> None:
    """sum + (K - 1) max, with each slice's transfer held by its sender; the last stage sends nothing forward and the
    first nothing back, which the formula counts."""
    cost = SimpleCost(cost.fixed, 1.0, cost.score, cost.sent, overlapped=False)
    plan = Plan((1,), (tuple(lengths),), tuple(range(ranks + 1)))
    size, length = np.ones(len(lengths)), np.array(lengths, float)
    context = np.cumsum(length) - length
    t = cost.forward(StageSpec(1), size, length, context)
    free = SimpleCost(cost.fixed, 1.0, cost.score)
    assert makespan(plan, free)[0] == pytest.approx(3 * (t.sum() + (ranks - 1) * t.max()), rel=1e-12)
    both = 3 * t + 2 * cost.sent * length
    forward, backward = t + cost.sent * length, 2 * t + cost.sent * length
    formula = both.sum() + (ranks - 1) * (forward.max() + backward.max())
    assert makespan(plan, cost)[0] <= formula * (1 + 1e-12)
    assert makespan(plan, cost)[0] >= formula - 2 * cost.sent * length.sum() - 1e-9


@settings(max_examples=examples(200))
@given(plan=plans(), cost=COSTS)
def test_any_plan_obeys_the_rule(plan: Plan, cost: SimpleCost) -> None:
    made = schedule(plan)
    timeline = simulate(made, cost)
    check_rule(timeline, cost)
    listed = sorted(a.to_text() for rank in made.ranks for a in rank)
    assert sorted(e.action.to_text() for e in timeline.events) == listed
    span, idle = makespan(plan, cost)
    assert span == pytest.approx(timeline.makespan, rel=1e-12)
    assert idle == pytest.approx(timeline.idle, abs=1e-9)
    assert Timeline.from_json(timeline.to_json()) == timeline


@settings(max_examples=examples(60))
@given(plans(), COSTS)
def test_a_limit_gives_up_only_what_is_slower(plan: Plan, cost: SimpleCost) -> None:
    """What is not above the limit is exact. What is far above is given up, in most orders while the pipeline fills."""
    span, idle = makespan(plan, cost)
    assert makespan(plan, cost, span) == (span, idle)
    assert makespan(plan, cost, 2 * span) == (span, idle)
    assert makespan(plan, cost, 0.99 * span) in ((span, idle), (float("inf"), 0.0))
    if span:
        assert makespan(plan, cost, span / plan.num_ranks / 2) == (float("inf"), 0.0)


def check_rule(timeline: Timeline, cost: SimpleCost) -> None:
    plan = timeline.plan
    ends = {completes(e.action): e.end for e in timeline.events}
    for rank in range(plan.num_ranks):
        mine = [e for e in timeline.computations if e.rank == rank]
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(mine))
    for e in timeline.events:
        if e.action.op not in RECEIVES:
            needed = [need for need in dependencies(e.action, plan) if need.op not in COPIES or need in ends]
            assert all(ends[need] <= e.start + 1e-9 for need in needed)
        else:
            assert e.end == ends[counterpart(e.action)]


def test_a_link_carries_one_transfer_at_a_time() -> None:
    plan = uniform("terapipe", 2, 1, 4)
    slow = simulate(schedule(plan), SimpleCost(sent=3.0))
    sends = [e for e in slow.events if e.action.op is Op.SEND_F]
    assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(sends))
    assert [e.end - e.start for e in sends] == [12.0] * 4
    # The first slice is computed, then the link is the bottleneck, then the last slice turns and comes back.
    assert slow.makespan == pytest.approx(4 + 4 * 12 + 4 + 8 + 4 * 12 + 8)


def test_a_link_takes_the_next_transfer_while_one_is_under_way() -> None:
    plan = uniform("terapipe", 2, 1, 4)
    far = simulate(schedule(plan), SimpleCost(sent=3.0, latency=5.0))
    sends = [e for e in far.events if e.action.op is Op.SEND_F]
    assert [b.start - a.start for a, b in itertools.pairwise(sends)] == [12.0] * 3
    assert [e.end - e.start for e in sends] == [17.0] * 4
    # As above, and the way is longer once in each direction.
    assert far.makespan == pytest.approx(4 + 4 * 12 + 5 + 4 + 8 + 4 * 12 + 5 + 8)


@dataclass(frozen=True)
class TwoHosts(SimpleCost):
    """Only what goes from or to the third rank is overlapped."""

    def link_behavior(self, source: int, target: int) -> LinkBehavior:
        return LinkBehavior(overlapped=2 in (source, target))


def test_each_link_is_as_its_ranks_have_it() -> None:
    timeline = simulate(schedule(uniform("terapipe", 3, 1, 4)), TwoHosts(sent=0.25))

    def pauses(rank: int, op: Op) -> list[float]:
        mine = [e for e in timeline.computations if e.rank == rank and e.action.op is op]
        return [b.start - a.end for a, b in itertools.pairwise(mine)]

    assert pauses(0, Op.F) == pytest.approx([1.0] * 3)  # to the second rank, before the next forward
    assert pauses(1, Op.B) == pytest.approx([1.0] * 3)  # and back
    assert pauses(2, Op.B) == pytest.approx([0.0] * 3)  # from the third rank, meanwhile


def test_transfers_that_are_not_overlapped_hold_up_their_sender() -> None:
    plan = uniform("terapipe", 2, 1, 4)
    timeline = simulate(schedule(plan), SimpleCost(sent=0.25, overlapped=False))
    first = [e for e in timeline.computations if e.rank == 0 and e.action.op is Op.F]
    assert [b.start - a.end for a, b in itertools.pairwise(first)] == pytest.approx([1.0] * 3)


@settings(max_examples=examples(100))
@given(plan=plans(), cost=COSTS)
def test_causes_add_up_to_all_idle_time(plan: Plan, cost: SimpleCost) -> None:
    timeline = simulate(schedule(plan), cost)
    causes = idle_by_cause(timeline)
    assert len(causes) == plan.num_ranks
    assert all(value >= -1e-9 for cause in causes for value in cause)
    total = timeline.makespan * plan.num_ranks
    assert sum(cause.total for cause in causes) == pytest.approx(timeline.idle * total, abs=1e-6)
    if not cost.sent and not cost.latency:
        assert sum(cause.transfer for cause in causes) == pytest.approx(0.0, abs=1e-6)


def test_causes_of_gpipe() -> None:
    """Rank k waits k forwards at the start and K - 1 - k backwards at the turn, and drains k backwards early."""
    plan = uniform("gpipe", 3, 2)
    for k, cause in enumerate(idle_by_cause(simulate(schedule(plan), SimpleCost()))):
        assert cause.fill == pytest.approx(4 * k + (2 - k) * 12)
        assert cause.drain == pytest.approx(8 * k)
        assert cause.imbalance == cause.transfer == 0.0


def test_unequal_stages_show_as_imbalance() -> None:
    plan = Plan((1,) * 4, ((4,),) * 4, (0, 3, 4), "gpipe")
    causes = idle_by_cause(simulate(schedule(plan), SimpleCost()))
    assert causes[1].imbalance > 0.0


def test_computations_in_a_circle_are_named() -> None:
    plan = uniform("terapipe", 2, 1, 2)
    made = schedule(plan)
    turned = type(made)(plan, (tuple(reversed(made.ranks[0])), made.ranks[1]))
    with pytest.raises(ValueError, match="wait for each other in a cycle: rank 0 at B"):
        simulate(turned, SimpleCost())


def test_costs_must_make_sense() -> None:
    with pytest.raises(ValueError, match="finite and at least 0"):
        makespan(uniform("gpipe", 2, 1), SimpleCost(token=float("nan")))
    with pytest.raises(ValueError, match="finite and at least 0"):
        makespan(uniform("gpipe", 2, 1), SimpleCost(token=-1.0))


# Hosts


def hosted(plan: Plan, host: float, queue: float = 1e9, **more: float) -> Timeline:
    """Layers take a second for each token, backwards two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("terapipe.scheduling.program"), "QUEUE", queue)
        return simulate(schedule(plan), HostedCost(host=host, **more))


def test_a_host_that_is_ahead_does_not_show() -> None:
    plan = Plan((1,), ((4, 4, 4),), (0, 1, 2))
    assert hosted(plan, 1.0).events == simulate(schedule(plan), SimpleCost()).events


def test_a_slow_host_bounds_the_whole_step() -> None:
    """One rank, tokens of one second: six computations take nine seconds on the device, and 12 on the host."""
    plan = Plan((1,), ((1, 1, 1),), (0, 1))
    assert hosted(plan, 0.0).makespan == 9
    assert hosted(plan, 2.0).makespan == 12
    assert hosted(plan, 1.5).makespan == 3 * 1.5 + 3 * 2, "backwards take longer on the device"


def test_what_the_host_gained_while_the_device_was_busy_is_used_up() -> None:
    """A long slice, then short ones that the host issued meanwhile: not the sum of what each takes alone."""
    plan = Plan((1,), ((9, 1, 1),), (0, 1))  # device: 9 1 1 2 2 18
    assert hosted(plan, 3.0).makespan == 33
    assert hosted(plan, 3.0, queue=3.0).makespan > 33, "unless it could not get so far ahead"


def test_messages_are_posted_by_the_host() -> None:
    plan = Plan((1,), ((1, 1),), (0, 1, 2))
    without, posting = (hosted(plan, 4.0, message=message) for message in (0.0, 0.5))
    assert without.makespan < posting.makespan
    alone = Plan((1,), ((1, 1),), (0, 2))
    assert hosted(alone, 4.0, message=0.5).events == hosted(alone, 4.0).events


@given(plan=plans(), host=st.sampled_from([0.5, 3.0, 20.0]), queue=st.sampled_from([1.0, 50.0, 1e9]))
def test_hosts_issue_one_computation_after_the_other(plan: Plan, host: float, queue: float) -> None:
    """The step is never shorter than a rank's host needs, nor than without hosts; and never longer than if every
    computation took the longer of the two."""
    layers = np.diff(plan.boundaries)
    timeline, without = hosted(plan, host, queue), simulate(schedule(plan), SimpleCost())
    for events in timeline.by_rank:
        issued = list(itertools.accumulate(host * layers[e.action.stage] for e in events if e.action.op is not Op.W))
        assert timeline.makespan >= max(issued, default=0.0) - 1e-9
    assert timeline.makespan >= without.makespan - 1e-9
    if not ORDERS[plan.order].deferred:
        assert timeline.makespan <= simulate(schedule(plan), _Slower(host=host)).makespan + 1e-9
    cost = HostedCost(host=host)
    assert makespan(plan, cost)[0] == pytest.approx(simulate(schedule(plan), cost).makespan)


class _Slower(HostedCost):
    """Every computation takes as long as the slower of device and host."""

    def by_side(self) -> tuple["_Slower", HostTime]:
        return self, HostTime()

    def forward(self, stage: StageSpec, *slices: Numbers) -> Array:
        return np.maximum(super().forward(stage, *slices), self.host * stage.layers)

    def backward(self, stage: StageSpec, *slices: Numbers) -> Array:
        return np.maximum(super().backward(stage, *slices), self.host * stage.layers)
