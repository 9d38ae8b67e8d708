"""A cost model without measurements: seconds from the shape of a model, the hardware and the layout."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from terapipe.planning.cost import Array, LinkBehavior, Numbers, StageSpec
from terapipe.planning.hardware import Cluster, Link
from terapipe.planning.layout import Layout
from terapipe.planning.memory import parameters
from terapipe.presets import GPTConfig
from terapipe.recompute import Recompute


@dataclass(frozen=True)
class AnalyticCost:
    """A layer takes its overhead plus its arithmetic, or plus reading its weights if that takes longer (roofline).

    Ranks are numbered tp innermost, then pp, then dp, so a tensor parallel group lies within a host. ``ends`` says
    whether embedding, head and loss count.
    """

    config: GPTConfig
    cluster: Cluster
    layout: Layout
    recompute: Recompute = "none"
    ends: bool = True

    def with_recompute(self, mode: Recompute) -> "AnalyticCost":
        return replace(self, recompute=mode)

    def forward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        return stage.layers * self._layer(size, length, context) + self._ends(stage, size, length)

    def backward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        recomputed = self._recomputed(size, length, context)
        device = self.cluster.host.device
        # Input and weight gradients take the FLOPs of one forward each. Weight gradients are then accumulated.
        busy = 2 * (device.layer_overhead + self._products(size, length, context)) + self._accumulation
        layer = np.maximum(2 * device.min_layer_time, busy) + self._all_reduces(size, length)
        return np.asarray(stage.layers * (layer + recomputed), dtype=np.float64)

    def weights(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        device = self.cluster.host.device
        flops = 2.0 * np.multiply(size, length) * self.config.layer_parameters / self.layout.tp
        products = np.maximum(flops / self._rate, self._weight_bytes / device.bandwidth)
        return np.asarray(stage.layers * (products + self._accumulation), dtype=np.float64)

    def transfer(self, source: int, target: int, size: Numbers, length: Numbers) -> Array:
        nbytes = np.multiply(size, length) * float(self.config.hidden * self.cluster.host.device.element)
        link = self._link(source * self.layout.tp, target * self.layout.tp)
        return np.asarray(link.latency + nbytes / link.bandwidth, dtype=np.float64)

    def link_behavior(self, source: int, target: int) -> LinkBehavior:
        link = self._link(source * self.layout.tp, target * self.layout.tp)
        return LinkBehavior(self.cluster.host.overlapped, link.latency)

    def per_step(self, stages: Sequence[StageSpec]) -> float:
        device = self.cluster.host.device
        count = parameters(self.config, stages) / self.layout.tp if self.ends else self._layer_parameters(stages)
        optimizer = count * (2 * device.element + 2 * device.state) / device.bandwidth
        return optimizer + self._all_reduce_gradients(count) + self._tied(stages)

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
        return self.cluster.host.device.accumulated * self._weight_bytes / self.cluster.host.device.bandwidth

    def _layer(self, size: Numbers, length: Numbers, context: Numbers) -> Array:
        device = self.cluster.host.device
        busy = device.layer_overhead + self._products(size, length, context)
        return np.asarray(np.maximum(device.min_layer_time, busy) + self._all_reduces(size, length), dtype=np.float64)

    def _recomputed(self, size: Numbers, length: Numbers, context: Numbers) -> Array | float:
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
        """Embedding, head and loss. The embedding is bound by memory. The head counts three matmuls: its forward, and
        its backward, which the executor runs in the forward of the last stage."""
        if not self.ends:
            return 0.0
        device, tokens = self.cluster.host.device, np.multiply(size, length) * 1.0
        embedding = 3.0 * tokens * self.config.hidden * device.element / device.bandwidth if stage.first else 0.0
        if not stage.last:
            return np.asarray(embedding, dtype=np.float64)
        head = 3 * self.config.head_flops(1) * tokens / self.layout.tp / self._rate
        return np.asarray(embedding + head + 3 * device.layer_overhead, dtype=np.float64)

    # Links

    def _link(self, a: int, b: int) -> Link:
        host = self.cluster.host
        return host.intra_node if a // host.devices == b // host.devices else host.inter_node

    def _all_reduce_gradients(self, count: float) -> float:
        """The ring all-reduce over replicas. Between hosts, the devices of a host share its network card."""
        d = self.layout.dp
        if d == 1:
            return 0.0
        host = self.cluster.host
        sent = 2 * (d - 1) / d * host.device.summed * count
        if self.layout.devices <= host.devices:
            return host.intra_node.seconds(sent)
        return host.inter_node.seconds(sent * host.devices)

    def _tied(self, stages: Sequence[StageSpec]) -> float:
        """The gradient of a tied weight, exchanged between the first and the last stage's rank; sharded by tp."""
        first, last = (any(getattr(stage, end) for stage in stages) for end in ("first", "last"))
        if not (self.ends and self.config.tied) or first == last:
            return 0.0
        host, tp = self.cluster.host, self.layout.tp
        nbytes = float(self.config.vocab * self.config.hidden * host.device.element)
        link = self._link(0, (self.layout.pp - 1) * tp)
        return link.seconds(nbytes if link is host.inter_node else nbytes / tp)
