"""Starts the ranks of this machine, and gives each its share of the cores."""

import ctypes
import logging
import os
import re
import signal
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, get_error_handler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from terapipe.runtime.failures import PipelineError
from terapipe.runtime.transport import local_rank, local_ranks

PATIENCE = 3600  # seconds that processes asked to stop have to finish their step and save


def launch(function: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """Calls ``function(*args)`` on so many processes, as torchrun would; the first rank's result."""
    return elastic_launch(_config(ranks), function)(*args)[0]


def launch_module(module: str, arguments: Sequence[str], ranks: int, restarts: int) -> str:
    """Runs ``python -m module arguments`` on so many processes, all again if one died, so many times.

    How it ended: nothing to say, or why it did not go well. A signal to this process goes to them, once; they have time
    to save and end. At a second one this process ends, and they with it (see ``end_with_parent``).
    """
    config = _config(ranks, max_restarts=restarts, shutdown_timeout=PATIENCE)
    _quiet()
    try:
        elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
    except SignalException:
        return ""
    except ChildFailedError as error:
        return blame(error.failures)
    return ""


def record(error: Exception) -> None:
    """Keeps why this rank fails for the process that started it, where torchelastic looks for it."""
    with suppress(OSError):
        get_error_handler().record_exception(error)


def blame(failures: Mapping[int, ProcessFailure]) -> str:
    """What ended a run, in one line: of several ranks that failed, the one whose failure the others only noticed.

    What a signal ended may have been ended by torchelastic, after another rank had failed; so it is blamed only if the
    others say that it was gone, or say nothing.
    """
    told = {rank: text for rank, f in sorted(failures.items()) if (text := _told(f))}
    noticed = f"{PipelineError.__name__}: "
    own = [f"rank {rank} stopped: {text}" for rank, text in told.items() if not text.startswith(noticed)]
    heard = [_WAITS.split(text.removeprefix(noticed))[0] for text in told.values() if text.startswith(noticed)]
    ended = {rank: f"rank {rank} ended with {_exit(f.exitcode)}" for rank, f in sorted(failures.items())}
    gone = [text for rank, text in ended.items() if any(re.match(rf"rank {rank} (on .+? )?is gone", h) for h in heard)]
    by_signal = [text for rank, text in ended.items() if failures[rank].exitcode < 0]
    return next(iter([*own, *gone, *heard, *by_signal, *ended.values()]))


_WAITS = re.compile(r"; rank \d+ (?:on .+? )?(?:waited|was waiting) ")  # who noticed it, in a PipelineError


def _told(failure: ProcessFailure) -> str:
    data: Any = failure.error_file_data.get("message")
    return str(data["message"]) if isinstance(data, dict) and "extraInfo" in data and "message" in data else ""


def _exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _quiet() -> None:
    """Keeps torchelastic's warnings from between our lines, which say the same. Who has set LOGLEVEL, its own switch,
    to another level than its default gets what was asked for."""
    for name in list(logging.root.manager.loggerDict):
        logger = logging.getLogger(name)
        if name.startswith("torch.distributed.elastic") and logger.level == logging.WARNING:
            logger.setLevel(logging.CRITICAL)


def _config(ranks: int, **more: Any) -> LaunchConfig:
    defaults = {"max_restarts": 0, "monitor_interval": 0.1, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    return LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=str(uuid.uuid4()), **{**defaults, **more}
    )


def end_with_parent() -> None:
    """This process is sent SIGTERM when the one that started it ends in whatever way. Linux only."""
    with suppress(OSError, AttributeError):
        set_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_death_signal, signal.SIGTERM)


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
