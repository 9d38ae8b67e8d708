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

from functools import cached_property

import numpy as np

from terapipe.planning.cost import Array, StageSpec, by_side, stage_specs
from terapipe.planning.order import Order
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

    @cached_property
    def least_bytes(self) -> float:
        """Bytes of some rank at least: an equal share of the layers, one slice, and its microbatch's KV cache."""
        memory, (size, length, _) = self._evaluator.memory, self._columns
        stage = StageSpec(max(1, self._evaluator.source.layers // self._pp))
        state = memory.model_state(stage) + min(memory.gradients(stage).during, memory.gradients(stage).after)
        tokens = float(size[0]), self._evaluator.request.seq_len
        cache = memory.kv_cache(stage, *tokens)
        return float(state + cache + memory.activations(stage, size[:1], length[:1])[0])

    def step_time(self, order: Order, boundaries: tuple[int, ...], limit: float) -> float:
        """Seconds that a step takes at least, with what comes once per step.

        Args:
            order: Whether weight halves of backwards wait, and where stages are placed.
            boundaries: The layers of the stages, as in ``Plan.boundaries``.
            limit: If the busiest rank alone takes longer, that is the answer, and the rest is not computed.
        """
        specs, pp = stage_specs(boundaries), self._pp
        ranks = [k % pp if order.placement == "loop" or k < pp else 2 * pp - 1 - k for k in range(len(specs))]
        work = [self._of(spec) for spec in specs]
        busy = (np.bincount(ranks, [getattr(each, side) for each in work]) for side in ("device", "issued"))
        once = self._once(specs, ranks)
        bound = max(float(seconds.max()) for seconds in busy)  # a rank's device and its host work at the same time
        if bound + once >= limit:
            return bound + once
        last = [k for k in range(len(specs)) if ranks[k] == pp - 1]
        there = sum(each.first_forward for each in work[: pp - 1])
        back = sum(each.backward(order.deferred) for each in work[: pp - 1])
        waiting = sum(work[k].weights for k in last) if order.deferred else 0.0  # may be done while gradients go back
        around = there + sum(work[k].device for k in last) + max(0.0, back - waiting)
        through = sum(each.first_forward + each.backward(order.deferred) for each in work[:-1])
        return max(bound, around, through + work[-1].microbatch(order.deferred)) + once

    def _once(self, specs: tuple[StageSpec, ...], ranks: list[int]) -> float:
        """The work once per step of the first and of the last rank, whichever takes longer."""
        stages = (
            tuple(spec for spec, rank in zip(specs, ranks, strict=True) if rank == end) for end in (0, self._pp - 1)
        )
        return max(map(self._evaluator.cost.per_step, stages))

    def _of(self, spec: StageSpec) -> "_StageWork":
        if spec not in self._kinds:
            size, length, context = self._columns
            forward = self._cost.forward(spec, size, length, context)
            backward = self._cost.backward(spec, size, length, context)
            weights = np.minimum(self._cost.weights(spec, size, length), backward)
            issued = float(self._times.sum()) * (self._host.of_forward(spec) + self._host.of_backward(spec))
            self._kinds[spec] = _StageWork(forward, backward, weights, self._times, self._slices, issued)
        return self._kinds[spec]


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
