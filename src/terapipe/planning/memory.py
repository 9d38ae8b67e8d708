"""Memory of a stage, computed from the shape of the model."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from terapipe.planning.cost import Array, GradientBytes, Numbers, StageSpec
from terapipe.presets import GPTConfig
from terapipe.recompute import Recompute


def parameters(config: GPTConfig, stages: Sequence[StageSpec]) -> int:
    """The parameters of one rank's stages. A tied weight counts on every rank that has it, once."""
    count = sum(stage.layers for stage in stages) * config.layer_parameters
    embedding = config.vocab * config.hidden
    if any(stage.first for stage in stages):
        count += embedding + config.max_seq_len * config.hidden
    if any(stage.last for stage in stages):
        shared = any(stage.first for stage in stages) and config.tied
        count += 2 * config.hidden + (0 if shared else embedding)
    return count


@dataclass(frozen=True)
class ShapeMemory:
    """Bytes on one device, counting the tensors that the stages of ``modeling/gpt.py`` keep."""

    config: GPTConfig
    element: int = 4  # bytes of a weight, an activation, a gradient
    state: int = 8  # bytes of optimizer state per parameter
    tp: int = 1
    recompute: Recompute = "none"
    shards: int = 1  # replicas that shard the model state (FSDP2)
    replicas: int = 1

    def with_recompute(self, mode: Recompute) -> "ShapeMemory":
        return replace(self, recompute=mode)

    def model_state(self, stage: StageSpec) -> float:
        """Weights and optimizer state. With FSDP2 a device has a shard of each, and during a step all weights of the
        stage, too."""
        per_parameter = float(self.element + self.state)
        if self.shards > 1:
            per_parameter = self.element + (self.element + self.state) / self.shards
        return self._parameters(stage) * per_parameter

    def gradients(self, stage: StageSpec) -> GradientBytes:
        """Sums over slices are in float32 or wider. Those of half-precision weights do not exist before the first
        backward, and are rounded after the last; with replicas, when all are summed over replicas. With FSDP2 a device
        also has a shard of the rounded ones."""
        sums = self._parameters(stage) * self._sum
        if self.shards > 1:
            sums += self._parameters(stage) * self.element / self.shards
        if self.shards > 1 or self.element == self._sum:
            return GradientBytes(sums, sums, sums)
        rounded = sums if self.replicas > 1 else self._parameters(stage) * self.element
        return GradientBytes(0.0, sums, rounded)

    def _parameters(self, stage: StageSpec) -> float:
        return parameters(self.config, [stage]) / self.tp

    @property
    def _sum(self) -> int:
        """Bytes of a gradient that is a sum over slices."""
        return max(self.element, 4)

    def activations(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        # Besides what the layers save, a slice keeps its output until the gradient returns, and on the last stage also
        # that gradient.
        hidden = np.multiply(size, length) * float(self.config.hidden * self.element) / self.tp  # sequence parallel
        if self.recompute == "full":
            return np.asarray(2 * hidden, dtype=np.float64)
        layer = self._layer(size, length) if self.recompute == "none" else self._layer_ends(size, length)
        return hidden * (1 + stage.last) + stage.layers * layer

    def deferred_grads(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        c = self.config
        inputs = 3 * c.hidden + c.ffn_hidden
        gradients = 3 * c.hidden + 2 * c.num_kv_heads * c.head_size + c.ffn_hidden
        per_token = (inputs + gradients) * self.element / self.tp
        return np.asarray(stage.layers * np.multiply(size, length) * per_token, dtype=np.float64)

    def kv_cache(self, stage: StageSpec, size: Numbers, seq_len: int) -> Array:
        width = 2 * self.config.num_kv_heads * self.config.head_size  # keys and values, and the gradient of each
        nbytes = width * (self.element + self._sum) / self.tp
        return np.asarray(stage.layers * np.multiply(size, seq_len) * nbytes, dtype=np.float64)

    def workspace(self, stage: StageSpec, size: Numbers, length: Numbers) -> tuple[Array, Array]:
        tokens = np.multiply(size, length) * 1.0
        logits = tokens * (3 * 4 * self.config.vocab / self.tp) if stage.last else 0.0 * tokens
        layers = {"none": 0, "selective": 1, "full": stage.layers}[self.recompute]  # of which all is there at a time
        recomputed = layers * self._layer(size, length)
        return np.asarray(logits, dtype=np.float64), np.asarray(recomputed, dtype=np.float64)

    def _layer(self, size: Numbers, length: Numbers) -> Array:
        """What autograd saves in one layer. Tensor parallel ranks gather the inputs of the two projections and shard
        the rest."""
        c = self.config
        replicated = 2 * c.hidden
        # Inputs of the norms, queries, attention output, both sides of the activation.
        sharded = 4 * c.hidden + 2 * c.ffn_hidden
        per_token = (replicated + sharded / self.tp) * self.element + 4 * (c.heads / self.tp + 4)
        return np.asarray(np.multiply(size, length) * per_token, dtype=np.float64)

    def _layer_ends(self, size: Numbers, length: Numbers) -> Array:
        """What selective recomputation keeps of a layer: its input, attention's output, and log-sum-exps."""
        c = self.config
        per_token = (2 * c.hidden * self.element + 4 * c.heads) / self.tp
        return np.asarray(np.multiply(size, length) * per_token, dtype=np.float64)


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


MOST_BYTES = 2**60


def parse_bytes(text: str) -> int:
    """The bytes in a text such as ``16GiB``, ``900MB`` or ``17179869184``."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"a number of bytes reads like 16GiB, 900MB or 17179869184, got {text!r}")
    nbytes = float(match[1]) * _UNITS[match[2]]
    if nbytes > MOST_BYTES:
        raise ValueError(f"a device has at most {MOST_BYTES} bytes, got {text}")
    return int(nbytes)
