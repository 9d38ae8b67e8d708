"""Failures between GPUs: errors that come late or never, aborts that wait, connections that are never made. Every rank
says who and what it was, and nothing is made of what the device computes after it."""

import gc
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from terapipe import GPT, Layout, Pipeline, Plan, device_mesh
from terapipe.hf import Decoder, save_pretrained
from terapipe.runtime.checkpoint.writer import Staging
from terapipe.runtime.comm import failures
from terapipe.runtime.comm.channel import NcclLinks
from terapipe.runtime.comm.environment import start_thread
from terapipe.runtime.comm.failures import Board
from terapipe.runtime.comm.groups import GROUPS, MAX_CTAS
from terapipe.runtime.comm.watcher import Watcher
from tests.pretend import cuda, nccl
from tests.pretend.channel import REMOTE, Settings
from tests.support.models import TINY, make_batch
from tests.support.ranks import Ranks

Start = Callable[[int], Ranks]
Told = tuple[str, str]  # an error's kind and its words
LONG, LARGE = 300.0, 1 << 60
PLAN = Plan((1,), ((10, 6, 8),), (0, 2, 4))
IDS, LABELS = make_batch(TINY, 1, 24, ignored=False)
NETWORK = "NCCL's connection (NCCL_DEBUG=INFO says what it tries, NCCL_SOCKET_IFNAME which network)"
CUT = "NCCL error: unhandled system error, the cable is cut"


@pytest.fixture(scope="module")
def survivors() -> Iterator[Ranks]:
    """Two processes that go on after failures, test after test, with a pipeline each time."""
    group = Ranks(2)
    yield group
    group.close()


def told(function: Callable[[], object]) -> Told:
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def patient() -> None:
    """All ranks have time to tell what they know, on a busy machine too."""
    Board.explain.__defaults__ = (LONG,)  # type: ignore[attr-defined]


def two_stages(**options: Any) -> Pipeline:
    pipe = Pipeline(GPT(TINY), PLAN, timeout=LONG, **options)
    pipe.step(IDS, LABELS).item()
    return pipe


def nccl_links(pipe: Pipeline) -> NcclLinks:
    found = pipe.transport.channel.links
    assert isinstance(found, NcclLinks)
    return found


# Transfers that fail


def failing_late(rank: int) -> list[Told]:
    """A transfer of this rank fails while it runs. What the step says, and the next."""
    patient()
    pipe = two_stages()
    if dist.get_rank() == rank:
        nccl.fail(nccl_links(pipe).groups[0], 2, f"{CUT}\nncclSystemError: ...", late=True)
    return [told(lambda: pipe.step(IDS, LABELS).item()), told(lambda: pipe.step(IDS, LABELS))]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_transfer_that_fails_is_told_in_nccls_own_words(survivors: Ranks, rank: int) -> None:
    """torch says of it that it is completed, so it was forgotten: both ranks waited until torch ended them."""
    for first, then in survivors(failing_late, rank):
        assert first[0] == then[0] == "PipelineError"
        assert re.match(
            rf"rank {rank} was waiting at \S.* for rank {1 - rank} \({CUT}\); rank {1 - rank} was", first[1]
        )
        assert then[1] == f"this pipeline stopped before: {first[1]}"


def dying(rank: int, notices: bool) -> Told:
    """The rank dies in a step. Between hosts, NCCL notices it, and says so in its own way."""
    Settings.notices_death = notices
    pipe = two_stages()
    if dist.get_rank() == rank:
        next(iter(pipe.stages.values())).register_forward_hook(lambda *_: os._exit(9))
    return told(lambda: pipe.step(IDS, LABELS).item())


@pytest.mark.parametrize("notices", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_rank_that_dies_is_named(fresh_ranks: Start, notices: bool) -> None:
    group = fresh_ranks(2)
    group.submit(dying, 1, notices)
    kind, message = group.result(0)
    assert kind == "PipelineError"
    assert message.startswith("rank 1 is gone: its process died or lost its connection; rank 0 was waiting at ")
    assert notices == message.endswith(f"({REMOTE.splitlines()[0]})")


# Aborting


class Stuck:
    """A communicator whose abort waits for the other's."""

    def __init__(self) -> None:
        self.began, self.others = threading.Event(), list[Stuck]()

    def abort(self) -> None:
        self.began.set()
        for other in self.others:
            other.began.wait()


def test_communicators_are_aborted_at_the_same_time() -> None:
    """One after the other, NCCL hangs; and whoever failed raised when all aborts were through, or never."""
    pair = [Stuck(), Stuck()]
    pair[0].others, pair[1].others = [pair[1]], [pair[0]]
    GROUPS.abort(pair, torch.device("cuda", 1))
    assert GROUPS.await_closing(LONG)


def waiting_for_two() -> Told:
    """Rank 1 waits for messages on two channels, in the middle of three stages; its own stage raises."""
    patient()
    plan = Plan.uniform(batch_size=2, seq_len=12, num_slices=3, boundaries=(0, 1, 2, 4), order="terapipe-1f1b")
    pipe = Pipeline(GPT(TINY), plan, timeout=LONG)
    batch = make_batch(TINY, 2, 12, ignored=False)
    pipe.step(*batch).item()
    if pipe.rank == 1:
        works = [nccl_links(pipe).receive(torch.empty(1, device=pipe.device), peer) for peer in (2, 0)]
        assert not any(work.is_completed() for work in works)

        def fail(*_: object) -> None:
            raise ArithmeticError("the sun was in my eyes")

        return told(lambda: with_failure(pipe, fail))
    return told(lambda: pipe.step(*batch).item())


def with_failure(pipe: Pipeline, fail: Callable[[], None]) -> None:
    with pipe.failing_together():
        fail()


def test_a_failure_is_raised_while_transfers_wait(fresh_ranks: Start) -> None:
    """The rank that failed first aborted its communicators, one after the other, and hung in the second."""
    first, second, third = fresh_ranks(3)(waiting_for_two)
    assert second == ("ArithmeticError", "the sun was in my eyes")
    for kind, message in (first, third):
        assert kind == "PipelineError"
        assert message.startswith("rank 1 stopped")
        assert "the sun was in my eyes" in message


# Connections


def never_connected() -> Told:
    Settings.answers = dist.get_rank() == 1  # a firewall, or the wrong network interface

    def hurried(store: Any, rank: int, device: torch.device, timeout: float, *rest: Any) -> Watcher:
        return Watcher(store, rank, device, 1.0, *rest)

    with mock.patch.object(failures, "Watcher", hurried):
        return told(lambda: Pipeline(GPT(TINY), PLAN, timeout=LONG))


def test_a_connection_that_is_never_made_is_named(fresh_ranks: Start) -> None:
    """NCCL makes communicators without a deadline: nothing was said at all."""
    for kind, message in fresh_ranks(2)(never_connected):
        assert kind == "PipelineError"
        assert re.search(rf"waited \d+\.\d s at {re.escape(NETWORK)} for rank [01]", message)


def with_one_visible_gpu(folder: str) -> tuple[int | None, float]:
    """As Slurm's ``--gpus-per-task=1`` and Ray start processes. CUDA was not used yet."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    with cuda.one_visible(rank), mock.patch.object(torch.cuda, "_initialized", False):
        store = dist.FileStore(f"{folder}/store", size)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size)
        pipe = Pipeline(GPT(TINY), PLAN, mesh=device_mesh(Layout(1, 2, 1)), timeout=LONG)
        return pipe.device.index, pipe.step(IDS, LABELS).item()


def test_processes_that_see_one_gpu_each(fresh_ranks: Start, tmp_path: Path) -> None:
    """torch takes the GPU of LOCAL_RANK for a mesh: there was no such device."""
    plain = Pipeline(GPT(TINY), Plan((1,), ((24,),), (0, 4)), device="cpu").step(IDS, LABELS).item()
    for index, loss in fresh_ranks(2)(with_one_visible_gpu, str(tmp_path)):
        assert index == 0
        assert loss == pytest.approx(plain, rel=1e-5)


def test_waits_that_block_the_host_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has no watchdog then, and would not tell that transfers are through: a healthy step would time out."""
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    with pytest.raises(ValueError, match=r"got TORCH_NCCL_BLOCKING_WAIT=1; unset it"):
        Pipeline(GPT(TINY), Plan((1,), ((24,),), (0, 4)))


# After a failure


def afterwards(folder: str) -> tuple[dict[str, Told], bool]:
    """What is refused after a failure, and whether what was saved before is as it was."""
    from transformers import AutoConfig

    patient()
    config = AutoConfig.for_model(
        "llama", hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2, vocab_size=TINY.vocab
    )
    pipe = Pipeline(Decoder.from_config(config), PLAN, timeout=LONG)
    pipe.step(IDS, LABELS)
    pipe.save(f"{folder}/saved")
    kept = {path.name: path.stat().st_mtime_ns for path in Path(folder, "saved").iterdir()}
    if pipe.rank == 0:
        nccl.fail(nccl_links(pipe).groups[0], 2, CUT, late=True)
    uses = {
        "the loss": lambda: pipe.step(IDS, LABELS).item(),
        "clip_grad_norm_": lambda: pipe.clip_grad_norm_(1.0),
        "grad_norm": lambda: pipe.grad_norm(),
        "zero_grad": lambda: pipe.zero_grad(),
        "step": lambda: pipe.step(IDS, LABELS),
        "save": lambda: pipe.save(f"{folder}/saved"),
        "save_in_background": lambda: pipe.save_in_background(f"{folder}/saved"),
        "save_pretrained": lambda: save_pretrained(pipe, f"{folder}/model"),
    }
    said = {name: told(use) for name, use in uses.items()}
    same = kept == {path.name: path.stat().st_mtime_ns for path in Path(folder, "saved").iterdir()}
    return said, same and not Path(folder, "model").exists()


def test_gradients_and_weights_are_refused_after_a_failure(survivors: Ranks, tmp_path: Path) -> None:
    """Kernels that were queued behind an aborted transfer run on over unfinished buffers, up to the optimizer's."""
    for said, untouched in survivors(afterwards, str(tmp_path)):
        assert {kind for kind, _ in said.values()} == {"PipelineError"}
        for name in ("clip_grad_norm_", "grad_norm", "zero_grad", "save", "save_in_background", "save_pretrained"):
            assert "load the last checkpoint" in said[name][1], name
            assert CUT in said[name][1], name
        assert untouched


def saved_while_failing(folder: str) -> tuple[Told, bool]:
    """The failure comes after the copies were queued and before they are made."""
    pipe = two_stages()
    plain = Staging.wait

    def cut(self: Staging) -> None:
        plain(self)
        pipe.transport.failure.cut((1,))

    with mock.patch.object(Staging, "wait", cut):
        saving = pipe.save_in_background(f"{folder}/saved")
        return told(saving.result), Path(folder, "saved").exists()


def test_what_was_copied_after_a_failure_is_not_saved(survivors: Ranks, tmp_path: Path) -> None:
    for (kind, message), exists in survivors(saved_while_failing, str(tmp_path)):
        assert kind == "PipelineError"
        assert "load the last checkpoint" in message
        assert not exists


def heard_at_the_end() -> Told:
    """Another rank has failed when this one waits for nothing: a transfer that it then posts is aborted."""
    pipe = two_stages()

    def step() -> None:
        with pipe.failing_together():
            pipe.transport.failure.hear(None, (1 - dist.get_rank(),))

    return told(step)


def test_a_step_does_not_return_what_was_cut(survivors: Ranks) -> None:
    """It returned a loss that was never sent."""
    for kind, message in survivors(heard_at_the_end):
        assert kind == "PipelineError"
        assert "the end of a step" in message


def goes_on() -> tuple[str, float]:
    """With a default group that is not terapipe's: torch's monitor of it ends the process after any failure."""
    patient()
    pipe = two_stages()
    if dist.get_rank() == 1:
        nccl.fail(nccl_links(pipe).groups[0], 2, CUT, late=True)
    kind, _ = told(lambda: pipe.step(IDS, LABELS).item())
    GROUPS.await_closing(LONG)
    Settings.heartbeat = 0.0  # eight minutes later
    time.sleep(1.0)
    return kind, two_stages().step(IDS, LABELS).item()


def test_a_process_may_go_on_after_a_failure(fresh_ranks: Start) -> None:
    """Also with another pipeline. It was ended with SIGABRT eight minutes later, though torch was told to leave errors
    alone."""
    first, second = fresh_ranks(2)(goes_on)
    assert first[0] == second[0] == "PipelineError"
    assert first[1] == second[1]


# Threads and memory


def devices_of_threads() -> list[int]:
    seen: list[int] = []
    thread = start_thread(lambda: seen.append(torch.cuda.current_device()), torch.device("cuda", 3), "a thread")
    thread.join(LONG)
    return seen


def test_threads_use_the_gpu_of_their_rank() -> None:
    """CUDA's calls in them made a context on the first GPU, half a gigabyte of each rank."""
    assert devices_of_threads() == [3]


def memory_after_a_step() -> tuple[int, int, list[bool], int]:
    """Bytes on the device before and after a step, its loss read, and nobody given the time to clean up. Then, whether
    its pairs are closed at the end of the process."""
    with mock.patch("terapipe.runtime.comm.watcher.BEAT", LONG):
        pipe = Pipeline(GPT(TINY), Plan((1,), ((2,) * 12,), (0, 2, 4)), timeout=LONG)
        for _ in range(2):
            pipe.step(IDS, LABELS).item()
            pipe.zero_grad()
        before = lowest(pipe.device)
        pipe.step(IDS, LABELS).item()
        pipe.zero_grad()
        after = lowest(pipe.device)
    GROUPS.leave()
    return before, after, [pair.is_terminated for pair in nccl_links(pipe).groups], len(GROUPS._pairs)


def lowest(device: torch.device) -> int:
    """When the threads of the pretend NCCL have let go of what they have sent."""
    gc.collect()
    found, end = LARGE, time.monotonic() + 0.5
    while time.monotonic() < end:
        found = min(found, torch.cuda.memory_allocated(device))
        time.sleep(0.02)
    return found


def test_nothing_is_left_of_a_step_and_of_a_process(fresh_ranks: Start) -> None:
    """The watcher held all messages of its last half second, 41 of 16 slices. ``destroy_process_group`` does not know
    pairs, and torch warned that it had not been called."""
    for before, after, closed, left in fresh_ranks(2)(memory_after_a_step):
        assert after <= before
        assert closed == [True, True]
        assert left == 0


def options_of_groups() -> dict[str, tuple[int, bool]]:
    pipe = Pipeline(GPT(TINY), PLAN, mesh=device_mesh(Layout(2, 2, 1)), timeout=LONG + 1)  # with groups of its own
    groups = {name: pipe.transport.ranks[name].tensors for name in ("pp", "all")} | {"pair": nccl_links(pipe).groups[0]}
    return {name: (group.options.config.max_ctas, group._warns) for name, group in groups.items()}


def test_groups_are_small_and_quiet(ranks: Start) -> None:
    """Groups that send a few numbers had NCCL's buffers for dozens of channels. Each rank warned of its pairs."""
    for options in ranks(4)(options_of_groups):
        assert options == {"pp": (MAX_CTAS, False), "all": (1, False), "pair": (MAX_CTAS, False)}
