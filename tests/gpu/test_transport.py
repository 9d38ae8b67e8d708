"""A pipeline over NCCL: how its ranks meet, what they say when they cannot, and that its hosts never wait for each
other in a step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from terapipe import GPT, Pipeline, Plan
from terapipe.runtime.checkpoint.writer import CheckpointWriter
from terapipe.runtime.comm.channel import NcclLinks
from terapipe.runtime.comm.groups import GROUPS, MAX_CTAS, PATIENCE
from tests.pretend import nccl
from tests.pretend.waits import counting_waits
from tests.support.models import TINY, make_batch
from tests.support.ranks import Ranks

Start = Callable[[int], Ranks]
PLAN = Plan((1,), ((10, 6, 8),), (0, 2, 4))
IDS, LABELS = make_batch(TINY, 1, 24, ignored=False)


def device() -> torch.device:
    return torch.device("cuda", dist.get_rank())


def pipeline(timeout: float = 100.0, **options: Any) -> Pipeline:
    return Pipeline(GPT(TINY), PLAN, timeout=timeout, **options)


def nccl_links(pipe: Pipeline) -> NcclLinks:
    found = pipe.transport.channel.links
    assert isinstance(found, NcclLinks)
    return found


def failure(function: Callable[[], object]) -> tuple[str, str]:
    try:
        function()
    except (RuntimeError, ValueError) as error:
        return type(error).__name__, str(error)
    return "", ""


# Meeting


def on_a_gpu_without_a_number() -> tuple[int | None, int, float]:
    torch.cuda.set_device(0)  # a user's own process group, who has not said which GPU is whose
    pipe = pipeline(device="cuda")
    for _ in range(2):
        pipe.step(IDS, LABELS).item()
    busy = pipe.timeline().makespan
    return pipe.device.index, torch.cuda.current_device(), busy


def test_each_rank_has_the_gpu_of_its_number(ranks: Start) -> None:
    """``device="cuda"`` raised an error of torch's. With a process group of the user's, all ranks used GPU 0 for
    objects, and recorded their times there."""
    for rank, (index, current, busy) in enumerate(ranks(2)(on_a_gpu_without_a_number)):
        assert index == current == rank
        assert busy > 0


def on_one_gpu() -> tuple[str, str]:
    return failure(lambda: pipeline(device="cuda:0"))


def test_two_ranks_on_one_gpu_are_refused(fresh_ranks: Start) -> None:
    """NCCL hangs, or says "Duplicate GPU", which users read as "rank 1 is gone"."""
    for kind, message in fresh_ranks(2)(on_one_gpu):
        assert kind == "ValueError"
        assert "each rank needs a GPU of its own, got rank 0 and rank 1 on Pretend GPU" in message
        assert "--nproc-per-node" in message


def on_a_part_of_the_job(folder: str) -> str:
    """The recommended way to begin, and a pipeline on some ranks of the job only."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=torch.device("cuda", rank))
    if rank == 0:
        return "elsewhere"
    pipe = pipeline(mesh=DeviceMesh("cuda", [1, 2], mesh_dim_names=("pp",), _init_backend=False), timeout=300.0)
    assert dist.group.WORLD is not None
    assert dist.group.WORLD.bound_device_id == device()
    return f"{pipe.step(IDS, LABELS).item():.6f}"


def test_a_pipeline_on_a_part_of_the_job(fresh_ranks: Start, tmp_path: Path) -> None:
    """It waited for ever: torch splits new groups off from the default group, for which all ranks must call."""
    plain = Pipeline(GPT(TINY), Plan((1,), ((24,),), (0, 4)), device="cpu").step(IDS, LABELS)
    other, first, last = fresh_ranks(3)(on_a_part_of_the_job, str(tmp_path))
    assert other == "elsewhere"
    assert first == last == f"{plain.item():.6f}"


# Communicators


@contextmanager
def counting_communicators() -> Iterator[list[str]]:
    made: list[str] = []
    plain = nccl._Communicator.__init__

    def counted(self: Any, group: Any, name: str, *rest: Any) -> None:
        made.append(name)
        plain(self, group, name, *rest)

    with mock.patch.object(nccl._Communicator, "__init__", counted):
        yield made


def communicators() -> tuple[int, list[str]]:
    GROUPS._pairs.clear()
    with counting_communicators() as at_start:
        pipe = pipeline(timeout=101.0)
    with counting_communicators() as in_a_step:
        pipe.step(IDS, LABELS).item()
    return len(at_start), in_a_step


def test_all_communicators_are_made_before_the_first_step(fresh_ranks: Start) -> None:
    """Making one blocks the host until the peer makes it, too, behind receives that are already waiting: a hang that
    NCCL's own developers warn of."""
    for at_start, in_a_step in fresh_ranks(2)(communicators):
        assert at_start >= 2, "one for each direction"
        assert in_a_step == []


def options_of_pairs() -> list[tuple[bool, int, float]]:
    pipe = pipeline(timeout=50.0)
    found = [pair.options for pair in nccl_links(pipe).groups]
    return [(o.is_high_priority_stream, o.config.max_ctas, o._timeout.total_seconds()) for o in found]


def test_directions_have_communicators_of_their_own(ranks: Start) -> None:
    """A receive that waits would hold up sends to the same peer. Transfers go before computations, and hold few
    multiprocessors. torch's own watchdog is more patient than ours, or it would end the process without a word."""
    assert PATIENCE > 1
    assert ranks(2)(options_of_pairs) == [[(True, MAX_CTAS, PATIENCE * 50.0)] * 2] * 2


def channel_at_the_start() -> tuple[bool, str, str]:
    pipe = pipeline()
    group = pipe.transport.ranks["all"].objects
    return CheckpointWriter.of(pipe.transport) is not None, dist.get_backend(group), dist.get_backend()


def test_what_checkpoints_need_is_made_at_the_start(ranks: Start) -> None:
    """Where NCCL works and gloo does not, runs ended at their first checkpoint, hours later."""
    assert ranks(2)(channel_at_the_start) == [(True, "gloo", "nccl")] * 2


# Steps


def waits_of_a_step() -> list[list[Any]]:
    found = []
    for dtype, casts in ((torch.float32, False), (torch.bfloat16, False), (torch.float32, True)):
        pipe = Pipeline(GPT(TINY).to(dtype), PLAN)
        for _ in range(2):  # the first learns dtypes under autocast
            with counting_waits() as waits, torch.autocast("cuda", torch.bfloat16, enabled=casts):
                pipe.step(IDS, LABELS)
        found.append(waits)
    return found


def test_a_step_between_ranks_has_no_waits(ranks: Start) -> None:
    """``Work.wait(timeout)`` blocks the host and looks again every millisecond: it was called for each message."""
    assert ranks(2)(waits_of_a_step) == [[[], [], []]] * 2


# Failing

NCCL_SAYS = "NCCL error: unhandled cuda error. Cuda failure 'out of memory'"


def with_an_error(rank: int) -> tuple[str, str]:
    pipe = pipeline()
    pipe.step(IDS, LABELS)
    if dist.get_rank() == rank:
        nccl.fail(nccl_links(pipe).groups[0], 2, NCCL_SAYS)
    return failure(lambda: pipe.step(IDS, LABELS))


@pytest.mark.parametrize("rank", [0, 1])
def test_errors_of_nccl_are_told_in_its_own_words(fresh_ranks: Start, rank: int) -> None:
    """On every rank. They were thrown away, and ranks said that others were gone."""
    for _, message in fresh_ranks(2)(with_an_error, rank):
        assert NCCL_SAYS in message


def posted_for_long() -> float:
    """Hosts run ahead: a transfer may be posted long before its turn. Each must end within the timeout, not all."""
    pipe = Pipeline(GPT(TINY), Plan((1,), ((2,) * 12,), (0, 2, 4)), timeout=10.0)
    slow = next(iter(pipe.stages.values()))
    slow.register_forward_hook(lambda *_: time.sleep(1.0))
    return pipe.step(IDS, LABELS).item()


@pytest.mark.gpu_seldom
def test_steps_may_be_longer_than_the_timeout(fresh_ranks: Start) -> None:
    first, last = fresh_ranks(2)(posted_for_long)
    assert first == last
