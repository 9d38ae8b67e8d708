"""The facts of one rank: versions, attention kernels, cores, memory."""

import os
import platform
import re
import resource
import socket
import warnings
from contextlib import suppress
from importlib import metadata
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import terapipe
from terapipe.launch.processes import take_cores
from terapipe.modeling.kernels import PLAIN, kernel_for
from terapipe.runtime.transport import host_name, local_device, local_ranks


def facts(rank: int) -> dict[str, Any]:
    """The fields of ``Facts``, as values that become JSON."""
    kernels, fallbacks = _kernels()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return {
        "rank": rank,
        "host": host_name(),
        "addresses": _addresses(socket.gethostname()),
        "local_ranks": local_ranks(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "terapipe": terapipe.__version__,
        },
        "needs": _needs(),
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "kernels": kernels,
        "fallbacks": fallbacks,
        "cores": _cores(),
        "all_cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "memory": _free_memory(),
        "shared_memory": _shared_memory(),
        "files": None if files == resource.RLIM_INFINITY else files,
    }


def _addresses(host: str) -> list[str]:
    try:
        return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None)))
    except OSError:
        return []


def _needs() -> dict[str, str]:
    """The versions that this release requires. Empty if it is not installed but only on the path."""
    try:
        about, requirements = metadata.metadata("terapipe"), metadata.requires("terapipe") or []
    except metadata.PackageNotFoundError:
        return {}
    needs = {"python": str(about["Requires-Python"] or "")}
    for requirement in requirements:
        found = re.fullmatch(r"(torch|numpy)\b([^;]*)", requirement)
        if found:
            needs[found[1]] = found[2].strip()
    return needs


def _kernels() -> tuple[list[str], list[str]]:
    """The dtypes whose fast attention kernel passes its self-test, and reasons for the others."""
    passed, fallbacks = [], []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fast = kernel_for(local_device(), dtype) is not PLAIN
        if fast:
            passed.append(name)
        else:
            why = [str(w.message).partition(". Falling back")[0] for w in caught if w.category is RuntimeWarning]
            fallbacks.append(f"{name}: {why[0] if why else 'the fast kernel is not trusted'}")
    return passed, fallbacks


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def share_cores() -> None:
    """Pins this rank to cores, as training does; with more ranks than cores, none is pinned."""
    if local_ranks() <= len(_cores()):
        take_cores()
    else:
        torch.set_num_threads(1)


def _free_memory() -> int:
    with suppress(OSError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _shared_memory() -> int | None:
    try:
        about = os.statvfs("/dev/shm")
    except OSError:
        return None
    return about.f_blocks * about.f_frsize
