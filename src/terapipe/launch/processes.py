"""Starts ranks on this machine and pins each to its share of the cores.

Ranks that compute on CPUs pin themselves, each to neighboring cores (``take_cores``). Ranks with GPUs are pinned by
torch's launcher, to cores on the NUMA node of their GPU, where ``numactl`` is installed. So `terapipe train`, `profile`
and `doctor` all run on the same cores. Under torchrun, that is up to torchrun (``--numa-binding``).
"""

import ctypes
import logging
import os
import re
import shutil
import signal
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, get_error_handler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.numa.binding import AffinityMode, NumaOptions

from terapipe.launch import loopback
from terapipe.launch.stopped import ending_stopped_ranks
from terapipe.runtime.comm.environment import growing_segments, local_device, local_rank, local_ranks, on_loopback
from terapipe.runtime.comm.errors import PipelineError

MOST_RANKS = 1024  # of one host: more than any has devices
SHUTDOWN_TIMEOUT = 3600  # seconds for ranks that were asked to stop to finish their step and save


def launch(function: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """Calls a function in several processes of this machine, as torchrun would. When one of them dies, torch asks the
    others to end, and kills them 30 seconds later, whatever its shutdown_timeout says.

    Args:
        function: one that pickle can name.
        ranks: how many processes.
        *args: of the function, the same for all.

    Returns:
        The result of rank 0.
    """
    with on_loopback(), growing_segments(), ending_stopped_ranks():
        return elastic_launch(launch_config(ranks), function)(*args)[0]


def launch_module(module: str, arguments: Sequence[str], ranks: int, restarts: int) -> str:
    """Runs ``python -m module arguments`` in several processes of this machine, and restarts all if one dies.

    The first signal to this process is passed on to the ranks, which save and end. A second signal ends this process
    and with it the ranks (see ``end_with_parent``).

    Args:
        module: to run.
        arguments: of its command line.
        ranks: how many processes.
        restarts: how many times all are started again.

    Returns:
        Why the run failed; empty if it did not, or was asked to end.
    """
    config = launch_config(ranks, max_restarts=restarts, shutdown_timeout=SHUTDOWN_TIMEOUT)
    _quiet()
    try:
        with on_loopback(), growing_segments(), ending_stopped_ranks():
            elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
    except SignalException:
        return ""
    except ChildFailedError as error:
        return blame(error.failures)
    return ""


def record(error: Exception) -> None:
    """Writes this rank's error where torchelastic in the parent process reads it, so that ``blame`` can name it."""
    with suppress(OSError):
        get_error_handler().record_exception(error)


def blame(failures: Mapping[int, ProcessFailure]) -> str:
    """Names the cause of a failed run in one line. If several ranks failed, it is the one that the others only noticed.

    torchelastic itself ends ranks by a signal after another rank has failed. So a rank that ended by a signal is blamed
    only if the others report that it is gone, or report nothing. The order of preference::

        own        a rank's error that is no PipelineError: the cause itself
        gone       a rank that a PipelineError of another rank says is gone
        heard      what a PipelineError says without naming such a rank
        by_signal  a rank that a signal ended, where nobody reports anything
        ended      any other

    Args:
        failures: of the ranks, as torchelastic reports them.
    """
    messages = {rank: text for rank, f in sorted(failures.items()) if (text := _message(f))}
    noticed = f"{PipelineError.__name__}: "
    own = [f"rank {rank} stopped: {text}" for rank, text in messages.items() if not text.startswith(noticed)]
    heard = [_WAITS.split(text.removeprefix(noticed))[0] for text in messages.values() if text.startswith(noticed)]
    ended = {rank: f"rank {rank} ended with {_exit(f.exitcode)}" for rank, f in sorted(failures.items())}
    gone = [text for rank, text in ended.items() if any(re.match(rf"rank {rank} (on .+? )?is gone", h) for h in heard)]
    by_signal = [text for rank, text in ended.items() if failures[rank].exitcode < 0]
    return next(iter([*own, *gone, *heard, *by_signal, *ended.values()]))


_WAITS = re.compile(r"; rank \d+ (?:on .+? )?(?:waited|was waiting) ")  # in a PipelineError: the rank that noticed


def _message(failure: ProcessFailure) -> str:
    """Returns the error that the rank itself has recorded; empty if it recorded none."""
    data: Any = failure.error_file_data.get("message")
    return str(data["message"]) if isinstance(data, dict) and "extraInfo" in data and "message" in data else ""


def _exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _quiet() -> None:
    """Silences torchelastic's warnings, which repeat our messages, unless LOGLEVEL (its own switch) was set."""
    for name in list(logging.root.manager.loggerDict):
        logger = logging.getLogger(name)
        if name.startswith("torch.distributed.elastic") and logger.level == logging.WARNING:
            logger.setLevel(logging.CRITICAL)


def launch_config(ranks: int, **more: Any) -> LaunchConfig:
    """Configures torch's launcher for one host: ranks meet on the loopback interface, where no other host can join.

    Args:
        ranks: Processes to start.
        **more: Fields of torch's ``LaunchConfig``, in place of the defaults here.
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(
            f"between 1 and {MOST_RANKS} ranks can be started on this host, got {ranks}; start more with torchrun, on "
            "several hosts"
        )
    meeting = {"rdzv_backend": loopback.BACKEND, "rdzv_endpoint": loopback.ADDRESS, "local_addr": loopback.ADDRESS}
    defaults = {"max_restarts": 0, "monitor_interval": 0.1, "numa_options": numa_options(ranks), **meeting}
    return LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=str(uuid.uuid4()), **{**defaults, **more}
    )


def end_with_parent() -> None:
    """Asks the kernel to send this process SIGTERM when its parent ends, however that ends. Linux only."""
    with suppress(OSError, AttributeError):
        set_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_death_signal, signal.SIGTERM)


def numa_options(ranks: int) -> NumaOptions | None:
    """Asks torch to give each rank physical cores of its own, with their hyperthreads, on the NUMA node of its GPU. The
    thread that issues kernels is what short slices wait for; on another socket it takes longer to reach the GPU, and on
    a core that another rank uses, too, twice as long.

    Args:
        ranks: of this host.

    Returns:
        The options; None where there are not enough GPUs, or no ``numactl``.
    """
    if torch.cuda.device_count() < ranks or shutil.which("numactl") is None:
        return None
    return NumaOptions(AffinityMode.EXCLUSIVE, should_fall_back_if_binding_fails=True)


def take_cores() -> None:
    """Pins a process that computes on the CPU to its share of the cores, with as many threads; one with a GPU stays
    where its launcher has put it. Call it before other threads start."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0), key=_place)
        if local_device().type == "cpu":
            share = max(1, len(cores) // local_ranks())
            first = local_rank() * share % len(cores)
            os.sched_setaffinity(0, set(cores[first : first + share]))
        else:
            share = max(1, min(len(cores), (os.cpu_count() or 1) // local_ranks()))
        torch.set_num_threads(share)
    keep_memory()


CORES = Path("/sys/devices/system/cpu")


def _place(core: int) -> tuple[int, int, int]:
    """Returns a key that sorts cores into neighbors: sockets one after the other, and hyperthreads of one physical core
    together, which the kernel numbers far apart. Where the system does not tell, cores stay as numbered."""
    try:
        socket, physical = (
            int((CORES / f"cpu{core}" / "topology" / name).read_text()) for name in ("physical_package_id", "core_id")
        )
    except (OSError, ValueError):
        return 0, core, core
    return socket, physical, core


def keep_memory() -> None:
    """Tells glibc to keep freed memory. Otherwise large tensors get fresh pages in some steps, slow to touch."""
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return  # another C library
    trim_threshold, mmap_threshold = -1, -3
    for option in (trim_threshold, mmap_threshold):
        libc.mallopt(option, 1 << 30)
