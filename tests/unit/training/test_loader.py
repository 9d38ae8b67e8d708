"""Every token is predicted once in an epoch, from the tokens before it, in an order that one number determines."""

from itertools import pairwise
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from terapipe.modeling.stage import IGNORE
from terapipe.training.config import DataConfig
from terapipe.training.data.loader import Batches, Packing
from terapipe.training.data.prepare import prepare
from terapipe.training.data.token_file import Origin, TokenFile, open_data
from tests.support.training_runs import PRESET, short_run

PACKINGS = get_args(Packing)
lengths = st.lists(st.integers(1, 9), min_size=1, max_size=8)
sizes = st.integers(1, 6)


def token_file(lengths: list[int]) -> TokenFile:
    """In memory, of documents so long; every token is its own place in the file."""
    file = TokenFile(Path("nowhere"), "<u2", 2**16, sum(lengths), len(lengths), Origin("", ""))
    starts = np.cumsum([0, *lengths[:-1]])
    vars(file).update(tokens=np.arange(sum(lengths), dtype=np.uint16), starts=starts)
    return file


def batches(lengths: list[int], tokens: int, packing: Packing, shuffle: bool = False, seed: int = 0) -> Batches:
    file = token_file(lengths)
    assume(packing == "padded" or file.num_tokens >= tokens)
    assume(packing != "padded" or max(lengths) > 1)
    return Batches(file, tokens, packing, shuffle, seed)


@pytest.mark.parametrize("packing", PACKINGS)
@settings(deadline=None)
@given(lengths, sizes, st.booleans())
def test_every_token_is_predicted_once(packing: Packing, lengths: list[int], tokens: int, shuffle: bool) -> None:
    data = batches(lengths, tokens, packing, shuffle)
    ids, labels, _ = data.read(0, len(data))[:3]
    counted = labels != IGNORE
    assert ids.shape == labels.shape == (len(data), tokens)
    assert ids.dtype == labels.dtype == torch.int64
    assert (labels[counted] == ids[counted] + 1).all()  # the next token
    starts = set(token_file(lengths).starts.tolist())
    last = sum(lengths) - 1 if packing == "padded" else min(sum(lengths) - 1, len(data) * tokens)
    wanted = [i for i in range(1, last + 1) if packing == "concat" or i not in starts]
    assert sorted(labels[counted].tolist()) == wanted
    if packing != "padded":
        assert sorted(ids.flatten().tolist()) == list(range(len(data) * tokens))


@settings(deadline=None)
@given(lengths, sizes)
def test_padded_sequences_hold_one_document(lengths: list[int], tokens: int) -> None:
    data = batches(lengths, tokens, "padded")
    ids, labels, documents = data.read(0, len(data))[:3]
    assert documents is None
    assert (labels != IGNORE).any(dim=1).all()
    edges = [0, *np.cumsum(lengths).tolist()]
    for row, label in zip(ids.tolist(), labels.tolist(), strict=True):
        start, stop = next((a, b) for a, b in pairwise(edges) if a <= row[0] < b)
        part = list(range(row[0], min(row[0] + tokens, stop)))
        assert (row[0] - start) % tokens == 0
        assert row == part + [0] * (tokens - len(part))
        assert label == [i + 1 if i + 1 < stop else IGNORE for i in part] + [IGNORE] * (tokens - len(part))


@settings(deadline=None)
@given(lengths, sizes, st.booleans())
def test_where_documents_begin(lengths: list[int], tokens: int, shuffle: bool) -> None:
    data = batches(lengths, tokens, "packed", shuffle)
    ids, _, documents = data.read(1, 2 * len(data))[:3]
    starts = set(token_file(lengths).starts.tolist())
    assert documents is not None
    for row, found in zip(ids.tolist(), documents, strict=True):
        assert found == tuple(place for place, token in enumerate(row) if place == 0 or token in starts)
    assert batches(lengths, tokens, "concat").documents(0, 1) is None


@pytest.mark.parametrize("packing", PACKINGS)
@settings(deadline=None)
@given(lengths, sizes, st.integers(0, 50), st.integers(0, 12), st.integers(0, 12))
def test_the_order_is_that_of_single_sequences(
    packing: Packing, lengths: list[int], tokens: int, first: int, some: int, more: int
) -> None:
    """However they are taken, over the ends of epochs too."""
    data = batches(lengths, tokens, packing, True, seed=3)
    whole = data.read(first, some + more)
    again = batches(lengths, tokens, packing, True, seed=3)
    parts = [again.read(first + some, more), again.read(first, some)][::-1]
    assert torch.equal(whole.ids, torch.cat([p.ids for p in parts]))
    assert torch.equal(whole.labels, torch.cat([p.labels for p in parts]))
    if packing == "packed":
        assert whole.documents == sum((p.documents or () for p in parts), ())


def test_epochs_and_seeds_differ() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        data = Batches(token_file([100]), 2, "concat", True, seed)
        return data.read(epoch * len(data), len(data)).ids[:, 0].tolist()

    drawn = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(one) == list(range(0, 100, 2)) for one in drawn)
    assert len({tuple(one) for one in [*drawn, sorted(drawn[0])]}) == 5
    assert drawn[1] == order(0, 1)
    plain = Batches(token_file([100]), 2, "concat", False, 0)
    assert plain.read(48, 4).ids[:, 0].tolist() == [96, 98, 0, 2]


def test_documents_are_told_without_reading_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("one")
    (tmp_path / "b.md").write_text("two")
    config = DataConfig(train=(str(tmp_path / "*.md"),), seq_len=8)
    prepare(config, tmp_path / "data")
    file = open_data(config, tmp_path / "data").train
    data = Batches(file, 8, "packed", True, 0)
    (tmp_path / "data" / "train" / "tokens.bin").unlink()
    assert data.documents(0, 2) == ((0, 4), (0, 4))
    with pytest.raises(FileNotFoundError):
        data.read(0, 1)


@pytest.mark.parametrize("packing", PACKINGS)
def test_no_sequence_at_all(packing: Packing) -> None:
    with pytest.raises(ValueError, match=rf"none of 4 tokens \({packing}\) in nowhere, which has 3 tokens in 3 doc"):
        Batches(token_file([1, 1, 1]), 4, packing, False, 0)


def test_a_token_out_of_range_is_named(tmp_path: Path) -> None:
    """It ended as an index error of an embedding, with a traceback."""
    config = short_run(tmp_path, PRESET)
    prepare(config.data, tmp_path / "data")
    file = open_data(config.data, tmp_path / "data").train
    damaged = np.memmap(file.folder / "tokens.bin", file.dtype, "r+")
    damaged[20] = 9999
    damaged.flush()
    batches = Batches(TokenFile.open(file.folder), 16, "concat", False, 0)
    assert batches.read(0, 1).ids.max() < 257
    said = r"tokens\.bin must be below the vocabulary of 257, the one at place 20 is 9999; the file is damaged"
    with pytest.raises(ValueError, match=said):
        batches.read(1, 1)
