"""The open question, for one's own model: every order at its best on the same devices, by time and by memory."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from terapipe.search.candidates import Candidate, candidates
from terapipe.search.choose import best_by_order, best_of, finish
from terapipe.search.cuts import uniform
from terapipe.search.evaluator import PlanEstimate
from terapipe.search.refine import hill_climb
from terapipe.search.request import Request, Source


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
    return [replace(choice, name=name) for name, choice in _rows(found) if choice]


def _rows(found: list[Candidate]) -> Iterator[tuple[str, PlanEstimate | None]]:
    plain = [candidate for candidate in found if candidate.chunks == 1]
    yield "GPipe", best_of(found, "gpipe")
    yield "1F1B", best_of(found, "1f1b")
    yield "interleaved 1F1B", best_of([s for s in found if s.count == 1], "interleaved")
    even = best_of(plain, "terapipe", even=True)
    yield "TeraPipe, uniform", even and _evenly(plain, even)
    yield "TeraPipe, planned", _finished(plain, best_of(plain, "terapipe"))
    yield "TeraPipe, deferred", _finished(plain, best_of(plain, "terapipe-deferred"))
    yield "TeraPipe, folded", _finished(found, best_of(found, "terapipe-v"))
    yield "TeraPipe-1F1B", _finished(plain, best_of(plain, "terapipe-1f1b"))
    yield "TeraPipe, interleaved", _finished(found, best_of([s for s in found if s.count > 1], "interleaved"))


def _finished(found: Iterable[Candidate], choice: PlanEstimate | None) -> PlanEstimate | None:
    return finish(found, choice) if choice else None


def _evenly(found: Iterable[Candidate], choice: PlanEstimate) -> PlanEstimate:
    """The best number of equal slices."""
    evaluator = next(s.evaluator for s in found if s.evaluator.recompute == choice.plan.recompute)
    request, plan = evaluator.request, choice.plan

    def evaluated(count: int) -> PlanEstimate:
        lengths = uniform(request.seq_len, count, request.tile)
        return evaluator.evaluate(evaluator.plan(plan.order, plan.sizes[0], lengths))

    return hill_climb(evaluated, len(plan.lengths[0]), request.seq_len // request.tile)


def frontier(choices: Iterable[PlanEstimate]) -> list[PlanEstimate]:
    """Those that no other beats in both time and memory, fastest first."""
    kept: list[PlanEstimate] = []
    for choice in sorted(choices, key=lambda c: (c.step_time, c.peak_bytes)):
        if not kept or choice.peak_bytes < kept[-1].peak_bytes:
            kept.append(choice)
    return kept
