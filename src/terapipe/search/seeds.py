"""Where the search begins: every layout, order, microbatch and number of slices, by a formula that costs nothing."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from terapipe.planning.cost import Part, parts
from terapipe.planning.order import ORDERS, InFlight, Order, order_named
from terapipe.search.choice import Bench
from terapipe.search.request import Request, Source, layouts

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class Seed:
    """``estimate`` is the formula's step time, ``peak`` a rough count of bytes: both only say what to look at first."""

    estimate: float
    peak: float
    bench: Bench
    order: str
    size: int
    count: int
    chunks: int

    @property
    def hopeless(self) -> bool:
        """Whether it is too large even if the rough count is wrong by a factor of two."""
        budget = self.bench.budget
        return budget is not None and self.peak > 2 * budget

    @property
    def work(self) -> int:
        """Computations in one step: what simulating it once costs."""
        microbatches = -(-self.bench.batch_size // self.size)
        return 2 * microbatches * self.count * self.bench.layout.pp * self.chunks


def seeds(source: Source, request: Request) -> list[Seed]:
    """All of them, the most promising first."""
    found: list[Seed] = []
    for layout in layouts(source, request):
        for recompute in (False, True) if request.recompute is None else (request.recompute,):
            found += _of_bench(Bench(source, request, layout, recompute))
    return sorted(found, key=lambda seed: (seed.estimate, seed.count, seed.chunks))


def _of_bench(bench: Bench) -> Iterator[Seed]:
    request, kinds = bench.request, set(parts(bench.boundaries()))
    once = max(bench.cost.once([part]) for part in kinds)
    static = max(bench.memory.static(part) for part in kinds)
    for size in _sizes(bench):
        microbatches = -(-bench.batch_size // size)
        whole = _held(bench, size)
        for count in _counts(request):
            lengths = _even(request, count)
            t = bench.seconds(size, lengths, np.cumsum(lengths) - lengths)
            work = float(t.sum()) * microbatches
            for order, chunks in _orders(bench, count):
                bubble = (bench.layout.pp - 1) * float(t.mean()) / chunks * order.bubble
                peak = static + whole * order.in_flight(InFlight(microbatches, count, bench.layout.pp, chunks))
                yield Seed(work + bubble + once, peak, bench, order.name, size, count, chunks)


def _even(request: Request, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    if request.slice_lengths is not None:
        return np.array(request.slice_lengths, dtype=np.float64)
    return np.full(count, request.seq_len / count)


def _sizes(bench: Bench) -> list[int]:
    fixed = bench.request.microbatch_size
    if fixed is not None:
        if fixed > bench.batch_size:
            raise ValueError(
                f"a microbatch of {fixed} sequences does not fit into a replica's batch of {bench.batch_size}; "
                "lower microbatch_size or dp"
            )
        return [fixed]
    return [size for size in (2**i for i in range(20)) if size <= bench.batch_size]


def _counts(request: Request) -> list[int]:
    if request.slice_lengths is not None:
        return [len(request.slice_lengths)]
    if request.num_slices is not None:
        return [request.num_slices]
    return [n for n in COUNTS if n * request.tile <= max(request.seq_len, request.tile)]


def _orders(bench: Bench, count: int) -> Iterator[tuple[Order, int]]:
    request, pp = bench.request, bench.layout.pp
    for order in [order_named(request.order)] if request.order else ORDERS.values():
        if not order.sliced and count > 1:
            continue
        if request.order is None and order.unsliced_twin and count == 1:
            continue
        for chunks in _chunks(order, request):
            if pp * chunks <= bench.source.layers and (chunks == 1 or pp > 1):
                yield order, chunks


def _chunks(order: Order, request: Request) -> tuple[int, ...]:
    """Per rank: what the order takes, what is asked for, or else what is worth a try."""
    if order.chunks is not None:
        return (order.chunks,) if request.chunks in (None, order.chunks) else ()
    return order.tried_chunks if request.chunks is None else (request.chunks,)


def _held(bench: Bench, size: int) -> float:
    """Bytes of one whole microbatch on one rank."""
    part = Part(-(-bench.source.layers // bench.layout.pp))
    seq_len = bench.request.seq_len
    kept = bench.memory.kept(part, float(size), float(seq_len)) + bench.memory.cache(part, float(size), seq_len)
    return float(kept)
