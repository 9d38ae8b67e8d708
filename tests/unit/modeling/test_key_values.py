"""How much of keys, values and their gradients is there at a time, and that nothing else is read."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from terapipe import SliceCache, attend
from terapipe.modeling.key_values import KeyValueStore
from terapipe.modeling.visibility import Bounds, oldest_key
from tests.support.plans import slicings

Starts = tuple[tuple[int, ...], ...]


def visible(tokens: int, window: int | None, chunk: int | None, starts: Starts) -> Tensor:
    """Which keys each token sees, token by token: (sequences, 1, tokens, tokens)."""
    seen = torch.zeros(2, 1, tokens, tokens, dtype=torch.bool)
    for row in range(2):
        for i in range(tokens):
            document = max(start for start in (starts[row] if starts else (0,)) if start <= i)
            first = document if chunk is None else i - (i - document) % chunk
            seen[row, 0, i, max(first, 0 if window is None else i - window + 1) : i + 1] = True
    return seen


def poison(cache: SliceCache) -> None:
    """Whatever is in memory that is used again must not matter."""
    for free in cache.gradient_room._free.values():
        for tensor in free:
            tensor.fill_(torch.nan)
    for store in cache._stores.values():
        if store._pair is not None:
            store._pair.fill_(torch.nan)


class Sliced:
    """Attention over slices, with its inputs and what their gradients must be."""

    def __init__(self, tokens: int, window: int | None, chunk: int | None, starts: Starts) -> None:
        generator = torch.Generator().manual_seed(tokens)
        shapes = [(2, 4, tokens, 4), (2, 2, tokens, 4), (2, 2, tokens, 4), (2, 4, tokens, 4)]
        *inputs, self.grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        self.limits = {"window": window, "chunk": chunk}
        self.inputs = [x.clone().requires_grad_() for x in inputs]
        truth = [x.clone().requires_grad_() for x in inputs]
        k, v = (x.repeat_interleave(2, 1) for x in truth[1:])
        scores = (truth[0] @ k.transpose(2, 3) / 2).masked_fill(~visible(tokens, window, chunk, starts), -torch.inf)
        self.out = scores.softmax(3) @ v
        self.wanted = torch.autograd.grad(self.out, truth, self.grad)
        self.cache = SliceCache(tokens)
        if starts:
            self.cache.set_documents(starts)

    def forward(self, start: int, length: int, *, forward_only: bool = False) -> Tensor:
        self.cache.begin(start, length, forward_only=forward_only)
        q, k, v = (x[:, :, start : start + length] for x in self.inputs)
        return attend(q, k, v, self.cache, "layer", **self.limits)

    def step(self, lengths: tuple[int, ...]) -> float:
        """The largest error of any gradient."""
        edges = [0, *accumulate(lengths)]
        for x in self.inputs:
            x.grad = None
        outs = [self.forward(start, length) for start, length in zip(edges, lengths, strict=False)]
        for start, length, out in reversed(list(zip(edges, lengths, outs, strict=False))):
            self.cache.begin(start, length)
            self.cache.backward(out, self.grad[:, :, start : start + length])
        self.cache.clear()
        errors = [(x.grad - g).abs().max() for x, g in zip(self.inputs, self.wanted, strict=True) if x.grad is not None]
        assert len(errors) == 3
        return torch.stack(errors).max().item()

    @torch.no_grad()
    def evaluate(self, lengths: tuple[int, ...]) -> float:
        """The largest error of the output, where nothing is kept for backwards."""
        edges = [0, *accumulate(lengths)]
        pairs = zip(edges, lengths, strict=False)
        outs = [self.forward(start, length, forward_only=True) for start, length in pairs]
        self.cache.clear()
        return (torch.cat(outs, 2) - self.out).abs().max().item()

    @property
    def store(self) -> KeyValueStore:
        return self.cache.store("layer")


@settings(max_examples=60, deadline=None)
@given(data=st.data(), tokens=st.integers(1, 24))
def test_any_window_chunk_slices_and_documents(data: st.DataObject, tokens: int) -> None:
    """Windows smaller than slices, as large, and larger; twice, over what others left in memory."""
    window = data.draw(st.none() | st.integers(1, tokens + 2))
    chunk = data.draw(st.none() | st.integers(1, tokens + 2))
    cuts = [data.draw(slicings(tokens, 4)) for _ in range(2)] if data.draw(st.booleans()) else []
    sliced = Sliced(tokens, window, chunk, tuple(tuple([0, *accumulate(row)][:-1]) for row in cuts))
    for _ in range(2):
        lengths = data.draw(slicings(tokens, 6))
        assert sliced.evaluate(lengths) < 1e-12  # NaN is not
        assert sliced.step(lengths) < 1e-12
        poison(sliced.cache)


def test_gradients_have_room_for_what_one_slice_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    make = KeyValueStore._room

    def note(self: KeyValueStore) -> Tensor:
        sizes.append(make(self).shape[2])
        return make(self)

    monkeypatch.setattr(KeyValueStore, "_room", note)
    sliced = Sliced(40, 5, None, ())
    assert sliced.step((4, 9, 2, 8, 3, 7, 7)) < 1e-12
    assert set(sizes) == {4}
    (free,) = sliced.cache.gradient_room._free.values()
    assert len(free) == 2  # one moves while the other is read


def test_gradients_that_nobody_needs_are_not_made() -> None:
    """Slices that end where chunks do see nothing of earlier slices."""
    sliced = Sliced(12, None, 4, ())
    assert sliced.step((4, 8)) < 1e-12
    assert not sliced.cache.gradient_room._free


def test_forwards_keep_what_later_slices_see() -> None:
    sliced, most = Sliced(40, 5, None, ()), 0
    sliced.evaluate((8,) * 5)
    assert sliced.store._pair is None  # after the last slice nothing is left
    with torch.no_grad():
        for start in range(0, 40, 8):
            sliced.forward(start, 8, forward_only=True)
            assert sliced.store._pair is not None
            most = max(most, sliced.store._pair.shape[2])
    assert most == 4 + 8


def test_a_cache_of_training_serves_evaluation_and_the_other_way_round() -> None:
    sliced = Sliced(20, 3, None, ())
    assert sliced.evaluate((6, 7, 7)) < 1e-12
    assert sliced.step((6, 7, 7)) < 1e-12
    pair = sliced.store._pair
    assert pair is not None
    assert pair.shape[2] == 20
    assert sliced.evaluate((5, 5, 10)) < 1e-12
    assert sliced.store._pair is pair
    assert sliced.step((5, 5, 10)) < 1e-12


def test_a_window_that_moves_without_what_it_had_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation that only windows longer than a slice can show."""
    monkeypatch.setattr(KeyValueStore, "take_over", lambda self, before, keys: None)
    assert Sliced(20, 4, None, ()).step((5, 5, 5, 5)) < 1e-12
    assert Sliced(20, 9, None, ()).step((5, 5, 5, 5)) > 1e-3


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 40), st.integers(1, 12), st.none() | st.integers(1, 12))
def test_bounds_hold_what_any_token_from_there_on_sees(place: int, window: int, chunk: int | None) -> None:
    seen = visible(60, window, chunk, ())[0, 0]
    first = min(int(seen[token].nonzero()[0]) for token in range(place, 60))
    oldest = oldest_key(place, window, chunk, has_documents=False)
    assert oldest == first
    assert oldest_key(place, window, chunk, has_documents=True) <= first
    bounds = Bounds.of(place, place + 3, window, chunk, has_documents=True)
    assert bounds.most is not None
    assert place - bounds.oldest <= bounds.most
