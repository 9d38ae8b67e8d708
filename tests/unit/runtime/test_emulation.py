"""Emulated devices: what a stage sleeps is what the cost model says, action by action."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from terapipe import Pipeline, Plan
from terapipe.planning.cost import LinkBehavior
from terapipe.planning.recompute import Recompute
from terapipe.runtime import emulation
from terapipe.runtime.comm.channel import Done, Links
from terapipe.runtime.emulation import EmulatedLinks, EmulatedModel, EmulatedStage, Emulation, Wire, predict
from tests.support.costs import SimpleCost

COST = SimpleCost(fixed=0.5, token=1.0, score=0.25)
PLAN = Plan((1, 1), ((3, 5), (3, 5)), (0, 4))


def sleeps(plan: Plan, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Pipeline, list[float]]:
    """The pipeline after a step of a single rank, and the seconds that it would have slept."""
    slept: list[float] = []
    monkeypatch.setattr(EmulatedStage, "sleep", lambda self, seconds, start: slept.append(seconds))
    emulated = Emulation.of(plan, COST, **options)
    pipe = Pipeline(EmulatedModel(emulated, 0), plan, device="cpu")
    ids = torch.zeros(plan.batch_size, plan.seq_len, dtype=torch.int64)
    assert float(pipe.step(ids, ids + 1)) == plan.num_stages
    return pipe, slept


@pytest.mark.parametrize("order", ["terapipe", "terapipe-deferred", "terapipe-v", "interleaved"])
@pytest.mark.parametrize("recompute", ["none", "light", "block", "full"])
def test_each_computation_sleeps_once_what_it_costs(
    order: str, recompute: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = 2 if order in ("terapipe-v", "interleaved") else 1
    plan = Plan(PLAN.sizes, PLAN.lengths, (0, 1, 4) if chunks == 2 else (0, 4), order, chunks, recompute)
    pipe, slept = sleeps(plan, monkeypatch)
    events = predict(plan, COST).computations
    assert sorted(slept) == pytest.approx(sorted(e.end - e.start for e in events))
    for stage in pipe.stages.values():
        assert isinstance(stage, EmulatedStage)
        assert stage.weight.grad == len(plan.slices)


def test_everything_is_stretched(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, stretched = sleeps(PLAN, monkeypatch)[1], sleeps(PLAN, monkeypatch, stretch=3.0)[1]
    assert stretched == pytest.approx([3 * seconds for seconds in plain])


def test_a_straggler_is_simulated_by_its_factor() -> None:
    plan = Plan((1,), ((4, 4),), (0, 1, 2))
    plain, slow = predict(plan, SimpleCost()), predict(plan, SimpleCost(), (1.0, 1.5))
    assert [e.end - e.start for e in slow.by_rank[0]] == [e.end - e.start for e in plain.by_rank[0]]
    assert [e.end - e.start for e in slow.by_rank[1]] == [1.5 * (e.end - e.start) for e in plain.by_rank[1]]
    assert slow.makespan > plain.makespan


def test_jitter_and_slowdown_are_those_of_the_rank() -> None:
    emulated = Emulation.of(Plan((1,), ((8,),), (0, 1, 2)), COST, slowdown=(1.0, 1.5))
    assert [EmulatedModel(emulated, rank).draw_factor() for rank in (0, 1)] == [1.0, 1.5]
    model = EmulatedModel(replace(emulated, jitter=0.1), 1)
    draws = [model.draw_factor() for _ in range(1000)]
    assert sum(draws) / 1000 == pytest.approx(1.5, rel=0.02)
    assert len(set(draws)) == 1000


def test_what_cannot_be_emulated_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Plan((1,), ((8,),), (0, 1, 2))
    with pytest.raises(ValueError, match="slowdown one number above 0 for each of the 2 ranks"):
        Emulation.of(two, COST, slowdown=(1.5,))
    with pytest.raises(ValueError, match="have no activations to copy"):
        Emulation.of(replace(PLAN, offload=True), COST)
    pipe, _ = sleeps(PLAN, monkeypatch)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match="run the plan that they were made for, got a slice of 2 sequences"):
        pipe.step(ids, ids + 1, plan=Plan((2,), ((8,),), (0, 4)))


class Loopback(Links):
    """What is sent arrives here, at once."""

    def __init__(self) -> None:
        self.messages: list[Tensor] = []

    def connect(self, pairs: Any, guard: Any) -> None:
        pass

    def send(self, tensor: Tensor, peer: int) -> dist.Work:
        self.messages.append(tensor)
        return Done()

    def receive(self, buffer: Tensor, peer: int) -> dist.Work:
        buffer.copy_(self.messages.pop(0))
        return Done()

    def wait(self, work: dist.Work) -> None:
        pass


@pytest.mark.parametrize(
    ("behavior", "arrivals"),
    [(LinkBehavior(), [2.0, 4.0]), (LinkBehavior(latency=0.5), [2.0, 3.5]), (LinkBehavior(overlapped=False), [2, 4])],
)
def test_messages_arrive_when_the_link_would_bring_them(
    behavior: LinkBehavior, arrivals: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two messages that leave at once: the link takes one after the other, all of it or but for its latency."""
    now = [0.0]
    monkeypatch.setattr(emulation.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(emulation, "sleep_until", lambda t: now.__setitem__(0, max(now[0], t)))
    links = EmulatedLinks(Loopback(), 0, {(0, 1): Wire({(1, 3): 2.0}, behavior)})
    tensors = [torch.randn(1, 3, 1), torch.randn(1, 3, 1)]
    for tensor in tensors:
        links.wait(links.send(tensor, 1))
    for tensor, arrival in zip(tensors, arrivals, strict=True):
        buffer = torch.empty(1, 3, 1)
        links.wait(links.receive(buffer, 1))
        assert torch.equal(buffer, tensor)
        assert now[0] == (arrival if behavior.overlapped else 4.0)
