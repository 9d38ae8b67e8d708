"""Compares all orders, each with its best plan, on the same devices."""

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
    """The best plan of every order, all in the layout that is fixed or that the planner would choose.

    If no plan of an order fits the memory budget, the one with the smallest peak is returned, with ``fits`` False.
    """
    if request.order or request.fixed_slices or request.chunks or request.distinct:
        raise ValueError(
            "a comparison tries all orders and slicings; leave out order, num_slices, slice_lengths, chunks "
            "and distinct"
        )
    layout = best_by_order(candidates(source, request), source, request)[0].layout
    pool = candidates(source, request.fixed(dp=layout.dp, pp=layout.pp, tp=layout.tp))
    rows = [(name, estimate) for order in ORDERS.values() for name, estimate in _rows(pool, order) if estimate]
    if layout.pp == 1:  # all orders are the same then, and refinement may have merged the slices: one row per title
        return list({estimate.title: estimate for _, estimate in reversed(rows)}.values())[::-1]
    return [replace(estimate, name=name) for name, estimate in rows]


def _rows(pool: list[Candidate], order: Order) -> Iterator[tuple[str, PlanEstimate | None]]:
    """The order by its name, with one stage per rank if it supports that, and for some orders a variant of it."""
    own = [c for c in pool if c.order == order.name]
    plain = [c for c in own if c.chunks == 1] or own
    if order.name == "terapipe":
        even = best_of(plain, order.name, even=True)
        yield "terapipe, equal slices", even and _refine_even(plain, even)
    whole = [c for c in own if c.count == 1]
    if order.sliced and order.chunks is None and 1 not in order.tried_chunks:
        yield f"{order.name}, whole sequences", best_of(whole, order.name)
        plain = [c for c in own if c.count > 1]
    best = best_of(plain, order.name)
    yield order.name, finish(plain, best) if best else None


def _refine_even(pool: Iterable[Candidate], start: PlanEstimate) -> PlanEstimate:
    """The best number of equal slices."""
    evaluator = next(c.evaluator for c in pool if c.evaluator.recompute == start.plan.recompute)
    request, plan = evaluator.request, start.plan

    def evaluated(count: int) -> PlanEstimate:
        lengths = uniform(request.seq_len, count, evaluator.tile)
        return evaluator.evaluate(evaluator.plan(plan.order, plan.sizes[0], lengths))

    return hill_climb(evaluated, len(plan.lengths[0]), request.seq_len // evaluator.tile)
