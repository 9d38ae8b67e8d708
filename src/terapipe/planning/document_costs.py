"""What packed documents cost: a token by its position in its document, in whole numbers that all ranks share."""

from typing import NamedTuple, Self

import numpy as np

from terapipe.planning.cost import Array, Cost, stage_specs
from terapipe.planning.fitted import nonnegative_fit
from terapipe.planning.presets import GPTConfig
from terapipe.planning.slices import Plan

LARGEST = 2**31  # of ``DocumentCosts.token``, so that the sum over a batch is a number of 64 bits


class DocumentCosts(NamedTuple):
    """Costs of slices over all stages, forward plus backward. The unit is a pair: a token and one that it sees.

    Whole numbers, so that every rank cuts the same documents alike, however its processor rounds.
    """

    token: int  # beside its pairs
    slice: int = 0  # once for every slice, however short
    context: int = 0  # once for every slice and every token before it in the document that it continues

    @classmethod
    def of(cls, cost: Cost, plan: Plan) -> Self:
        """Fitted to the costs of slices of one document, short and long ones, at its start and far behind it."""
        size, seq_len = plan.sizes[0], plan.seq_len
        lengths = {max(1, seq_len * share // 64) for share in (1, 2, 4, 8, 16, 32, 64)}
        contexts = {seq_len * share // 4 for share in range(4)}
        points = [(n, c) for n in sorted(lengths) for c in sorted(contexts) if n + c <= seq_len]
        length, context = np.array(points, dtype=np.float64).T
        seconds = _seconds(cost, plan, size, length, context)
        pairs = length * (context + (length + 1) / 2)
        features = np.stack([np.ones_like(length), size * length, size * context, size * pairs], axis=-1)
        fixed, token, behind, pair = nonnegative_fit(features, seconds, np.maximum(seconds, np.finfo(float).tiny))
        return cls._in_pairs(token, fixed, behind, pair)

    @classmethod
    def of_shape(cls, config: GPTConfig) -> Self:
        """By arithmetic alone, where nothing was measured."""
        whole = config.layers * 2.0 * config.layer_parameters + config.head_flops(1)
        return cls._in_pairs(whole, 0.0, 0.0, config.layers * 4.0 * config.hidden)

    @classmethod
    def _in_pairs(cls, token: float, fixed: float, behind: float, pair: float) -> Self:
        unit = max(pair, token / LARGEST) or 1.0
        return cls(max(1, round(token / unit)), round(fixed / unit), round(behind / unit))


def _seconds(cost: Cost, plan: Plan, size: int, length: Array, context: Array) -> Array:
    """Of slices on all stages together."""
    stages = stage_specs(plan.boundaries)
    total = np.zeros_like(length)
    for stage in set(stages):
        seconds = cost.forward(stage, size, length, context) + cost.backward(stage, size, length, context)
        total = total + stages.count(stage) * seconds
    return total
