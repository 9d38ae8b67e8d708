"""Packed documents: what they cost, and plans that cut each batch by the costs of its own documents."""

from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from math import isqrt
from typing import NamedTuple, Self, TypeVar

import numpy as np

from terapipe.planning.bounds import Ints
from terapipe.planning.cost import Array, Cost, stage_specs
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


Number = TypeVar("Number", int, Ints)

POINTS = 4096  # at most so many places where a sequence may be cut; more would cost time and gain nothing
STRETCH = 2  # slices may be so much longer than the plan's are on average, or as long as its longest
LEVELS = 64  # more than any plan has


class DocumentPlanner:
    """Cuts batches by their documents, as ``plan`` cuts a batch of whole sequences. The same documents give the same
    plan on every rank, without messages.

    ::

        planner = tp.document_planner(best)  # what tp.plan returned
        loss = pipe.step(input_ids, labels, documents, plan=planner.plan_for(documents))

    A slice gets the share of its microbatch's costs that it has in ``plan``; slices of equal length in ``plan`` say
    nothing of costs, and get equal shares. The less work a batch is, the fewer slices it is cut into, in steps of a
    factor of about 1.4, so that few schedules are ever needed. For the sake of memory no slice is longer than the
    longest of ``plan``, or than twice its average.
    """

    def __init__(self, plan: Plan, costs: DocumentCosts, *, tile: int = 8) -> None:
        """``tile``: slice lengths are multiples of it, except that of a last slice."""
        check_whole_number("tile", tile)
        if costs.token < 1 or costs.slice < 0 or costs.context < 0:
            raise ValueError(f"a token costs at least 1 pair, a slice and its context at least 0, got {costs}")
        self.plan, self.costs = plan, costs
        self._step = tile * -(-plan.seq_len // (tile * POINTS))
        self._edges: Ints = np.append(np.arange(0, plan.seq_len, self._step), plan.seq_len)
        self._schemes = [_Scheme(lengths, costs, self._edges, tile) for lengths in plan.lengths]
        self._whole = plan.batch_size * _triangle(plan.seq_len)  # pairs

    def plan_for(self, documents: Sequence[Sequence[int]] | None) -> Plan:
        """The plan for a batch. ``documents`` are the places where documents begin in each of its sequences."""
        if not documents:
            return self.plan
        pairs = [self._pairs_before(row) for row in self._checked(documents)]
        counts = self.counts[self._level(sum(int(row[-1]) for row in pairs))]
        lengths, row = [], 0
        for size, count, scheme in zip(self.plan.sizes, counts, self._schemes, strict=True):
            costs = self.costs.token * size * self._edges + np.sum(pairs[row : row + size], axis=0)
            lengths.append(scheme.cut(costs, count))
            row += size
        return self.plan.recut(tuple(lengths))

    @cached_property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """The slices of each microbatch that a batch may be cut into, from most to fewest."""
        found: list[tuple[int, ...]] = []
        for level in range(2 * max(map(len, self.plan.lengths)).bit_length() + 1):
            counts = tuple(scheme.count(level, self._multiple) for scheme in self._schemes)
            if counts not in found:
                found.append(counts)
        return tuple(found)

    @property
    def _multiple(self) -> int:
        """Several chunks of layers take slices in groups of as many as there are ranks. If the plan fills them, so do
        the plans that are made of it."""
        ranks = self.plan.num_ranks
        groups = self.plan.chunks > 1 and all(len(row) % ranks == 0 for row in self.plan.lengths)
        return ranks if groups else 1

    def _level(self, pairs: int) -> int:
        """By how many factors of the square root of 2 a batch with so many pairs has fewer slices than the plan.

        A step takes about W + N s + b W / N with work W, N slices that cost s each, and a bubble of b slices. The best
        N^2 is b W / s. If the plan is the best for whole sequences, N^2 falls as W / s does; if the plan has fewer
        slices than that, because of memory or because somebody wanted it so, only when they are too many.
        """
        (work, rise), (whole, whole_rise) = self._work(pairs), self._work(self._whole)
        too_many = len(self.plan.slices) ** 2 * rise, self._bubble * work
        return min(
            max(0, _rounded_log2(whole * rise, work * whole_rise)),
            max(0, _rounded_log2(*too_many)),
            len(self.counts) - 1,
        )

    def _work(self, pairs: int) -> tuple[Fraction, Fraction]:
        """The cost of a batch with so many pairs, and by how much it rises with every slice."""
        microbatches, seq_len = len(self.plan.sizes), self.plan.seq_len
        rise = self.costs.slice + Fraction(self.costs.context * pairs, microbatches * seq_len)
        return Fraction(self.costs.token * self.plan.batch_size * seq_len + pairs), rise

    @cached_property
    def _bubble(self) -> Fraction:
        """How many slices a rank idles for, about."""
        bubble = Fraction(order_named(self.plan.order).bubble).limit_denominator(100)
        return bubble * (self.plan.num_ranks - 1) / self.plan.chunks

    def _pairs_before(self, starts: Sequence[int]) -> Ints:
        """Of a sequence's tokens up to each edge."""
        begin = np.array(starts, dtype=np.int64)
        before = np.concatenate(([0], np.cumsum(_triangle(np.diff(begin)))))
        document = np.searchsorted(begin, self._edges, side="right") - 1
        found: Ints = before[document] + _triangle(self._edges - begin[document])
        return found

    def _checked(self, documents: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        batch, seq_len = self.plan.batch_size, self.plan.seq_len
        for row in documents if len(documents) == batch else ((),):
            if len(row) == 0 or row[0] != 0 or any(b <= a for a, b in pairwise([*row, seq_len])):
                raise ValueError(
                    f"documents must be, for each of the {batch} sequences, the rising places below {seq_len} where "
                    f"documents begin, 0 first, got {documents}"
                )
        return documents


class _Scheme:
    """How the sequences of one microbatch are cut."""

    def __init__(self, lengths: Sequence[int], costs: DocumentCosts, edges: Ints, tile: int) -> None:
        self._edges: list[int] = edges.tolist()
        equal = max(lengths) - min(lengths) < 2 * tile
        self._longest = max(max(lengths), STRETCH * int(edges[-1]) // len(lengths))
        # Costs up to the end of each slice of one whole document; or equal ones.
        ends = list(accumulate(lengths, initial=0))
        self._costs = [i if equal else costs.token * end + _triangle(end) for i, end in enumerate(ends)]

    @property
    def _most(self) -> int:
        """The longest slice, in steps of the grid."""
        return -(-self._longest // self._edges[1])

    def count(self, level: int, multiple: int) -> int:
        own, points = len(self._costs) - 1, len(self._edges) - 1
        least = -(-3 * points // (2 * self._most))  # the average slice is shorter than the longest may be
        wanted = -(-max(least, _rounded_sqrt(own * own, 1 << level)) // multiple) * multiple
        return min(wanted, own, points)

    def cut(self, costs: Ints, count: int) -> tuple[int, ...]:
        """The lengths of ``count`` slices, where ``costs`` are those up to each edge. What one slice cannot have of its
        share, because of its length, all that follow it share."""
        last = len(self._edges) - 1
        shares = [self._share(i, count) for i in range(count + 1)]
        cuts = [0]
        for i in range(1, count):
            spent, left = int(costs[cuts[-1]]), count - i
            share = shares[i] - shares[i - 1], shares[-1] - shares[i - 1]
            wanted = _nearest(costs, spent + (int(costs[-1]) - spent) * share[0] // share[1])
            # What is left must suffice for the slices that are left, and must not be too much for them.
            low, high = max(cuts[-1] + 1, last - left * self._most), min(cuts[-1] + self._most, last - left)
            cuts.append(min(max(wanted, low), high))
        return tuple(self._edges[b] - self._edges[a] for a, b in pairwise([*cuts, last]))

    def _share(self, number: int, count: int) -> int:
        """What the first ``number`` of ``count`` slices have of all costs, up to a factor. Between ends of the plan's
        slices, of which there may be another number, costs are interpolated."""
        at, rest = divmod(number * (len(self._costs) - 1), count)
        return self._costs[at] * (count - rest) + (self._costs[at + 1] * rest if rest else 0)


def _nearest(costs: Ints, target: int) -> int:
    above = max(1, int(np.searchsorted(costs, target)))
    return above - (target - int(costs[above - 1]) < int(costs[above]) - target)


def _triangle(n: Number) -> Number:
    """The pairs of a document of ``n`` tokens."""
    return n * (n + 1) // 2


def _rounded_sqrt(numerator: int, denominator: int) -> int:
    return (isqrt(4 * numerator // denominator) + 1) // 2


def _rounded_log2(numerator: Fraction, denominator: Fraction) -> int:
    """Of the quotient: the floor of log2(2 x^2) / 2, which is that of log2(x) + 1/2. Large for one without end."""
    if not denominator:
        return LEVELS
    square = 2 * (numerator / denominator) ** 2
    above, below = square.numerator, square.denominator
    power = above.bit_length() - below.bit_length()
    reached = above >= below << power if power >= 0 else above << -power >= below
    return (power if reached else power - 1) >> 1
