"""Seconds from first principles: the shape of a model, a description of the hardware, a layout."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from terapipe.planning.cost import Array, LinkBehavior, Numbers, StageSpec
from terapipe.planning.hardware import Cluster, Link
from terapipe.planning.layout import Layout
from terapipe.planning.memory import parameters
from terapipe.presets import GPTConfig


@dataclass(frozen=True)
class AnalyticCost:
    """A layer takes a fixed time beside its arithmetic, or the time to read its weights where that is longer.

    Devices are numbered tensor innermost, then pipe, then data, so a tensor group lies inside a host. ``ends`` says
    whether embedding, head and loss count.
    """

    config: GPTConfig
    cluster: Cluster
    layout: Layout
    recompute: bool = False
    ends: bool = True

    def forward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        return stage.layers * self._layer(size, length, context) + self._ends(stage, size, length)

    def backward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        again = self._layer(size, length, context) if self.recompute else 0.0
        device = self.cluster.host.device
        # Gradients of inputs and of weights are one forward's arithmetic each; the latter are then added to their sum.
        busy = 2 * (device.layer_overhead + self._products(size, length, context)) + self._accumulation
        layer = np.maximum(2 * device.min_layer_time, busy) + self._all_reduces(size, length)
        return np.asarray(stage.layers * (layer + again), dtype=np.float64)

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

    def per_step(self, held: Sequence[StageSpec]) -> float:
        device = self.cluster.host.device
        count = parameters(self.config, held) / self.layout.tp if self.ends else self._layer_parameters(held)
        optimizer = count * (2 * device.element + 2 * device.state) / device.bandwidth
        return optimizer + self._reduction(count) + self._tied(held)

    # One layer

    @property
    def _rate(self) -> float:
        """Of products of the model's width by a tensor rank's share of it, taken as squares of the same area."""
        return self.cluster.host.device.rate(self.config.hidden / self.layout.tp**0.5)

    @property
    def _weight_bytes(self) -> float:
        return self.config.layer_parameters * self.cluster.host.device.element / self.layout.tp

    def _layer_parameters(self, held: Sequence[StageSpec]) -> float:
        return sum(stage.layers for stage in held) * self.config.layer_parameters / self.layout.tp

    def _flops(self, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """Multiply-adds, counted twice, of one layer's forward on one device."""
        tokens = np.multiply(size, length)
        seen = np.add(context, np.multiply(length, 0.5 if self.cluster.host.device.causal else 1.0))
        linear = 2.0 * tokens * self.config.layer_parameters
        return np.asarray((linear + 4.0 * tokens * seen * self.config.hidden) / self.layout.tp, dtype=np.float64)

    def _products(self, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """Arithmetic, or reading the weights where that takes longer."""
        device = self.cluster.host.device
        return np.maximum(self._flops(size, length, context) / self._rate, self._weight_bytes / device.bandwidth)

    @property
    def _accumulation(self) -> float:
        return self.cluster.host.device.accumulated * self._weight_bytes / self.cluster.host.device.bandwidth

    def _layer(self, size: Numbers, length: Numbers, context: Numbers) -> Array:
        device = self.cluster.host.device
        busy = device.layer_overhead + self._products(size, length, context)
        return np.asarray(np.maximum(device.min_layer_time, busy) + self._all_reduces(size, length), dtype=np.float64)

    def _all_reduces(self, size: Numbers, length: Numbers) -> Array | float:
        """Two in each direction: after attention and after the feed-forward layer."""
        t = self.layout.tp
        if t == 1:
            return 0.0
        link = self._link(0, t - 1)
        nbytes = np.multiply(size, length) * float(self.config.hidden * self.cluster.host.device.element)
        return np.asarray(2 * (link.latency + 2 * (t - 1) / t * nbytes / link.bandwidth), dtype=np.float64)

    def _ends(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array | float:
        """The embedding only moves memory; head and loss are three products, forward and backward at once."""
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

    def _reduction(self, count: float) -> float:
        """All replicas sum their gradients round a ring; the devices of a host share its card."""
        d = self.layout.dp
        if d == 1:
            return 0.0
        host = self.cluster.host
        sent = 2 * (d - 1) / d * host.device.summed * count
        if self.layout.devices <= host.devices:
            return host.intra_node.seconds(sent)
        return host.inter_node.seconds(sent * host.devices)

    def _tied(self, held: Sequence[StageSpec]) -> float:
        """A tied weight's gradient, exchanged between the first and the last rank; each tensor rank sends its part."""
        first, last = (any(getattr(stage, end) for stage in held) for end in ("first", "last"))
        if not (self.ends and self.config.tied) or first == last:
            return 0.0
        host, tp = self.cluster.host, self.layout.tp
        nbytes = float(self.config.vocab * self.config.hidden * host.device.element)
        link = self._link(0, (self.layout.pp - 1) * tp)
        return link.seconds(nbytes if link is host.inter_node else nbytes / tp)
