"""Ways to train without a pipeline, which a pipeline has to beat: DDP, FSDP2, tensor parallel, context parallel.

They are not ours and are not simulated, but estimated from the same costs as plans: products, attention and elementwise
work of a layer by ``AnalyticCost``, bytes by ``ShapeMemory``, collectives by ``traffic.py``. Devices are numbered with
tensor parallel ranks innermost, then those that share a sequence, then replicas::

    dp 2 x cp 2 x tp 2 on a host of 8     0 1 | 2 3 || 4 5 | 6 7      || between replicas, | between parts of a sequence

One step, with what is taken to overlap (as prefetching and bucketing do, if all goes well)::

    for each microbatch
        for each layer                      seconds
            forward                         max(computation, gathering weights)
            backward                        max(computation, gathering weights + scattering gradients)
                                            of the last microbatch also + summing them over replicas
    optimizer

Ring attention overlaps with the attention to keys of other devices, and with nothing else. Ulysses (all-to-all before
and after attention) and tensor parallelism overlap with nothing. Where there is a doubt, the rival gets the benefit:
loss in chunks, perfect balance of causal masks, no fragmentation, no cost of the collectives' kernels.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import gcd
from typing import Any, Literal

from terapipe.planning.cost import Cost, Memory, StageSpec, by_side, with_recompute
from terapipe.planning.layout import Layout
from terapipe.planning.recompute import Recompute
from terapipe.search.request import Request
from terapipe.search.source import ClusterSource, Source
from terapipe.search.throughput import Throughput
from terapipe.search.traffic import REPEATED, Exchange, Traffic, all_to_all, ring, tensor_traffic

# Whose logits are in memory at a time, as fused and chunked losses have it. Hugging Face's default has those of all
# tokens, in float32, so without such a loss a rival needs more than we say.
LOSS_TOKENS = 2048


@dataclass(frozen=True)
class Way:
    """How devices share batch, sequences, layers' weights and the model's state.

    Attributes:
        dp: Parts of the batch.
        cp: Devices that share each sequence (context parallel).
        tp: Tensor parallel ranks.
        shards: Devices over which weights, gradients and optimizer state are spread (FSDP2), at most ``dp * cp``. If
            fewer, there are several copies (hybrid sharding); 1 is DDP.
        size: Sequences of a microbatch.
        exchange: How devices that share a sequence see each other's keys and values.
        recompute: What layers compute again in their backward.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    shards: int = 1
    size: int = 1
    exchange: Literal["ring", "Ulysses"] = "ring"
    recompute: Recompute = "none"

    @property
    def devices(self) -> int:
        """Devices that have work."""
        return self.dp * self.cp * self.tp

    @property
    def name(self) -> str:
        """In the field's words: "DDP", "FSDP2 + ring", "TP + DDP"."""
        if self.shards == 1:
            return "DDP" if self.tp == 1 else "TP" if self.dp == 1 else "TP + DDP"
        more = self.exchange if self.cp > 1 else "TP" if self.tp > 1 else ""
        return "FSDP2" + (f" + {more}" if more else "")


@dataclass(frozen=True)
class Rival(Throughput):
    """What training without a pipeline would take. An estimate, see the module.

    Attributes:
        way: The best of its kind, within the memory budget if one fits.
        step_time: Seconds.
        idle: Share of the step in which devices compute nothing: they wait for traffic, or have no work at all.
        peak_bytes: Of each device; all need the same.
        fits: Whether that is within the memory budget.
        traffic: Bytes that a device with work sends in a step.
        source: Model and cluster.
        request: The batch.
        devices: Of the cluster, also those that have no work: there may be fewer sequences than devices.
    """

    way: Way
    step_time: float
    idle: float
    peak_bytes: int
    fits: bool
    traffic: Traffic
    source: ClusterSource = field(compare=False, repr=False)
    request: Request = field(compare=False, repr=False)
    devices: int = 1

    @property
    def title(self) -> str:
        """For display."""
        return self.way.name

    @property
    def batch(self) -> tuple[int, int]:
        return self.request.batch_size, self.request.seq_len

    @property
    def costs(self) -> Source:
        return self.source

    def to_dict(self) -> dict[str, Any]:
        """For JSON. ``rival`` tells it from a plan."""
        return {
            "name": self.title,
            "rival": True,
            "step_time": self.step_time,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "idle": self.idle,
            "peak_bytes": self.peak_bytes,
            "fits": self.fits,
            "traffic": asdict(self.traffic),
            "way": asdict(self.way),
            "devices_with_work": self.way.devices,
        }


def rivals(source: Source, request: Request) -> list[Rival]:
    """The best way of every kind on the devices of a cluster: the fastest that fits, or the smallest if none does.

    Args:
        source: Model and devices. Of a measured profile there are none: it does not know what collectives cost.
        request: The batch, the memory budget, and recomputation if it is fixed. A fixed layout counts by its number of
            devices only.
    """
    if not isinstance(source, ClusterSource) or source.devices == 1:
        return []
    fixed = (request.dp or 0) * (request.pp or 0) * (request.tp or 0)
    devices = fixed or source.devices
    best: dict[str, Rival] = {}
    for way in _ways(source, request, devices):
        rival = estimate(source, request, way, devices=devices)
        kind = way.name.removesuffix(" + DDP")
        best[kind] = min((each for each in (best.get(kind), rival) if each), key=_preference)
    return list(best.values())


def _preference(rival: Rival) -> tuple[bool, float]:
    """Those that fit come first, by time; then the others, by memory."""
    return (False, rival.step_time) if rival.fits else (True, float(rival.peak_bytes))


def _ways(source: ClusterSource, request: Request, devices: int) -> Iterator[Way]:
    """All ways on so many devices, kind by kind. A kind that needs more sequences than there are leaves devices out."""
    batch, per_host = request.batch_size, source.cluster.host.devices
    degrees = [tp for tp in source.tensor_degrees() if tp <= devices]
    most = {tp: max(d for d in _divisors(batch) if d * tp <= devices) for tp in degrees}
    shapes = [(most[tp], 1, tp, 1, "ring") for tp in degrees]  # DDP, tensor parallel
    shapes += [(most[tp], 1, tp, s, "ring") for tp in degrees for s in _shards(most[tp], per_host // tp)]
    for dp in reversed(_divisors(gcd(batch, devices))):  # of equal ways, that with the shortest exchange
        cp = devices // dp
        if cp == 1 or request.seq_len % (2 * cp) or max(cp, per_host) % min(cp, per_host):
            continue  # parts of equal work are made of an early and a late piece of the sequence
        exchanges = ["ring"] if source.config.heads % cp else ["ring", "Ulysses"]
        shapes += [(dp, cp, 1, s, exchange) for exchange in exchanges for s in _shards(devices, per_host)]
    modes = [request.recompute] if request.recompute else request.recompute_modes
    for dp, cp, tp, shards, exchange in shapes:
        sizes = [request.microbatch_size] if request.microbatch_size else _divisors(batch // dp)
        for size in sizes:
            if (batch // dp) % size == 0:
                yield from (Way(dp, cp, tp, shards, size, exchange, mode) for mode in modes)  # type: ignore[arg-type]


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _shards(most: int, per_host: int) -> Iterable[int]:
    """Over all devices, or over those of a host, with copies on other hosts."""
    return [each for each in sorted({most, per_host}, reverse=True) if each > 1 and most % each == 0]


def estimate(
    source: ClusterSource, request: Request, way: Way, *, devices: int | None = None, offload: bool = False
) -> Rival:
    """Time, memory and traffic of a step.

    Args:
        source: Model and cluster.
        request: Batch, sequence length, memory budget.
        way: How to spread them. Its microbatches divide the batch of each part.
        devices: Of the cluster; by default those that have work.
        offload: Whether what layers keep for the backward is on the host, which is taken to cost no time.
    """
    step, devices = _Step(source, request, way), devices or way.devices
    peak, budget = round(step.peak(offload)), request.budget or source.budget
    idle = 1 - step.computed / step.seconds * way.devices / devices
    return Rival(way, step.seconds, idle, peak, peak <= budget, step.traffic, source, request, devices)


@dataclass(frozen=True)
class _Step:
    """The parts of one step of a way: seconds and bytes of a layer (``layer``) and of the ends of the model."""

    source: ClusterSource
    request: Request
    way: Way

    @cached_property
    def cost(self) -> Cost:
        return with_recompute(self.source.cost(Layout(tp=self.way.tp)), self.way.recompute)

    @property
    def microbatches(self) -> int:
        return self.request.batch_size // (self.way.dp * self.way.size)

    @property
    def length(self) -> float:
        """Tokens of a sequence on one device."""
        return self.request.seq_len / self.way.cp

    @property
    def whole(self) -> StageSpec:
        return StageSpec(self.source.config.layers, True, True)

    def computation(self, stage: StageSpec, context: float | None = None) -> tuple[float, float]:
        """Seconds of a forward and of a backward on the device, for a microbatch.

        Args:
            stage: The whole model, or a layer.
            context: Tokens before those of the device. Parts of a sequence have early and late tokens, such that all
                see equally many: by default the mean.
        """
        context = (self.request.seq_len - self.length) / 2 if context is None else context
        cost, size, length = by_side(self.cost)[0], self.way.size, self.length
        return float(cost.forward(stage, size, length, context)), float(cost.backward(stage, size, length, context))

    @cached_property
    def computed(self) -> float:
        """Seconds in which a device computes in a step, beside its optimizer."""
        return self.microbatches * sum(self.computation(self.whole))

    @cached_property
    def seconds(self) -> float:
        """The step, as in the drawing of the module."""
        host = by_side(self.cost)[1]
        issued = host.of_forward(self.whole) + host.of_backward(self.whole)
        usual, last = (max(self._microbatch(sums), issued) for sums in (False, True))
        optimizer = self.cost.per_step([self.whole]) / self.way.shards
        return (self.microbatches - 1) * usual + last + optimizer

    def _microbatch(self, sums: bool) -> float:
        """Seconds of forward and backward of all layers, embedding and head.

        Args:
            sums: Whether gradients are summed over copies: in the last backward.
        """
        layer, whole, config = self.computation(StageSpec(1)), self.computation(self.whole), self.source.config
        seconds = 0.0
        for count, weights, (forward, backward), shared in (
            (config.layers, config.layer_parameters, layer, self._shared),
            (1, self._end_parameters, [w - config.layers * one for w, one in zip(whole, layer, strict=True)], (0, 0)),
        ):
            gather, scatter, total = self.collectives(weights)
            received = gather.seconds + scatter.seconds + total.seconds * sums
            seconds += count * max(forward + shared[0], gather.seconds)
            seconds += count * max(backward + shared[1], received)
        return seconds

    @property
    def _end_parameters(self) -> int:
        config = self.source.config
        return (config.parameters - config.layers * config.layer_parameters) * self.source.ends

    def collectives(self, weights: float) -> tuple[Exchange, Exchange, Exchange]:
        """Gathering weights, scattering their gradients, and summing these over copies of the model.

        Args:
            weights: Parameters of a layer, or of the ends.
        """
        way, cluster = self.way, self.source.cluster
        device, mine = cluster.host.device, weights / way.tp
        others, copies = (way.shards - 1) / way.shards, way.dp * way.cp // way.shards
        gather = ring(cluster, others * mine * device.element, way.shards, way.tp)
        scatter = ring(cluster, others * mine * device.summed, way.shards, way.tp)
        sent = 2 * (copies - 1) / copies * mine / way.shards * device.summed
        return gather, scatter, ring(cluster, sent, copies, way.tp * way.shards)

    @cached_property
    def _shared(self) -> tuple[float, float]:
        """Seconds of a layer's forward and backward in which a device waits for keys and values of other devices."""
        forward, backward = (self.exchanges[which].seconds for which in (0, 1))
        if self.way.cp == 1 or self.way.exchange == "Ulysses":
            return forward, backward
        alone, together = self.computation(StageSpec(1), 0.0), self.computation(StageSpec(1))
        remote = [b - a for a, b in zip(alone, together, strict=True)]
        return max(0.0, forward - remote[0]), max(0.0, backward - remote[1])

    @cached_property
    def exchanges(self) -> tuple[Exchange, Exchange]:
        """What devices that share a sequence exchange in a layer's forward and in its backward.

        A ring passes keys and values on to all others; in the backward also their gradients. Ulysses sends queries,
        keys, values and outputs to the devices of their heads, and their gradients; where there are fewer heads of keys
        than devices, they are repeated. Full recomputation has the forward's once more.
        """
        way, config, cluster = self.way, self.source.config, self.source.cluster
        if way.cp == 1:
            return Exchange(), Exchange()
        tokens, element = way.size * self.length, cluster.host.device.element
        if way.exchange == "ring":
            block = tokens * 2 * config.num_kv_heads * config.head_size * element
            one = ring(cluster, block, way.cp)
            once, times = Exchange((way.cp - 1) * one.seconds, one.traffic * (way.cp - 1)), 2
        else:
            width = 2 * config.attention_width + 2 * max(config.num_kv_heads, way.cp) * config.head_size
            once, times = all_to_all(cluster, tokens * width * element, way.cp), 1
        times += way.recompute == "full"
        return once, Exchange(times * once.seconds, once.traffic * times)

    @property
    def traffic(self) -> Traffic:
        """Bytes that a device sends in the step."""
        config, way = self.source.config, self.way
        gather, scatter, total = self.collectives(config.layers * config.layer_parameters + self._end_parameters)
        shared = (self.exchanges[0].traffic + self.exchanges[1].traffic) * config.layers
        tokens = way.size * self.length
        tensor = tensor_traffic(self.source, way.tp, tokens, config.layers, REPEATED[way.recompute])
        # Weights are gathered for the forward and for the backward. Those of the head and the embedding once.
        again = self.collectives(config.layers * config.layer_parameters)[0].traffic
        each = gather.traffic + again + scatter.traffic + shared + tensor
        return each * self.microbatches + total.traffic

    def peak(self, offload: bool) -> float:
        """Bytes of a device: its shard of weights, optimizer state and gradients, what all layers keep of a microbatch,
        and what is there for a while, in the backward of a layer or in the loss.

        Args:
            offload: Whether what layers keep is on the host.
        """
        way = self.way
        memory = with_recompute(self.source.memory(Layout(tp=way.tp)), way.recompute)
        state = memory.model_state(self.whole) + memory.gradients(self.whole).during
        if way.recompute == "full":  # by layer, so each keeps its input; ours, by stage, keeps input and output
            saved = self.whole.layers * float(memory.activations(StageSpec(1), way.size, self.length)) / 2
        else:
            saved = float(memory.activations(self.whole, way.size, self.length))
        turn = max(self._layer_bytes(memory), self._loss_bytes(memory))
        return state / way.shards + (0.0 if offload else saved) + turn + memory.per_rank()

    def _layer_bytes(self, memory: Memory) -> float:
        """What a layer needs in its backward; if sharded, also two layers' gathered weights (the next is prefetched)
        and one's whole gradients; if sequences are shared, keys and values of another device."""
        way, config, element = self.way, self.source.config, self.source.cluster.host.device.element
        # Attention sees one device's keys at a time, or all keys of some heads: as many bytes as of its own tokens.
        nbytes = float(memory.workspace(StageSpec(1), way.size, self.length, 0)[1])
        if way.shards > 1:
            nbytes += 2 * config.layer_parameters * element / way.tp + memory.gradients(StageSpec(1)).during
        if way.cp > 1:
            nbytes += 2 * way.size * self.length * 2 * config.num_kv_heads * config.head_size * element
        return nbytes

    def _loss_bytes(self, memory: Memory) -> float:
        """What the loss needs: logits of some tokens at a time; if sharded, also the head's weights and gradients."""
        way, config = self.way, self.source.config
        length = min(self.length, LOSS_TOKENS / way.size)
        nbytes = float(memory.workspace(StageSpec(1, last=True), way.size, length, 0)[0])
        if way.shards > 1:
            element = self.source.cluster.host.device.element
            nbytes += config.vocab * config.hidden * (element + max(element, 4)) / way.tp
        return nbytes
