"""Descriptions of devices, hosts and clusters, for the analytic cost model."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

GB, GIB, MIB = 1e9, 2**30, 2**20
FLASH, EFFICIENT, CPU_ATTENTION = "flash", "memory-efficient", "flash for CPUs"  # attention kernels


@dataclass(frozen=True)
class Link:
    """A connection between devices. A message takes its latency, then its bytes at the bandwidth."""

    bandwidth: float  # bytes per second, in one direction
    latency: float  # seconds

    def seconds(self, nbytes: float) -> float:
        """Seconds of a message."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Device:
    """A device, and how well transformer layers use it."""

    peak: float  # FLOP/s in the dtype of training
    achieved: float  # utilization of the peak by very wide matmuls
    bandwidth: float  # memory bandwidth, bytes per second
    memory: int  # bytes
    layer_overhead: float  # seconds of a layer's forward besides its arithmetic
    min_layer_time: float  # lower bound on the seconds of a layer's forward: its kernels, however little they do
    half_width: float = 0.0  # matmul width at which utilization is half of `achieved`
    # Memory traffic of accumulating a slice's weight gradients, as a multiple of weight bytes. A product that adds to a
    # sum in float32 reads and writes 4 bytes for each weight: 4 times the bytes of half precision.
    accumulated: float = 4.0
    element: int = 2  # bytes of a weight, an activation, a gradient
    summed: int = 4  # bytes of a gradient in the all-reduce over replicas, which is in float32
    state: int = 12  # bytes of optimizer state per parameter: float32 copy and Adam's two moments
    causal: bool = True  # whether attention skips masked blocks; otherwise it computes whole rectangles
    tile: int = 8  # tokens; slice lengths that are multiples of it use the device well
    accelerator: bool = True  # whether a context and NCCL take part of its memory, see ``usable_memory``
    flash: bool = True  # whether FlashAttention runs in half precision; else memory-efficient attention
    blas: int = 3 * 32 * MIB  # bytes of cuBLAS's workspaces, see ``blas_workspaces``
    # Seconds of the host that issues the kernels; zero where ``min_layer_time`` has them, or the device is the host.
    host_forward: float = 0.0  # of a layer's forward
    host_backward: float = 0.0  # of a layer's backward
    host_action: float = 0.0  # of a computation beside its layers
    host_message: float = 0.0  # to post a send or a receive

    def rate(self, width: float) -> float:
        """FLOP/s of a matmul of this width. Narrow ones do not fill the device."""
        return self.peak * self.achieved * width / (width + self.half_width)

    @property
    def attention(self) -> str:
        """The attention kernel, as modeling/kernels.py names it."""
        if not self.accelerator:
            return CPU_ATTENTION
        return FLASH if self.flash and self.element == 2 else EFFICIENT


# What a plan cannot have of an accelerator's memory. Typical values, not measured on the device at hand.
REPORTED = 0.989  # of the data sheet's memory: a card of 80 GiB reports 79.1 GiB, one of 40 GiB 39.6, of 16 GiB 15.8
CONTEXT = 3 << 28  # bytes of the CUDA context with loaded kernels: 0.5 to 1 GiB
COLLECTIVES = 3 << 29  # bytes of NCCL's buffers for pipeline, tensor and data parallel groups: 1 to 2 GiB
LATER_GROUPS = 1 << 29  # of these, bytes of the groups of replicas and tensor parallel ranks
FRAGMENTED = 0.04  # of the rest: gaps between tensors that torch's allocator cannot fill, 3 to 5 %


def usable_memory(device: Device) -> int:
    """Bytes that a plan may use: the data sheet's, less what driver, CUDA context, NCCL and fragmentation take."""
    if not device.accelerator:
        return device.memory
    return _without_fragmentation(device.memory * REPORTED - CONTEXT - COLLECTIVES)


def usable_of_measured(free: int) -> int:
    """The same of a GPU on which ``free`` bytes were measured to be left for tensors when context and connections of a
    pipeline were there. Profiling makes no groups of replicas and tensor parallel ranks; a run may."""
    return _without_fragmentation(free - LATER_GROUPS)


def _without_fragmentation(nbytes: float) -> int:
    return max(0, int(nbytes * (1 - FRAGMENTED)))


@dataclass(frozen=True)
class Host:
    """A machine: its devices, and the links inside of it and to others."""

    device: Device
    devices: int
    intra_node: Link  # between two devices of the host
    inter_node: Link  # the network card of the host, shared by its devices
    overlapped: bool = True  # whether devices compute while they send


@dataclass(frozen=True, init=False)
class Cluster:
    """``Cluster("dgx-h100:8")`` is 8 hosts of a known type. ``Cluster("cpu")`` is this machine, calibrated on the spot.

    For other hosts, describe them: ``Cluster("mine", Host(...), hosts=4)``.
    """

    name: str
    host: Host
    hosts: int

    def __init__(self, name: str, host: Host | None = None, hosts: int = 1) -> None:
        if host is None:
            name, host, hosts = _parse_cluster(name)
        if isinstance(hosts, bool) or not isinstance(hosts, int) or hosts < 1:
            raise ValueError(f"a cluster has at least one host, got {hosts!r}")
        for field, value in (("name", name), ("host", host), ("hosts", hosts)):
            object.__setattr__(self, field, value)

    @property
    def devices(self) -> int:
        return self.host.devices * self.hosts


def blas_workspace(capability: int) -> int:
    """Bytes that torch's cuBLAS keeps for each thread, on a GPU of this compute capability (its first number)."""
    return 32 * MIB if capability >= 9 else 8 * MIB + 128 * 2**10


def blas_workspaces(capability: int) -> int:
    """For the threads of forwards, of backwards, and of attention kernels' self-tests, if these multiply anything."""
    return 3 * blas_workspace(capability)


# The V100 as the TeraPipe paper used it.
# - From data sheets: peak, memory and memory bandwidth.
# - From figure 3 of the paper: a layer takes at least 1.46 ms, however short the slice.
# - From the paper's implementation: attention computes whole rectangles, transfers do not overlap, gradients are
#   all-reduced in float32, and accumulating a weight gradient moves four times the weight's bytes (write the gradient,
#   read it, read the sum, write the sum).
# - Calibrated on figure 3 and settings 5, 8 and 10 of the main table: utilization, half width, overhead per layer.


_V100 = Device(
    125e12, 0.944, 900 * GB, 16 * GIB, 0.45e-3, 1.46e-3, half_width=2330.0, accumulated=4.0, summed=4, causal=False,
    flash=False, blas=blas_workspaces(7),
)  # fmt: skip
# What the host takes to issue a layer of an eager Hugging Face decoder for one slice, however short. Counted: about 139
# kernels and 620 Python calls for forward and backward of a Llama layer, the former as many as transformers alone.
# Measured: 1.7 ms on a busy virtual core. Scaled by 0.4 to an idle core of 3.5 GHz or more: an estimate. The V100's
# 1.46 ms were measured with the host's part in them.
EAGER_FORWARD, EAGER_BACKWARD = 0.35e-3, 0.40e-3
EAGER_ACTION = 0.1e-3  # beside the layers of a stage: positions, rotary embeddings, masks, bookkeeping
EAGER_MESSAGE = 40e-6  # NCCL's launch, its events and flight recorder
# The others have published peaks, and the utilization and overhead of well-tuned training. We did not measure them.
# Their matmul and attention kernels work on tiles of 128 rows.
_H100 = Device(
    989e12, 0.70, 3.35e12, 80 * GIB, 0.08e-3, 0.15e-3, half_width=2000.0, tile=128, host_forward=EAGER_FORWARD,
    host_backward=EAGER_BACKWARD, host_action=EAGER_ACTION, host_message=EAGER_MESSAGE,
)  # fmt: skip
_H200 = replace(_H100, bandwidth=4.8e12, memory=141 * 10**9)
_B200 = replace(_H100, peak=2250e12, bandwidth=8.0e12, memory=180 * 10**9)
_A100 = replace(
    _H100, peak=312e12, achieved=0.75, bandwidth=2.0e12, layer_overhead=0.10e-3, min_layer_time=0.20e-3,
    half_width=1000.0, blas=blas_workspaces(8),
)  # fmt: skip
_A100_40 = replace(_A100, bandwidth=1.55e12, memory=40 * GIB)

MOST_HOSTS = 100_000  # more than there are anywhere

HOSTS: dict[str, Host] = {
    "p3.16xlarge": Host(_V100, 8, Link(130 * GB, 10e-6), Link(3.125 * GB, 30e-6), overlapped=False),
    "p4d.24xlarge": Host(_A100_40, 8, Link(235 * GB, 8e-6), Link(50 * GB, 20e-6)),
    "dgx-a100": Host(_A100, 8, Link(235 * GB, 8e-6), Link(200 * GB, 10e-6)),
    "p5.48xlarge": Host(_H100, 8, Link(360 * GB, 8e-6), Link(400 * GB, 20e-6)),
    "dgx-h100": Host(_H100, 8, Link(360 * GB, 8e-6), Link(400 * GB, 10e-6)),
    "dgx-h200": Host(_H200, 8, Link(360 * GB, 8e-6), Link(400 * GB, 10e-6)),
    "dgx-b200": Host(_B200, 8, Link(720 * GB, 8e-6), Link(400 * GB, 10e-6)),
}


def _parse_cluster(text: str) -> tuple[str, Host, int]:
    """Parses ``HOST:COUNT``, such as ``p3.16xlarge:48``."""
    name, _, count = text.partition(":")
    if name != "cpu" and name not in HOSTS:
        raise ValueError(f"unknown host {name!r} in cluster {text!r}; the hosts are {', '.join([*HOSTS, 'cpu'])}")
    try:
        hosts = int(count or "1")
    except ValueError:
        hosts = 0
    if hosts < 1:
        raise ValueError(f"a cluster is HOST:COUNT with a count of at least 1, got {text!r}; try {name}:1")
    if hosts > MOST_HOSTS:
        raise ValueError(f"a cluster has at most {MOST_HOSTS} hosts, got {hosts}")
    return f"{name}:{hosts}", this_cpu() if name == "cpu" else HOSTS[name], hosts


@cache
def this_cpu() -> Host:
    """This machine as a host with one device per core. Calibrated by matmuls and copies, in about a second."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    a, b = np.ones((1024, 1024), np.float32), np.ones((1024, 1024), np.float32)
    block = np.ones(1 << 24, np.float32)
    rate = 2 * 1024**3 / _best(lambda: a @ b) / cores
    bandwidth = 2 * block.nbytes / _best(block.copy)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // cores
    # A float32 sum is read and written: twice the bytes of its weight.
    device = Device(
        rate, 0.8, bandwidth, memory, 0.4e-3, 0.5e-3, accumulated=2.0, element=4, summed=4, state=8, accelerator=False,
        flash=False, blas=0,
    )  # fmt: skip
    link = Link(bandwidth / 6, 50e-6)  # a message through a socket is copied several times
    return Host(device, cores, link, Link(1.25 * GB, 50e-6))


def _best(action: Callable[[], object], rounds: int = 7) -> float:
    """The shortest of several measured times."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
