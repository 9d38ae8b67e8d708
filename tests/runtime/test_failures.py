"""A rank that fails, dies or sticks: every other rank stops in time, with one message that names it."""

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from terapipe import Layout, Pipeline, PipelineError, Plan, device_mesh
from terapipe.modeling.gpt import GPT
from tests.models import TINY, make_batch, make_model
from tests.ranks import Ranks

PLAN = Plan.uniform(batch=2, tokens=12, slices=3, boundaries=(0, 1, 2, 3, 4), order="terapipe-1f1b")
TIMEOUT = 3.0


def misbehave(rank: int, how: str) -> tuple[float, str, str]:
    """One good step, then one in which a rank does something bad in its third forward."""
    pipe = Pipeline(make_model(TINY), PLAN, timeout=TIMEOUT)
    ids, labels = make_batch(TINY, PLAN.batch, PLAN.tokens, ignored=False)
    pipe.step(ids, labels)
    if pipe.rank == rank:
        _spoil(pipe.stages[rank], how)
    start = time.monotonic()
    try:
        pipe.step(ids if how != "input" or pipe.rank else ids[:1], labels)
    except Exception as error:
        seconds = time.monotonic() - start
        with pytest.raises(PipelineError):  # and it stays stopped
            pipe.evaluate(ids, labels)
        return seconds, type(error).__name__, str(error)
    return 0.0, "", ""


def _spoil(stage: torch.nn.Module, how: str) -> None:
    calls = 0

    def hook(module: GPT, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            if how == "raise":
                raise ArithmeticError("the sun was in my eyes")
            if how == "die":
                os._exit(9)
            if how == "stick":
                time.sleep(2.5 * TIMEOUT)
            if how == "shape":
                return output[:, :-1]
        return output

    stage.register_forward_hook(hook)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_an_exception_stops_all_ranks_with_that_ranks_error(fresh_ranks: Callable[[int], Ranks], rank: int) -> None:
    group = fresh_ranks(4)
    group.submit(misbehave, rank, "raise")
    for other, (seconds, kind, message) in enumerate(group.results()):
        assert seconds < TIMEOUT, "woken, not timed out"
        assert "the sun was in my eyes" in message
        if other == rank:
            assert kind == "ArithmeticError"
        else:
            assert kind == "PipelineError"
            assert message.startswith(f"rank {rank} stopped at F(stage {rank}, microbatch 0, slice 2): ArithmeticError")
            assert f"rank {other} was waiting at" in message


def test_a_dead_rank_is_named(fresh_ranks: Callable[[int], Ranks]) -> None:
    group = fresh_ranks(4)
    group.submit(misbehave, 2, "die")
    results = group.results()
    assert results[2] is None
    messages = set()
    for rank in (0, 1, 3):
        seconds, kind, message = results[rank]
        assert seconds < TIMEOUT + 1
        assert kind == "PipelineError"
        assert message.startswith("rank 2 is gone: its process died or lost its connection; rank 0 was waiting at ")
        assert "rank 3 was waiting at RECV_F(stage 3, microbatch 0, slice 2) for rank 2" in message
        messages.add(message)
    assert len(messages) == 1


def test_a_stuck_rank_is_named_within_the_timeout(fresh_ranks: Callable[[int], Ranks]) -> None:
    group = fresh_ranks(4)
    group.submit(misbehave, 1, "stick")
    results = group.results()
    for rank in (0, 2, 3):
        seconds, kind, message = results[rank]
        assert TIMEOUT * 0.9 < seconds < TIMEOUT + 2.5
        assert kind == "PipelineError"
        assert message.startswith(
            "rank 1 did not answer in time: it is stuck, cut off, or slower than the timeout allows"
        )
        assert "waited 3.0 s at RECV_" in message
    assert results[1][1] == "PipelineError", "the stuck rank learns of it when it comes back"


def test_bad_input_on_one_rank_stops_all(fresh_ranks: Callable[[int], Ranks]) -> None:
    group = fresh_ranks(4)
    group.submit(misbehave, 0, "input")
    (_, kind, message), *others = group.results()
    assert kind == "ValueError"
    assert "input_ids on rank 0 must be (2, 12)" in message
    for seconds, kind, other in others:
        assert seconds < TIMEOUT
        assert kind == "PipelineError"
        assert other.startswith("rank 0 stopped: ValueError: input_ids on rank 0 must be (2, 12)")


def test_a_stage_that_breaks_its_promise_is_told_so(fresh_ranks: Callable[[int], Ranks]) -> None:
    group = fresh_ranks(4)
    group.submit(misbehave, 1, "shape")
    results = group.results()
    assert results[1][1] == "ValueError"
    assert "SEND_F(stage 1, microbatch 0, slice 2) must send (1, 4, 16)" in results[1][2]
    assert results[3][2].startswith("rank 1 stopped at SEND_F(stage 1")


def test_a_timeout_must_be_positive() -> None:
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds, got 0"):
        Pipeline(make_model(TINY), Plan((1,), ((8,),), (0, 4)), timeout=0)


WIDE = Plan.uniform(batch=2, tokens=12, slices=3, boundaries=(0, 2, 4), order="terapipe-1f1b")


def misbehave_in_a_layout(layout: Layout, rank: int, how: str, shard: bool) -> tuple[float, str, str]:
    """As ``misbehave``, with replicas and split operators."""
    pipe = Pipeline(make_model(TINY), WIDE, mesh=device_mesh(layout), shard=shard, timeout=TIMEOUT)
    ids, labels = make_batch(TINY, WIDE.batch, WIDE.tokens, ignored=False)
    pipe.step(ids, labels)
    if dist.get_rank() == rank:
        _spoil(next(iter(pipe.stages.values())), how)
    start = time.monotonic()
    try:
        pipe.step(ids, labels)
    except Exception as error:
        return time.monotonic() - start, type(error).__name__, str(error)
    return 0.0, "", ""


@pytest.mark.parametrize(
    ("how", "layout", "shard"),
    [
        pytest.param(
            how, layout, shard, marks=[pytest.mark.exhaustive] if how == "stick" and layout.tensor == 1 else []
        )
        for how in ("raise", "die", "stick")
        for layout, shard in ((Layout(2, 2, 1), False), (Layout(2, 2, 1), True), (Layout(1, 2, 2), False))
    ],
)
def test_replicas_and_parts_stop_too(
    fresh_ranks: Callable[[int], Ranks], layout: Layout, shard: bool, how: str
) -> None:
    group = fresh_ranks(4)
    group.submit(misbehave_in_a_layout, layout, 2, how, shard)
    results = group.results()
    said = {"raise": "the sun was in my eyes", "die": "rank 2 is gone", "stick": "rank 2 did not answer in time"}[how]
    for rank in (0, 1, 3):
        seconds, kind, message = results[rank]
        assert kind == "PipelineError"
        assert said in message.split("; rank")[0], message
        assert seconds < TIMEOUT + (2.5 if how == "stick" else 1)
