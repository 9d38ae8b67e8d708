"""The open question, for one's own model: every order at its best on the same devices, by time and by memory."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from terapipe.planning.order import ORDERS, Order
from terapipe.search.candidates import Candidate, candidates
from terapipe.search.choose import best_by_order, best_of, finish
from terapipe.search.cuts import uniform
from terapipe.search.evaluator import PlanEstimate
from terapipe.search.refine import hill_climb
from terapipe.search.request import Request
from terapipe.search.source import Source


def compare(source: Source, request: Request) -> list[PlanEstimate]:
    """One named choice for each way to run a step, all in the layout that is fixed or would be chosen.

    Each is the best of its kind that fits; where none does, the one with the smallest peak, marked as not fitting.
    """
    if request.order or request.fixed_slices or request.chunks or request.distinct:
        raise ValueError(
            "a comparison tries all orders and slicings; leave out order, num_slices, slice_lengths, chunks "
            "and distinct"
        )
    layout = best_by_order(candidates(source, request), source, request)[0].layout
    found = candidates(source, request.fixed(dp=layout.dp, pp=layout.pp, tp=layout.tp))
    rows = [(name, estimate) for order in ORDERS.values() for name, estimate in _rows(found, order) if estimate]
    if layout.pp == 1:  # orders are alike then, and refining may have ended with whole sequences
        return list({estimate.title: estimate for _, estimate in reversed(rows)}.values())[::-1]
    return [replace(estimate, name=name) for name, estimate in rows]


def _rows(found: list[Candidate], order: Order) -> Iterator[tuple[str, PlanEstimate | None]]:
    """Each order by its own name; with as few stages per rank as it takes."""
    mine = [c for c in found if c.order == order.name]
    plain = [c for c in mine if c.chunks == 1] or mine
    if order.name == "terapipe":
        even = best_of(plain, order.name, even=True)
        yield "terapipe, equal slices", even and _evenly(plain, even)
    whole = [c for c in mine if c.count == 1]
    if order.sliced and order.chunks is None and 1 not in order.tried_chunks:
        yield f"{order.name}, whole sequences", best_of(whole, order.name)
        plain = [c for c in mine if c.count > 1]
    yield order.name, _finished(plain, best_of(plain, order.name))


def _finished(found: Iterable[Candidate], choice: PlanEstimate | None) -> PlanEstimate | None:
    return finish(found, choice) if choice else None


def _evenly(found: Iterable[Candidate], choice: PlanEstimate) -> PlanEstimate:
    """The best number of equal slices."""
    evaluator = next(s.evaluator for s in found if s.evaluator.recompute == choice.plan.recompute)
    request, plan = evaluator.request, choice.plan

    def evaluated(count: int) -> PlanEstimate:
        lengths = uniform(request.seq_len, count, evaluator.tile)
        return evaluator.evaluate(evaluator.plan(plan.order, plan.sizes[0], lengths))

    return hill_climb(evaluated, len(plan.lengths[0]), request.seq_len // evaluator.tile)
