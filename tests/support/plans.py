"""Random plans for property-based tests."""

from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st

from terapipe import ORDERS, Plan
from tests import pretend


def examples(most: int) -> int:
    """How many to try: a third in `make test`, whose examples are always the same, and all in `make test-all`. On
    pretend GPUs, which are slow, half of that."""
    most = most // 2 if pretend.is_active() else most
    return most if settings.get_current_profile_name() == "explore" else most // 3


@st.composite
def plans(draw: st.DrawFn, max_ranks: int = 6, max_microbatches: int = 6, max_slices: int = 7) -> Plan:
    order = ORDERS[draw(st.sampled_from(sorted(ORDERS)))]
    chunks = order.chunks or draw(st.integers(1, 3))
    stages = draw(st.integers(1, max_ranks)) * chunks
    widths = draw(st.lists(st.integers(1, 2), min_size=stages, max_size=stages))
    if stages > 1 and draw(st.booleans()):  # the embedding alone, the head alone, or both
        ends = draw(st.sampled_from([(0,), (-1,), (0, -1)] if stages > 2 else [(0,), (-1,)]))
        for end in ends:
            widths[end] = 0
    boundaries = tuple(sum(widths[:k]) for k in range(stages + 1))
    microbatches = draw(st.integers(1, max_microbatches))
    tokens = draw(st.integers(1, 24))
    lengths = tuple(draw(slicings(tokens, max_slices)) if order.sliced else (tokens,) for _ in range(microbatches))
    sizes = tuple(draw(st.lists(st.integers(1, 2), min_size=microbatches, max_size=microbatches)))
    row = st.lists(st.booleans(), min_size=sum(map(len, lengths)), max_size=sum(map(len, lengths)))
    offload = draw(st.booleans() | st.lists(row | st.booleans(), min_size=stages, max_size=stages))
    return Plan(sizes, lengths, boundaries, order.name, chunks, draw(st.booleans()), offload, draw(st.booleans()))


@st.composite
def slicings(draw: st.DrawFn, tokens: int, most: int) -> tuple[int, ...]:
    """Any way to cut so many tokens into at most ``most`` slices."""
    cuts = draw(st.sets(st.integers(1, tokens - 1), max_size=most - 1)) if tokens > 1 else set()
    edges = [0, *sorted(cuts), tokens]
    return tuple(b - a for a, b in pairwise(edges))


def uniform(order: str, ranks: int, batch: int, slices: int = 1, chunks: int = 1) -> Plan:
    """One layer per stage, slices of four tokens."""
    return Plan.uniform(
        batch_size=batch,
        seq_len=slices * 4,
        num_slices=slices,
        boundaries=range(ranks * chunks + 1),
        order=order,
        chunks=chunks,
    )
