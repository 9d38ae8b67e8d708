"""The open question, for one's own model: every order at its best on the same devices, by time and by memory."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from terapipe.search.choice import Choice
from terapipe.search.choose import best_of, candidates, finish
from terapipe.search.cuts import uniform
from terapipe.search.refine import climbed
from terapipe.search.request import Request, Source
from terapipe.search.seeds import Seed, seeds


def compare(source: Source, request: Request) -> list[Choice]:
    """One named choice for each way to run a step, all in the layout that is fixed or would be chosen.

    Each is the best of its kind that fits; where none does, the one with the smallest peak, marked as not fitting.
    """
    if request.order or request.fixed_slices or request.chunks or request.distinct:
        raise ValueError(
            "a comparison tries all orders and slicings; leave out order, num_slices, slice_lengths, chunks "
            "and distinct"
        )
    layout = candidates(seeds(source, request), source, request)[0].layout
    found = seeds(source, request.fixed(dp=layout.dp, pp=layout.pp, tp=layout.tp))
    return [replace(choice, name=name) for name, choice in _rows(found) if choice]


def _rows(found: list[Seed]) -> Iterator[tuple[str, Choice | None]]:
    plain = [seed for seed in found if seed.chunks == 1]
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


def _finished(found: Iterable[Seed], choice: Choice | None) -> Choice | None:
    return finish(found, choice) if choice else None


def _evenly(found: Iterable[Seed], choice: Choice) -> Choice:
    """The best number of equal slices."""
    bench = next(s.bench for s in found if s.bench.recompute == choice.plan.recompute)
    request, plan = bench.request, choice.plan

    def judged(count: int) -> Choice:
        lengths = uniform(request.seq_len, count, request.tile)
        return bench.judge(bench.plan(plan.order, plan.sizes[0], lengths))

    return climbed(judged, len(plan.lengths[0]), request.seq_len // request.tile)


def frontier(choices: Iterable[Choice]) -> list[Choice]:
    """Those that no other beats in both time and memory, fastest first."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.step_time, c.peak_bytes)):
        if not kept or choice.peak_bytes < kept[-1].peak_bytes:
            kept.append(choice)
    return kept
