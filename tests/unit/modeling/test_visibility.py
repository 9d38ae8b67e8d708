"""What a slice sees, as segments, and cut into blocks: each pair of tokens in exactly one block."""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terapipe import SliceCache
from terapipe.modeling.visibility import Block, Visibility
from tests.support.plans import slicings


def covered(seen: Visibility, sequences: int, largest: tuple[int, int] | None) -> torch.Tensor:
    """How many blocks each pair of a token and a key is in."""
    count = torch.zeros(sequences, seen.length, seen.end, dtype=torch.int64)
    for block in seen.blocks(largest):
        rows, keys = block.rows.stop - block.rows.start, block.keys.stop - block.keys.start
        shape = torch.ones(rows, keys, dtype=torch.int64)
        if block.shape != "full":
            assert rows == keys, "triangles are halves of squares"
            shape = shape.tril() if block.shape == "lower" else shape.triu()
        count[block.sequences, block.rows, block.keys] += shape
        assert largest is None or (rows <= largest[0] and keys <= largest[1])
    return count


def wanted(
    context: int, length: int, starts: tuple[tuple[int, ...], ...], window: int | None, chunk: int | None
) -> torch.Tensor:
    rows = []
    for row in starts or ((0,),):
        places = torch.arange(context + length)
        begins = torch.tensor(row)
        document = begins[torch.searchsorted(begins, places, right=True) - 1]
        i, j = places[context:, None], places[None]
        seen = (j <= i) & (document[context:, None] == document[None])
        if window is not None:
            seen &= i - j < window
        if chunk is not None:
            number = (places - document) // chunk
            seen &= number[context:, None] == number[None]
        rows.append(seen.long())
    return torch.stack(rows)


@settings(max_examples=300)
@given(
    data=st.data(),
    context=st.integers(0, 40),
    length=st.integers(1, 30),
    window=st.none() | st.integers(1, 50),
    chunk=st.none() | st.integers(1, 50),
    largest=st.none() | st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_each_pair_is_in_one_block(
    data: st.DataObject, context: int, length: int, window: int | None, chunk: int | None,
    largest: tuple[int, int] | None,
) -> None:  # fmt: skip
    seq_len = context + length
    cuts = [data.draw(slicings(seq_len, 5)) for _ in range(data.draw(st.integers(1, 2)))]
    starts = tuple(tuple([0, *accumulate(row)][:-1]) for row in cuts)
    cache = SliceCache(seq_len + 3)
    cache.set_documents(starts)
    cache.begin(context, length)
    seen = cache.visibility(window, chunk)
    truth = wanted(context, length, starts, window, chunk)
    assert torch.equal(covered(seen, len(starts), largest), truth)
    oldest = min(s.first_key(window) for s in seen.segments)
    assert not truth[:, :, :oldest].any(), "no key before the first one is seen"


def test_windows_need_few_blocks() -> None:
    """A tile of the slice with itself, and the triangle that its rows see of the tile before."""
    cache = SliceCache(8192)
    cache.begin(4096, 1024)
    assert cache.visibility(window=512).blocks() == (
        Block(slice(0, 512), slice(4096, 4608), "lower"),
        Block(slice(0, 511), slice(3585, 4096), "upper"),
        Block(slice(512, 1024), slice(4608, 5120), "lower"),
        Block(slice(512, 1023), slice(4097, 4608), "upper"),
    )
    wide = cache.visibility(window=3000).blocks()
    assert [b.shape for b in wide] == ["lower", "full", "upper"]


def test_segments_follow_each_other_without_gaps() -> None:
    """Kernels for segments of variable length count on it, in rows and in keys."""
    cache = SliceCache(100)
    cache.set_documents(((0, 13, 37, 50, 80),))
    for context, length in pairwise([0, 10, 13, 40, 77, 100]):
        cache.begin(context, length - context)
        for window, chunk in ((None, None), (7, None), (None, 9)):
            found = cache.visibility(window, chunk).segments
            assert found[0].first == context
            assert found[-1].last == length
            assert all(a.last == b.first == b.start for a, b in pairwise(found))


@pytest.mark.parametrize("limits", [{"window": 0}, {"chunk": 0}, {"window": -3}])
def test_limits_are_numbers_of_tokens(limits: dict[str, int]) -> None:
    from terapipe import attend

    x = torch.zeros(1, 1, 4, 8)
    cache = SliceCache(4)
    cache.begin(0, 4)
    with pytest.raises(ValueError, match="at least 1, got"):
        attend(x, x, x, cache, 0, **limits)  # type: ignore[arg-type]


def test_what_a_slice_sees_is_worked_out_once_for_all_layers() -> None:
    cache = SliceCache(10)
    cache.begin(2, 4)
    assert cache.visibility(3) is cache.visibility(3)
    before = cache.visibility(3)
    cache.set_documents(((0, 4),))
    assert cache.visibility(3) is not before
