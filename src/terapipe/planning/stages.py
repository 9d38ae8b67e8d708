"""The split of layers over stages: contiguous, every stage at least one layer, the dearest stage as cheap as can be."""

from collections.abc import Sequence
from itertools import accumulate

from terapipe.presets import GPTConfig


def balance(costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Boundaries that minimise the cost of the dearest stage.

    ``costs`` holds one number for each layer; ``first`` and ``last`` are what comes before and after the layers
    (embedding; final norm, head and loss). Of several splits with the same dearest stage, the one whose stages are
    most even (least sum of squares) is taken.
    """
    n = len(costs)
    if not 1 <= num_stages <= n:
        raise ValueError(f"every stage needs at least one layer, got {n} layers for {num_stages} stages")
    if any(not c >= 0 for c in (*costs, first, last)):
        raise ValueError("the cost of a layer must be a number of at least 0")
    sums = list(accumulate(costs, initial=0.0))

    def stage_cost(a: int, b: int) -> float:
        return sums[b] - sums[a] + (first if a == 0 else 0.0) + (last if b == n else 0.0)

    # best[b] = (dearest stage, sum of squares, boundaries) of the first b layers in the stages so far.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for k in range(1, num_stages + 1):
        ends = [n] if k == num_stages else range(k, n - (num_stages - k) + 1)
        best = {
            b: min(
                (max(top, c := stage_cost(a, b)), squares + c * c, (*cuts, b))
                for a, (top, squares, cuts) in best.items()
                if a < b
            )
            for b in ends
        }
    return best[n][2]


def split_layers(config: GPTConfig, num_stages: int, seq_len: int) -> tuple[int, ...]:
    """Boundaries for a GPT, balanced by the floating-point operations of its layers and its head."""
    layer = config.layer_flops(seq_len)
    return balance([layer] * config.layers, num_stages, last=config.head_flops(seq_len))
