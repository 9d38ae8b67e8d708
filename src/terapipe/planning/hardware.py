"""Known devices, hosts and clusters: what the analytic cost model needs to know of hardware."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

GB, GIB = 1e9, 2**30


@dataclass(frozen=True)
class Link:
    bandwidth: float  # bytes per second, one way
    latency: float  # seconds

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Device:
    """A device, and how well layers of a transformer use it."""

    peak: float  # floating-point operations per second, in the precision of training
    achieved: float  # the share of it that the widest products reach
    bandwidth: float  # bytes per second of its memory
    memory: int  # bytes
    layer_overhead: float  # seconds that a layer's forward takes beside its arithmetic
    min_layer_time: float  # seconds below which no forward of a layer falls, however short the slice: kernel launches
    half_width: float = 0.0  # of a product's sides, at which it reaches half of that share
    accumulated: float = 2.0  # times its weights' bytes that a layer moves to add a slice's gradients to the sum
    element: int = 2  # bytes of a weight, an activation, a gradient
    summed: int = 2  # bytes of a gradient in sums over replicas: the runtime sums in the parameters' dtype
    state: int = 12  # bytes of optimizer state for each parameter: float32 copy and Adam's two moments
    causal: bool = True  # whether attention skips the future; otherwise it computes whole rectangles
    tile: int = 8  # tokens: slice lengths that are multiples of it use the device well

    def rate(self, width: float) -> float:
        """Operations per second in products of matrices about so wide: narrow ones do not fill the device."""
        return self.peak * self.achieved * width / (width + self.half_width)


@dataclass(frozen=True)
class Host:
    device: Device
    devices: int
    intra_node: Link  # between two devices of the host
    inter_node: Link  # of the whole host, shared by its devices
    overlapped: bool = True  # whether devices compute while they send


@dataclass(frozen=True, init=False)
class Cluster:
    """``Cluster("dgx-h100:8")``: known hosts and how many of them, or ``cpu``, this machine, calibrated on the spot.

    For hosts of your own: ``Cluster("mine", Host(...), hosts=4)``.
    """

    name: str
    host: Host
    hosts: int

    def __init__(self, name: str, host: Host | None = None, hosts: int = 1) -> None:
        if host is None:
            name, host, hosts = _known(name)
        if isinstance(hosts, bool) or not isinstance(hosts, int) or hosts < 1:
            raise ValueError(f"a cluster has at least one host, got {hosts!r}")
        for field, value in (("name", name), ("host", host), ("hosts", hosts)):
            object.__setattr__(self, field, value)

    @property
    def devices(self) -> int:
        return self.host.devices * self.hosts


# The V100 of the TeraPipe paper. From data sheets: peak, memory and its bandwidth. From the paper's figure 3: no layer
# below 1.46 ms, however short the slice. By construction: attention over whole rectangles, transfers not overlapped,
# gradients of replicas summed in float32, a weight's gradient written, read, added to its sum and that written (4 times
# the weights' bytes). Calibrated, on figure
# 3 and settings 5, 8 and 10 of the main table: the share of the peak, the width that halves it, a layer's overhead.
_V100 = Device(
    125e12, 0.944, 900 * GB, 16 * GIB, 0.45e-3, 1.46e-3, half_width=2330.0, accumulated=4.0, summed=4, causal=False
)  # fmt: skip
# For the others, published peaks, and shares and overheads that well-tuned training reaches; not measured by us. Their
# matrix and attention kernels work on tiles of 128 rows.
_A100 = Device(312e12, 0.75, 2.0e12, 80 * GIB, 0.10e-3, 0.20e-3, half_width=1000.0, tile=128)
_A100_40 = Device(312e12, 0.75, 1.55e12, 40 * GIB, 0.10e-3, 0.20e-3, half_width=1000.0, tile=128)
_H100 = Device(989e12, 0.70, 3.35e12, 80 * GIB, 0.08e-3, 0.15e-3, half_width=2000.0, tile=128)

HOSTS: dict[str, Host] = {
    "p3.16xlarge": Host(_V100, 8, Link(130 * GB, 10e-6), Link(3.125 * GB, 30e-6), overlapped=False),
    "p4d.24xlarge": Host(_A100_40, 8, Link(235 * GB, 8e-6), Link(50 * GB, 20e-6)),
    "dgx-a100": Host(_A100, 8, Link(235 * GB, 8e-6), Link(200 * GB, 10e-6)),
    "p5.48xlarge": Host(_H100, 8, Link(360 * GB, 8e-6), Link(400 * GB, 20e-6)),
    "dgx-h100": Host(_H100, 8, Link(360 * GB, 8e-6), Link(400 * GB, 10e-6)),
}


def _known(text: str) -> tuple[str, Host, int]:
    """From ``HOST:COUNT``, such as ``p3.16xlarge:48``."""
    name, _, count = text.partition(":")
    if name != "cpu" and name not in HOSTS:
        raise ValueError(f"unknown host {name!r} in cluster {text!r}; the hosts are {', '.join([*HOSTS, 'cpu'])}")
    try:
        hosts = int(count or "1")
    except ValueError:
        hosts = 0
    if hosts < 1:
        raise ValueError(f"a cluster is HOST:COUNT with a count of at least 1, got {text!r}; try {name}:1")
    return f"{name}:{hosts}", this_cpu() if name == "cpu" else HOSTS[name], hosts


@cache
def this_cpu() -> Host:
    """This machine as a host whose devices are its cores, calibrated by large products and copies in a second or so."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    a, b = np.ones((1024, 1024), np.float32), np.ones((1024, 1024), np.float32)
    block = np.ones(1 << 24, np.float32)
    rate = 2 * 1024**3 / _best(lambda: a @ b) / cores
    bandwidth = 2 * block.nbytes / _best(block.copy)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // cores
    device = Device(rate, 0.8, bandwidth, memory, 0.4e-3, 0.5e-3, element=4, summed=4, state=8)
    link = Link(bandwidth / 6, 50e-6)  # through a socket: several copies
    return Host(device, cores, link, Link(1.25 * GB, 50e-6))


def _best(action: Callable[[], object], rounds: int = 7) -> float:
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
