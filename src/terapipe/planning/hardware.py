"""Devices and hosts that people have, with the sources of their constants; and `Cluster`, which reads their names.

Where a constant comes from:

- *Data sheets*: peak (dense matrices, half precision, sums in float32), memory, bandwidth, links.
- ``achieved``: the share of the peak that large products reach for as long as training lasts. Measured maxima (S.
  Bekman, Machine Learning Engineering, "Maximum Achievable Matmul FLOPS") are A100 0.87, H100 0.80, B200 0.78, MI300X
  0.60. Under the load of training, clocks are lower: gradients of weights alone ran at 0.77 to 0.81 on A100s (Qi et
  al., Zero Bubble Pipeline Parallelism, table 9).
- ``ATTENTION``: measured speeds of kernels, see there.
- Links: what NCCL's rings reach of the data sheet's, about four fifths of NVLink. Networks are at their line rate.

What was chosen with published tables in view, by trying several hundred combinations against all of them at once: of
the A100 ``achieved``, ``Device.passes``, the passes of ``unfused`` attention and the last digit of FlashAttention's
speeds; of the V100 ``achieved`` and ``layer_overhead``; ``rings`` of p3; ``_REPLICATED`` in analytic.py. So Megatron's,
DLPerf's, Seq1F1B's and the TeraPipe paper's tables show that one set of constants fits them all, not that it predicts
them. Speeds of attention on Hopper were set before the long-context tables were looked at with them.

Estimates without a source at hand: ``achieved`` of A10, L40S, RTX and MI300X devices, and their links.

None of it was measured by us on these devices. ``terapipe calibrate`` measures the device at hand.
"""

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from terapipe import files
from terapipe.planning.device import (
    CPU_ATTENTION,
    CUDNN,
    EFFICIENT,
    FLASH,
    FLASH3,
    FLASH4,
    GB,
    GIB,
    UNFUSED,
    AttentionSpeed,
    Device,
    Link,
    blas_workspaces,
)

# Speeds of attention kernels, as shares of the peak, by GPU. Forward and backward with causal masks, heads of 128,
# 16k tokens.
# - Hopper: Shah et al., FlashAttention-3, figures 5 and 6, of 989 TFLOP/s. Forward, causal: FlashAttention-2 335,
#   cuDNN 539, FlashAttention-3 616. Backward (without a mask): 322, 516, 561; with one about a tenth less.
# - Ampere: Dao, FlashAttention-2, figures 4 to 6: up to 73 % of 312 TFLOP/s forward and 63 % backward without a mask,
#   about 190 and 170 with one.
# - Blackwell: Together AI, FlashAttention-4: up to 1605 of 2250 TFLOP/s forward, 1.3 times cuDNN 9.13. Backwards are
#   bound by shared memory. FlashAttention-2 is as fast as on Hopper.
# - Ada, GeForce, MI300X and all backwards on Blackwell: estimates.
# - ``unfused``: products of half precision and a fused softmax, which write and read scores about five times: fitted to
#   Megatron's forward on A100s (Qi et al., table 9).
_UNFUSED = AttentionSpeed(0.45, 0.45, causal=False, scores=5.0)
ATTENTION: dict[str, dict[str, AttentionSpeed]] = {
    "ampere": {FLASH: AttentionSpeed(0.62, 0.54), EFFICIENT: AttentionSpeed(0.35, 0.25), UNFUSED: _UNFUSED},
    "ada": {FLASH: AttentionSpeed(0.55, 0.45), UNFUSED: _UNFUSED},
    "geforce": {FLASH: AttentionSpeed(0.90, 0.75), UNFUSED: _UNFUSED},  # whose products are held at half speed
    "hopper": {
        FLASH: AttentionSpeed(0.34, 0.30),
        CUDNN: AttentionSpeed(0.545, 0.50),
        FLASH3: AttentionSpeed(0.62, 0.54),
        UNFUSED: _UNFUSED,
    },
    "blackwell": {
        FLASH: AttentionSpeed(0.16, 0.14),
        CUDNN: AttentionSpeed(0.55, 0.45),
        FLASH4: AttentionSpeed(0.70, 0.50),
        UNFUSED: _UNFUSED,
    },
    "cdna3": {FLASH: AttentionSpeed(0.38, 0.20), UNFUSED: _UNFUSED},
    "volta": {EFFICIENT: AttentionSpeed(0.35, 0.25), UNFUSED: AttentionSpeed(0.30, 0.30, causal=False, scores=5.0)},
}


def with_attention(device: Device, kernel: str) -> Device:
    """The device with another attention kernel. Without it, a device has the one that the runtime would choose there.

    Args:
        device: One of ``DEVICES``.
        kernel: One of the kernels that ``ATTENTION`` has for its architecture.
    """
    speeds = ATTENTION.get(device.architecture, {})
    if kernel not in speeds:
        listed = ", ".join(speeds) or "none"
        raise ValueError(
            f"the speed of attention kernel {kernel!r} is not known on {device.architecture or 'CPU'} devices; those "
            f"of {listed} are"
        )
    return replace(device, attention_kernel=kernel, attention_speed=speeds[kernel])


# What the host takes to issue a layer of an eager Hugging Face decoder for one slice, however short. Counted: about 139
# kernels and 620 Python calls for forward and backward of a Llama layer, the former as many as transformers alone.
# Measured: 1.7 ms on a busy virtual core. Scaled by 0.4 to an idle core of 3.5 GHz or more: an estimate. The V100's
# 1.46 ms were measured with the host's part in them.
EAGER_FORWARD, EAGER_BACKWARD = 0.35e-3, 0.40e-3
EAGER_ACTION = 0.1e-3  # beside the layers of a stage: positions, rotary embeddings, masks, bookkeeping
EAGER_MESSAGE = 40e-6  # NCCL's launch, its events and flight recorder

# The V100 as the TeraPipe paper used it: attention is not fused (so our own, memory-efficient, is faster), products do
# not add to sums, and transfers do not overlap. From figure 3: a layer takes at least 1.46 ms, however short the slice.
_V100 = Device(
    125e12, 0.73, 900 * GB, 16 * GIB, 0.5e-3, 1.46e-3, units=80, fuses=False, architecture="volta",
    attention_kernel=EFFICIENT, attention_speed=ATTENTION["volta"][UNFUSED], blas=blas_workspaces(7),
)  # fmt: skip


def _gpu(
    architecture: str, tflops: float, achieved: float, gb_per_s: float, gib: float, units: int, capability: int = 9,
    kernel: str = FLASH, overhead: float = 0.08e-3,
) -> Device:  # fmt: skip
    """A GPU of 2020 or later, fed by an eager host. Its kernels work on tiles of 128 rows."""
    return Device(
        tflops * 1e12, achieved, gb_per_s * GB, int(gib * GIB), overhead, 2 * overhead, units=units, tile=128,
        architecture=architecture, attention_kernel=kernel, attention_speed=ATTENTION[architecture][kernel],
        blas=blas_workspaces(capability), host_forward=EAGER_FORWARD, host_backward=EAGER_BACKWARD,
        host_action=EAGER_ACTION, host_message=EAGER_MESSAGE,
    )  # fmt: skip


# TFLOP/s, share achieved, GB/s, GiB as the driver reports them (about), multiprocessors.
DEVICES: dict[str, Device] = {
    "v100": _V100,
    "a100-40": _gpu("ampere", 312, 0.79, 1555, 40, 108, 8, overhead=0.10e-3),
    "a100": _gpu("ampere", 312, 0.79, 2039, 80, 108, 8, overhead=0.10e-3),
    "a10": _gpu("ampere", 125, 0.60, 600, 22.5, 72, 8, overhead=0.10e-3),
    "h100": _gpu("hopper", 989, 0.72, 3350, 80, 132, kernel=CUDNN),
    "h200": _gpu("hopper", 989, 0.72, 4800, 141, 132, kernel=CUDNN),
    "b200": _gpu("blackwell", 2250, 0.70, 8000, 180, 148, kernel=CUDNN),
    "gb200": _gpu("blackwell", 2500, 0.70, 8000, 186, 148, kernel=CUDNN),
    "l40s": _gpu("ada", 362, 0.65, 864, 45, 142),
    "rtx4090": _gpu("geforce", 165, 0.90, 1008, 24, 128),
    "rtx5090": _gpu("geforce", 209.5, 0.90, 1792, 32, 170, 12),
    "mi300x": _gpu("cdna3", 1307, 0.55, 5300, 192, 304),
}
"""Devices by name, for descriptions such as ``l40s:8,pcie,25Gb:4``."""

SHEETS: dict[str, str] = {
    "v100": "NVIDIA V100 data sheet, SXM2, 16 GB; rates fitted to the TeraPipe paper's figure 3",
    "a100-40": "NVIDIA A100 data sheet, SXM4, 40 GB",
    "a100": "NVIDIA A100 data sheet, SXM4, 80 GB",
    "a10": "NVIDIA A10 data sheet; 150 W bound its clocks",
    "h100": "NVIDIA H100 data sheet, SXM5",
    "h200": "NVIDIA H200 data sheet",
    "b200": "NVIDIA DGX B200 data sheet",
    "gb200": "NVIDIA GB200 NVL72 data sheet, one of two GPUs",
    "l40s": "NVIDIA L40S data sheet; 350 W bound its clocks",
    "rtx4090": "NVIDIA Ada architecture paper, appendix: with float32 sums",
    "rtx5090": "NVIDIA RTX Blackwell architecture paper, appendix: with float32 sums",
    "mi300x": "AMD Instinct MI300X data sheet",
}
"""Where the peak, the memory and its bandwidth come from, by device."""

PAPERS: dict[str, str] = {
    "ampere": "Dao, FlashAttention-2, figures 4 to 6",
    "hopper": "Shah et al., FlashAttention-3, figures 5 and 6",
    "blackwell": "Together AI, FlashAttention-4",
    "ada": "assumed, after Zhang et al., SageAttention",
    "geforce": "Zhang et al., SageAttention",
    "cdna3": "an estimate, after AMD's Composable Kernel",
    "volta": "fitted to the TeraPipe paper's figure 3",
}
"""Where the speed of attention comes from, by architecture; details are beside ``ATTENTION``."""

# GB/s in one direction between devices of a host, as rings of NCCL use them. NVLink: V100 150, A100 300, H100 450,
# B200 900 by data sheet; Infinity Fabric of MI300X 448. PCIe 4.0 x16 is 32, 5.0 is 64; GeForce cards have no direct way
# to each other's memory, so that messages pass through the host's.
_FAST: dict[str, float] = {
    "v100": 130, "a100-40": 235, "a100": 235, "h100": 360, "h200": 360, "b200": 720, "gb200": 720, "mi300x": 300,
}  # fmt: skip
_PCIE: dict[str, float] = {"v100": 11, "rtx4090": 12, "rtx5090": 20, "h100": 50, "h200": 50, "b200": 50, "mi300x": 50}
_PCIE_4 = 24.0
# GB/s in one direction between a device and the memory of its host, while all devices copy in both directions. PCIe 4.0
# x16 copies 25 to 28 in one direction, 5.0 about 50. V100 and A100 hosts have two devices behind one switch with one
# way to the CPU; with H100s the memory of the CPUs is the limit. GB200: NVLink-C2C, as nvbandwidth measured GB300s
# (Megatron-LM, thread 6491). All but the last are estimates.
_TO_HOST: dict[str, float] = {
    "v100": 6, "a100-40": 12, "a100": 12, "h100": 40, "h200": 40, "b200": 40, "gb200": 170, "rtx5090": 45, "mi300x": 40,
}  # fmt: skip
_TO_HOST_PCIE_4 = 22.0
_LATENCY, _NETWORK_LATENCY = 8e-6, 20e-6
_TO_HOST_LINK = Link(_TO_HOST_PCIE_4 * GB, _LATENCY)
_HOST_MEMORY = 128 * GIB  # bytes for each device, where nothing is known of a host


@dataclass(frozen=True)
class Host:
    """A machine: its devices, and the links inside of it and to others."""

    device: Device
    devices: int
    intra_node: Link  # between two devices of the host
    inter_node: Link  # all network cards of the host together, shared by its devices
    overlapped: bool = True  # whether devices compute while they send
    rings: float = 0.9  # share of the network's bandwidth that NCCL's rings over hosts reach
    copies: Link = _TO_HOST_LINK  # between a device and the host's memory, each way
    memory: int = 0  # bytes of the host; 0: ``_HOST_MEMORY`` for each device

    @property
    def memory_per_device(self) -> int:
        """Bytes of the host's memory that slices of one device may take: three quarters of its share."""
        return int((self.memory or _HOST_MEMORY * self.devices) * 0.75) // self.devices

    def to_dict(self) -> dict[str, Any]:
        """For JSON: in saved plans, and in files of ``terapipe calibrate``."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Host":
        """Reads what ``to_dict`` gave. Refuses what something would be divided by, if it is not positive."""
        device, others = (
            dict(fields["device"]),
            _numbers({key: fields[key] for key in ("devices", "overlapped", "rings")}),
        )
        speed = AttentionSpeed(*device.pop("attention_speed"))
        words: dict[str, Any] = {name: str(device.pop(name)) for name in ("attention_kernel", "architecture")}
        _numbers(speed._asdict())
        intra_node, inter_node = (Link(**_numbers(fields[name])) for name in ("intra_node", "inter_node"))
        measured = Device(**_numbers(device), **words, attention_speed=speed)
        if "copies" in fields:  # files of earlier versions have neither
            others["copies"] = Link(**_numbers(fields["copies"]))
            others["memory"] = _numbers({"memory of the host": fields["memory"]}).popitem()[1]
        return cls(measured, intra_node=intra_node, inter_node=inter_node, **others)


_POSITIVE = {"peak", "achieved", "bandwidth", "memory", "devices", "rings", "element", "units", "forward", "backward"}


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in values.items():
        if not isinstance(value, int | float) or not (value > 0 if name in _POSITIVE else value >= 0):
            raise ValueError(f"{name}, which is {value!r}")
    return dict(values)


def _copies(name: str) -> Link:
    return Link(_TO_HOST.get(name, _TO_HOST_PCIE_4) * GB, _LATENCY)


def _dgx(name: str, network: float, devices: int = 8, latency: float = 10e-6, gib: int = 2048) -> Host:
    """Devices on NVLink, GB/s of all cards together, and GiB of the host's memory."""
    links = Link(_FAST[name] * GB, _LATENCY), Link(network * GB, latency)
    return Host(DEVICES[name], devices, *links, copies=_copies(name), memory=gib * GIB)


# InfiniBand and EFA; over TCP, as on p3, rings reach less: 0.62 fits the TeraPipe paper's settings with replicas, which
# sum gradients in half precision.
# Networks: p3 25 Gb/s, p4d 4 x 100, p5 32 x 100, g6e 400 Gb/s; DGX A100 8 x 200, later ones 8 x 400 Gb/s; each GPU of
# an NVL72 has 400 Gb/s.
HOSTS: dict[str, Host] = {
    "p3.16xlarge": Host(
        _V100, 8, Link(130 * GB, 10e-6), Link(3.125 * GB, 30e-6), overlapped=False, rings=0.62, copies=_copies("v100"),
        memory=488 * GIB,
    ),
    "p4d.24xlarge": _dgx("a100-40", 50, latency=20e-6, gib=1152),
    "dgx-a100": _dgx("a100", 200),
    "p5.48xlarge": _dgx("h100", 400, latency=20e-6),
    "dgx-h100": _dgx("h100", 400),
    "dgx-h200": _dgx("h200", 400),
    "dgx-b200": _dgx("b200", 400),
    "gb200-nvl72": _dgx("gb200", 3600, 72, gib=36 * 447),
    "mi300x-8": _dgx("mi300x", 400),
    "g6e.48xlarge": Host(
        DEVICES["l40s"], 8, Link(_PCIE_4 * GB, 10e-6), Link(50 * GB, 20e-6), copies=_copies("l40s"), memory=1536 * GIB
    ),
}  # fmt: skip


def sources_of(host: Host) -> dict[str, str]:
    """Where the constants of a host come from, for readers of a report: a sentence by the name of each constant.

    Args:
        host: Of a cluster. A device that is none of ``DEVICES`` was calibrated, or described by its user.
    """
    device = host.device
    name = next((name for name, one in DEVICES.items() if (one.peak, one.memory) == (device.peak, device.memory)), "")
    own = "measured or described by the user"
    known = next((name for name, one in HOSTS.items() if one.inter_node == host.inter_node), "")
    maxima = "S. Bekman, Machine Learning Engineering: measured maxima, less what clocks lose under load"
    return {
        "peak": SHEETS.get(name, own),
        "large products": maxima if name else own,
        "attention": PAPERS.get(device.architecture, own),
        "memory": SHEETS.get(name, own),
        "links in a host": "data sheet; about four fifths of it, as rings of NCCL reach" if name else own,
        "copies to the host": "bandwidthTest's usual figures, less what devices of a host share; an estimate",
        "network": f"line rate of a {known}'s cards, all together" if known else own,
        "host": "counted kernels and calls of an eager Llama layer, scaled from a measured core" if name else own,
    }


MOST_HOSTS = 100_000  # more than there are anywhere
MOST_DEVICES = 1024  # of one host
DESCRIPTION = "DEVICE:PER_HOST,LINK,NETWORK:HOSTS"  # of a cluster in words


@dataclass(frozen=True, init=False)
class Cluster:
    """Hosts that are all alike.

    - ``Cluster("dgx-h100:8")`` is 8 hosts of a known type. ``Cluster("cpu")`` is this machine, calibrated on the spot.
    - ``Cluster("l40s:8,pcie,25Gb:4")`` is 4 hosts with 8 devices each, which PCIe connects, and one card of 25 Gb/s.
      Inside of a host: ``pcie``, ``nvlink``, or a bandwidth in one direction such as ``50GB``. The network is that of a
      host: ``25Gb`` for bits, ``12.5GB`` for bytes per second, ``8x400Gb`` for eight cards.
    - ``Cluster("rtx4090:2")`` is one host, with the fastest link that such devices have.
    - ``Cluster("mine.json:4")`` is 4 hosts as ``terapipe calibrate`` saved one; ``mine.json`` also stands for its
      device in a description.
    - ``Cluster("mine", Host(...), hosts=4)`` is anything else.

    Args:
        name: A name or a description; with ``host``, what to call it.
        host: A host, if the name does not say which.
        hosts: The number of such hosts, with ``host``.
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


def _parse_cluster(text: str) -> tuple[str, Host, int]:
    """``HOST:COUNT``, such as ``p3.16xlarge:48``, ``FILE:COUNT``, or a description of devices and links."""
    first, *links = (word.strip() for word in text.split(","))
    name, _, count = first.rpartition(":") if re.search(r":[^/.]*$", first) else (first, "", "")
    if links or name in DEVICES:
        return _described(text, name, count, links)
    hosts = _count(text, count, MOST_HOSTS, f"a cluster is HOST:COUNT with a count of at least 1, try {name}:1")
    if name == "cpu":
        host = this_cpu()
    elif name in HOSTS:
        host = HOSTS[name]
    elif name.endswith(".json"):
        host = read_host(name)
    else:
        raise ValueError(
            f"unknown host {name!r} in cluster {text!r}; the hosts are {', '.join([*HOSTS, 'cpu'])}; or describe one "
            f"as {DESCRIPTION}, such as l40s:8,pcie,25Gb:4, with a device of {', '.join(DEVICES)}; or give a file of "
            "`terapipe calibrate`"
        )
    return f"{name}:{hosts}", host, hosts


def _described(text: str, name: str, count: str, words: list[str]) -> tuple[str, Host, int]:
    """A cluster in words: devices of a host, their link, the network of a host and the number of hosts."""
    if name not in DEVICES and not name.endswith(".json"):
        raise ValueError(
            f"unknown device {name!r} in cluster {text!r}; the devices are {', '.join(DEVICES)}, or a file of "
            "`terapipe calibrate`"
        )
    if len(words) > 2:
        raise ValueError(
            f"a described cluster is {DESCRIPTION}, such as l40s:8,pcie,25Gb:4; got {len(words) + 1} parts in {text!r}"
        )
    device = DEVICES[name] if name in DEVICES else read_host(name).device
    devices = _count(text, count, MOST_DEVICES, f"a host has 1 to {MOST_DEVICES} devices, as in {name}:8")
    inside = Link(_inside(text, name, words[0] if words else "") * GB, _LATENCY)
    network, _, number = (words[1] if len(words) > 1 else "").partition(":")
    hosts = _count(text, number, MOST_HOSTS, f"a cluster has 1 to {MOST_HOSTS} hosts, as in 25Gb:4")
    outside = Link((_bandwidth(text, network, "the network") if network else 25 / 8) * GB, _NETWORK_LATENCY)
    return text.replace(" ", ""), Host(device, devices, inside, outside, copies=_copies(name)), hosts


def _inside(text: str, name: str, word: str) -> float:
    """GB/s between devices of a host."""
    if word == "nvlink" or (not word and name in _FAST):
        if name not in _FAST:
            raise ValueError(
                f"{name} has no NVLink that we know of, got {text!r}; say pcie, or a bandwidth such as 50GB"
            )
        return _FAST[name]
    return _PCIE.get(name, _PCIE_4) if word in ("", "pcie") else _bandwidth(text, word, "the link inside of a host")


def _bandwidth(text: str, word: str, what: str) -> float:
    """GB/s of ``25Gb``, ``12.5GB`` or ``8x400Gb``."""
    match = re.fullmatch(r"(?:([1-9]\d{0,2})x)?(\d{1,6}(?:\.\d+)?)(Gb|GB)", word)
    if match is None or not float(match[2]):
        raise ValueError(
            f"{what} is a bandwidth per second such as 25Gb (bits), 12.5GB (bytes) or 8x400Gb (eight cards), or inside "
            f"of a host pcie or nvlink; got {word!r} in {text!r}"
        )
    return int(match[1] or 1) * float(match[2]) / (8 if match[3] == "Gb" else 1)


def _count(text: str, word: str, most: int, rule: str) -> int:
    number = int(word or 1) if re.fullmatch(r"\d{0,9}", word) else 0
    if not 1 <= number <= most:
        raise ValueError(f"{rule}; got {word!r} in {text!r}")
    return number


FORMAT = 1  # of files with a host


def save_host(host: Host, path: Path, origin: Mapping[str, Any]) -> None:
    """Writes a host that ``Cluster("FILE:COUNT")`` reads.

    Args:
        host: The host, with a measured device.
        path: The file.
        origin: Where its constants come from, for readers of the file.
    """
    files.write(path, json.dumps({"format": FORMAT, "host": host.to_dict(), "origin": dict(origin)}, indent=1))


def read_host(path: str) -> Host:
    """The host in a file of ``terapipe calibrate``."""
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a file; `terapipe calibrate --out {path}` writes one")
    try:
        content = json.loads(files.read(Path(path)))
        if content["format"] != FORMAT:
            raise ValueError(f"format {FORMAT}, it is of format {content['format']!r}")
        return Host.from_dict(content["host"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no description of a host: it lacks or misnames {error}; measure again with `terapipe calibrate`"
        ) from None


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
        attention_kernel=CPU_ATTENTION, blas=0,
    )  # fmt: skip
    link = Link(bandwidth / 6, 50e-6)  # a message through a socket is copied several times
    return Host(device, cores, link, Link(1.25 * GB, 50e-6), copies=Link(bandwidth / 2, 5e-6), memory=memory * cores)


def _best(action: Callable[[], object], rounds: int = 7) -> float:
    """The shortest of several measured times."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
