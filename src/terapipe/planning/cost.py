"""What a cost model answers: how long a slice takes on a stage, and how many bytes it holds there."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Numbers = Array | NDArray[np.int64] | float


class StageSpec(NamedTuple):
    """What a stage holds of the model: so many layers, and perhaps what comes before or after all layers."""

    layers: int
    first: bool = False  # the embedding
    last: bool = False  # the final norm, the head and the loss


class LinkBehavior(NamedTuple):
    """What a transfer keeps busy besides its own arrival."""

    overlapped: bool = True  # whether the rank computes while it sends; otherwise it first sends, then goes on
    latency: float = 0.0  # seconds of every transfer, however long, in which its link already takes the next


def stage_specs(boundaries: Sequence[int]) -> tuple[StageSpec, ...]:
    """The part of every stage."""
    last = boundaries[-1]
    return tuple(StageSpec(b - a, a == 0, b == last) for a, b in pairwise(boundaries))


class Cost(Protocol):
    """Seconds. Sizes, lengths and contexts are arrays that broadcast against each other; answers are element-wise."""

    def forward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """One slice's forward. On the last stage the loss and its gradient are part of it, as in the executor."""

    def backward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """One slice's whole backward."""

    def weights(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        """The half of a backward that nobody waits for: gradients of weights."""

    def transfer(self, source: int, target: int, size: Numbers, length: Numbers) -> Array:
        """Hidden states of one slice, or their gradient, from one rank of the pipeline to another."""

    def link_behavior(self, source: int, target: int) -> LinkBehavior:
        """How such a transfer goes about it."""

    def per_step(self, held: Sequence[StageSpec]) -> float:
        """What a rank that holds these parts does once per step: reduction over replicas, the optimizer."""


class Memory(Protocol):
    """Bytes on one device."""

    def model_state(self, stage: StageSpec) -> float:
        """Weights, gradients and optimizer state."""

    def activations(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        """What one slice keeps from its forward to its backward."""

    def deferred_grads(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        """What one slice keeps from the input half of its backward to the weight half."""

    def kv_cache(self, stage: StageSpec, size: Numbers, seq_len: int) -> Array:
        """Keys, values and their gradients of one microbatch, from its first forward to its last backward."""

    def workspace(self, stage: StageSpec, size: Numbers, length: Numbers) -> tuple[Array, Array]:
        """What only exists during a forward, and only during a backward."""


def slice_time(
    cost: Cost, stage: StageSpec, rank: int, ranks: int, size: Numbers, length: Numbers, context: Numbers
) -> Array:
    """One slice's forward and backward on one of so many ranks, and its transfers to the neighbors there are: what the
    formula of the paper calls t.

    Where the rank computes while it sends, slices follow each other as fast as the slower of the two permits.
    """
    forward, backward = cost.forward(stage, size, length, context), cost.backward(stage, size, length, context)

    def added(seconds: Array, target: int) -> Array | float:
        if not 0 <= target < ranks:
            return 0.0
        sent, (overlapped, latency) = cost.transfer(rank, target, size, length), cost.link_behavior(rank, target)
        return np.maximum(sent - latency - seconds, 0.0) if overlapped else sent

    return forward + backward + (added(forward, rank + 1) + added(backward, rank - 1))
