"""Bytes from the shape of a model."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from terapipe.planning.cost import Array, Numbers, StageSpec
from terapipe.presets import GPTConfig


def parameters(config: GPTConfig, held: Sequence[StageSpec]) -> int:
    """How many parameters the stages hold; a tied weight counts wherever it lies."""
    count = sum(stage.layers for stage in held) * config.layer_parameters
    embedding = config.vocab * config.hidden
    if any(stage.first for stage in held):
        count += embedding + config.max_seq_len * config.hidden
    if any(stage.last for stage in held):
        both = any(stage.first for stage in held) and config.tied
        count += 2 * config.hidden + (0 if both else embedding)
    return count


@dataclass(frozen=True)
class ShapeMemory:
    """Bytes of a GPT's stage on one device, by what the stage really saves: see ``modeling/gpt.py``."""

    config: GPTConfig
    element: int = 4
    state: int = 8
    tp: int = 1
    recompute: bool = False
    shards: int = 1  # replicas that share out the state

    def model_state(self, stage: StageSpec) -> float:
        """Weights and gradients, and the optimizer's state. Sharers of it have a part of each, and during a step whole
        weights and gradients beside."""
        each = float(2 * self.element + self.state)
        if self.shards > 1:
            each = 2 * self.element + each / self.shards
        return parameters(self.config, [stage]) / self.tp * each

    def activations(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        # Beside what the layers save: the output until its gradient is back; on the last stage that gradient itself.
        hidden = np.multiply(size, length) * float(self.config.hidden * self.element)
        if self.recompute:
            return np.asarray(2 * hidden, dtype=np.float64)
        return hidden * (1 + stage.last) + stage.layers * self._layer(size, length)

    def deferred_grads(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        c = self.config
        inputs = 3 * c.hidden + c.ffn_hidden
        gradients = 3 * c.hidden + 2 * c.num_kv_heads * c.head_size + c.ffn_hidden
        per_token = (inputs + gradients) * self.element / self.tp
        return np.asarray(stage.layers * np.multiply(size, length) * per_token, dtype=np.float64)

    def kv_cache(self, stage: StageSpec, size: Numbers, tokens: int) -> Array:
        width = 4 * self.config.num_kv_heads * self.config.head_size  # keys, values, and a gradient of each
        return np.asarray(stage.layers * np.multiply(size, tokens) * width * self.element / self.tp, dtype=np.float64)

    def workspace(self, stage: StageSpec, size: Numbers, length: Numbers) -> tuple[Array, Array]:
        tokens = np.multiply(size, length) * 1.0
        logits = tokens * (3 * 4 * self.config.vocab / self.tp) if stage.last else 0.0 * tokens
        again = stage.layers * self._layer(size, length) if self.recompute else 0.0 * tokens
        return np.asarray(logits, dtype=np.float64), np.asarray(again, dtype=np.float64)

    def _layer(self, size: Numbers, length: Numbers) -> Array:
        """What autograd saves in one layer: inputs of both norms and their results on every device, the rest split."""
        c = self.config
        whole = 4 * c.hidden
        split = 3 * c.hidden + 2 * c.ffn_hidden  # queries, attention's result twice, both sides of the activation
        per_token = (whole + split / self.tp) * self.element + 4 * (c.heads / self.tp + 4)
        return np.asarray(np.multiply(size, length) * per_token, dtype=np.float64)


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"a number of bytes reads like 16GiB, 900MB or 17179869184, got {text!r}")
    return int(float(found[1]) * _UNITS[found[2]])
