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
    """Stage boundaries that minimize the cost of the slowest stage.

    ``costs`` has one number per layer. ``first`` is the additional cost of the first stage (embedding), ``last`` that
    of the last stage (final norm, head and loss). Ties are broken by the smallest sum of squared stage costs, which
    prefers even stages. Every stage has at least one layer.
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
    # Dynamic programming over the stages. By number of layers: the best split of so many into the stages so far, as the
    # cost of its slowest stage, the sum of squares, and its place among all of them in lexicographic order.
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
    """Stage boundaries that minimize the cost of the slowest rank, for ranks with several stages and equal layers.

    ``ranks[k]`` is the rank of stage ``k``, ``layer`` the cost of a layer; ``first`` and ``last`` as in ``balance``.
    Ties are broken by the smallest sum of squared stage costs. If several splits are left, stages of later chunks get
    the larger parts, on ranks near that of the last stage, which was the fastest choice in simulated steps.

    Layers are handed out one by one, each where it costs least: first to find the cost of the slowest rank, then within
    that limit. This is exact, because costs are convex and each limit is on disjoint sets of stages.
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
    """Stage boundaries for a GPT, balanced by the FLOPs of its layers and its head."""
    layer = config.layer_flops(seq_len)
    return balance([layer] * config.layers, num_stages, last=config.head_flops(seq_len))
