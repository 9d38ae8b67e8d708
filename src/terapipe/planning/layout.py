"""Splitting a model over devices: the layout (dp, pp, tp), and layers over stages such that the slowest is fast."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from terapipe.planning.presets import GPTConfig


@dataclass(frozen=True)
class Layout:
    """Data parallel replicas (``dp``), pipeline ranks (``pp``) and tensor parallel ranks (``tp``).

    With ``shard``, replicas shard their parameters, gradients and optimizer state (FSDP2).
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    shard: bool = False

    @property
    def devices(self) -> int:
        return self.dp * self.pp * self.tp

    def __str__(self) -> str:
        return f"dp {self.dp}{' (sharded)' if self.shard else ''} x pp {self.pp} x tp {self.tp}"

    @property
    def shards(self) -> int:
        """The number of shards of the model state."""
        return self.dp if self.shard else 1


def balance(costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Chooses stage boundaries that minimize the cost of the slowest stage. Every stage has at least one layer.

    Of several such boundaries, those with the smallest sum of squared stage costs are taken: even stages.

    Args:
        costs: The cost of each layer, in any unit.
        num_stages: The number of stages, at most that of the layers.
        first: What the first stage costs in addition: the embedding.
        last: What the last stage costs in addition: final norm, head and loss.

    Returns:
        ``num_stages + 1`` layer indices, as in ``Plan.boundaries``.
    """
    n = len(costs)
    if not 1 <= num_stages <= n:
        raise ValueError(f"every stage needs at least one layer, got {n} layers for {num_stages} stages")
    if any(not c >= 0 for c in (*costs, first, last)):
        raise ValueError("the cost of a layer must be a number of at least 0")
    sums = np.array(list(accumulate(costs, initial=0.0)))
    stage_cost = sums - sums[:, None]  # of the layers from row to column
    stage_cost[0] += first
    stage_cost[:, n] += last
    stage_cost[np.tril_indices(n + 1)] = np.inf
    # Dynamic programming over the stages. ``best[j]`` is the best split of the first j layers into the stages so far,
    # and with one more stage, which takes the layers i to j,
    #
    #     best[j] = min over i < j of (max(slowest[i], stage_cost[i, j]), squares[i] + stage_cost[i, j]**2, boundaries)
    #
    # Tuples are compared from left to right, so equal splits go to the one with earlier boundaries. Five layers of
    # cost 1 on two stages: i = 2 gives (3, 4 + 9, (0, 2, 5)), i = 3 gives (3, 9 + 4, (0, 3, 5)), and i = 2 wins.
    #
    # All j are computed at once, in columns. A split's boundaries are not stored: to compare them it is enough to know
    # the ``place`` of each among all of best[0] to best[n] in lexicographic order. With one more boundary, splits are
    # ordered by the place of what they continue, then by j.
    slowest, squares, place = np.full(n + 1, np.inf), np.full(n + 1, np.inf), np.zeros(n + 1, dtype=np.int64)
    slowest[0] = squares[0] = 0.0
    choices = []  # for each stage: by its end, its start
    for _ in range(num_stages):
        bounds = np.maximum(slowest[:, None], stage_cost)
        sums_of_squares = np.where(bounds == bounds.min(axis=0), squares[:, None] + stage_cost**2, np.inf)
        tied = sums_of_squares == sums_of_squares.min(axis=0)
        choice = np.where(tied, place[:, None], n + 1).argmin(axis=0)
        slowest, squares = bounds.min(axis=0), sums_of_squares.min(axis=0)
        place = np.argsort(np.lexsort((np.arange(n + 1), place[choice])))
        choices.append(choice.tolist())
    boundaries = [n]
    for choice in reversed(choices):
        boundaries.append(choice[boundaries[-1]])
    return tuple(reversed(boundaries))


def balance_ranks(
    layers: int, ranks: Sequence[int], layer: float, *, first: float = 0.0, last: float = 0.0
) -> tuple[int, ...]:
    """Chooses stage boundaries that minimize the cost of the slowest rank, for ranks with several stages.

    Of several such boundaries, those with the smallest sum of squared stage costs are taken. If several are left,
    stages of later chunks get the larger parts, on ranks near that of the last stage, which was the fastest choice in
    simulated steps.

    Layers are given out one by one, each where it costs least: first to learn the cost of the slowest rank, then within
    that limit. This is exact, because costs are convex and each limit is on disjoint sets of stages.

    Args:
        layers: The number of layers. All cost the same.
        ranks: The rank of each stage.
        layer: The cost of a layer.
        first: As in ``balance``.
        last: As in ``balance``.
    """
    stages, last_rank = range(len(ranks)), ranks[-1]
    if len(ranks) > layers:
        raise ValueError(f"every stage needs at least one layer, got {layers} layers for {len(ranks)} stages")
    costs = [layer] * len(ranks)  # every stage has a layer
    costs[0] += first
    costs[-1] += last
    sums = [sum(costs[k] for k in stages if ranks[k] == rank) for rank in range(max(ranks) + 1)]
    slowest = list(sums)
    for _ in range(layers - len(ranks)):
        slowest[slowest.index(min(slowest))] += layer
    limit = max(slowest) * (1 + 1e-9)
    counts = [1] * len(ranks)
    for _ in range(layers - len(ranks)):
        open_stages = (k for k in stages if sums[ranks[k]] + layer <= limit)
        k = min(open_stages, key=lambda k: (costs[k], -(k // len(sums)), abs(ranks[k] - last_rank)))
        counts[k] += 1
        costs[k] += layer
        sums[ranks[k]] += layer
    return tuple(accumulate(counts, initial=0))


def split_layers(config: GPTConfig, num_stages: int, seq_len: int) -> tuple[int, ...]:
    """Chooses stage boundaries for a GPT by the FLOPs of its layers and its head.

    Args:
        config: The shape of the model.
        num_stages: The number of stages.
        seq_len: Tokens in a sequence: attention takes a larger share of long ones.
    """
    layer = config.layer_flops(seq_len)
    return balance([layer] * config.layers, num_stages, last=config.head_flops(seq_len))
