"""Memory of a stage, computed from the shape of the model."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from terapipe.planning.cost import Array, GradientBytes, Numbers, StageSpec
from terapipe.planning.device import CPU_ATTENTION, CUDNN, EFFICIENT, FLASH, FLASH3, FLASH4
from terapipe.planning.presets import FrozenLayers, GPTConfig, LayerBytes
from terapipe.planning.recompute import Recompute


def parameters(config: GPTConfig, stages: Sequence[StageSpec]) -> int:
    """The parameters of one rank's stages. A tied weight counts on every rank that has it, once.

    Args:
        config: The shape of the model.
        stages: All stages of the rank.
    """
    count = sum(stage.layers for stage in stages) * config.layer_parameters
    embedding = config.vocab * config.hidden
    if any(stage.first for stage in stages):
        count += embedding + config.max_seq_len * config.hidden
    if any(stage.last for stage in stages):
        shared = any(stage.first for stage in stages) and config.tied
        count += 2 * config.hidden + (0 if shared else embedding)
    return count


def gradient_tokens(config: GPTConfig, layers: int, seq_len: int) -> int:
    """The tokens for whose gradients of keys and values a stage has room, summed over its layers: see KeyValueStore.

    ::

        layers of Gemma 3    w w w w w a w w w w w a        w: window - 1 tokens, a: all tokens
        a stage of two                 |---|                those that take most, wherever it lies

    Room that moves from one slice to the slice before takes other room before it gives its own back: one more.

    Args:
        config: The shape of the model.
        layers: Those of the stage.
        seq_len: Tokens of a sequence.
    """
    if not any(config.windows) or not layers:
        return layers * seq_len
    rooms = np.array([min(window - 1, seq_len) if window else seq_len for window in config.windows])
    sums, layers = np.concatenate(([0], np.cumsum(rooms))), min(layers, config.layers)
    return int((sums[layers:] - sums[: len(sums) - layers]).max() + max(rooms[rooms < seq_len], default=0))


def attention_inside(
    kernel: str, rows: Numbers, keys: Numbers, heads: float, kv_heads: float, head_size: int, element: int
) -> Array:
    """Bytes that an attention kernel allocates in the backward of one layer, beside the gradients that it returns.

    Queries of ``rows`` tokens see ``keys`` tokens. FlashAttention sums the queries' gradients in float32. Where several
    query heads share keys, it writes dK and dV for *every query head*, over the whole context of the slice, and sums
    them afterwards:

        keys    0 ............ context | slice        64 query heads, 8 of keys, heads of 128, 128k tokens of bfloat16:
        dk, dv  all query heads x all of these keys   2 x 2.15 GB, for each slice at the end of the sequence

    Args:
        kernel: As modeling/kernels.py names it.
        rows: Tokens of the slice, of all its sequences together.
        keys: Tokens that they see, themselves included.
        heads: Heads of queries on this device.
        kv_heads: Heads of keys and values on this device.
        head_size: Features of a head.
        element: Bytes of a number.
    """
    if kernel not in _FLASH:
        return np.zeros(np.broadcast(rows, keys).shape)
    padded = -(-head_size // 32) * 32
    expanded = 2 * np.multiply(keys, heads * head_size * element) if heads != kv_heads else 0.0
    return np.asarray(np.multiply(rows, heads * padded * 4.0) + expanded, dtype=np.float64)


# cuDNN's stands beside FlashAttention, which takes the slices that it does not.
_FLASH = (FLASH, FLASH3, FLASH4, "flash-attn", CUDNN)
_PLAIN = 5 * 4  # bytes of the matrices of a backward by matrix products, for a row and a key of a block ...
_PLAIN_BLOCK = 512, 1024  # ... of at most so many


@dataclass(frozen=True)
class ShapeMemory:
    """Bytes on one device, counting the tensors that the stages of ``modeling/gpt.py`` keep.

    Under ``torch.autocast`` (``autocast``) weights, their gradients and what goes from layer to layer are float32,
    ``element`` is that of products, and a copy of every weight in it lives as long as the step.
    """

    config: GPTConfig
    element: int = 4  # bytes of a weight, an activation, a gradient
    state: float = 8  # bytes of optimizer state per parameter, on the device
    tp: int = 1
    recompute: Recompute = "none"
    shards: int = 1  # replicas that shard the model state (FSDP2)
    replicas: int = 1
    autocast: bool = False
    attention: str = CPU_ATTENTION  # kernel, as modeling/kernels.py names it
    blas: int = 0  # bytes of cuBLAS's workspaces
    fused: bool = True  # whether gradients of weights are added in place, and can be deferred
    frozen: FrozenLayers | None = None  # see ModelSpec.frozen
    layer_bytes: LayerBytes | None = None  # that one layer keeps; None: what the GPT's keeps

    def with_recompute(self, mode: Recompute) -> "ShapeMemory":
        return replace(self, recompute=mode)

    def per_rank(self) -> float:
        return float(self.blas)

    def model_state(self, stage: StageSpec) -> float:
        """Weights and optimizer state. With FSDP2 a device has a shard of each, and during a step all weights of the
        stage, too."""
        per_parameter = float(self._weight + self.state)
        if self.shards > 1:
            per_parameter = self._weight + (self._weight + self.state) / self.shards
        if self.frozen is None:
            return self._parameters(stage) * per_parameter + self._casts(stage)
        layers = stage.layers * (self.frozen.layer_bytes / self.tp + self.frozen.trained * (self._sum + self.state))
        ends = self._end_parameters(stage) * (per_parameter if self.frozen.ends_trained else self._weight)
        return layers + ends + self._casts(stage)

    def _end_parameters(self, stage: StageSpec) -> float:
        """Counts the parameters of one device outside of layers."""
        return self._parameters(stage) - self._parameters(StageSpec(stage.layers))

    def _trained(self, stage: StageSpec) -> float:
        """Counts the parameters of one device that have gradients."""
        if self.frozen is None:
            return self._parameters(stage)
        return stage.layers * self.frozen.trained + self._end_parameters(stage) * self.frozen.ends_trained

    def _casts(self, stage: StageSpec) -> float:
        """Copies of the weights of products. An embedding is none, unless it is the head, too."""
        head = self.config.vocab * self.config.hidden * stage.last
        layers = 0 if self.frozen and self.frozen.quantized else stage.layers * self.config.layer_parameters
        return (layers + head) * self.element / self.tp * self.autocast

    def gradients(self, stage: StageSpec) -> GradientBytes:
        """Sums over slices are in float32 or wider. Those of half-precision weights do not exist before the first
        backward, and are rounded after the last; with replicas, when all are summed over replicas. With FSDP2 a device
        also has a shard of the rounded ones."""
        sums = self._trained(stage) * self._sum
        if self.shards > 1:
            sums += self._trained(stage) * self._weight / self.shards
        if self.shards > 1 or self._weight == self._sum:
            return GradientBytes(sums, sums, sums)
        rounded = sums if self.replicas > 1 else self._trained(stage) * self._weight
        return GradientBytes(0.0, sums, rounded)

    def _parameters(self, stage: StageSpec) -> float:
        """Counts the parameters of one device. Positions, norms, and biases of products whose outputs are sums over
        devices are whole on each of them."""
        c = self.config
        whole = c.hidden * (6 * stage.layers + stage.first * c.max_seq_len + 2 * stage.last)
        return whole + (parameters(c, [stage]) - whole) / self.tp

    @property
    def _weight(self) -> int:
        """Bytes of a weight, and of a number that goes from layer to layer."""
        return max(self.element, 4) if self.autocast else self.element

    @property
    def _sum(self) -> int:
        """Bytes of a gradient that is a sum over slices."""
        return max(self.element, 4)

    def activations(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        """What a slice keeps from its forward to its backward, by the mode of recomputation. Besides what the layers
        save, that is its output until the gradient returns, and on the last stage also that gradient."""
        hidden = self._hidden(size, length)
        if self.recompute == "full":
            return np.asarray(2 * hidden, dtype=np.float64)
        return hidden * (1 + stage.last) + stage.layers * self._layer_keeps(size, length)

    def _layer_keeps(self, size: Numbers, length: Numbers) -> Array:
        """What a slice keeps of one layer, unless the whole stage is computed again."""
        if self.recompute == "light":
            return self._layer_products(size, length)
        return self._layer(size, length) if self.recompute == "none" else self._layer_ends(size, length)

    def _hidden(self, size: Numbers, length: Numbers) -> Array:
        """What goes from stage to stage. Tensor parallel ranks share out its tokens."""
        return np.asarray(np.multiply(size, length) * float(self.config.hidden * self._weight) / self.tp)

    def offloaded(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        """All but the output. A last stage that computes all of a slice again keeps none; its loss keeps a gradient."""
        kept = self.activations(stage, size, length)
        return kept if stage.last and self.recompute == "full" else kept - self._hidden(size, length)

    def deferred_grads(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        c = self.config
        inputs = 2 * c.hidden + c.attention_width + c.ffn_hidden
        gradients = inputs + 2 * c.num_kv_heads * c.head_size
        deferred = self.fused and self.frozen is None  # frozen weights have none, and adapters little
        per_token = (inputs + gradients) * self.element / self.tp * deferred
        return np.asarray(stage.layers * np.multiply(size, length) * per_token, dtype=np.float64)

    def kv_cache(self, stage: StageSpec, size: Numbers, seq_len: int, sliced: bool = True) -> Array:
        """Keys and values of whole sequences: later slices attend to them. With a single slice and ``full``
        recomputation one cache serves all microbatches of a stage, while each is computed."""
        if not sliced and self.recompute == "full":
            return np.zeros(np.shape(size))
        return self._keys_and_values(size, stage.layers * seq_len) * self.element

    def kv_gradients(self, stage: StageSpec, size: Numbers, seq_len: int) -> Array:
        """Sums over slices, in float32 or wider. Buffers of microbatches that are through serve others. Layers with
        windows have room for what one slice sees."""
        tokens = gradient_tokens(self.config, stage.layers, seq_len)
        return self._keys_and_values(size, tokens) * self._sum

    def _keys_and_values(self, size: Numbers, tokens: int) -> Array:
        """How many numbers they are, of so many tokens in one layer."""
        per_token = 2 * self.config.num_kv_heads * self.config.head_size / self.tp
        return np.asarray(np.multiply(size, tokens) * per_token, dtype=np.float64)

    def workspace(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> tuple[Array, Array]:
        tokens = np.multiply(size, length) * 1.0
        # Of float32 logits: torch's cross-entropy over a split vocabulary holds one more than that of one device.
        copies = 3 if self.tp == 1 else 4
        logits = tokens * (copies * 4 * self.config.vocab / self.tp) if stage.last else 0.0 * tokens
        layers = {"none": 0, "light": 0, "block": 1, "full": stage.layers}[self.recompute]  # all is there at a time
        # The backward begins with the MLP of the last layer: a gradient as wide as it is, beside that of the output.
        # When attention has its turn, what the MLP had saved is gone already.
        mlp = tokens * ((self.config.hidden + self.config.ffn_hidden) * self.element / self.tp)
        attention = self._attention(size, length, context) - self._mlp(size, length)
        again = self._layer_again(size, length) if self.recompute == "light" else layers * self._layer(size, length)
        backward = again + np.maximum(attention, mlp)
        if self.frozen and self.frozen.quantized:
            backward = backward + self.config.hidden * self.config.ffn_hidden * self.element  # one product's weight
        return np.asarray(logits, dtype=np.float64), np.asarray(backward, dtype=np.float64)

    def _attention(self, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """The backward of one layer's attention: dK and dV of all tokens that the slice sees, as the kernel returns
        them, and what the kernel needs inside."""
        c = self.config
        heads, kv_heads = c.heads / self.tp, c.num_kv_heads / self.tp
        if all(c.windows) and c.windows:
            context = np.minimum(context, max(c.windows) - 1)
        if self.attention == "plain":
            rows, keys = np.minimum(length, _PLAIN_BLOCK[0]), np.minimum(np.add(length, context), _PLAIN_BLOCK[1])
            return np.asarray(np.multiply(size, rows * keys) * _PLAIN * heads, dtype=np.float64)
        rows, keys = np.multiply(size, length), np.multiply(size, np.add(length, context))
        # Memory-efficient attention returns them for every query head, whose sums are made after it.
        copies = kv_heads + heads if self.attention == EFFICIENT and heads != kv_heads else kv_heads
        returned = np.multiply(keys, 2.0 * copies * c.head_size * self.element)
        return returned + attention_inside(self.attention, rows, keys, heads, kv_heads, c.head_size, self.element)

    def _mlp(self, size: Numbers, length: Numbers) -> Array:
        """What autograd had saved in the MLP of a layer, less the gradients that take its place: of the layer's output,
        of attention's output and of the queries."""
        c = self.config
        per_token = (c.hidden * (self.element + self._weight) + 2 * c.ffn_hidden * self.element) / self.tp
        if self.layer_bytes is not None:  # the MLP's share of it
            per_token *= self.layer_bytes.none / self._gpt_layer_bytes
        gradients = (c.hidden * self._weight + 2 * c.attention_width * self.element) / self.tp
        return np.asarray(np.multiply(size, length) * (per_token - gradients), dtype=np.float64)

    def _layer(self, size: Numbers, length: Numbers) -> Array:
        """What autograd saves in one layer. Tensor parallel ranks share out all of it, the inputs of the two
        projections by tokens: see ``project`` in modeling/linear.py."""
        per_token = (self._gpt_layer_bytes if self.layer_bytes is None else self.layer_bytes.none) / self.tp
        return np.asarray(np.multiply(size, length) * per_token, dtype=np.float64)

    @property
    def _gpt_layer_bytes(self) -> float:
        """Of each token: inputs of the norms; inputs of both projections, queries, attention output, both sides of the
        activation; log-sum-exps and statistics of norms."""
        c = self.config
        norms, products = 2 * c.hidden, 2 * (c.hidden + c.attention_width + c.ffn_hidden)
        return float(products * self.element + norms * self._weight + 4 * (c.heads + 4))

    def _layer_products(self, size: Numbers, length: Numbers) -> Array:
        """What light recomputation keeps of a layer: its input, queries, the outputs of attention and of the products
        behind it but the last, and log-sum-exps. The output of attention's projection is one device's summand of it, so
        that tensor parallel ranks have all of its tokens."""
        c = self.config
        whole = c.hidden * self.element
        shared = (2 * c.attention_width + c.ffn_hidden) * self.element + c.hidden * self._weight + 4.0 * c.heads
        if self.layer_bytes is not None:
            shared = self.layer_bytes.light - whole
        per_token = shared / self.tp + whole
        return np.asarray(np.multiply(size, length) * per_token, dtype=np.float64)

    def _layer_again(self, size: Numbers, length: Numbers) -> Array:
        """What light recomputation makes anew of a layer in its backward: outputs of norms and of the activation
        function, and the input of the second norm."""
        c = self.config
        per_token = (2.0 * c.hidden + c.ffn_hidden) * self.element + c.hidden * self._weight
        if self.layer_bytes is not None:
            per_token = self.layer_bytes.none - self.layer_bytes.light + c.hidden * self.element
        return np.asarray(np.multiply(size, length) * (per_token / self.tp), dtype=np.float64)

    def _layer_ends(self, size: Numbers, length: Numbers) -> Array:
        """What block recomputation keeps of a layer: its input, attention's output, and log-sum-exps."""
        c = self.config
        per_token = (c.attention_width * self.element + c.hidden * self._weight + 4 * c.heads) / self.tp
        return np.asarray(np.multiply(size, length) * per_token, dtype=np.float64)


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


MOST_BYTES = 2**60


def parse_bytes(text: str) -> int:
    """The bytes in a text such as ``16GiB``, ``900MB`` or ``17179869184``.

    Args:
        text: A number, and a unit of powers of 1,000 or (with an i) of 1,024; upper or lower case.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"a number of bytes reads like 16GiB, 900MB or 17179869184, got {text!r}")
    nbytes = float(match[1]) * _UNITS[match[2]]
    if nbytes > MOST_BYTES:
        raise ValueError(f"a device has at most {MOST_BYTES} bytes, got {text}")
    return int(nbytes)
