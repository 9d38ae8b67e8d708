"""The interfaces of cost models (seconds) and memory models (bytes) of slices on stages."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from terapipe.planning.recompute import Recompute

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
Numbers = Array | NDArray[np.int64] | float


class StageSpec(NamedTuple):
    """What a stage holds: a number of layers, and on the first and the last stage the ends of the model.

    Where there are several stages, the first may hold the embedding alone, and the last the head: no layers.
    """

    layers: int
    first: bool = False  # also the embedding
    last: bool = False  # also the final norm, the head and the loss


class LinkBehavior(NamedTuple):
    """How a transfer occupies the sending rank and the link."""

    overlapped: bool = True  # whether the rank computes while it sends; otherwise sending blocks it
    latency: float = 0.0  # seconds of every transfer that do not occupy the link


@dataclass(frozen=True)
class HostTime:
    """Seconds in which the host of a device issues the kernels of a computation. They are the same for slices of all
    lengths: the number of kernels is."""

    forward: float = 0.0  # of a layer
    backward: float = 0.0  # of a layer, with what it computes again
    weights: float = 0.0  # of a layer: the part of its backward that can be deferred
    action: float = 0.0  # of every computation beside its layers
    embedding: float = 0.0  # in a forward of the first stage
    embedding_backward: float = 0.0
    head: float = 0.0  # norm, head, loss and their backward, in a forward of the last stage
    message: float = 0.0  # to post a send or a receive

    def __bool__(self) -> bool:
        return any(astuple(self))

    def of_forward(self, stage: StageSpec) -> float:
        """Seconds in which the host issues a forward on this stage.

        Args:
            stage: Its layers and ends; embedding and head are kernels of their own.
        """
        ends = self.embedding * stage.first + self.head * stage.last
        return self.action + stage.layers * self.forward + ends

    def of_backward(self, stage: StageSpec) -> float:
        """Seconds in which the host issues a backward on this stage. The head's is part of the last stage's forward.

        Args:
            stage: Its layers and ends.
        """
        return self.action + stage.layers * self.backward + self.embedding_backward * stage.first

    def of_weights(self, stage: StageSpec) -> float:
        """Seconds in which the host issues the weight half. It is a part of the backward, so never more.

        Args:
            stage: Its layers.
        """
        return min(stage.layers * self.weights, self.of_backward(stage))


@lru_cache(maxsize=256)  # asked several times for each plan that is simulated
def stage_specs(boundaries: tuple[int, ...]) -> tuple[StageSpec, ...]:
    """The StageSpec of every stage.

    Args:
        boundaries: As in ``Plan.boundaries``. Their numbers do not tell which stages are the ends, since one without
            layers has the same numbers as its neighbor: (0, 0, 4) is the embedding alone, then four layers and the
            head.
    """
    last = len(boundaries) - 2
    return tuple(StageSpec(b - a, k == 0, k == last) for k, (a, b) in enumerate(pairwise(boundaries)))


class Cost(Protocol):
    """Seconds of everything a rank does. Sizes, lengths and contexts broadcast; results are element-wise.

    A slice is ``size`` sequences of ``length`` tokens each, behind ``context`` tokens of the same sequences::

        sequence    |-------- context --------|---- length ----|........ later slices ........|
                      attended to, not computed  computed

    All three may be arrays: the search asks for thousands of slices at once, and Python calls would take longer than
    the arithmetic.

    Where a host issues the kernels of a device, a computation takes as long as the slower of the two.

    It may also have ``with_recompute(mode)``, the same with backwards that compute activations again: see
    recompute.py. Else recomputation costs nothing. And it may have ``by_side()``, which gives the seconds of the device
    alone, as a Cost, and those of its host, as a HostTime. Else the host takes no time.

    For plans that offload it must have ``copy(stage, size, length, seq_len)``, the seconds in which what a slice keeps
    is copied to the host's memory, and those for keys and values of whole sequences; as many back. And where a device
    copies by itself, not beside what it computes (a CPU), a true ``copies_block``.
    """

    def forward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """The forward of a slice. On the last stage it includes the loss and its gradient, as in the executor.

        Args:
            stage: What the rank computes.
            size: Sequences of the slice.
            length: Tokens of each.
            context: Tokens of each before the slice.
        """

    def backward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """The whole backward of a slice: gradients of inputs and of weights, and what it computes again.

        Args:
            stage: What the rank computes.
            size: As in ``forward``.
            length: As in ``forward``.
            context: As in ``forward``. Its keys and values get gradients, too.
        """

    def weights(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        """The part of the backward that computes gradients of weights. No other stage waits for it, so that orders may
        put it off to when a rank would be idle.

        Args:
            stage: What the rank computes.
            size: As in ``forward``.
            length: As in ``forward``. The context does not matter: attention has no weights.
        """

    def transfer(self, source: int, target: int, size: Numbers, length: Numbers) -> Array:
        """Point-to-point transfer of a slice's hidden states, or of their gradient, between two pipeline ranks.

        Args:
            source: The pipeline rank that sends.
            target: The one that receives.
            size: Sequences of the slice.
            length: Tokens of each.
        """

    def link_behavior(self, source: int, target: int) -> LinkBehavior:
        """Whether transfers between two pipeline ranks overlap with computation, and their latency.

        Args:
            source: The pipeline rank that sends.
            target: The one that receives.
        """

    def per_step(self, stages: Sequence[StageSpec]) -> float:
        """The work that a rank with these stages does once per step: gradient all-reduce and optimizer.

        Args:
            stages: All stages of the rank: a weight that two of them share counts once.
        """


class GradientBytes(NamedTuple):
    """Bytes of the gradients of a stage's weights, at three times of a step."""

    before: float  # its first backward
    during: float  # its backwards
    after: float  # its last backward


class Memory(Protocol):
    """Bytes on one device. It may also have ``with_recompute(mode)``, as a ``Cost``."""

    def model_state(self, stage: StageSpec) -> float:
        """Weights and optimizer state, which are there all the time.

        Args:
            stage: Its layers and ends.
        """

    def gradients(self, stage: StageSpec) -> GradientBytes:
        """Gradients of the weights, which need not be there between steps.

        Args:
            stage: Its layers and ends.
        """

    def activations(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        """What a slice keeps from its forward to its backward.

        Args:
            stage: Its layers and ends.
            size: Sequences of the slice.
            length: Tokens of each.
        """

    def offloaded(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        """What of it is copied to the host's memory where the slice is offloaded. Nothing of it stays on the device
        then; the slice's output is not copied, since nobody needs its numbers once it was sent.

        Args:
            stage: Its layers and ends.
            size: Sequences of the slice.
            length: Tokens of each.
        """

    def deferred_grads(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        """What a slice keeps from the input half of its backward to the weight half: inputs of products, and the
        gradients of their outputs.

        Args:
            stage: Its layers.
            size: Sequences of the slice.
            length: Tokens of each.
        """

    def kv_cache(self, stage: StageSpec, size: Numbers, seq_len: int, sliced: bool = True) -> Array:
        """Keys and values of a microbatch, from its first forward to its last backward.

        Without slices (``sliced``), where the whole stage is computed again, they do not wait.
        """

    def kv_gradients(self, stage: StageSpec, size: Numbers, seq_len: int) -> Array:
        """Gradients of the keys and values of a microbatch, from its first backward to its last. Without slices there
        are none that wait for earlier ones.

        Args:
            stage: Its layers.
            size: Sequences of the microbatch.
            seq_len: Tokens of each.
        """

    def workspace(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> tuple[Array, Array]:
        """Temporary memory during a forward, and during a backward.

        Args:
            stage: Its layers and ends.
            size: Sequences of the slice.
            length: Tokens of each.
            context: Tokens before the slice: attention's backward needs room for all keys that it sees.
        """

    def per_rank(self) -> float:
        """What a rank needs once, whatever its stages are: workspaces of libraries."""


def by_side(cost: Cost) -> tuple[Cost, HostTime]:
    """Seconds of the device alone, and of the host that feeds it.

    Args:
        cost: Any cost model. One that does not tell the two apart has a host that takes no time.
    """
    sides: tuple[Cost, HostTime] = getattr(cost, "by_side", lambda: (cost, HostTime()))()
    return sides


def copy_time(cost: Cost, stage: StageSpec, size: Numbers, length: Numbers, seq_len: int) -> tuple[Array, Array]:
    """Seconds in which what a slice keeps for its backward is copied to the memory of the host, or back; and those for
    the keys and values of its sequences.

    Args:
        cost: Any cost model with ``copy``.
        stage: Its layers and ends.
        size: Sequences of the slice.
        length: Tokens of each.
        seq_len: Tokens of the whole sequences.
    """
    copy = getattr(cost, "copy", None)
    if copy is None:
        raise ValueError(
            f"costs of an offloaded plan must say what copies to the host take, {type(cost).__name__} does not; plan "
            "for a described cluster or a profile, or without offload"
        )
    seconds: tuple[Array, Array] = copy(stage, size, length, seq_len)
    return seconds


def copies_block(cost: Cost) -> bool:
    """Whether a device that copies to its host's memory, or back, computes nothing meanwhile."""
    return bool(getattr(cost, "copies_block", False))


T = TypeVar("T", Cost, Memory)


def with_recompute(model: T, mode: Recompute) -> T:
    """The cost or memory model of slices with this mode of recomputation.

    Args:
        model: Any cost or memory model. One that knows no modes stays as it is.
        mode: What backwards compute again.
    """
    changed: T = getattr(model, "with_recompute", lambda mode: model)(mode)
    return changed


def slice_time(
    cost: Cost, stage: StageSpec, rank: int, ranks: int, size: Numbers, length: Numbers, context: Numbers
) -> Array:
    """Forward, backward and transfers of a slice on pipeline rank ``rank`` of ``ranks``: the paper's t.

    Where transfers overlap with computation, only the time by which a transfer exceeds the computation counts.

    Args:
        cost: The cost model.
        stage: What the rank computes.
        rank: The pipeline rank, whose neighbors it exchanges messages with.
        ranks: The number of pipeline ranks: the first and the last have one neighbor only.
        size: Sequences of the slice.
        length: Tokens of each.
        context: Tokens of each before the slice.
    """
    forward, backward = cost.forward(stage, size, length, context), cost.backward(stage, size, length, context)

    def exposed_transfer(compute: Array, target: int) -> Array | float:
        if not 0 <= target < ranks:
            return 0.0
        transfer, (overlapped, latency) = cost.transfer(rank, target, size, length), cost.link_behavior(rank, target)
        return np.maximum(transfer - latency - compute, 0.0) if overlapped else transfer

    return forward + backward + (exposed_transfer(forward, rank + 1) + exposed_transfer(backward, rank - 1))
