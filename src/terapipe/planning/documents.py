"""Packed documents: what they cost, and plans that cut each batch by the costs of its own documents."""

from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from math import isqrt
from typing import NamedTuple, Self, TypeVar

import numpy as np

from terapipe.planning.cost import Array, Cost, Ints, stage_specs
from terapipe.planning.limits import check_whole_number
from terapipe.planning.order import order_named
from terapipe.planning.presets import GPTConfig
from terapipe.planning.profile import nonnegative_fit
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
        """Counts FLOPs in place of seconds, where nothing was measured."""
        whole = config.layers * 2.0 * config.layer_parameters + config.head_flops(1)
        return cls._in_pairs(whole, 0.0, 0.0, config.layers * 4.0 * config.attention_width)

    @classmethod
    def _in_pairs(cls, token: float, fixed: float, behind: float, pair: float) -> Self:
        unit = max(pair, token / LARGEST) or 1.0
        return cls(max(1, round(token / unit)), round(fixed / unit), round(behind / unit))


def _seconds(cost: Cost, plan: Plan, size: int, length: Array, context: Array) -> Array:
    """Sums the seconds of slices over all stages."""
    stages = stage_specs(plan.boundaries)
    total = np.zeros_like(length)
    for stage in set(stages):
        seconds = cost.forward(stage, size, length, context) + cost.backward(stage, size, length, context)
        total = total + stages.count(stage) * seconds
    return total


Number = TypeVar("Number", int, Ints)

POINTS = 4096  # at most so many places where a sequence may be cut; more would cost time and gain nothing
STRETCH = 2  # slices may be so much longer than the plan's are on average, or as long as its longest
LEVELS = 64  # more than any plan has

# How many slices a batch is cut into. With work W, N slices that cost s each beside their work, and a bubble of b
# slices, a step takes about
#
#     W  +  N s  +  b W / N            least at  N = sqrt(b W / s)
#
# The plan has N0 slices for whole sequences, which are W0. Documents make W smaller, because a token sees only its own
# document, and N falls with the square root of W / s. Not every N is used: a *level* is a factor of sqrt(2) fewer
# slices, so few schedules are ever made. The level is log2 of (W0 / s0) / (W / s), rounded. For example, a plan has 16
# slices, and the documents of a batch are a quarter of the work of whole sequences: log2(4) = 2 levels, 8 slices.
#
# If the plan has fewer slices than sqrt(b W0 / s0), because of memory or because somebody wanted it so, it keeps them
# until they are too many: the level is then log2 of N0^2 / (b W / s). Both are whole numbers of whole numbers, so that
# all ranks round alike.


class DocumentPlanner:
    """Cuts batches by their documents, as ``plan`` cuts a batch of whole sequences. The same documents give the same
    plan on every rank, without messages.

    ::

        planner = tp.document_planner(best)  # what tp.plan returned
        loss = pipe.step(input_ids, labels, documents, plan=planner.plan_for(documents))

    A slice gets the share of its microbatch's costs that it has in ``plan``. If the plan's slices have equal lengths,
    every slice gets an equal share. The less work a batch is, the fewer slices it is cut into, in steps of a factor of
    about 1.4, so that few schedules are ever needed. For the sake of memory no slice is longer than the longest of
    ``plan``, or than twice its average.

    Args:
        plan: The plan for a batch of whole sequences.
        costs: What slices of packed documents cost.
        tile: Slice lengths are multiples of it, except that of a last slice.
    """

    def __init__(self, plan: Plan, costs: DocumentCosts, *, tile: int = 8) -> None:
        check_whole_number("tile", tile)
        if costs.token < 1 or costs.slice < 0 or costs.context < 0:
            raise ValueError(f"a token costs at least 1 pair, a slice and its context at least 0, got {costs}")
        self.plan, self.costs = plan, costs
        self._step = tile * -(-plan.seq_len // (tile * POINTS))
        self._edges: Ints = np.append(np.arange(0, plan.seq_len, self._step), plan.seq_len)
        self._cutters = [_Cutter(lengths, costs, self._edges, tile) for lengths in plan.lengths]
        self._whole_pairs = plan.batch_size * _pairs(plan.seq_len)

    def plan_for(self, documents: Sequence[Sequence[int]] | None) -> Plan:
        """The plan for a batch.

        Args:
            documents: For each sequence of the batch, the rising positions at which documents begin, 0 first. None or
                nothing: sequences are whole, and the plan is the planner's own.
        """
        if not documents:
            return self.plan
        self._check(documents)
        pairs = [self._pairs_before(row) for row in documents]
        counts = self.counts[self._level(sum(int(row[-1]) for row in pairs))]
        lengths, row = [], 0
        for size, num_slices, cutter in zip(self.plan.sizes, counts, self._cutters, strict=True):
            costs = self.costs.token * size * self._edges + np.sum(pairs[row : row + size], axis=0)
            lengths.append(cutter.lengths_for(costs, num_slices))
            row += size
        return self.plan.recut(tuple(lengths))

    @cached_property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """The slices of each microbatch that a batch may be cut into, from most to fewest."""
        levels = range(2 * max(map(len, self.plan.lengths)).bit_length() + 1)
        by_level = (tuple(c.num_slices_for(level, self._multiple) for c in self._cutters) for level in levels)
        return tuple(dict.fromkeys(by_level))

    @property
    def _multiple(self) -> int:
        """Several chunks of layers take slices in groups of as many as there are ranks. If the plan fills them, so do
        the plans that are made of it."""
        ranks = self.plan.num_ranks
        groups = self.plan.chunks > 1 and all(len(row) % ranks == 0 for row in self.plan.lengths)
        return ranks if groups else 1

    def _level(self, pairs: int) -> int:
        """The level of a batch with so many pairs: see the formula above."""
        (work, rise), (whole, whole_rise) = self._work(pairs), self._work(self._whole_pairs)
        bubble, per = self._bubble
        # ``_work`` has s as a multiple of 1 / unit. The unit cancels out in the first quotient, not in the second.
        unit = len(self.plan.sizes) * self.plan.seq_len
        fewer = _rounded_log2(whole * rise, work * whole_rise)
        too_many = _rounded_log2(len(self.plan.slices) ** 2 * rise * per, bubble * work * unit)
        return min(max(0, fewer), max(0, too_many), len(self.counts) - 1)

    def _work(self, pairs: int) -> tuple[int, int]:
        """W of a batch with so many pairs, and s times microbatches times tokens. A slice costs a constant, and what it
        pays for its context, which is pairs / tokens on average."""
        unit = len(self.plan.sizes) * self.plan.seq_len
        work = self.costs.token * self.plan.batch_size * self.plan.seq_len + pairs
        return work, self.costs.slice * unit + self.costs.context * pairs

    @cached_property
    def _bubble(self) -> tuple[int, int]:
        """How many slices a rank idles for, about: numerator and denominator."""
        order = Fraction(order_named(self.plan.order).bubble).limit_denominator(100)
        return (order * (self.plan.num_ranks - 1) / self.plan.chunks).as_integer_ratio()

    def _pairs_before(self, starts: Sequence[int]) -> Ints:
        """The pairs of a sequence's tokens up to each edge: those of whole documents, and of the one that is cut."""
        begin = np.array(starts, dtype=np.int64)
        before = np.concatenate(([0], np.cumsum(_pairs(np.diff(begin)))))
        document = np.searchsorted(begin, self._edges, side="right") - 1
        pairs: Ints = before[document] + _pairs(self._edges - begin[document])
        return pairs

    def _check(self, documents: Sequence[Sequence[int]]) -> None:
        batch, seq_len = self.plan.batch_size, self.plan.seq_len
        for row in documents if len(documents) == batch else ((),):
            if len(row) == 0 or row[0] != 0 or any(b <= a for a, b in pairwise([*row, seq_len])):
                raise ValueError(
                    f"documents must be, for each of the {batch} sequences, the rising places below {seq_len} where "
                    f"documents begin, 0 first, got {documents}"
                )


class _Cutter:
    """Cuts the sequences of one microbatch. Lengths are multiples of a step; an *edge* is where a slice may end."""

    def __init__(self, lengths: Sequence[int], costs: DocumentCosts, edges: Ints, tile: int) -> None:
        self._edges: list[int] = edges.tolist()
        equal = max(lengths) - min(lengths) < 2 * tile
        self._longest = max(max(lengths), STRETCH * int(edges[-1]) // len(lengths))
        # Costs up to the end of each slice of one whole document; or equal ones.
        ends = list(accumulate(lengths, initial=0))
        self._costs = [i if equal else costs.token * end + _pairs(end) for i, end in enumerate(ends)]

    @property
    def _most(self) -> int:
        """The longest slice, in steps of the grid."""
        return -(-self._longest // self._edges[1])

    def num_slices_for(self, level: int, multiple: int) -> int:
        """The plan's number divided by sqrt(2) ** level, rounded up to a multiple, as far as lengths permit."""
        own, points = len(self._costs) - 1, len(self._edges) - 1
        least = -(-3 * points // (2 * self._most))  # the average slice is shorter than the longest may be
        wanted = -(-max(least, _rounded_sqrt(own * own, 1 << level)) // multiple) * multiple
        return min(wanted, own, points)

    def lengths_for(self, costs: Ints, num_slices: int) -> tuple[int, ...]:
        """The lengths of so many slices, where ``costs`` are those up to each edge.

        From left to right, each slice gets its share of what is left, so what one cannot take because of its length is
        shared by all that follow it. Equal shares of a cost of 12, of which half is in the first quarter::

            edges    0     1     2     3     4
            costs    0     6     8    10    12
            cuts     |     |           |     |      of three slices: 12 / 3 = 4 is nearest to edge 1, 6 are spent;
                                                    6 / 2 = 3 more are 9, between edges 2 and 3
        """
        last = len(self._edges) - 1
        shares = [self._share(i, num_slices) for i in range(num_slices + 1)]
        cuts = [0]
        for i in range(1, num_slices):
            spent, left = int(costs[cuts[-1]]), num_slices - i
            share, rest = shares[i] - shares[i - 1], shares[-1] - shares[i - 1]
            wanted = _nearest(costs, spent + (int(costs[-1]) - spent) * share // rest)
            # What is left must suffice for the slices that are left, and must not be too much for them.
            low, high = max(cuts[-1] + 1, last - left * self._most), min(cuts[-1] + self._most, last - left)
            cuts.append(min(max(wanted, low), high))
        return tuple(self._edges[b] - self._edges[a] for a, b in pairwise([*cuts, last]))

    def _share(self, number: int, num_slices: int) -> int:
        """What the first ``number`` of ``num_slices`` slices have of all costs, up to a factor. Between ends of the
        plan's slices, of which there may be another number, costs are interpolated."""
        at, rest = divmod(number * (len(self._costs) - 1), num_slices)
        return self._costs[at] * (num_slices - rest) + (self._costs[at + 1] * rest if rest else 0)


def _nearest(costs: Ints, target: int) -> int:
    """The edge at which the costs are nearest to the target, at least 1."""
    above = max(1, int(np.searchsorted(costs, target)))
    return above - (target - int(costs[above - 1]) < int(costs[above]) - target)


def _pairs(n: Number) -> Number:
    """The pairs of a document of ``n`` tokens."""
    return n * (n + 1) // 2


def _rounded_sqrt(numerator: int, denominator: int) -> int:
    """The square root of a quotient, rounded to the nearest whole number."""
    return (isqrt(4 * numerator // denominator) + 1) // 2


def _rounded_log2(numerator: int, denominator: int) -> int:
    """log2 of a quotient x, rounded: the floor of log2(x) + 1/2, which is half of log2(2 x^2). ``LEVELS`` without a
    denominator; negative for 0.

    The floor of log2 of a quotient is the difference of the bit lengths, or one less: for 12 / 5 it is 4 - 3 = 1, for
    8 / 5 also 4 - 3 = 1, but 5 << 1 is more than 8, so it is 0.
    """
    if not denominator:
        return LEVELS
    above, below = 2 * numerator**2, denominator**2
    power = above.bit_length() - below.bit_length()
    reached = above >= below << power if power >= 0 else above << -power >= below
    return (power if reached else power - 1) >> 1
