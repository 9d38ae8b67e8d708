"""The double of NCCL: what it computes, in which order, and what it refuses."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import WorkResult  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _abort_process_group
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.pretend import nccl
from tests.pretend.channel import Settings
from tests.pretend.waits import counting_waits
from tests.support.ranks import Ranks

Start = Callable[[int], Ranks]
SHORT = timedelta(seconds=0.2)
LONG = 300.0


def here(*shape: int, value: float | None = None) -> Tensor:
    return torch.full(shape, float(dist.get_rank()) if value is None else value, device="cuda")


def failure(function: Callable[[], object]) -> str:
    """What it raises by itself, or when the host waits for the device."""
    try:
        function()
        torch.cuda.synchronize()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# What it computes


def collectives() -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {"backend": dist.get_backend(), "device": here(1).device.index}
    for name, op in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX), ("mean", dist.ReduceOp.AVG)):
        dist.all_reduce(x := here(2), op)
        found[name] = x.tolist()
    dist.all_reduce(x := here(2).bfloat16() + 0.5)
    found["half"] = x.tolist()
    dist.broadcast(x := here(2), 1)
    found["broadcast"] = x.tolist()
    dist.all_gather(xs := [here(1, value=9.0) for _ in range(size)], here(1))
    found["gathered"] = torch.cat(xs).tolist()
    dist.all_gather_single(x := here(size), here(1))
    found["into"] = x.tolist()
    dist.reduce_scatter_single(x := here(1), torch.arange(float(size), device="cuda"))
    found["scattered"] = x.tolist()
    dist.all_to_all_single(x := here(size), torch.arange(float(size), device="cuda") + 10 * rank)
    found["exchanged"] = x.tolist()
    dist.scatter(x := here(1), [here(1, value=10.0 + i) for i in range(size)] if rank == 0 else None)
    found["one"] = x.tolist()
    dist.all_gather_object(objects := [None] * size, {"rank": rank})
    found["objects"] = objects
    work = dist.all_reduce(x := here(1), async_op=True)
    found["asynchronous"] = (work is not None and work.wait(), x.tolist())
    dist.barrier(device_ids=[rank])
    return found


def test_collectives(ranks: Start) -> None:
    for rank, found in enumerate(ranks(3)(collectives)):
        assert found == {
            "backend": "nccl", "device": rank, "sum": [3, 3], "max": [2, 2], "mean": [1, 1], "half": [4.5, 4.5],
            "broadcast": [1, 1], "gathered": [0, 1, 2], "into": [0, 1, 2], "scattered": [3 * rank],
            "exchanged": [rank, 10 + rank, 20 + rank], "one": [10 + rank],
            "objects": [{"rank": i} for i in range(3)], "asynchronous": (True, [3]),
        }  # fmt: skip


def tensors_of_a_mesh() -> tuple[list[Tensor], list[Tensor]]:
    """DTensors in several layouts, and a layer that FSDP has split."""
    mesh = init_device_mesh("cuda", (2,))
    whole = torch.arange(12.0, device="cuda").view(4, 3)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    found = [x.full_tensor(), x.redistribute(mesh, [Shard(1)]).full_tensor(), (x @ x.T).full_tensor()]
    found.append(DTensor.from_local(here(2), mesh, [Replicate()]).sum().full_tensor())
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 5, device="cuda")
    copy = torch.nn.Linear(3, 5, device="cuda")
    copy.load_state_dict(layer.state_dict())
    fully_shard(layer, mesh=mesh)
    rows = whole[2 * dist.get_rank() : 2 * dist.get_rank() + 2]
    layer(rows).square().sum().backward()
    copy(whole).square().sum().div(2).backward()
    gradients = [p.grad.full_tensor() for p in layer.parameters() if isinstance(p.grad, DTensor)]
    wanted = [p.grad for p in copy.parameters() if p.grad is not None]
    return found, [torch.stack([a.flatten(), b.flatten()]) for a, b in zip(gradients, wanted, strict=True)]


def test_dtensors_and_fully_sharded_layers(ranks: Start) -> None:
    whole = torch.arange(12.0).view(4, 3)
    for rank, (found, gradients) in enumerate(ranks(2)(tensors_of_a_mesh)):
        for x, y in zip(found, [whole, whole, whole @ whole.T, torch.tensor(2.0 * rank)], strict=True):
            torch.testing.assert_close(x, y)
        assert len(gradients) == 2
        for a, b in gradients:
            torch.testing.assert_close(a, b)


def both_kinds() -> list[list[float]]:
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    found = [here(1), torch.full((1,), float(dist.get_rank()))]
    for x in found:
        dist.all_reduce(x, group=group)
    return [x.tolist() for x in found]


def test_a_group_for_both_kinds_of_devices(ranks: Start) -> None:
    assert ranks(2)(both_kinds) == [[[1], [1]]] * 2


# Messages


def exchanged(values: list[float]) -> list[float]:
    """Rank 0 sends them, one message each; rank 1 receives them. Posted at once, waited for afterwards."""
    rank = dist.get_rank()
    tensors = [here(3, value=value) if rank == 0 else here(3) for value in values]
    works = [dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0) for x in tensors]
    for work in works:
        assert work is not None
        work.wait()
    torch.cuda.synchronize()
    assert all(work is not None and work.is_completed() for work in works)
    return [x[0].item() for x in tensors]


def test_messages_keep_their_order(ranks: Start) -> None:
    assert ranks(2)(exchanged, [4.0, 5.0, 6.0]) == [[4, 5, 6]] * 2


def late() -> tuple[bool, float, float]:
    """A receive that has not run yet when the host goes on."""
    Settings.delay = 0.2
    try:
        x = here(1)
        work = dist.isend(x, 1) if dist.get_rank() == 0 else dist.irecv(x, 0)
        assert work is not None
        early, before = work.is_completed(), x.item()
        work.wait()
        return early, before, x.item()
    finally:
        Settings.delay = 0.0


def test_operations_run_later_than_they_are_posted(ranks: Start) -> None:
    assert ranks(2)(late) == [(False, 0, 0), (False, 1, 0)]


def mismatched(kind: str) -> str:
    group = dist.new_group()
    rank = dist.get_rank()
    x = here(2 + rank if kind == "size" else 2).to(torch.float64 if rank and kind == "dtype" else torch.float32)

    def run() -> None:
        if kind == "collective":
            return dist.all_reduce(x, group=group) if rank else dist.broadcast(x, 0, group)
        sends = rank == 0 or kind == "both send"
        return through(dist.isend(x, 1 - rank, group) if sends else dist.irecv(x, 1 - rank, group))

    return failure(run)


def through(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("size", "rank 1 has recv 3 of torch.float32, rank 0 has send 2 of torch.float32"),
        ("dtype", "rank 1 has recv 2 of torch.float64, rank 0 has send 2 of torch.float32"),
        ("both send", "rank 1 has send 2 of torch.float32, rank 0 has send 2 of torch.float32"),
        ("collective", "rank 1 has ALLREDUCE of 2 torch.float32"),
    ],
)
def test_both_ends_must_agree(ranks: Start, kind: str, said: str) -> None:
    first, second = ranks(2)(mismatched, kind)
    assert first.startswith("DistBackendError: operation")
    assert said in second


def meet(peer: int, group: dist.ProcessGroup) -> None:
    """Both send, the lower rank first."""
    sends = [dist.get_rank() < peer, dist.get_rank() > peer]
    for send in sends:
        through(dist.isend(here(1), peer, group) if send else dist.irecv(here(1), peer, group))


def crossed(eager: bool) -> list[str]:
    """A ring in which each receives before it sends: fine on channels of its own, stuck on one for all peers."""
    device = torch.device("cuda", torch.cuda.current_device())
    group = dist.new_group(device_id=device if eager else None)
    rank, size = dist.get_rank(), dist.get_world_size()
    if eager:
        group.set_timeout(timedelta(seconds=1))
    else:  # communicators of pairs are made in an order that cannot block
        for peer in sorted({(rank - 1) % size, (rank + 1) % size}):
            meet(peer, group)
    works = [dist.irecv(here(1), (rank - 1) % size, group), dist.isend(here(1), (rank + 1) % size, group)]
    return [failure(lambda work=work: through(work)) for work in works]  # type: ignore[misc]


@pytest.mark.parametrize("eager", [False, True])
def test_a_group_with_a_device_has_one_channel(fresh_ranks: Start, eager: bool) -> None:
    for said in fresh_ranks(3)(crossed, eager):
        if eager:
            assert all("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=" in text for text in said)
        else:
            assert said == ["nothing"] * 2


# What it refuses


def refused() -> list[str]:
    rank = dist.get_rank()
    x = here(2, 3)
    cases = [lambda: dist.all_reduce(x.T), lambda: dist.all_reduce(torch.ones(1))]
    cases.append(lambda: dist.all_reduce(torch.ones(1, device=f"cuda:{rank + 2}")))
    return [failure(case) for case in cases]


def test_what_is_refused(ranks: Start) -> None:
    for rank, said in enumerate(ranks(2)(refused)):
        assert said == [
            "ValueError: Tensors must be contiguous",
            "RuntimeError: No backend type associated with device type cpu",
            f"ValueError: tensors must be on the current device, got one on cuda:{rank + 2}, not cuda:{rank}",
        ]


def on_one_gpu(how: str) -> str:
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    if how == "eager":
        return failure(lambda: dist.new_group(device_id=device))
    group = dist.new_group()
    if how == "collective":
        return failure(lambda: dist.all_reduce(here(1), group=group))
    rank = dist.get_rank()
    return failure(lambda: (dist.irecv if rank else dist.isend)(here(1), 1 - rank, group))


@pytest.mark.parametrize("how", ["eager", "collective", "message"])
def test_two_ranks_on_one_gpu(fresh_ranks: Start, how: str) -> None:
    for said in fresh_ranks(2)(on_one_gpu, how):
        assert said.startswith("DistBackendError: NCCL error in: ")
        assert "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000" in said


def split_off(folder: str, local: bool) -> str:
    """Where the world was given its device, new groups are split off from it: by all of its ranks, or by none."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=torch.device("cuda", rank))
    Settings.gives_up = 1.0 if local else None

    def run() -> None:
        group = dist.new_group([0, 1], use_local_synchronization=local)
        if rank < 2:
            dist.all_reduce(here(1), group=group)

    return failure(run)


@pytest.mark.parametrize("local", [False, True])
def test_a_world_with_devices_is_split_by_all_ranks(fresh_ranks: Start, tmp_path: Path, local: bool) -> None:
    first, second, outsider = fresh_ranks(3)(split_off, str(tmp_path), local)
    assert outsider == "nothing"
    assert first == second
    assert ("other ranks at ncclCommSplit" in first) == local


def options() -> tuple[int, bool]:
    chosen = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    chosen.config.max_ctas = 4
    device = torch.device("cuda", torch.cuda.current_device())
    group = dist.new_group([0, 1], backend="nccl", pg_options=chosen, device_id=device)
    dist.all_reduce(x := here(1), group=group)
    return int(x.item()), group.bound_device_id == device


def test_options_of_a_group(ranks: Start) -> None:
    assert ranks(2)(options) == [(1, True)] * 2


# Waiting and failing


def waits_of_a_message() -> list[str]:
    exchanged([1.0])  # makes the communicator
    with counting_waits() as found:
        rank = dist.get_rank()
        x = here(1)
        for timeout in (None, timedelta(seconds=60)):
            work = dist.irecv(x, 0) if rank else dist.isend(x, 1)
            assert work is not None
            work.wait() if timeout is None else work.wait(timeout)
        dist.all_reduce(x)
        dist.barrier(device_ids=[rank])
    return [wait.kind for wait in found]


def test_only_waits_with_a_timeout_are_the_hosts(ranks: Start) -> None:
    assert ranks(2)(waits_of_a_message) == [["Work.wait(timeout)", "barrier"]] * 2


def nobody_sends(how: str) -> tuple[str, str]:
    """Rank 1 waits for a message that never comes; what it is told, and what the next operation is."""
    exchanged([1.0])
    group = dist.new_group()
    rank = dist.get_rank()
    dist.all_reduce(here(1), group=group)
    work = dist.isend(here(1), 1 - rank, group) if rank == 0 else dist.irecv(here(1), 1 - rank, group)
    through(work)
    if rank == 0:
        return "", ""
    if how == "watchdog":
        group.set_timeout(timedelta(seconds=1))
    work = dist.irecv(here(1), 0, group)
    assert work is not None
    if how == "timeout":
        return failure(lambda: work.wait(SHORT)), ""
    if how == "abort":
        threading.Timer(0.2, lambda: _abort_process_group(group)).start()
    said = failure(work.wait)
    return said, failure(lambda: group.allreduce([here(1)])) if how == "abort" else ""


@pytest.mark.parametrize(
    ("how", "said", "after"),
    [
        ("timeout", "timed out in blocking wait", ""),
        ("watchdog", "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=RECV", ""),
        ("abort", "nothing", "NCCL communicator was aborted on rank 1."),
    ],
)
def test_a_message_that_never_comes(fresh_ranks: Start, how: str, said: str, after: str) -> None:
    _, (found, then) = fresh_ranks(2)(nobody_sends, how)
    assert said in found
    assert after in then


def one_dies(notices: bool) -> str:
    Settings.notices_death = notices
    exchanged([1.0])
    group = dist.new_group()
    dist.all_reduce(here(1), group=group)
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        os._exit(1)
    if not notices:
        group.set_timeout(timedelta(seconds=1))
    return failure(lambda: dist.all_reduce(here(1), group=group))


@pytest.mark.parametrize("notices", [False, True])
def test_a_peer_that_is_gone_is_not_noticed(fresh_ranks: Start, notices: bool) -> None:
    """Unless it is on another host, to which a connection breaks."""
    group = fresh_ranks(2)
    group.submit(one_dies, notices)
    said = group.result(1)
    assert said.startswith("DistBackendError")
    assert ("Watchdog" in said) != notices


def failing_on_purpose() -> list[str]:
    group = dist.new_group()
    rank = dist.get_rank()
    if rank == 1:
        nccl.fail(group, 2, "ncclSystemError: no socket interface found")
    return [failure(lambda: dist.all_reduce(here(1), group=group)) for _ in range(2 if rank else 1)]


def test_errors_on_purpose(fresh_ranks: Start) -> None:
    first, second = fresh_ranks(2)(failing_on_purpose)
    assert first == ["nothing"]
    assert second == ["nothing", "DistBackendError: ncclSystemError: no socket interface found"]


# As unkind as the original


@contextmanager
def handling(**variables: str) -> Iterator[None]:
    """An environment in which groups are made."""
    with mock.patch.dict(os.environ, variables):
        yield


def own_group() -> Any:
    """One with whose errors torch does nothing."""
    with handling(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_DUMP_ON_TIMEOUT="0"):
        group = dist.new_group()
    dist.all_reduce(here(1), group=group)
    torch.cuda.synchronize()
    return group


def message(group: dist.ProcessGroup) -> dist.Work:
    """From rank 0 to rank 1, or nothing of it on rank 0."""
    work = dist.irecv(here(1), 0, group)
    assert work is not None
    return work


def late_error() -> list[Any]:
    """On rank 1 an operation fails while it runs."""
    group, rank = own_group(), dist.get_rank()
    if rank == 0:
        return []
    nccl.fail(group, 1, "ncclSystemError: the cable is cut", late=True)
    work: Any = dist.all_reduce(x := here(1), group=group, async_op=True)
    said = [failure_now(work.wait), work.exception()]  # returns at once, and knows nothing
    result = work.get_future_result()
    while not result.done():
        time.sleep(0.01)
    said += [WorkResult(result.value()), work.is_completed(), failure_now(lambda: None)]
    threading.Timer(0.2, group.abort).start()
    torch.cuda.synchronize()  # waits for the abort
    return [*map(str, said), x.item()]


def failure_now(function: Callable[[], object]) -> str:
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_an_error_comes_later_and_the_device_waits_on(fresh_ranks: Start) -> None:
    """torch says of a transfer that has failed that it is completed. Computations go on when it is aborted."""
    _, said = fresh_ranks(2)(late_error)
    assert said == ["nothing", "None", "WorkResult.COMM_ERROR", "True", "nothing", 1.0]


def aborts(together: bool) -> list[bool]:
    """Rank 1 waits for two messages that never come, on two channels; it aborts the later one first."""
    groups = [own_group(), own_group()]
    for group in groups:
        meet(1 - dist.get_rank(), group)
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        return []
    works = [message(group) for group in groups]
    threads = [threading.Thread(target=group.abort, daemon=True) for group in reversed(groups)]
    for thread in threads if together else threads[:1]:
        thread.start()
    threads[0].join(LONG if together else 0.5)
    return [not threads[0].is_alive(), *(work.is_completed() for work in works)]


@pytest.mark.parametrize("together", [False, True])
def test_aborting_waits_for_what_was_posted_earlier(fresh_ranks: Start, together: bool) -> None:
    """Kernels run in order: the one of a communicator that is aborted waits for one that is not."""
    assert fresh_ranks(2)(aborts, together)[1] == [together, together, together]


def monitored(disarmed: bool) -> str:
    """Rank 1 has a failure; both may have aborted their first group."""
    dist.all_reduce(here(1))
    torch.cuda.synchronize()
    group = own_group()
    Settings.heartbeat = 0.2
    rank = dist.get_rank()
    if disarmed:
        assert dist.group.WORLD is not None
        dist.group.WORLD.abort()
    if rank == 1:
        nccl.fail(group, 1, "ncclSystemError: the cable is cut", late=True)
        group.allreduce([here(1)])
    time.sleep(1.5 if disarmed else LONG)
    return "alive"


@pytest.mark.parametrize("disarmed", [False, True])
def test_torch_ends_all_processes_some_time_after_a_failure(fresh_ranks: Start, disarmed: bool) -> None:
    """Also those where nothing failed, and whatever handles errors of the group that it was in."""
    group = fresh_ranks(2)
    group.submit(monitored, disarmed)
    assert group.results() == (["alive"] * 2 if disarmed else [None, None])


def asked_in_a_thread(chooses: bool) -> list[str]:
    said: list[str] = []
    work: Any = dist.all_reduce(here(1), async_op=True)
    event = torch.cuda.current_stream().record_event()
    device = torch.cuda.current_device()

    def ask() -> None:
        if chooses:
            torch.cuda.set_device(device)
        said.extend(failure_now(one) for one in (work.is_completed, event.query, event.synchronize))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return said


@pytest.mark.parametrize("chooses", [False, True])
def test_threads_choose_their_device(ranks: Start, chooses: bool) -> None:
    """One that has not chosen asks the first, and gets a context there."""
    first, second = ranks(2)(asked_in_a_thread, chooses)
    assert first == ["nothing"] * 3
    assert len(second) == 3
    for said in second:
        assert said == "nothing" if chooses else "of cuda:1 was asked for by a thread whose current device" in said
