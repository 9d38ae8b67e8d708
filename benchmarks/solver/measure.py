"""How long the planner thinks: the exact cut of a sequence, and of a batch."""

from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.harness import arguments, best, pin, race, report
from terapipe.planning import Array, Cuts, SliceCost, solve

HIDDEN, STEP = 5120, 8


def gpt(size: Array | int, length: Array | int, context: Array | int) -> Array:
    """One layer per stage on V100s over 25 Gb/s: forward, twice that backward, hidden states and their gradients."""
    tokens = np.multiply(size, length) * 1.0
    flops = tokens * (24.0 * HIDDEN**2 + 4.0 * HIDDEN * (np.asarray(context) + length))
    return np.asarray(3 * np.maximum(1.46e-3, 1e-3 + flops / 72e12) + tokens * (HIDDEN * 2 * 2 / 3.125e9))


def noisy(units: int, sizes: int = 1) -> SliceCost:
    """The same, measured badly: each slice up to 5 % off, so that longer ones often seem to take less."""
    noise = np.random.default_rng(0).uniform(0.95, 1.05, (sizes + 1, units + 1, units))

    def cost(size: Array | int, length: Array | int, context: Array | int) -> Array:
        k, c = (np.asarray(x, dtype=np.float64).astype(np.int64) // STEP for x in (length, context))
        return np.asarray(gpt(size, length, context) * noise[np.asarray(size, dtype=np.int64), k, c])

    return cost


def questions() -> dict[str, Callable[[], Cuts]]:
    return {
        "tokens_2048": partial(solve, gpt, seq_len=2048, stages=40, step=STEP),
        "tokens_8192": partial(solve, gpt, seq_len=8192, stages=40, step=STEP),
        "joint_72": partial(solve, gpt, seq_len=2048, stages=24, step=STEP, batch_size=72),
        "noisy_2048": partial(solve, noisy(256), seq_len=2048, stages=40, step=STEP),
        "noisy_8192": partial(solve, noisy(1024), seq_len=8192, stages=40, step=STEP),
        "noisy_joint_72": partial(solve, noisy(256, 72), seq_len=2048, stages=24, step=STEP, batch_size=72),
    }


def main() -> None:
    rounds = 3 if arguments(__doc__ or "").quick else 10
    pin(0)
    asked = questions()
    times = best(race(asked, rounds))
    answers = {name: ask() for name, ask in asked.items()}
    rows = [
        [name, times[name], cuts.time, len(cuts.sizes), sum(map(len, cuts.lengths))] for name, cuts in answers.items()
    ]
    header = "question", "seconds to answer", "seconds of a step", "microbatches", "slices"
    report(__doc__ or "", header, rows, times)
