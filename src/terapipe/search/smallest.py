"""Whether any plan fits into memory, and the longest sequences for which one does, without a search for the fastest.

Bytes are counted, nothing is simulated: a count takes milliseconds, a search seconds to minutes. What makes a plan
small is known, so few plans stand for all: the smallest microbatches, equal slices, the mode that recomputes most, and
where the request permits it everything offloaded. Only the number of slices is tried: what is computed at a time
shrinks with it, the rest does not, so two numbers of slices say what no number can get below::

    bytes
      | o                        limit = 2 * bytes(2n) - bytes(n)
      |    o
      |         o         o      if the limit is above the budget, more slices do not help, and neither do modes that
      | - - - - - - - - - - -    keep more: the next kind of plan is tried
      +------------------------- slices
        n   2n   4n       8n

``choose`` asks first whether anything fits, and refuses the request at once if these plans miss by more than ``NEAR``:
none of the others is so much smaller. ``longest`` ends where these plans end; the search may find a plan for a few
tokens more.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf

from terapipe.planning.recompute import MODES
from terapipe.planning.slices import Plan, even_lengths
from terapipe.search.candidates import Candidate
from terapipe.search.evaluator import Needs, PlanEstimate, PlanEvaluator
from terapipe.search.offload import may_offload_to_fit, offload_few, offload_share, with_keys_and_values

FIRST = 32  # slices to begin with, if there may be so many
MOST = 1 << 15  # computations of the largest plan to try
Name = tuple[bool, int]  # of a shape: whether stages have equally many layers; the place of what is offloaded
SAME = 0.98  # of the limit: what counting in tiles may change of it
NEAR = 1.2  # times what there is: plans that need so much may have smaller ones beside them, which nobody counted


@dataclass(frozen=True)
class Smallest:
    """The smallest plan of those that were tried, up to the first that fits."""

    evaluator: PlanEvaluator
    plan: Plan
    needs: Needs
    kind: "Kind"
    shape: "Name"

    @property
    def fits(self) -> bool:
        return self.evaluator.fits(self.needs)

    @property
    def excess(self) -> float:
        """What it needs in relation to what there is, on the device or in its host, whichever is scarcer."""
        device = self.needs.device / (self.evaluator.budget or inf)
        return max(device, self.needs.host / (self.evaluator.host_budget or inf))

    def estimate(self) -> PlanEstimate:
        """The same plan with its step time, which takes a simulation."""
        return self.evaluator.evaluate(self.plan)


@dataclass(frozen=True)
class Kind:
    """Plans of one layout and order with so many chunks. The rest follows from what makes a plan small."""

    evaluators: tuple[PlanEvaluator, ...]  # one for each mode of recomputation, the one that keeps least first
    order: str
    size: int  # sequences per microbatch, the fewest
    chunks: int
    counts: tuple[int, ...]  # numbers of slices to start from

    def smallest(self) -> Smallest:
        """The first plan that fits, or the smallest."""
        best: Smallest | None = None
        for evaluator in self.evaluators:
            hopeless = True
            for name, shape in self._shapes(evaluator).items():
                own, limit = self._with_more_slices(evaluator, name, shape)
                best = own if best is None or own.excess < best.excess else best
                if own.fits:
                    return own
                hopeless = hopeless and limit * SAME > (evaluator.budget or inf)
            if hopeless:
                break
        assert best is not None
        return best

    def fits_like(self, other: Smallest) -> bool:
        """Whether a plan with the same mode, ends of stages and offload fits as one for other sequences does.

        Args:
            other: The smallest plan of this kind for other sequences.
        """
        (evaluator,) = (each for each in self.evaluators if each.recompute == other.evaluator.recompute)
        shapes, (_, place) = self._shapes(evaluator), other.shape
        shape = shapes.get(other.shape) or shapes[False, place]  # stages of equal time have equally many layers here
        return self._with_more_slices(evaluator, other.shape, shape)[0].fits

    def _shapes(self, evaluator: PlanEvaluator) -> dict[Name, Plan]:
        """Plans of one slice each, for everything but slices: where stages end, and what is offloaded."""
        wish, shapes = evaluator.request.offload, dict[Name, Plan]()
        time = evaluator.plan(self.order, self.size, (evaluator.request.seq_len,), self.chunks)
        layers = replace(time, boundaries=evaluator.even_boundaries(self.chunks))
        for even, plain in enumerate(dict.fromkeys((time, layers))):
            plans = [plain]
            if isinstance(wish, float):
                plans = [replace(plain, offload_kv=bool(evaluator.request.offload_kv))]
            elif may_offload_to_fit(evaluator):
                variants = with_keys_and_values(evaluator, plans)
                plans = [replace(plan, offload=True) for group in variants for plan in group]
            shapes |= {(bool(even), place): plan for place, plan in enumerate(plans)}
        return shapes

    def _with_more_slices(self, evaluator: PlanEvaluator, name: Name, shape: Plan) -> tuple[Smallest, float]:
        """The plan with the number of slices that fits, or with the most that were tried; and the bytes that it cannot
        get below."""
        best, last, limit = None, (0, 0), 0.0
        for count in self._counts(evaluator, shape):
            own = self._evaluate(evaluator, name, shape, count)
            best = own if best is None or own.excess < best.excess else best
            if own.fits:
                break
            if 1 < last[0] < count:
                limit = (count * own.needs.device - last[0] * last[1]) / (count - last[0])
            if limit * SAME > (evaluator.budget or inf):
                break
            last = count, own.needs.device
        assert best is not None
        return best, limit

    def _counts(self, evaluator: PlanEvaluator, shape: Plan) -> Iterator[int]:
        """Numbers of slices: a whole sequence, then more and more slices; at least one, with however many stages."""
        most, microbatches = evaluator.request.seq_len // evaluator.tile, -(-evaluator.batch_size // self.size)
        if max(self.counts) < FIRST or evaluator.request.fixed_slices:
            yield from sorted(self.counts)
            return
        work = 2 * shape.num_stages * min(microbatches, 8)  # computations for each slice of a sequence
        if 1 in self.counts or FIRST * work > MOST:
            yield min(self.counts)
        count = FIRST
        while count <= most and (count * work <= MOST or count <= 2 * FIRST):  # two say what no number can get below
            yield count
            count *= 2

    def _evaluate(self, evaluator: PlanEvaluator, name: Name, shape: Plan, count: int) -> Smallest:
        """The plan with so many slices. If it fits with everything offloaded, as few as necessary are."""
        request = evaluator.request
        lengths = request.slice_lengths or even_lengths(
            request.seq_len, count, 1 if request.num_slices is not None else evaluator.tile
        )
        plan = replace(shape, lengths=(tuple(lengths),) * len(shape.sizes))
        if isinstance(request.offload, float):
            plan = offload_share(plan, request.offload)
        needs = evaluator.needs(plan)
        if plan.offload is True and needs.device <= (evaluator.budget or inf):
            plan = offload_few(evaluator, replace(plan, offload=False))
            needs = evaluator.needs(plan)
        return Smallest(evaluator, plan, needs, self, name)

    def of(self, pool: list[Candidate]) -> "Kind | None":
        """The same kind for other sequences, or None if they have none.

        Args:
            pool: The candidates for these sequences.
        """
        same = (kind for kind in kinds_of(pool) if kind.key == self.key)
        return next(same, None)

    @property
    def key(self) -> tuple[object, ...]:
        return self.evaluators[0].layout, self.order, self.chunks


def kinds_of(pool: list[Candidate]) -> list[Kind]:
    """The kinds of plans that there are candidates of, the one that probably needs least memory first.

    Args:
        pool: All candidates.
    """
    groups: dict[tuple[object, ...], list[Candidate]] = {}
    for c in pool:
        groups.setdefault((c.evaluator.layout, c.order, c.chunks), []).append(c)
    kinds = []
    for group in sorted(groups.values(), key=lambda group: min(c.peak for c in group)):
        by_mode = {c.evaluator.recompute: c.evaluator for c in group}
        modes = sorted(by_mode, key=MODES.index, reverse=True)
        size, counts = min(c.size for c in group), tuple({c.count for c in group})
        kinds.append(Kind(tuple(by_mode[mode] for mode in modes), group[0].order, size, group[0].chunks, counts))
    return kinds


def smallest(pool: list[Candidate]) -> Smallest:
    """A plan that fits, or if there is none, the smallest.

    Args:
        pool: All candidates, at least one.
    """
    best: Smallest | None = None
    for kind in kinds_of(pool):
        own = kind.smallest()
        if own.fits:
            return own
        best = own if best is None or own.excess < best.excess else best
    assert best is not None
    return best


def longest(candidates_for: Callable[[int], list[Candidate]], most: int) -> int:
    """The largest number of blocks of tokens for which a plan fits, to 2 %; 0 if none does even for one.

    The plan that fits is followed as far as it goes, by bisection; then all are asked for the next length::

        all, 1 block      plan A fits 1, 2, 4, ... 512, not 1024, ... at last 610
        all, 622          plan B fits, ... at last 700
        all, 714          none: the answer is 700

    Args:
        candidates_for: Makes the candidates for so many blocks.
        most: Blocks to try at most.
    """
    blocks = 0
    while blocks < most:
        own = smallest(candidates_for(step := min(most, blocks + max(1, blocks // 50))))
        if not own.fits:
            break
        blocks = _longest_like(own, candidates_for, step, most)
    return blocks


def _longest_like(one: Smallest, candidates_for: Callable[[int], list[Candidate]], fits: int, most: int) -> int:
    """How many blocks fit with plans like this one, to 2 %."""

    def fit(blocks: int) -> bool:
        own = one.kind.of(candidates_for(blocks))
        return own is not None and own.fits_like(one)

    while 2 * fits <= most and fit(2 * fits):
        fits *= 2
    too_many = min(2 * fits, most + 1)
    while too_many - fits > max(1, fits // 50):
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if fit(middle) else (fits, middle)
    return fits
