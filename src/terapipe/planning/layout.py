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


def balance(
    costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0, bare_ends: bool = False
) -> tuple[int, ...]:
    """Chooses stage boundaries that minimize the cost of the slowest stage.

    Every stage has at least one layer. With ``bare_ends`` the first may be the embedding alone, and the last the head
    alone, where that makes the slowest stage faster or where there are more stages than layers: a head of 128,000 words
    takes as long as some layers.

    Of several such boundaries, those with the smallest sum of squared stage costs are taken: even stages.

    Args:
        costs: The cost of each layer, in any unit.
        num_stages: The number of stages, at most that of the layers, or two more with ``bare_ends``.
        first: What the first stage costs in addition: the embedding.
        last: What the last stage costs in addition: final norm, head and loss.
        bare_ends: Whether the first and the last of several stages may have no layers.

    Returns:
        ``num_stages + 1`` layer indices, as in ``Plan.boundaries``.
    """
    n, bare_ends = len(costs), bare_ends and num_stages > 1
    _refuse_few_layers(n, num_stages, bare_ends)
    if any(not c >= 0 for c in (*costs, first, last)):
        raise ValueError("the cost of a layer must be a number of at least 0")
    sums = np.array(list(accumulate(costs, initial=0.0)))
    inner = sums - sums[:, None]  # the cost of the layers from row to column
    inner[np.tril_indices(n + 1)] = np.inf
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
    for stage in range(num_stages):
        stage_cost = inner.copy()
        if bare_ends and stage in (0, num_stages - 1):
            end = 0 if stage == 0 else n
            stage_cost[end, end] = 0.0
        stage_cost += first * (stage == 0) + last * (stage == num_stages - 1)
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


def _refuse_few_layers(layers: int, num_stages: int, bare_ends: bool) -> None:
    if not 1 <= num_stages <= layers + 2 * bare_ends:
        needy = "every stage but the first and the last" if bare_ends else "every stage"
        raise ValueError(f"{needy} needs at least one layer, got {layers} layers for {num_stages} stages")


def balance_ranks(
    layers: int,
    ranks: Sequence[int],
    layer: float,
    *,
    first: float = 0.0,
    last: float = 0.0,
    bare_ends: bool = False,
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
        bare_ends: As in ``balance``.
    """
    stages, last_rank, bare_ends = range(len(ranks)), ranks[-1], bare_ends and len(ranks) > 1
    _refuse_few_layers(layers, len(ranks), bare_ends)
    counts = [1] * len(ranks)
    if bare_ends:
        counts[0] = counts[-1] = 0
    costs = [layer * count for count in counts]
    costs[0] += first
    costs[-1] += last
    sums = [sum(costs[k] for k in stages if ranks[k] == rank) for rank in range(max(ranks) + 1)]
    slowest, rest = list(sums), layers - sum(counts)
    for _ in range(rest):
        slowest[slowest.index(min(slowest))] += layer
    limit = max(slowest) * (1 + 1e-9)
    for _ in range(rest):
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
