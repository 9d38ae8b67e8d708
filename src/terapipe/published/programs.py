"""What published programs do otherwise than ours, as costs and memory models: measured times instead of a cost model,
copies that ours does not make, activations that ours does not keep.

Each class is a `Cost` or a `Memory` as the planner has them, so that a simulation does not know the difference.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from terapipe.planning.analytic import AnalyticCost
from terapipe.planning.cost import (
    Array,
    Cost,
    GradientBytes,
    LinkBehavior,
    Numbers,
    StageSpec,
    with_recompute,
)
from terapipe.planning.layout import Layout
from terapipe.planning.memory import ShapeMemory
from terapipe.planning.presets import GPTConfig
from terapipe.planning.recompute import Recompute
from terapipe.search.source import ClusterSource


@dataclass(frozen=True)
class StageTimes:
    """A cost model of four measured numbers: all stages take the same, and slices of a microbatch their share.

    Attributes:
        forward_time: Seconds of a rank's forward of one microbatch, over all of its chunks.
        input_time: Seconds of the half of its backward that computes the gradient of its input.
        weight_time: Seconds of the other half.
        transfer_time: Seconds of a transfer. It delays the receiver and occupies nobody.
        whole: Tokens of a microbatch, times the stages of a rank: what the first three are for.
        step_time: Seconds once per step.
    """

    forward_time: float
    input_time: float
    weight_time: float
    transfer_time: float
    whole: int
    step_time: float = 0.0

    def _share(self, size: Numbers, length: Numbers) -> Array:
        return np.asarray(np.multiply(size, length) / self.whole, dtype=np.float64)

    def forward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """Seconds of a forward."""
        return self.forward_time * self._share(size, length)

    def backward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """Seconds of both halves of a backward."""
        return (self.input_time + self.weight_time) * self._share(size, length)

    def weights(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        """Seconds of the weight half."""
        return self.weight_time * self._share(size, length)

    def transfer(self, source: int, target: int, size: Numbers, length: Numbers) -> Array:
        """Seconds of a transfer, whatever its size."""
        return np.full(np.broadcast(size, length).shape, self.transfer_time)

    def link_behavior(self, source: int, target: int) -> LinkBehavior:
        """All of a transfer is latency: the next one need not wait for it."""
        return LinkBehavior(overlapped=True, latency=self.transfer_time)

    def per_step(self, stages: object) -> float:
        """Seconds of the optimizer."""
        return self.step_time


@dataclass(frozen=True)
class OtherCost:
    """Another cost model, to which a published program adds something.

    Attributes:
        cost: Seconds of everything else.
    """

    cost: Cost

    def with_recompute(self, mode: Recompute) -> Self:
        """The same with another mode of recomputation, which does not repeat what is added.

        Args:
            mode: As in a plan.
        """
        return replace(self, cost=with_recompute(self.cost, mode))

    def forward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """The wrapped cost's."""
        return self.cost.forward(stage, size, length, context)

    def backward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """The wrapped cost's."""
        return self.cost.backward(stage, size, length, context)

    def weights(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        """The wrapped cost's."""
        return self.cost.weights(stage, size, length)

    def transfer(self, source: int, target: int, size: Numbers, length: Numbers) -> Array:
        """The wrapped cost's."""
        return self.cost.transfer(source, target, size, length)

    def link_behavior(self, source: int, target: int) -> LinkBehavior:
        """The wrapped cost's."""
        return self.cost.link_behavior(source, target)

    def per_step(self, stages: Any) -> float:
        """The wrapped cost's."""
        return self.cost.per_step(stages)


@dataclass(frozen=True)
class AttentionAgain(OtherCost):
    """Another cost model, and Megatron-LM's selective recomputation: backwards compute scores, softmax and the product
    with values once more, so that none of these matrices is kept.

    Attributes:
        cost: Seconds of everything else.
        once: Seconds of that in one layer, by sequences, length and context.
    """

    once: Callable[[Numbers, Numbers, Numbers], Array]

    def backward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """Adds to the wrapped cost attention's forward in every layer."""
        again = np.asarray(stage.layers * self.once(size, length, context), dtype=np.float64)
        return self.cost.backward(stage, size, length, context) + again


@dataclass(frozen=True)
class PrefixCopies(OtherCost):
    """Another cost model, and the copies that Seq1F1B makes of all earlier keys and values, for every slice and layer.

    Our cache is written once: a slice adds its own keys and values, and attention reads what is there. Seq1F1B joins
    the earlier ones and its own to new tensors, and in the backward adds the gradients of all of them to the sum:

        forward    cat(earlier, own)    reads and writes context + length of K and of V
        backward   dk += sum            reads two and writes one of what a slice sees, but for the last slice

    Over the slices of a sequence, "what a slice sees, but for the last" adds up to the contexts of all slices. So the
    backward is charged by its context, which is what a cost model knows. Recomputation keeps attention, so it repeats
    no copy, and messages have hidden states of the slice only.

    Attributes:
        cost: Seconds of everything else.
        per_token: Seconds to read or write keys and values of one token in one layer.
    """

    per_token: float

    @classmethod
    def of(cls, cost: Cost, source: ClusterSource, layout: Layout) -> Self:
        """The copies of a model on a cluster, with a share of the heads on each tensor parallel rank.

        Args:
            cost: Seconds of everything else.
            source: Model and cluster.
            layout: Its tensor parallel ranks.
        """
        device, config = source.cluster.host.device, source.config
        nbytes = 2 * config.num_kv_heads * config.head_size * device.element / layout.tp
        return cls(cost, nbytes / device.bandwidth)

    def forward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """Adds to the wrapped cost a read and a write of all that the slice sees, unless it is the first."""
        seen = np.where(np.asarray(context) > 0, np.add(context, length), 0)
        return self.cost.forward(stage, size, length, context) + self._copies(stage, size, seen, 2)

    def backward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """Adds to the wrapped cost two reads and a write of the gradients before the slice."""
        return self.cost.backward(stage, size, length, context) + self._copies(stage, size, np.asarray(context), 3)

    def _copies(self, stage: StageSpec, size: Numbers, tokens: Array, times: int) -> Array:
        return np.asarray(stage.layers * times * np.multiply(size, tokens) * self.per_token, dtype=np.float64)


@dataclass(frozen=True)
class OtherSource(ClusterSource):
    """A model on a cluster, trained by a published program.

    Attributes:
        early_stop: As in `AnalyticCost`.
        products_again: As in `AnalyticCost`.
    """

    early_stop: bool = False
    products_again: float = 0.0

    def cost(self, layout: Layout) -> Cost:
        """The planner's, with what the program does otherwise.

        Args:
            layout: Replicas, pipeline ranks and tensor parallel ranks.
        """
        cost = super().cost(layout)
        if not isinstance(cost, AnalyticCost):
            return cost
        return replace(cost, early_stop=self.early_stop, products_again=self.products_again)


@dataclass(frozen=True)
class ShardedMemory:
    """Bytes on a device of a program that shards weights, gradients and optimizer state (FSDP2), and computes each
    layer again in its backward. Counted from its code: what is there at a time, in bytes of a token for each feature.

    The peak is in the backward of a layer, when all that its forward keeps is there again::

        shards of the state | inputs of all layers, unless on the host | embedding, head | layers at hand | a turn

    Layers at hand: the gathered weights of one and of the next, the gradient of one, and its copy to be summed. The
    embedding and the head stay gathered all the time, with the head's gradient. A turn is the larger of

        the MLP's          what the layer keeps, and gradients in the MLP
        attention's        what is left then, and all that ring attention has

    Attributes:
        config: The shape of the model.
        element: Bytes of a gathered weight and of an activation.
        state_bytes: Bytes of weight, gradient and optimizer of each parameter, over all shards.
        offload: Whether inputs of layers are on the host.
        saved: As in `OtherProgram`.
        mlp_turn: Beyond ``saved``, bytes for each feature of hidden states and of the MLP.
        attention_turn: Bytes for each feature of hidden states, of queries, of keys and values; the last is of keys and
            values of whole sequences, where they are gathered.
    """

    config: GPTConfig
    element: int
    state_bytes: float
    offload: bool
    saved: tuple[float, ...]
    mlp_turn: tuple[float, ...]
    attention_turn: tuple[float, ...]

    def peak(self, tokens: float, seen: float, shards: int) -> float:
        """Bytes at the peak.

        Args:
            tokens: Of a microbatch, on one device.
            seen: Of its whole sequences, on all devices that share them.
            shards: Devices over which the state is spread.
        """
        c, embedding = self.config, self.config.vocab * self.config.hidden
        ends = (c.parameters - c.layers * c.layer_parameters + embedding) * self.element
        at_hand = 4 * c.layer_parameters * self.element
        inputs = 0.0 if self.offload else c.layers * tokens * c.hidden * self.element
        return c.parameters * self.state_bytes / shards + inputs + ends + at_hand + self._turn(tokens, seen)

    def _turn(self, tokens: float, seen: float) -> float:
        """Bytes that the backward of a layer has."""
        c = self.config
        keys_width = 2 * c.num_kv_heads * c.head_size
        hidden, attention, keys, ffn = self.saved
        inputs, mlp = self.mlp_turn
        mlp_turn = (hidden + inputs) * c.hidden + attention * c.attention_width + keys * keys_width
        mlp_turn += (ffn + mlp) * c.ffn_hidden
        hidden, attention, keys, gathered = self.attention_turn
        own = hidden * c.hidden + attention * c.attention_width + keys * keys_width
        return max(tokens * mlp_turn, tokens * own + seen * gathered * keys_width)


@dataclass(frozen=True)
class OtherProgram(ShapeMemory):
    """The planner's memory model, with what a published program keeps otherwise than our runtime.

    Activations of a program that has ``saved`` are counted from its code: autograd keeps the inputs of products, what
    norms in float32 and activation functions need, and without FlashAttention the scores. Keys and values of
    a slice come with it: no cache for whole sequences waits beside them, as in our runtime.

    Attributes:
        state_bytes: Bytes of weight, gradient and optimizer of each parameter, there for the whole step. None: as ours.
        layer_checkpoints: Whether full recomputation keeps the input of every layer and computes one layer again at a
            time, as Megatron-LM and transformers do. Ours keeps the input of a stage, and what attention needs of
            earlier slices.
        divided: Whether tensor parallel ranks keep parts of these inputs (sequence parallel), or each all of them.
        saved: Bytes that a layer keeps of a token for each feature of hidden states, of queries, of keys and values,
            of the MLP. Empty: as ours.
        score_bytes: With ``saved``, bytes that it keeps of two tokens for each head of attention.
        mask_bytes: Bytes of two tokens in a mask that is there for the whole step.
        layer_masks: Bytes of two tokens in a layer's own mask: those that it keeps, and those while it is computed.
        logit_bytes: Bytes of a logit, over all copies that head and loss have at a time. None: as ours.
        logits_chunk: Tokens whose logits are there at a time. None: those of a slice.
        head: ``"spread"``: all pipeline ranks have parts of a whole sequence's logits; ``"apart"``: they are not
            counted. Otherwise the last stage has those of a slice.
        kv_gradient_bytes: Bytes of the gradients of keys and values of a token, for each feature of *queries*: of a
            program that does not sum over the heads which share them. None: as ours.
        temporaries: Whether what a backward needs while it runs is counted.
        ranks: Pipeline ranks, over which logits are spread.
        whole_layer: Bytes of all tokens of a sequence, for each feature of hidden states and of queries, that the
            backward of a layer has, however short its slice.
    """

    state_bytes: float | None = None
    layer_checkpoints: bool = False
    divided: bool = True
    saved: tuple[float, ...] = ()
    score_bytes: float = 0.0
    mask_bytes: float = 0.0
    layer_masks: tuple[float, ...] = (0.0, 0.0)
    logit_bytes: float | None = None
    logits_chunk: int | None = None
    head: str = ""
    kv_gradient_bytes: float | None = None
    temporaries: bool = True
    ranks: int = 1
    whole_layer: tuple[float, ...] = (0.0, 0.0)

    def model_state(self, stage: StageSpec) -> float:
        """Weights and optimizer, and with ``state_bytes`` gradients too."""
        return super().model_state(stage) if self.state_bytes is None else self._parameters(stage) * self.state_bytes

    def gradients(self, stage: StageSpec) -> GradientBytes:
        """Nothing beside ``model_state``, if that has them."""
        return super().gradients(stage) if self.state_bytes is None else GradientBytes(0.0, 0.0, 0.0)

    @property
    def _by_layer(self) -> bool:
        return self.layer_checkpoints and self.recompute == "full"

    def activations(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        """With checkpoints of layers the input of each, and on the last stage the gradient of its output. With
        ``saved`` what the layers keep: other programs free the output of a stage once it is sent."""
        if self.saved and self.recompute == "none":
            return stage.layers * self._layer(size, length)
        if not self._by_layer:
            return super().activations(stage, size, length)
        width = self.config.hidden * self.element / (self.tp if self.divided else 1)
        return np.asarray(np.multiply(size, length) * width * (stage.layers + stage.last), dtype=np.float64)

    def _layer(self, size: Numbers, length: Numbers) -> Array:
        """Counts what autograd saves in one layer: ``saved`` for each token, scores and masks for each pair."""
        if not self.saved:
            return super()._layer(size, length)
        c = self.config
        hidden, attention, keys, ffn = self.saved
        parts = attention * c.attention_width + keys * 2 * c.num_kv_heads * c.head_size + ffn * c.ffn_hidden
        per_token = hidden * c.hidden / (self.tp if self.divided else 1) + parts / self.tp
        per_pair = self.score_bytes * c.heads / self.tp + self.layer_masks[0]
        tokens = np.multiply(size, length)
        return np.asarray(tokens * (per_token + np.multiply(length, per_pair)), dtype=np.float64)

    def kv_cache(self, stage: StageSpec, size: Numbers, seq_len: int, sliced: bool = True) -> Array:
        """Nothing: keys and values are computed again, or among what the layers keep."""
        cache = super().kv_cache(stage, size, seq_len, sliced)
        return np.zeros_like(cache) if self._by_layer or self.saved else cache

    def kv_gradients(self, stage: StageSpec, size: Numbers, seq_len: int) -> Array:
        """Nothing with checkpoints of layers, likewise."""
        gradients = super().kv_gradients(stage, size, seq_len)
        if self.kv_gradient_bytes is not None:
            per_token = stage.layers * self.config.attention_width * self.kv_gradient_bytes / self.tp
            gradients = np.asarray(np.multiply(size, seq_len) * per_token, dtype=np.float64)
        return np.zeros_like(gradients) if self._by_layer else gradients

    def workspace(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> tuple[Array, Array]:
        """With checkpoints of layers that of one layer, whose activations are there again. And masks, logits and what
        a layer has of whole sequences, as the program has them."""
        one = stage._replace(layers=min(1, stage.layers)) if self._by_layer else stage
        forward, backward = super().workspace(one, size, length, context)
        seen = np.add(length, context)
        pairs, tokens = size * np.square(seen), np.multiply(size, seen)
        hidden, attention = self.whole_layer
        whole = tokens * (hidden * self.config.hidden + attention * self.config.attention_width)
        # The gradients of probabilities and of scores.
        scores = np.multiply(size, np.square(length)) * (4 * self.config.heads / self.tp) * bool(self.score_bytes)
        layer = whole + pairs * self.layer_masks[1]
        forward = np.maximum(self._head(stage, size, length, context, forward), layer)
        mask = pairs * self.mask_bytes
        backward = self.temporaries * np.maximum(backward + scores, layer)
        return forward + mask, backward + mask

    def _head(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers, ours: Array) -> Array:
        """Bytes of head and loss. Autograd makes the gradient of the head's weight, beside that of the logits, before
        it adds it to the sum."""
        vocab = self.config.vocab / self.tp
        if self.head == "apart" or (self.logit_bytes is not None and not (stage.last or self.head)):
            return np.zeros_like(ours)
        if self.logit_bytes is None:
            return ours
        if self.head == "spread":
            return np.multiply(size, np.add(length, context)) * (self.logit_bytes * vocab / self.ranks)
        rows = np.multiply(size, length if self.logits_chunk is None else np.minimum(length, self.logits_chunk))
        weight = self.config.hidden * vocab * self.element
        return np.maximum(rows * (self.logit_bytes * vocab), rows * (self.element * vocab) + weight)
