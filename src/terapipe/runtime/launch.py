"""Starts the ranks of this machine, and gives each its share of the cores."""

import ctypes
import os
import uuid
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from terapipe.runtime.transport import local_rank, local_ranks


def launch(function: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """Calls ``function(*args)`` on so many processes, as torchrun would; the first rank's result."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    return elastic_launch(config, function)(*args)[0]


def take_cores() -> None:
    """This process on its own share of the cores, with as many threads; before any other thread is started."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // local_ranks())
        first = local_rank() * share % len(cores)
        os.sched_setaffinity(0, set(cores[first : first + share]))
        torch.set_num_threads(share)
    keep_memory()


def keep_memory() -> None:
    """Tells glibc to keep freed memory: large tensors then do not come with fresh pages, which are slow to touch the
    first time, in some steps and not in others."""
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return  # another C library
    trim_threshold, mmap_threshold = -1, -3
    for option in (trim_threshold, mmap_threshold):
        libc.mallopt(option, 1 << 30)
