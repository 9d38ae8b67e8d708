"""This process among those that torchrun started. The only code that reads RANK and the like."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from terapipe.runtime.failures import PipelineError
from terapipe.runtime.roll_call import roll_call


def local_rank() -> int:
    """This process among those that torchrun started on this host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def rank_and_size() -> tuple[int, int]:
    """This process among all that torchrun started, before they have met."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def host_name() -> str:
    """This host, told apart from others of the same name by the number that torchrun gave it."""
    number = os.environ.get("GROUP_RANK")
    return platform.node() if number is None else f"{platform.node()} (node {number})"


def restarts() -> int:
    """How often torchrun has started the processes again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def job() -> str:
    """What torchrun calls the run, the same on all hosts and after restarts; nothing where it was given no name."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name


def under_torchrun() -> bool:
    return "RANK" in os.environ and "MASTER_ADDR" in os.environ


def local_device() -> torch.device:
    """The device of this process: under torchrun, each takes the GPU of its local rank, if there are GPUs."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank() % torch.cuda.device_count())
    return torch.device("cpu")


def device_of(device: torch.device | str | None) -> torch.device:
    """The one that was asked for. A GPU without a number is this process's own."""
    asked = local_device() if device is None else torch.device(device)
    return local_device() if asked == torch.device("cuda") else asked


def ensure_process_group(device: torch.device, timeout: float = 300.0) -> bool:
    """Joins the processes that torchrun started, if nobody has yet. False where there is only this process. Those that
    have not come within ``timeout`` seconds are named."""
    if not dist.is_initialized() and under_torchrun():
        rank, size = rank_and_size()
        # torchrun keeps its store when it restarts processes, and gloo would find the addresses of dead ones in it.
        store = PrefixStore(f"terapipe/{restarts()}", _store_of_job(timeout))
        roll_call(store, rank, range(size), timeout, "join the process group")
        store.set_timeout(dist.default_pg_timeout)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        with errors_left_to_us():
            dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    return dist.is_initialized()


def _store_of_job(timeout: float) -> Store:
    """The rank that hosts it would wait in it for the others, and name nobody: hence a world size of 1."""
    try:
        store: Store = next(iter(rendezvous("env://?world_size=1", timeout=timedelta(seconds=timeout))))[0]
    except dist.DistError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT')}"
        raise PipelineError(
            f"no store of the job answered at {place} within {timeout:g} s; rank 0, or torchrun on its host, must be "
            f"started, and be reached there: {str(error).partition(chr(10))[0]}"
        ) from error
    return store


@contextmanager
def errors_left_to_us() -> Iterator[None]:
    """NCCL groups made inside do not end the process by themselves when an operation fails or is aborted: every rank
    is to end with a message that names the cause."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
