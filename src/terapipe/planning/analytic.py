"""A cost model without measurements: seconds from the shape of a model, the hardware and the layout.

A layer is a sum of three kinds of work, each bound by something else:

    products      4 in a forward, 4 for gradients of inputs, 4 for gradients of weights     multiplications
    attention     its kernel's share of the peak, or scores in memory if it is not fused    multiplications, or memory
    elementwise   norms, rotary embeddings, residuals, activation functions                 memory

Elementwise work is why narrow models use a GPU badly: it grows with the width, products with its square. Products
alone run at nearly the same speed at all widths, as measured gradients of weights show (tests/unit/planning).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from terapipe.planning.cost import Array, HostTime, LinkBehavior, Numbers, StageSpec
from terapipe.planning.device import Link
from terapipe.planning.hardware import Cluster
from terapipe.planning.layout import Layout
from terapipe.planning.memory import ShapeMemory, parameters
from terapipe.planning.optimizer_state import state_bytes
from terapipe.planning.presets import GPTConfig
from terapipe.planning.recompute import Recompute

# Of a tile's loop over inputs: filling the pipeline of loads and multiplications, and writing the tile. Measured
# gradients of weights (Qi et al., Zero Bubble Pipeline Parallelism, table 9) are 6 % slower with 1,024 tokens than with
# 6,144.
_RAMP = 64.0
# The last round of tiles of 128 x 128 leaves half of the multiprocessors idle on average. Libraries choose among tiles
# of several sizes, which halves that.
_TAIL = 128 * 128 / 4
# FlashAttention's measured speed over 512 to 16k tokens (Shah et al., FlashAttention-3, figure 5): as if every row had
# so many more keys. Blocks on the diagonal are computed whole, and rows have a start and an end.
_RAMP_KEYS = 160.0
_REPLICATED = 18.0  # of `Device.passes`: norms, residuals and dropouts, on every rank without sequence parallelism
# Bytes per logit of the loss: its cast to float32, log-softmax, their backwards, and the cast back.
_LOSS_BYTES = 28.0
_WEIGHTS = 0.2  # of the host's time for a layer's backward: products of weight gradients, and their bookkeeping


class Products(NamedTuple):
    """Seconds of matrix products, by the number of tokens."""

    per_token: float
    fixed: float  # of every slice
    least: float  # reading and writing weights, or their sums, takes so long

    def __call__(self, tokens: Numbers) -> Array:
        return np.asarray(np.maximum(np.multiply(tokens, self.per_token) + self.fixed, self.least), dtype=np.float64)


class LayerTerms(NamedTuple):
    """What a layer's seconds are made of. They are the same for all modes of recomputation."""

    forward: Products
    inputs: Products  # gradients of the products' inputs
    weights: Products  # gradients of weights, added to their sums
    block: Products  # what block recomputation repeats: all but the last product
    head: Products
    elementwise: float  # seconds per token
    attention: tuple[float, float]  # seconds of a token and a key that it sees, in a forward and in a backward


@dataclass(frozen=True)
class AnalyticCost:
    """Seconds by first principles. No computation is shorter than its host takes to issue it.

    Ranks are numbered tp innermost, then pp, then dp, so a tensor parallel group lies within a host.

    Args:
        config: The shape of the model.
        cluster: Its devices and links.
        layout: Replicas, pipeline ranks and tensor parallel ranks.
        recompute: What backwards compute again.
        ends: Whether embedding, head and loss count.
        fused: Whether gradients of weights are added to their sums by the products themselves, and can be deferred.
        autocast: Whether weights are float32, and products in the device's dtype.
        sequence_parallel: Whether tensor parallel ranks divide norms and residuals among them, as ours do. Megatron
            before 2022 did not: every rank computed them for all tokens.
        scatter: Whether each tensor parallel rank sends its part of a message. Otherwise each sends all of it, through
            the same network card.
        batched: Whether a message that a rank sends and one that it receives are one kernel, in which they pass one
            after the other, as Megatron-LM's ``batch_isend_irecv`` makes them. Ours are kernels of their own. Without
            ``scatter`` it does not matter: a shared card is the limit, and other devices use its other direction.
        hosted: Whether a computation takes as long as its host does, if that is longer.
        early_stop: Whether full recomputation is by layers and ends before the last product of each, whose output no
            backward needs, as torch's checkpoints that are not reentrant. Ours, by stages, needs it in the next layer.
        products_again: Share of a layer's products that light recomputation computes again. Ours none.
        optimizer: Whose state a step reads and writes, one of ``OPTIMIZERS``; None: that of the device's description.
    """

    config: GPTConfig
    cluster: Cluster
    layout: Layout
    recompute: Recompute = "none"
    ends: bool = True
    fused: bool = True
    autocast: bool = False
    sequence_parallel: bool = True
    scatter: bool = True
    batched: bool = False
    hosted: bool = True
    early_stop: bool = False
    products_again: float = 0.0
    optimizer: str | None = None

    def with_recompute(self, mode: Recompute) -> "AnalyticCost":
        """The same costs, with backwards that compute activations again."""
        return self._copy_with(recompute=mode)

    def by_side(self) -> tuple["AnalyticCost", HostTime]:
        """Device and host apart: a device that never waits for its host, and what the host takes."""
        return self._copy_with(hosted=False), self._host if self.hosted else HostTime()

    def _copy_with(self, **fields: Any) -> "AnalyticCost":
        """A copy with the same terms: simulations ask for thousands of copies."""
        changed = replace(self, **fields)
        changed.__dict__["_terms"] = self._terms
        return changed

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
        """Seconds of a backward: gradients of inputs and of weights, each as many products as a forward has, and what
        it computes again."""
        device, terms, tokens = self.cluster.host.device, self._terms, np.multiply(size, length)
        busy = 2 * device.layer_overhead + terms.inputs(tokens) + terms.weights(tokens)
        busy = busy + tokens * terms.elementwise + self.attention(size, length, context, backward=True)
        layer = np.maximum(2 * device.min_layer_time, busy) + self._all_reduces(size, length)
        recomputed = self._recompute_time(size, length, context)
        seconds = np.asarray(stage.layers * (layer + recomputed) + self._embedding_backward(stage, size, length))
        return np.maximum(seconds, self._host.of_backward(stage)) if self.hosted else seconds

    def weights(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        products = self._terms.weights(np.multiply(size, length))
        seconds = np.asarray(stage.layers * products * self.fused, dtype=np.float64)
        return np.maximum(seconds, self._host.of_weights(stage)) if self.hosted else seconds

    def transfer(self, source: int, target: int, size: Numbers, length: Numbers) -> Array:
        sent = max(self.cluster.host.device.element, 4 * self.autocast)
        nbytes = np.multiply(size, length) * float(self.config.hidden * sent)
        link = self._link(source * self.layout.tp, target * self.layout.tp)
        if not self.scatter and link is self.cluster.host.inter_node:
            nbytes = nbytes * self.layout.tp  # every rank sends all of it, through the same card
        seconds = (1 + (self.batched and self.scatter)) * nbytes / link.bandwidth
        return np.asarray(link.latency + seconds + self._gather_parts(nbytes), dtype=np.float64)

    def _gather_parts(self, nbytes: Array) -> Array | float:
        """Seconds in which tensor parallel ranks that each got a part of a message gather all of it. With sequence
        parallelism a rank needs its part only."""
        tp = self.layout.tp
        if tp == 1 or self.sequence_parallel or not self.scatter:
            return 0.0
        link = self._link(0, tp - 1)
        return link.latency + (tp - 1) / tp * nbytes / link.bandwidth

    def link_behavior(self, source: int, target: int) -> LinkBehavior:
        link = self._link(source * self.layout.tp, target * self.layout.tp)
        return LinkBehavior(self.cluster.host.overlapped, link.latency)

    def copy(self, stage: StageSpec, size: Numbers, length: Numbers, seq_len: int) -> tuple[Array, Array]:
        """Seconds in which what a slice keeps, and keys and values, go to the host's memory, or come back."""
        element, link = self.cluster.host.device.element, self.cluster.host.copies
        memory = ShapeMemory(self.config, element, tp=self.layout.tp, recompute=self.recompute, autocast=self.autocast)
        moved = memory.offloaded(stage, size, length), memory.kv_cache(stage, size, seq_len)
        own, cache = (nbytes / link.bandwidth + link.latency for nbytes in moved)
        return own, cache

    @property
    def copies_block(self) -> bool:
        """A device that is its own host copies by itself."""
        return not self.cluster.host.device.accelerator

    def per_step(self, stages: Sequence[StageSpec]) -> float:
        update = self._parameters(stages) / self.layout.shards * self._update_time
        return update + self.sums_over_replicas(stages) + self._tied_exchange(stages)

    def sums_over_replicas(self, stages: Sequence[StageSpec]) -> float:
        """Seconds in which gradients are summed over replicas once per step.

        Args:
            stages: All stages of a rank.
        """
        return self._all_reduce_gradients(self._parameters(stages))

    def _parameters(self, stages: Sequence[StageSpec]) -> float:
        return parameters(self.config, stages) / self.layout.tp if self.ends else self._layer_parameters(stages)

    @cached_property
    def _update_time(self) -> float:
        """Seconds for each parameter. An optimizer reads and writes weights and its state; of a sharded model, each
        replica its part. One on the host does that in the host's memory, of which a device has a share that it can fill
        from both directions; and gradients and weights are copied meanwhile, through the same memory."""
        device, host = self.cluster.host.device, self.cluster.host
        if self.optimizer is None:
            return (2 * device.element + 2 * device.state) / device.bandwidth
        weight = 4 if self.autocast else device.element
        state = state_bytes(self.optimizer, weight, master=True)
        if state.host:
            return (2 * state.host + 2 * weight) / (2 * host.copies.bandwidth)
        return (2 * weight + 2 * state.device) / device.bandwidth

    # One layer

    @cached_property
    def _terms(self) -> LayerTerms:
        """The layer has four products: queries, keys and values; attention's output; both of the MLP."""
        c, tp, device = self.config, self.layout.tp, self.cluster.host.device
        qkv = c.attention_width + 2 * c.num_kv_heads * c.head_size
        shapes = [(c.hidden, qkv / tp), (c.attention_width / tp, c.hidden), (c.hidden, c.ffn_hidden / tp)]
        shapes.append((c.ffn_hidden / tp, c.hidden))
        repeated = 0.0 if self.sequence_parallel else _REPLICATED * (1 - 1 / tp)
        nbytes = (device.passes / tp + repeated) * c.hidden * device.element
        return LayerTerms(
            forward=self._products(shapes),
            inputs=self._products([(outputs, inputs) for inputs, outputs in shapes]),
            weights=self._weight_products(shapes, self.fused),
            block=self._products(shapes[:-1]),
            head=self._products([(c.hidden, c.vocab / tp)]),
            elementwise=nbytes / device.bandwidth,
            attention=(self._attention_rate(1.0, backward=False), self._attention_rate(2.5, backward=True)),
        )

    def _products(self, shapes: Sequence[tuple[float, float]]) -> Products:
        """Products of (tokens, inputs) and (inputs, outputs) matrices.

        A multiprocessor computes one tile of the result after the other, each over all inputs. The loop over inputs has
        a start and an end (``_RAMP``), and the last tiles do not keep all multiprocessors busy (``_TAIL``):

            seconds = 2 / rate * sum of (tokens * outputs + tail) * (inputs + ramp)

        This is linear in the tokens, so a slice has a fixed cost beside that of its tokens.
        """
        device = self.cluster.host.device
        per_token = sum((inputs + _RAMP) * outputs for inputs, outputs in shapes)
        fixed = _TAIL * device.units * sum(inputs + _RAMP for inputs, _ in shapes)
        read = sum(inputs * outputs for inputs, outputs in shapes) * device.element / device.bandwidth
        return Products(2 * per_token / device.rate, 2 * fixed / device.rate, read)

    def flops_with_ends(self, rows: int, inputs: int, outputs: int) -> float:
        """FLOPs of a product that would take as long without a ramp and a tail. Divided by measured seconds they give
        the device's ``rate``.

        Args:
            rows: Of the first matrix, and of the result.
            inputs: Columns of the first matrix.
            outputs: Columns of the result.
        """
        return 2.0 * (rows * outputs + _TAIL * self.cluster.host.device.units) * (inputs + _RAMP)

    def _weight_products(self, shapes: Sequence[tuple[float, float]], fused: bool) -> Products:
        """Gradients of weights, products of (inputs, tokens) and (tokens, outputs) matrices, and their accumulation.

        A product that adds to the sum itself reads and writes it while it computes, so the longer of the two counts.
        Else (in compiled code, under autocast, on devices that cannot) it is written, and an addition reads it.
        """
        device = self.cluster.host.device
        weight_bytes = sum(inputs * outputs for inputs, outputs in shapes) * device.element
        per_token = 2 * sum(inputs * outputs + _TAIL * device.units for inputs, outputs in shapes) / device.rate
        traffic = device.accumulated * weight_bytes / device.bandwidth
        if fused and device.fuses and not self.autocast:
            return Products(per_token, _RAMP * per_token, traffic)
        apart = 2 * weight_bytes / device.bandwidth * device.fuses  # else ``accumulated`` has it already
        return Products(per_token, _RAMP * per_token + traffic + apart, 0.0)

    def _attention_rate(self, products: float, *, backward: bool) -> float:
        """Seconds of a token and a key that it sees. ``products`` are those of a fused kernel, 1 in a forward: its
        backward computes the scores once more."""
        c, device, speed = self.config, self.cluster.host.device, self.cluster.host.device.attention_speed
        flops = 4.0 * c.attention_width / self.layout.tp * (2.0 if speed.scores and backward else products)
        seconds = flops / (device.peak * (speed.backward if backward else speed.forward))
        return seconds + speed.scores * c.heads / self.layout.tp * device.element / device.bandwidth

    def attention(self, size: Numbers, length: Numbers, context: Numbers, backward: bool = False) -> Array:
        """Seconds of attention between queries, keys and values in one layer, without products with weights. A row of
        the causal triangle has on average half of the slice's own keys.

        Args:
            size: As in ``forward``.
            length: As in ``forward``.
            context: As in ``forward``.
            backward: Whether of its backward.
        """
        own = 0.5 if self.cluster.host.device.attention_speed.causal else 1.0
        keys = np.add(context, np.multiply(length, own)) + _RAMP_KEYS
        return np.asarray(np.multiply(size, length) * keys * self._terms.attention[backward], dtype=np.float64)

    def _layer_parameters(self, stages: Sequence[StageSpec]) -> float:
        return sum(stage.layers for stage in stages) * self.config.layer_parameters / self.layout.tp

    def _layer(self, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """A layer's forward."""
        device, tokens = self.cluster.host.device, np.multiply(size, length)
        busy = device.layer_overhead + self._terms.forward(tokens) + tokens * self._terms.elementwise
        busy = busy + self.attention(size, length, context)
        return np.asarray(np.maximum(device.min_layer_time, busy) + self._all_reduces(size, length), dtype=np.float64)

    def _recompute_time(self, size: Numbers, length: Numbers, context: Numbers) -> Array | float:
        """The part of a layer's forward that its backward computes again. Block recomputation leaves out attention,
        and ends before the last product of the layer, of which only the input is needed. Light recomputation leaves out
        all products."""
        if self.recompute == "none":
            return 0.0
        tokens = np.multiply(size, length)
        if self.recompute == "full":
            last = self._terms.forward(tokens) - self._terms.block(tokens) + self._all_reduces(size, length) / 2
            return self._layer(size, length, context) - self.early_stop * last
        light = self.recompute == "light"
        products = self.products_again * self._terms.forward(tokens) if light else self._terms.block(tokens)
        seconds = products + tokens * self._terms.elementwise
        overhead = self.cluster.host.device.layer_overhead
        return np.asarray(overhead + seconds + self._all_reduces(size, length) / 2, dtype=np.float64)

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
        weights, or reading and writing their gradient's sum. The loss reads and writes logits in float32."""
        if not self.ends:
            return 0.0
        device, tokens = self.cluster.host.device, np.multiply(size, length) * 1.0
        embedding = 2.0 * tokens * self.config.hidden * device.element / device.bandwidth if stage.first else 0.0
        if not stage.last:
            return np.asarray(embedding, dtype=np.float64)
        vocab = self.config.vocab / self.layout.tp
        gradient = self._weight_products([(self.config.hidden, vocab)], fused=True)
        head = 2 * self._terms.head(tokens) + gradient(tokens)
        loss = tokens * vocab * _LOSS_BYTES / device.bandwidth
        return np.asarray(embedding + head + loss + 3 * device.layer_overhead, dtype=np.float64)

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
        return max(inside, host.inter_node.seconds(sent * min(replica, host.devices) / host.rings))

    def _tied_exchange(self, stages: Sequence[StageSpec]) -> float:
        """The gradient of a tied weight, exchanged between the first and the last stage's rank; sharded by tp."""
        first, last = (any(getattr(stage, end) for stage in stages) for end in ("first", "last"))
        if not (self.ends and self.config.tied) or first == last:
            return 0.0
        host, tp = self.cluster.host, self.layout.tp
        nbytes = float(self.config.vocab * self.config.hidden * host.device.element)
        link = self._link(0, (self.layout.pp - 1) * tp)
        return link.seconds(nbytes if link is host.inter_node else nbytes / tp)
