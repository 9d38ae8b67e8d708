"""Simple costs and memories with which formulas can be checked by hand."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from terapipe.planning.cost import Array, Cost, GradientBytes, HostTime, LinkBehavior, Memory, Numbers, StageSpec
from terapipe.planning.layout import Layout


@dataclass(frozen=True)
class SimpleCost:
    """Per layer a fixed time, a time per token, a time per score; backward twice that; transfers per token."""

    fixed: float = 0.0
    token: float = 1.0
    score: float = 0.0
    sent: float = 0.0
    head: float = 0.0
    overlapped: bool = True
    latency: float = 0.0
    copied: float = 0.0  # seconds of a slice's copy to the host, or back
    copies_block: bool = False

    def forward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        scores = np.multiply(length, np.add(context, np.multiply(length, 0.5)))
        layer = self.fixed + np.multiply(size, np.multiply(self.token, length) + self.score * scores)
        return np.asarray(stage.layers * layer + self.head * stage.last * np.multiply(size, length), dtype=np.float64)

    def backward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        return 2 * self.forward(stage._replace(last=False), size, length, context)

    def weights(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        return np.asarray(stage.layers * self.token * np.multiply(size, length), dtype=np.float64)

    def transfer(self, source: int, target: int, size: Numbers, length: Numbers) -> Array:
        return np.asarray(self.latency + self.sent * np.multiply(size, length), dtype=np.float64)

    def link_behavior(self, source: int, target: int) -> LinkBehavior:
        return LinkBehavior(self.overlapped, self.latency)

    def copy(self, stage: StageSpec, size: Numbers, length: Numbers, seq_len: int) -> tuple[Array, Array]:
        seconds = np.full(np.broadcast(size, length).shape, self.copied)
        return seconds, 2 * seconds

    def per_step(self, held: Sequence[StageSpec]) -> float:
        return 0.0


@dataclass(frozen=True)
class HostedCost(SimpleCost):
    """The same, with a host that takes so long to issue a layer's forward, and as long for its backward."""

    host: float = 0.0
    message: float = 0.0

    def by_side(self) -> tuple[Cost, HostTime]:
        return self, HostTime(self.host, self.host, message=self.message)


@dataclass(frozen=True)
class SimpleMemory:
    """A byte per token and layer; the rest as asked."""

    held: float = 1.0
    owing: float = 0.0
    caching: float = 0.0
    weight: float = 0.0
    extra: float = 0.0

    def model_state(self, stage: StageSpec) -> float:
        return self.weight * stage.layers

    def gradients(self, stage: StageSpec) -> GradientBytes:
        return GradientBytes(0.0, 0.0, 0.0)

    def activations(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        return np.asarray(self.held * stage.layers * np.multiply(size, length), dtype=np.float64)

    def offloaded(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        return self.activations(stage, size, length)

    def deferred_grads(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        return np.asarray(self.owing * stage.layers * np.multiply(size, length), dtype=np.float64)

    def kv_cache(self, stage: StageSpec, size: Numbers, tokens: int, sliced: bool = True) -> Array:
        return np.asarray(self.caching * stage.layers * np.multiply(size, tokens), dtype=np.float64)

    def kv_gradients(self, stage: StageSpec, size: Numbers, tokens: int) -> Array:
        return np.zeros(np.shape(size))

    def per_rank(self) -> float:
        return 0.0

    def workspace(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> tuple[Array, Array]:
        tokens = np.asarray(self.extra * np.multiply(size, length), dtype=np.float64)
        return tokens * stage.last, 0.0 * tokens


@dataclass(frozen=True)
class SimpleSource:
    """The same for every layout."""

    costs: Cost
    memories: Memory
    layers: int
    devices: int
    name: str = "a simple machine"
    budget: int | None = None
    host_budget: int | None = None
    knows_host: bool = False
    optimizer: str | None = None
    tile: int = 8
    dtype: str = "float32"

    def cost(self, layout: Layout) -> Cost:
        return self.costs

    def memory(self, layout: Layout) -> Memory:
        return self.memories

    def host_state(self, layout: Layout, stages: Sequence[StageSpec]) -> float:
        return 0.0

    def tensor_degrees(self) -> list[int]:
        return [1]
