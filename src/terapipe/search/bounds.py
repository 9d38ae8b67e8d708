"""Lower bounds on the step time of a plan, without simulating it: what no order of computations can go below.

A bound rules a candidate out for certain, where the formula of candidates.py only says what is likely. Three paths
through a step are as long as they are, whatever waits for whom::

    the busiest rank     rank 1   F F F F F F B B B B B B          all of its computations

    there and back       rank 0   F                            I   the first slice must get to the last rank, which
                         rank 1     F                        I     then has all of its computations to do, and the
                         rank 2       F F F ... all ... I I        last gradient must get back to the first

    one microbatch       stage 0  F                            I   the same of one microbatch over *all* stages: what
                         ...        F                        I     counts where ranks have many stages, and there are
                         stage 7      F F F I I I                  few slices to fill them
"""

from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from terapipe.planning.cost import Array, StageSpec, by_side, stage_specs
from terapipe.planning.order import Order, all_microbatches
from terapipe.search.evaluator import Lengths, PlanEvaluator


class Work:
    """The computations of a batch in microbatches of one size, all cut alike, and how long they take at least.

    Args:
        evaluator: For the costs in a layout, with a mode of recomputation.
        size: Sequences per microbatch. The last microbatch takes the remainder.
        lengths: The slices of every microbatch.
    """

    def __init__(self, evaluator: PlanEvaluator, size: int, lengths: Lengths) -> None:
        self._evaluator, self._pp = evaluator, evaluator.layout.pp
        self._cost, self._host = by_side(evaluator.cost)
        whole, rest = divmod(evaluator.batch_size, size)
        # One column for each slice of a whole microbatch, then of the remainder, and how often each occurs.
        sizes, times = ([size, rest], [whole, 1]) if rest else ([size], [whole])
        length = np.array(lengths, dtype=np.float64)
        self._columns = (
            np.repeat(np.array(sizes, dtype=np.float64), len(length)),
            np.tile(length, len(sizes)),
            np.tile(np.cumsum(length) - length, len(sizes)),
        )
        self._times = np.repeat(np.array(times, dtype=np.float64), len(length))
        self._slices = len(length)
        self._kinds: dict[StageSpec, _StageWork] = {}

    @cached_property
    def floor(self) -> float:
        """Seconds of all computations, if ranks had equal shares and nobody ever waited. Cheaper than the others."""
        return float((self._evaluator.equal_share(*self._columns) * self._times).sum())

    def least_bytes(self, order: Order) -> float:
        """Bytes of some rank at least. It has an equal share of the layers, and of the slices one, with the keys and
        values of its microbatch; or all, where all forwards come before the first backward.

        Args:
            order: Of the computations.
        """
        one, whole = self._least_bytes
        return whole if order.in_flight is all_microbatches else one

    @cached_property
    def _least_bytes(self) -> tuple[float, float]:
        memory, (size, length, _) = self._evaluator.memory, self._columns
        stage, seq_len = StageSpec(-(-self._evaluator.source.layers // self._pp)), self._evaluator.request.seq_len
        state = memory.model_state(stage) + min(memory.gradients(stage).during, memory.gradients(stage).after)
        activations = memory.activations(stage, size, length)
        caches = np.broadcast_to(memory.kv_cache(stage, size, seq_len, self._slices > 1), size.shape)
        one = state + activations[0] + caches[0]
        whole = state + float((activations * self._times).sum() + (caches * self._times)[:: self._slices].sum())
        return float(one), max(float(one), whole)

    def step_time(self, order: Order, boundaries: tuple[int, ...], limit: float) -> float:
        """Seconds that a step takes at least, with what comes once per step.

        Args:
            order: Whether weight halves of backwards wait, and where stages are placed.
            boundaries: The layers of the stages, as in ``Plan.boundaries``.
            limit: If the busiest rank alone takes longer, that is the answer, and the rest is not computed.
        """
        stages, pp, split = _stages(boundaries, order.placement, self._pp), self._pp, order.deferred
        kinds = [self._of(spec) for spec in stages.kinds]
        device, issued = (np.array([getattr(each, side) for each in kinds]) for side in ("device", "issued"))
        # A rank's device and its host work at the same time.
        bound = float(max((stages.counts @ device).max(), (stages.counts @ issued).max()))
        once = max(map(self._evaluator.once, stages.ends))
        if bound + once >= limit:
            return bound + once
        forward, backward = (
            np.array(each) for each in zip(*((kind.first_forward, kind.backward(split)) for kind in kinds), strict=True)
        )
        last = stages.counts[pp - 1]
        waiting = (
            float(last @ [kind.weights for kind in kinds]) if split else 0.0
        )  # may be done while gradients go back
        around = float(stages.others @ forward + last @ device) + max(0.0, float(stages.others @ backward) - waiting)
        final = kinds[stages.final]
        through = stages.counts.sum(axis=0) @ (forward + backward) - final.first_forward - final.backward(split)
        return max(bound, around, float(through) + final.microbatch(split)) + once

    def _of(self, spec: StageSpec) -> "_StageWork":
        if spec not in self._kinds:
            size, length, context = self._columns
            forward = self._cost.forward(spec, size, length, context)
            backward = self._cost.backward(spec, size, length, context)
            weights = np.minimum(self._cost.weights(spec, size, length), backward)
            issued = float(self._times.sum()) * (self._host.of_forward(spec) + self._host.of_backward(spec))
            self._kinds[spec] = _StageWork(forward, backward, weights, self._times, self._slices, issued)
        return self._kinds[spec]


class _Stages(NamedTuple):
    """The stages of a pipeline by their kinds, of which there are few: what bounds need of them, for any times."""

    kinds: tuple[StageSpec, ...]
    counts: NDArray[np.float64]  # by rank and kind
    others: NDArray[np.float64]  # by kind, of the first stages of all ranks but the last
    final: int  # the kind of the last stage
    ends: tuple[tuple[StageSpec, ...], tuple[StageSpec, ...]]  # the stages of the first and of the last rank


@lru_cache(maxsize=4096)
def _stages(boundaries: tuple[int, ...], placement: str, pp: int) -> _Stages:
    specs = stage_specs(boundaries)
    ranks = [k % pp if placement == "loop" or k < pp else 2 * pp - 1 - k for k in range(len(specs))]
    kinds = tuple(dict.fromkeys(specs))
    counts = np.zeros((pp, len(kinds)))
    at = [kinds.index(spec) for spec in specs]
    np.add.at(counts, (ranks, at), 1.0)
    others = np.bincount(at[: pp - 1], minlength=len(kinds)).astype(np.float64)
    first, last = (tuple(spec for spec, rank in zip(specs, ranks, strict=True) if rank == end) for end in (0, pp - 1))
    return _Stages(kinds, counts, others, at[-1], (first, last))


class _StageWork:
    """The computations of one stage: seconds by slice, and sums of them that bounds are made of.

    Args:
        forward: Seconds on the device of each column's forward.
        backward: Of its whole backward.
        weights: Of its weight half.
        times: How often each column occurs in a batch.
        slices: Columns of the first microbatch.
        issued: Seconds in which the host issues all of them.
    """

    def __init__(
        self, forward: Array, backward: Array, weights: Array, times: Array, slices: int, issued: float
    ) -> None:
        self._forward, self._backward, self._weights, self._slices = forward, backward, weights, slices
        self.first_forward = float(forward[::slices].min())  # of the first slice of a microbatch
        self.device = float(((forward + backward) * times).sum())
        self.issued = issued
        self.weights = float((weights * times).sum())
        self._shortest = float(backward.min()), float((backward - weights).min())

    def backward(self, split: bool) -> float:
        """Seconds of its shortest backward, or of the shortest input half."""
        return self._shortest[split]

    def microbatch(self, split: bool) -> float:
        """Seconds of the shortest microbatch: its forwards, and its backwards or their input halves."""
        seconds = self._forward + self._backward - (self._weights if split else 0.0)
        return float(seconds.reshape(-1, self._slices).sum(axis=1).min())
