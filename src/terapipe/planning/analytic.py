"""A cost model without measurements: seconds from the shape of a model, the hardware and the layout."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from terapipe.planning.cost import Array, HostTime, LinkBehavior, Numbers, StageSpec
from terapipe.planning.hardware import Cluster, Link
from terapipe.planning.layout import Layout
from terapipe.planning.memory import parameters
from terapipe.planning.presets import GPTConfig
from terapipe.planning.recompute import Recompute

_WEIGHTS = 0.2  # of the host's time for a layer's backward: products of weight gradients, and their bookkeeping


@dataclass(frozen=True)
class AnalyticCost:
    """A layer takes its overhead plus its arithmetic, or plus reading its weights if that takes longer (roofline). No
    computation is shorter than its host takes to issue it.

    Ranks are numbered tp innermost, then pp, then dp, so a tensor parallel group lies within a host.
    """

    config: GPTConfig
    cluster: Cluster
    layout: Layout
    recompute: Recompute = "none"
    ends: bool = True  # whether embedding, head and loss count
    fused: bool = True  # whether gradients of weights are added in place, and can be deferred
    autocast: bool = False  # whether weights are float32, and products in the device's dtype
    hosted: bool = True  # whether a computation takes as long as its host does, if that is longer

    def with_recompute(self, mode: Recompute) -> "AnalyticCost":
        """The same costs, with backwards that compute activations again."""
        return replace(self, recompute=mode)

    def by_side(self) -> tuple["AnalyticCost", HostTime]:
        """Device and host apart: a device that never waits for its host, and what the host takes."""
        return replace(self, hosted=False), self._host if self.hosted else HostTime()

    @cached_property
    def _host(self) -> HostTime:
        device = self.cluster.host.device
        again = device.host_forward if self.recompute != "none" else 0.0
        ends = device.host_action if self.ends else 0.0
        return HostTime(
            device.host_forward,
            device.host_backward + again,
            _WEIGHTS * device.host_backward * self.fused,
            device.host_action,
            embedding=ends,
            embedding_backward=ends,
            head=2 * ends,
            message=device.host_message,
        )

    def forward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """Seconds of a forward: products and attention of every layer, and on the ends embedding, head and loss."""
        seconds = stage.layers * self._layer(size, length, context) + self._ends(stage, size, length)
        return np.maximum(seconds, self._host.of_forward(stage)) if self.hosted else seconds

    def backward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """Seconds of a backward: twice the products of a forward, and what it computes again."""
        recomputed = self._recompute_time(size, length, context)
        device = self.cluster.host.device
        # Input and weight gradients take the FLOPs of one forward each. Weight gradients are then accumulated.
        busy = 2 * (device.layer_overhead + self._products(size, length, context)) + self._accumulation
        layer = np.maximum(2 * device.min_layer_time, busy) + self._all_reduces(size, length)
        seconds = np.asarray(stage.layers * (layer + recomputed) + self._embedding_backward(stage, size, length))
        return np.maximum(seconds, self._host.of_backward(stage)) if self.hosted else seconds

    def weights(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        device = self.cluster.host.device
        flops = 2.0 * np.multiply(size, length) * self.config.layer_parameters / self.layout.tp
        products = np.maximum(flops / self._rate, self._weight_bytes / device.bandwidth)
        seconds = np.asarray(stage.layers * (products + self._accumulation) * self.fused, dtype=np.float64)
        return np.maximum(seconds, self._host.of_weights(stage)) if self.hosted else seconds

    def transfer(self, source: int, target: int, size: Numbers, length: Numbers) -> Array:
        sent = max(self.cluster.host.device.element, 4 * self.autocast)
        nbytes = np.multiply(size, length) * float(self.config.hidden * sent)
        link = self._link(source * self.layout.tp, target * self.layout.tp)
        return np.asarray(link.latency + nbytes / link.bandwidth, dtype=np.float64)

    def link_behavior(self, source: int, target: int) -> LinkBehavior:
        link = self._link(source * self.layout.tp, target * self.layout.tp)
        return LinkBehavior(self.cluster.host.overlapped, link.latency)

    def per_step(self, stages: Sequence[StageSpec]) -> float:
        device = self.cluster.host.device
        count = parameters(self.config, stages) / self.layout.tp if self.ends else self._layer_parameters(stages)
        # The optimizer reads and writes weights and its state; of a sharded model, each replica its part.
        optimizer = count / self.layout.shards * (2 * device.element + 2 * device.state) / device.bandwidth
        return optimizer + self._all_reduce_gradients(count) + self._tied_exchange(stages)

    # One layer

    @property
    def _rate(self) -> float:
        """FLOP/s of hidden x (hidden / tp) matmuls, treated as squares of the same area."""
        return self.cluster.host.device.rate(self.config.hidden / self.layout.tp**0.5)

    @property
    def _weight_bytes(self) -> float:
        return self.config.layer_parameters * self.cluster.host.device.element / self.layout.tp

    def _layer_parameters(self, stages: Sequence[StageSpec]) -> float:
        return sum(stage.layers for stage in stages) * self.config.layer_parameters / self.layout.tp

    def _flops(self, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """FLOPs of one layer's forward on one device. A multiply-add counts as two."""
        tokens = np.multiply(size, length)
        attended = np.add(context, np.multiply(length, 0.5 if self.cluster.host.device.causal else 1.0))
        linear = 2.0 * tokens * self.config.layer_parameters
        return np.asarray((linear + 4.0 * tokens * attended * self.config.hidden) / self.layout.tp, dtype=np.float64)

    def _products(self, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """Seconds of one layer's matmuls: arithmetic, or reading the weights if that takes longer."""
        device = self.cluster.host.device
        return np.maximum(self._flops(size, length, context) / self._rate, self._weight_bytes / device.bandwidth)

    @property
    def _accumulation(self) -> float:
        """Seconds to accumulate one layer's weight gradients of a slice."""
        return self._accumulate(self._weight_bytes, self.fused)

    def _accumulate(self, weight_bytes: float, fused: bool = True) -> float:
        """A product that cannot add to the sum itself (in compiled code, or in another dtype) is written, and read by
        an addition."""
        device = self.cluster.host.device
        times = device.accumulated + (0.0 if fused and not self.autocast else 2.0)
        return times * weight_bytes / device.bandwidth

    def _layer(self, size: Numbers, length: Numbers, context: Numbers) -> Array:
        device = self.cluster.host.device
        busy = device.layer_overhead + self._products(size, length, context)
        return np.asarray(np.maximum(device.min_layer_time, busy) + self._all_reduces(size, length), dtype=np.float64)

    def _recompute_time(self, size: Numbers, length: Numbers, context: Numbers) -> Array | float:
        """The part of a layer's forward that its backward computes again. Selective recomputation leaves out attention,
        and ends before the last product of the layer, of which only the input is needed."""
        if self.recompute == "none":
            return 0.0
        if self.recompute == "full":
            return self._layer(size, length, context)
        device, config = self.cluster.host.device, self.config
        share = 1 - config.hidden * config.ffn_hidden / config.layer_parameters
        flops = 2.0 * np.multiply(size, length) * config.layer_parameters / self.layout.tp
        products = share * np.maximum(flops / self._rate, self._weight_bytes / device.bandwidth)
        return np.asarray(device.layer_overhead + products + self._all_reduces(size, length) / 2, dtype=np.float64)

    def _all_reduces(self, size: Numbers, length: Numbers) -> Array | float:
        """The two all-reduces of tensor parallelism in a layer, after attention and after the MLP."""
        t = self.layout.tp
        if t == 1:
            return 0.0
        link = self._link(0, t - 1)
        nbytes = np.multiply(size, length) * float(self.config.hidden * self.cluster.host.device.element)
        return np.asarray(2 * (link.latency + 2 * (t - 1) / t * nbytes / link.bandwidth), dtype=np.float64)

    def _ends(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array | float:
        """Embedding, head and loss. The embedding reads and writes rows. The head counts three products, its forward
        and its backward, which the executor runs in the forward of the last stage, each at least as long as reading its
        weights; and its gradient is accumulated once for every slice."""
        if not self.ends:
            return 0.0
        device, tokens = self.cluster.host.device, np.multiply(size, length) * 1.0
        embedding = 2.0 * tokens * self.config.hidden * device.element / device.bandwidth if stage.first else 0.0
        if not stage.last:
            return np.asarray(embedding, dtype=np.float64)
        weight_bytes = self.config.vocab * self.config.hidden * device.element / self.layout.tp
        product = self.config.head_flops(1) * tokens / self.layout.tp / self._rate
        head = 3 * np.maximum(product, weight_bytes / device.bandwidth) + self._accumulate(weight_bytes)
        return np.asarray(embedding + head + 3 * device.layer_overhead, dtype=np.float64)

    def _embedding_backward(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array | float:
        """Adds the slice's rows to those of the sum: reads the gradient, reads and writes the sum, in float32."""
        if not (self.ends and stage.first):
            return 0.0
        device, tokens = self.cluster.host.device, np.multiply(size, length) * 1.0
        nbytes = device.element + 2 * max(device.element, 4)
        return np.asarray(tokens * self.config.hidden * nbytes / device.bandwidth, dtype=np.float64)

    # Links

    def _link(self, a: int, b: int) -> Link:
        host = self.cluster.host
        return host.intra_node if a // host.devices == b // host.devices else host.inter_node

    def _all_reduce_gradients(self, count: float) -> float:
        """Seconds of the ring over replicas that sums the gradients of ``count`` parameters of each device.

        A ring passes through the replicas of a host one after the other, and leaves the host once. So a card carries as
        many rings as a replica has devices in the host, not as many as the host has devices:

            dp 4, tp 2, two hosts of four         0 1 | 2 3    ranks; the bar stands between replicas
            ring of the first of each pair        0 -> 2 => 4 -> 6 => 0    => goes through a card, -> does not

        Inside the host the links of devices carry the same bytes at the same time; the slower of the two counts. With
        FSDP2 (``layout.shard``) half of the sum is replaced by gathering the weights, in their own dtype.
        """
        d, host = self.layout.dp, self.cluster.host
        if d == 1:
            return 0.0
        replica = self.layout.pp * self.layout.tp
        per_weight = host.device.summed + (host.device.element if self.layout.shard else host.device.summed)
        sent = (d - 1) / d * per_weight * count
        inside = host.intra_node.seconds(sent) if replica < host.devices else 0.0
        if self.layout.devices <= host.devices:
            return inside
        return max(inside, host.inter_node.seconds(sent * min(replica, host.devices)))

    def _tied_exchange(self, stages: Sequence[StageSpec]) -> float:
        """The gradient of a tied weight, exchanged between the first and the last stage's rank; sharded by tp."""
        first, last = (any(getattr(stage, end) for stage in stages) for end in ("first", "last"))
        if not (self.ends and self.config.tied) or first == last:
            return 0.0
        host, tp = self.cluster.host, self.layout.tp
        nbytes = float(self.config.vocab * self.config.hidden * host.device.element)
        link = self._link(0, (self.layout.pp - 1) * tp)
        return link.seconds(nbytes if link is host.inter_node else nbytes / tp)
