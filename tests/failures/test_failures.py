"""A rank that fails, dies or sticks: every other rank stops, with one message that names it.

Nothing here measures time. A rank that was woken says "was waiting", one that timed out "waited 10.0 s"; and a stuck
rank stays stuck until all others have told how they ended.
"""

import json
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from terapipe import Layout, Pipeline, PipelineError, Plan, device_mesh
from terapipe.modeling.gpt import GPT
from terapipe.runtime.comm.failures import GRACE, Board, FailureReport
from tests.support.models import TINY, gradients, make_batch, make_model, variant
from tests.support.ranks import Ranks

PLAN = Plan.uniform(batch_size=2, seq_len=12, num_slices=3, boundaries=(0, 1, 2, 3, 4), order="terapipe-1f1b")
SHORT, LONG = 10.0, 300.0  # timeouts, for those who wait for a stuck rank and for all others

LengthOnlyCache = tuple[str, str]  # an error's kind and its words


def misbehave(rank: int, how: str, free: Path) -> LengthOnlyCache:
    """One good step, then one in which a rank does something bad in its third forward."""
    pipe = Pipeline(make_model(TINY), PLAN, timeout=SHORT if how == "stick" else LONG)
    ids, labels = make_batch(TINY, PLAN.batch_size, PLAN.seq_len, ignored=False)
    pipe.step(ids, labels)
    if pipe.rank == rank:
        _spoil(pipe.stages[rank], how, free)
    told = _told(pipe, ids, labels)
    with pytest.raises(PipelineError):  # and it stays stopped
        pipe.evaluate(ids, labels)
    return told


def _told(pipe: Pipeline, ids: Tensor, labels: Tensor) -> LengthOnlyCache:
    Board.explain.__defaults__ = (LONG,)  # type: ignore[attr-defined]  # all have time to post, on a busy machine too
    try:
        pipe.step(ids, labels)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def _spoil(stage: torch.nn.Module, how: str, free: Path) -> None:
    calls = 0

    def hook(module: GPT, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            if how == "raise":
                raise ArithmeticError("the sun was in my eyes")
            if how == "memory":
                torch.empty(1 << 60)
            if how == "die":
                os._exit(9)
            while how == "stick" and not free.exists():
                time.sleep(0.05)
            if how == "shape":
                return output[:, :-1]
        return output

    stage.register_forward_hook(hook)


def outcome(group: Ranks, function: Callable[..., Any], rank: int, how: str, free: Path, *more: Any) -> list[Any]:
    """What every rank tells; a stuck one goes on when it has heard of the others."""
    group.submit(function, rank, how, free, *more)
    others = {other: group.result(other) for other in range(group.size) if other != rank}
    free.touch()
    return [others[other] if other in others else group.result(other) for other in range(group.size)]


@pytest.mark.gpu_seldom
@pytest.mark.parametrize(("rank", "how"), [(0, "raise"), (1, "memory"), (3, "raise")])
def test_an_exception_stops_all_ranks_with_that_ranks_error(
    fresh_ranks: Callable[[int], Ranks], tmp_path: Path, rank: int, how: str
) -> None:
    kind, words = {"raise": ("ArithmeticError", "the sun was in my eyes"), "memory": ("RuntimeError", "memory")}[how]
    reason = "out of memory: " if how == "memory" else f"{kind}: {words}"
    for other, (found, message) in enumerate(outcome(fresh_ranks(4), misbehave, rank, how, tmp_path / "free")):
        assert words in message
        if other == rank:
            assert found == kind
        else:
            assert found == "PipelineError"
            assert message.startswith(f"rank {rank} stopped at F(stage {rank}, microbatch 0, slice 2): {reason}")
            assert f"rank {other} was waiting at" in message


def test_a_dead_rank_is_named(fresh_ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    results = outcome(fresh_ranks(4), misbehave, 2, "die", tmp_path / "free")
    assert results[2] is None
    for rank in (0, 1, 3):
        kind, message = results[rank]
        assert kind == "PipelineError"
        assert message.startswith("rank 2 is gone: its process died or lost its connection; rank 0 was waiting at ")
        # What rank 2 had begun to send when it died may not have left it.
        assert re.search(r"rank 3 was waiting at RECV_F\(stage 3, microbatch 0, slice [012]\) for rank 2", message)
    assert results[0] == results[1] == results[3]


def test_a_rank_that_is_slow_to_tell_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 3 have told whom they wait for: 1 and 2. Rank 1 lives, and tells the same a second later."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    board = Board(store, dict.fromkeys(range(4), "here"))
    board.post(FailureReport(3, at="RECV_F", peers=(2,)))
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 1.0:
            board.post(FailureReport(1, at="RECV_B", peers=(2,)))

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    message = board.explain(FailureReport(0, at="RECV_B", peers=(1,)))
    assert message.startswith("rank 2 is gone: its process died or lost its connection; rank 0 was waiting at RECV_B")
    assert now[0] < GRACE


def test_ranks_that_are_woken_one_after_the_other_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven ranks each tell later than the last, all together longer than the patience with one: rank 7 is to blame."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    board = Board(store, dict.fromkeys(range(8), "here"))
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        late = [rank for rank in range(1, 7) if rank not in {report.rank for report in board.read()}]
        if late and now[0] > 0.75 * GRACE * late[0]:
            board.post(FailureReport(late[0], at="RECV_B", peers=(late[0] + 1,)))

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    message = board.explain(FailureReport(0, at="RECV_B", peers=(1,)))
    assert message.startswith("rank 7 is gone: its process died or lost its connection; rank 0 was waiting at RECV_B")
    assert 6 * 0.75 * GRACE < now[0] < 6 * 0.75 * GRACE + GRACE


class CountingStore:
    """A store that counts what it is asked."""

    def __init__(self) -> None:
        self.store: Any = dist.HashStore()  # type: ignore[attr-defined]
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        self.asked += 1
        return getattr(self.store, name)


def test_reports_of_many_ranks_are_read_once_each() -> None:
    """Each rank asked for the report of every other one, again and again: 4032 questions every time, with 64 ranks."""
    store, size = CountingStore(), 64
    board = Board(store, dict.fromkeys(range(size), "here"))  # type: ignore[arg-type]
    for rank in range(2, size):
        board.post(FailureReport(rank, at="RECV_F", peers=(1,)))
    store.asked = 0
    assert len(board.read()) == size - 2
    assert store.asked <= 2 * size
    for _ in range(10):
        assert len(board.read()) == size - 2
    assert store.asked <= 2 * size + 10


def test_a_report_that_was_begun_is_read_when_it_is_there() -> None:
    """A rank takes the number of its report before it writes it; another may write its own meanwhile."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    store.add("reports", 1)
    board = Board(store, {0: "here", 1: "here"})
    board.post(FailureReport(1, error="late"))
    assert [report.rank for report in board.read()] == [1]
    store.set("report1", json.dumps(asdict(FailureReport(0, error="early"))))
    assert {report.rank for report in board.read()} == {0, 1}


def test_a_stuck_rank_is_named(fresh_ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    results = outcome(fresh_ranks(4), misbehave, 1, "stick", tmp_path / "free")
    for rank in (0, 2, 3):
        kind, message = results[rank]
        assert kind == "PipelineError"
        assert message.startswith(
            "rank 1 did not answer in time: it is stuck, cut off, or slower than the timeout allows"
        )
        assert re.search(r"waited \d\d\.\d s at (RECV|SEND)_", message)  # NCCL waits for the end of sends, too
    assert results[1][0] == "PipelineError", "the stuck rank learns of it when it comes back"


def test_a_stage_that_breaks_its_promise_is_told_so(fresh_ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    results = outcome(fresh_ranks(4), misbehave, 1, "shape", tmp_path / "free")
    assert results[1][0] == "ValueError"
    assert "SEND_F(stage 1, microbatch 0, slice 2) must send (1, 4, 16)" in results[1][1]
    assert results[3][1].startswith("rank 1 stopped at SEND_F(stage 1")


def test_a_timeout_must_be_positive() -> None:
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds, got 0"):
        Pipeline(make_model(TINY), Plan((1,), ((8,),), (0, 4)), timeout=0)


WIDE = Plan.uniform(batch_size=2, seq_len=12, num_slices=3, boundaries=(0, 2, 4), order="terapipe-1f1b")


def misbehave_in_a_layout(rank: int, how: str, free: Path, layout: Layout, shard: bool) -> LengthOnlyCache:
    """As ``misbehave``, with replicas and split operators."""
    timeout = SHORT if how == "stick" else LONG
    pipe = Pipeline(make_model(TINY), WIDE, mesh=device_mesh(layout), shard=shard, timeout=timeout)
    ids, labels = make_batch(TINY, WIDE.batch_size, WIDE.seq_len, ignored=False)
    pipe.step(ids, labels)
    if dist.get_rank() == rank:
        _spoil(next(iter(pipe.stages.values())), how, free)
    return _told(pipe, ids, labels)


@pytest.mark.gpu_seldom("^(die|stick|raise-layout[01])")
@pytest.mark.parametrize(
    ("how", "layout", "shard"),
    [
        pytest.param(how, layout, shard, marks=[pytest.mark.exhaustive] if how == "stick" else [])
        for how in ("raise", "die", "stick")
        for layout, shard in ((Layout(2, 2, 1), False), (Layout(2, 2, 1), True), (Layout(1, 2, 2), False))
    ],
)
def test_replicas_and_parts_stop_too(
    fresh_ranks: Callable[[int], Ranks], tmp_path: Path, layout: Layout, shard: bool, how: str
) -> None:
    results = outcome(fresh_ranks(4), misbehave_in_a_layout, 2, how, tmp_path / "free", layout, shard)
    said = {"raise": "the sun was in my eyes", "die": "rank 2 is gone", "stick": "rank 2 did not answer in time"}[how]
    for rank in (0, 1, 3):
        kind, message = results[rank]
        assert kind == "PipelineError"
        assert said in message.split("; rank")[0], message
        assert how == "stick" or "waited" not in message, "woken, not timed out"


def fail_in_a_hook(rank: int, how: str, method: str) -> LengthOnlyCache:
    """A hook for gradients on one rank, of the last parameter there to get one, which raises."""
    pipe = Pipeline(make_model(TINY), HOOKED, timeout=LONG)
    ids, labels = make_batch(TINY, PLAN.batch_size, PLAN.seq_len, ignored=False)
    pipe.step(ids, labels)

    def hook(_: Tensor) -> None:
        raise ArithmeticError("the sun was in my eyes")

    if pipe.rank == rank:
        norm = pipe.get_parameter(f"layers.{rank}.norm1.weight")
        _ = norm.register_hook(hook) if how == "hook" else norm.register_post_accumulate_grad_hook(hook)
    try:
        pipe.step(ids, labels) if method == "step" else pipe.token_outputs(ids, labels).sum().backward()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


HOOKED = Plan.uniform(batch_size=2, seq_len=12, num_slices=3, boundaries=(0, 1, 2, 4))


@pytest.mark.parametrize(
    ("rank", "how", "method"), [(0, "post", "step"), (2, "post", "token_outputs"), (0, "hook", "step")]
)
def test_an_error_in_a_gradient_hook_stops_all_ranks_in_the_same_step(
    fresh_ranks: Callable[[int], Ranks], rank: int, how: str, method: str
) -> None:
    """The hook is the last thing that its rank does in a step: others must not have gone on."""
    for other, (kind, message) in enumerate(fresh_ranks(3)(fail_in_a_hook, rank, how, method)):
        assert kind == ("ArithmeticError" if other == rank else "PipelineError")
        assert "the sun was in my eyes" in message
        assert other == rank or message.startswith(f"rank {rank} stopped")
        assert "waited" not in message, "woken, not timed out"


def come_late(free: Path) -> list[LengthOnlyCache]:
    """Rank 1 comes only when rank 0 has given up; then both make a Pipeline."""
    told, is_late = [], dist.get_rank() == 1
    if not is_late:
        try:
            Pipeline(make_model(TINY), WIDE, timeout=0.5)
        except Exception as error:
            told.append((type(error).__name__, str(error)))
        free.touch()
    while is_late and not free.exists():
        time.sleep(0.05)
    pipe = Pipeline(make_model(TINY), WIDE, timeout=LONG)
    return [*told, ("", f"{pipe.step(*make_batch(TINY, 2, 12, ignored=False)).item():.6f}")]


def test_a_rank_that_never_makes_its_pipeline_is_named(fresh_ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    first, late = fresh_ranks(2)(come_late, tmp_path / "free")
    words = "all 2 ranks must make a Pipeline, rank 1 did not within 0.5 s; look for what happened there, or raise "
    assert first == [("PipelineError", f"{words}timeout"), *late]
    assert [kind for kind, _ in late] == [""]


def test_processes_that_never_meet_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there is a process group, where torch would wait half an hour."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    where = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PipelineError, match=r"all 2 ranks must join the process group, rank 1 did not within 0\.5 s"):
        Pipeline(make_model(TINY), WIDE, timeout=0.5)
    assert not dist.is_initialized()


def detach(stage: int, how: str, plan: Plan) -> LengthOnlyCache:
    pipe = Pipeline(make_model(TINY), plan, timeout=LONG)
    if stage in pipe.stages and how == "output":
        pipe.stages[stage].register_forward_hook(lambda module, args, out: out.detach())
    elif stage in pipe.stages and how == "input":
        pipe.stages[stage].register_forward_pre_hook(lambda module, args: (args[0].detach(), *args[1:]))
    elif stage in pipe.stages:
        last: Any = pipe.stages[stage]
        loss = last.loss
        last.loss = lambda hidden, labels: loss(hidden, labels).detach()
    told = _told(pipe, *make_batch(TINY, 2, 12, ignored=False))
    with pytest.raises(PipelineError):  # if not in the step itself, then in what comes next
        pipe.evaluate(*make_batch(TINY, 2, 12, ignored=False))
    return told


INPUT = "the output of stage {} must depend on its input by operations with gradients"
TRAINED = "the output of stage 0 must depend on its parameters that are trained"


@pytest.mark.parametrize(
    ("stage", "how", "recompute", "words"),
    [
        (0, "output", "none", TRAINED),
        (1, "output", "none", INPUT),
        (1, "input", "full", INPUT),
        (2, "output", "block", INPUT),
        (2, "loss", "none", "an objective must return a loss with a gradient"),
    ],
)
def test_a_stage_without_a_gradient_is_told_so(
    fresh_ranks: Callable[[int], Ranks], stage: int, how: str, recompute: Any, words: str
) -> None:
    results = fresh_ranks(3)(detach, stage, how, replace(HOOKED, recompute=recompute))
    kind, message = results[stage]
    assert kind == "ValueError"
    assert message.startswith(words.format(stage))
    assert "do not detach" in message


def test_layers_of_a_single_stage_without_a_gradient() -> None:
    plan = Plan.uniform(batch_size=2, seq_len=12, num_slices=3, boundaries=(0, 4))
    assert detach(0, "output", plan)[1].startswith(TRAINED)


def test_a_head_alone_may_be_trained() -> None:
    model = make_model(variant(tied=False))
    model.requires_grad_(False)
    assert model.head is not None
    model.head.requires_grad_(True)
    pipe = Pipeline(model, Plan.uniform(batch_size=2, seq_len=12, num_slices=3, boundaries=(0, 4)))
    pipe.step(*make_batch(TINY, 2, 12, ignored=False))
    assert [*gradients(pipe)] == ["head.weight"]
