"""Sequences from a token file. Which ones come next is a pure function of one number, so a run can go on anywhere."""

from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terapipe.modeling.stage import IGNORE
from terapipe.training.data.token_file import TOKENS, TokenFile

Packing = Literal["concat", "packed", "padded"]
Documents = tuple[tuple[int, ...], ...]
Integers = NDArray[np.int64]


class Rows(NamedTuple):
    """Sequences: token ids, at each place the token to predict, and where documents begin if that matters."""

    ids: Tensor
    labels: Tensor
    documents: Documents | None


class Batches:
    """Sequences of so many tokens, counted from the start of training on through all epochs.

    joined: the file, cut at every so many tokens. separate: the same, and where documents begin is told; the first
    token of a document is not predicted. alone: a document is cut for itself, the last part filled up.
    """

    def __init__(self, file: TokenFile, tokens: int, packing: Packing, shuffle: bool, seed: int) -> None:
        self._file, self._tokens, self._packing = file, tokens, packing
        self._shuffle, self._seed = shuffle, seed
        self._drawn: tuple[int, Integers] | None = None
        if not len(self):
            raise ValueError(
                f"there must be at least one sequence, got none of {tokens} tokens ({packing}) in {file.folder}, which "
                f"has {file.num_tokens} tokens in {file.num_documents} documents"
            )

    def __len__(self) -> int:
        """Sequences of an epoch."""
        if self._packing == "padded":
            return int(self._sums[-1])
        return self._file.num_tokens // self._tokens

    @cached_property
    def _sums(self) -> Integers:
        """Packed alone, the sequences up to each document's last. One token that nothing follows is none of them."""
        lengths = np.diff(self._file.starts, append=self._file.num_tokens)
        return np.cumsum(-(-(lengths - 1) // self._tokens))

    def rows(self, first: int, count: int) -> Rows:
        """The sequences from this one on; they never run out."""
        ids = np.zeros((count, self._tokens), np.int64)
        labels = np.full((count, self._tokens), IGNORE, np.int64)
        for row, place in enumerate(self._places(first, count)):
            start, stop = self._alone(place) if self._packing == "padded" else self._window(place)
            tokens = self._read(start, stop)
            ids[row, : len(tokens)] = tokens[: self._tokens]
            labels[row, : len(tokens) - 1] = tokens[1:]
            if self._packing == "packed":
                labels[row, self._borders(place) - 1] = IGNORE
        return Rows(torch.from_numpy(ids), torch.from_numpy(labels), self.documents(first, count))

    def _read(self, start: int, stop: int) -> NDArray[Any]:
        tokens: NDArray[Any] = self._file.tokens[start:stop]
        if tokens.max() >= self._file.vocab:
            place = start + int((tokens >= self._file.vocab).argmax())
            raise ValueError(
                f"every token of {self._file.folder / TOKENS} must be below the vocabulary of {self._file.vocab}, the "
                f"one at place {place} is {self._file.tokens[place]}; the file is damaged: delete {self._file.folder}, "
                "and it is made again"
            )
        return tokens

    def documents(self, first: int, count: int) -> Documents | None:
        """Where documents begin in the same sequences. Reads no tokens."""
        if self._packing != "packed":
            return None
        borders = (self._borders(place) for place in self._places(first, count))
        return tuple((0, *found[found < self._tokens].tolist()) for found in borders)

    def _window(self, place: int) -> tuple[int, int]:
        """From where to where to read: one token more than the sequence has, to be predicted by its last."""
        start = place * self._tokens
        return start, min(start + self._tokens + 1, self._file.num_tokens)

    def _alone(self, place: int) -> tuple[int, int]:
        """The same, of a part of one document."""
        document = int(np.searchsorted(self._sums, place, side="right"))
        before = int(self._sums[document - 1]) if document else 0
        starts = self._file.starts
        end = int(starts[document + 1]) if document + 1 < len(starts) else self._file.num_tokens
        start = int(starts[document]) + (place - before) * self._tokens
        return start, min(start + self._tokens + 1, end)

    def _borders(self, place: int) -> Integers:
        """Where documents begin, counted from the start of a window: after its first token, up to the one after it."""
        start = place * self._tokens
        low, high = np.searchsorted(self._file.starts, (start, start + self._tokens), side="right")
        return self._file.starts[low:high] - start

    def _places(self, first: int, count: int) -> list[int]:
        """Which sequences of the file these are."""
        numbers = (divmod(n, len(self)) for n in range(first, first + count))
        return [int(self._order(epoch)[place]) if self._shuffle else place for epoch, place in numbers]

    def _order(self, epoch: int) -> Integers:
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = epoch, np.random.default_rng((self._seed, epoch)).permutation(len(self))
        return self._drawn[1]
