"""Calibration: one device, measured in a minute, gives the constants with which a cluster of it is planned.

A *profile* times one model on the ranks that will train it, and is the better of the two. A *calibration* times what
all models are made of, on one device, and leaves the rest to the cost model (planning/analytic.py): it answers what a
cluster would do that is not there yet. Each constant is measured by what it will stand for:

    copy of a large tensor                      bandwidth; to memory of the host, that of offloaded slices
    products of square matrices, by width       achieved: their FLOP/s, without the ramp and tail of the cost model
    attention, by the kernel that is used here  its speed, forward and backward
    a layer over many tokens                    passes: what is left of its seconds after products and attention
    a layer over one token                      overhead on the device; on a GPU also the time of the host

Sizes grow until a measurement takes long enough, so that the same code measures a GPU and the core of a laptop.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from terapipe.modeling.attention import attend
from terapipe.modeling.gpt import GPT
from terapipe.modeling.kernel_choice import kernel_of
from terapipe.modeling.kernels import KernelRequest
from terapipe.modeling.slice_cache import SliceCache
from terapipe.planning.analytic import AnalyticCost
from terapipe.planning.cost import StageSpec
from terapipe.planning.device import AttentionSpeed, Device
from terapipe.planning.hardware import DEVICES, Cluster, Host, save_host, this_cpu
from terapipe.planning.layout import Layout
from terapipe.planning.presets import GPTConfig
from terapipe.planning.profile import typical
from terapipe.runtime.stopwatch import Stopwatch, copy_bandwidth

WIDTHS = (256, 512, 1024, 2048, 4096, 8192)  # of square products
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)  # of attention
LARGEST_COPY = 2**30  # bytes
ROUNDS = 5
LAYER = StageSpec(1)


@dataclass(frozen=True)
class Calibration:
    """A host whose device was measured.

    Attributes:
        host: For ``Cluster("mine", calibration.host, hosts=4)``.
        measured: What was measured, by name, for whoever reads the file.
    """

    host: Host
    measured: dict[str, Any]

    def save(self, path: str | Path) -> None:
        """Writes a file that stands for the host, or for its device, wherever a cluster is named.

        Args:
            path: The file. It ends in ``.json``, by which the name of a cluster is known to be a file.
        """
        if Path(path).suffix != ".json":
            raise ValueError(f"the file of a host ends in .json, so that --cluster knows it, got {path}; add .json")
        save_host(self.host, Path(path), self.measured)


class _Attention(NamedTuple):
    kernel: str
    tokens: int
    forward: float  # FLOP/s
    backward: float


class Calibrator:
    """Measures the device of this process.

    Args:
        device: What to measure.
        host: Whose device it is. Constants that are not measured (links, memory, bytes of states) are taken from it.
        seconds: About how long to measure, at most.
    """

    def __init__(self, device: torch.device, host: Host, seconds: float) -> None:
        self._device, self._host, self._timed = device, host, Stopwatch(device)
        self._dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        # There are about 20 measurements, each of up to ROUNDS + 1 runs, of growing sizes.
        self._longest = seconds / (20 * (ROUNDS + 1))

    def run(self, progress: Callable[[float], None]) -> Calibration:
        """Measures everything.

        Args:
            progress: Called with the completed share, between 0 and 1.
        """
        began = time.perf_counter()
        bandwidth = self._bandwidth()
        progress(0.2)
        products = self._products()
        progress(0.4)
        rate = typical_rate(list(products.values()))
        heads = self._attention()
        progress(0.7)
        known = self._host.device
        peak = known.peak if known.architecture else rate
        device = replace(
            known,
            peak=peak,
            achieved=rate / peak,
            bandwidth=bandwidth,
            memory=self._memory(known),
            attention_kernel=heads.kernel,
            attention_speed=AttentionSpeed(heads.forward / peak, heads.backward / peak),
        )
        device, layer = self._layer(device)
        progress(1.0)
        measured = {
            "device": self._name(),
            "torch": str(torch.__version__),
            "seconds": round(time.perf_counter() - began, 1),
            "products": {str(width): flops for width, flops in products.items()},
            "attention": heads._asdict(),
            **layer,
        }
        copies = replace(self._host.copies, bandwidth=copy_bandwidth(self._device))
        return Calibration(replace(self._host, device=device, copies=copies), measured)

    # What is measured

    def _bandwidth(self) -> float:
        """Bytes per second that a copy reads and writes. It starts with a tensor larger than caches."""
        nbytes, seconds = 2**25, 0.0
        while nbytes <= LARGEST_COPY and seconds < self._longest / 4:
            source = torch.ones(nbytes, dtype=torch.uint8, device=self._device)
            target = torch.empty_like(source)
            seconds = self._time(lambda source=source, target=target: target.copy_(source))  # type: ignore[misc]
            nbytes *= 2
        return nbytes / seconds  # the last one had half as many, each read and written

    def _products(self) -> dict[int, float]:
        """FLOP/s of products by their width, without the start and the end that the cost model adds to each."""
        cost = AnalyticCost(GPTConfig(1, 128, 1), Cluster("", self._host), Layout())
        rates: dict[int, float] = {}
        for width in WIDTHS:
            a, b = (torch.randn(width, width, device=self._device, dtype=self._dtype) for _ in range(2))
            seconds = self._time(lambda a=a, b=b: a @ b)  # type: ignore[misc]
            rates[width] = cost.flops_with_ends(width, width, width) / seconds
            if 8 * seconds > self._longest:  # as long as the next would take
                break
        return rates

    def _attention(self) -> _Attention:
        """Causal attention of whole sequences, by the kernel that a model would get."""
        heads, size = (16, 128) if self._device.type == "cuda" else (4, 64)
        request = KernelRequest(self._device, self._dtype, size)
        for tokens in TOKENS:
            q, k, v = (
                torch.randn(1, heads, tokens, size, device=self._device, dtype=self._dtype, requires_grad=True)
                for _ in range(3)
            )
            cache = SliceCache(tokens)
            cache.begin(0, tokens)
            kernel = kernel_of(q, cache.visibility(None, None), request)
            forward, backward = self._both(lambda q=q, k=k, v=v, c=cache: attend(q, k, v, c, 0), (q, k, v))  # type: ignore[misc]
            if 4 * (forward + backward) > self._longest:
                break
        flops = 2.0 * tokens * tokens * heads * size
        return _Attention(kernel.name, tokens, flops / forward, 2.5 * flops / backward)

    def _layer(self, device: Device) -> tuple[Device, dict[str, Any]]:
        """Elementwise work and overheads, from a layer of this project's GPT over one token and over many: what the
        cost model, with products and attention as measured, leaves of their seconds."""
        hidden = max(h for h in WIDTHS[:4] if h == WIDTHS[0] or 3 * 48.0 * h**3 / device.rate < self._longest)
        tokens = 2 * hidden
        config = GPTConfig(3, hidden, hidden // 128, vocab=8, max_seq_len=tokens)
        stage = GPT(config).to(self._device, self._dtype).stage(1, 2, self._device)  # without the ends
        short = self._stage_times(stage, config, 1, self._timed)
        long = self._stage_times(stage, config, tokens, self._timed)
        bare = replace(device, passes=0.0, layer_overhead=0.0, min_layer_time=0.0)
        cost = AnalyticCost(config, Cluster("", replace(self._host, device=bare)), Layout(), ends=False, hosted=False)
        explained = [float(cost.forward(LAYER, 1, n, 0)) for n in (1, tokens)]
        overhead = max(min(short[0], long[0]) - explained[0], 0.0)
        left = max(long[0] - overhead - explained[1], 0.0)
        device = replace(
            device,
            layer_overhead=overhead,
            min_layer_time=min(short[0], long[0]),
            passes=left * device.bandwidth / (tokens * hidden * device.element),
        )
        measured: dict[str, Any] = {"hidden": hidden, "tokens": tokens, "one token": short, "all tokens": long}
        if self._device.type == "cuda":
            queued = self._stage_times(stage, config, 1, self._timed.queueing)
            device, measured["host"] = replace(device, host_forward=queued[0], host_backward=queued[1]), queued
        return device, {"layer": measured}

    def _stage_times(
        self, stage: Any, config: GPTConfig, tokens: int, clock: Callable[..., list[float]]
    ) -> tuple[float, float]:
        """Seconds of a layer's forward and backward."""
        cache = stage.make_cache(1, tokens)
        x = torch.randn(1, tokens, config.hidden, device=self._device, dtype=self._dtype, requires_grad=True)

        def forward() -> Tensor:
            cache.begin(0, tokens)
            out: Tensor = stage(x, cache)
            return out

        return self._both(forward, (x, *(p for p in stage.parameters() if p.requires_grad)), clock)

    # How

    def _both(
        self,
        forward: Callable[[], Tensor],
        inputs: tuple[Tensor, ...],
        clock: Callable[..., list[float]] | None = None,
    ) -> tuple[float, float]:
        """Seconds of a forward, and of its backward."""
        clock, results = clock or self._timed, []  # the first one makes buffers and loads kernels
        for _ in range(ROUNDS + 1):
            outs: list[Tensor] = []
            grads: list[Any] = []

            def run(outs: list[Tensor] = outs) -> None:
                outs.append(forward())

            def back(outs: list[Tensor] = outs, grads: list[Any] = grads) -> None:
                grads.append(torch.autograd.grad(outs[0], inputs, torch.ones_like(outs[0]), allow_unused=True))

            results.append(clock(run, back))
        return typical([r[0] for r in results[1:]]), typical([r[1] for r in results[1:]])

    def _time(self, action: Callable[[], object]) -> float:
        """Seconds of an action, once it has been run for the first time."""
        action()
        return typical(self._timed(*[action] * ROUNDS))

    def _memory(self, known: Device) -> int:
        return torch.cuda.mem_get_info(self._device)[1] if self._device.type == "cuda" else known.memory

    def _name(self) -> str:
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU, one core"


def typical_rate(rates: list[float]) -> float:
    """FLOP/s of large products: the mean of the faster half of those measured."""
    return 1 / typical([1 / rate for rate in rates])


def host_here(description: str | None) -> Host:
    """The host whose device is measured: as described, or as found. On a GPU that is a host with all of its devices.

    Args:
        description: A cluster, of which the host counts. None: what this machine seems to be.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if description is not None:
        host = Cluster(description).host
        if host.device.accelerator != bool(gpus):
            here = f"{gpus} GPUs" if gpus else "no GPU"
            raise ValueError(f"{description} and this machine must both have GPUs, or neither; here is {here}")
        return host
    if not gpus:
        return this_cpu()
    name = torch.cuda.get_device_name().lower().replace(" ", "")
    named = [key for key in DEVICES if key.partition("-")[0] in name]
    fits = [key for key in named if DEVICES[key].memory > 0.8 * torch.cuda.mem_get_info()[1]]
    if fits:
        return Cluster(f"{fits[0]}:{gpus}").host
    unknown = Cluster(f"a100:{gpus},pcie").host
    return replace(unknown, device=replace(unknown.device, architecture=""))
