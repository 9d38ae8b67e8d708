"""Batches from a token file, for one rank: the sequences of its replica, the tensors that its stages need.

The position in the data is one number, so a run can resume anywhere.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terapipe.modeling.stage import IGNORE, fill_batch
from terapipe.runtime import Pipeline
from terapipe.training.config import DataConfig
from terapipe.training.data.token_file import TOKENS, TokenFile

Packing = Literal["concat", "packed", "padded"]
DocumentStarts = tuple[tuple[int, ...], ...]  # of each sequence, the places where documents begin
Integers = NDArray[np.int64]
Rows = Literal["documents", "weighted", "pairs"]


class Sequences(NamedTuple):
    """Token ids, the label of each token, and where documents begin (None unless packed)."""

    ids: Tensor
    labels: Tensor
    documents: DocumentStarts | None
    weights: Tensor | None = None  # of each label, if documents have weights
    numbers: tuple[int, ...] = ()  # of pairs: the document that each row holds


class Batches:
    """Sequences of ``seq_len`` tokens. Their numbers count from the start of training through all epochs.

    concat: the token file, split every ``seq_len`` tokens. packed: the same, with the places where documents begin; the
    first token of a document is not predicted. padded: each document is split by itself, the last sequence padded.
    """

    def __init__(
        self, file: TokenFile, seq_len: int, packing: Packing, shuffle: bool, seed: int, weighted: bool = False
    ) -> None:
        self._file, self._seq_len, self._packing = file, seq_len, packing
        self._shuffle, self._seed, self._weighted = shuffle, seed, weighted
        self._permutation: tuple[int, Integers] | None = None  # of the latest epoch, and its number
        if not len(self):
            raise ValueError(
                f"there must be at least one sequence, got none of {seq_len} tokens ({packing}) in {file.folder}, "
                f"which has {file.num_tokens} tokens in {file.num_documents} documents"
            )

    @property
    def folder(self) -> Path:
        return self._file.folder

    def __len__(self) -> int:
        """Sequences in an epoch."""
        if self._packing == "padded":
            return int(self._padded_ends[-1])
        return self._file.num_tokens // self._seq_len

    @cached_property
    def _padded_ends(self) -> Integers:
        """With padded: the number of sequences up to the end of each document. The last token has no label, so a
        document of one token has no sequence."""
        lengths = np.diff(self._file.starts, append=self._file.num_tokens)
        return np.cumsum(-(-(lengths - 1) // self._seq_len))

    def read(self, first: int, count: int) -> Sequences:
        """``count`` sequences from number ``first`` on. They continue in the next epoch."""
        ids = np.zeros((count, self._seq_len), np.int64)
        labels = np.full((count, self._seq_len), IGNORE, np.int64)
        weights = np.ones((count, self._seq_len), np.float32) if self._weighted else None
        for row, index in enumerate(self._indices(first, count)):
            start, stop = self._padded_range(index) if self._packing == "padded" else self._range(index)
            tokens = self._tokens(start, stop)
            ids[row, : len(tokens)] = tokens[: self._seq_len]
            labels[row, : len(tokens) - 1] = tokens[1:]
            if self._packing == "packed":
                labels[row, self._borders(index) - 1] = IGNORE
            if weights is not None:
                weights[row, : len(tokens) - 1] = self._weights(start + 1, stop)
        documents = self.documents(first, count)
        token_weights = None if weights is None else torch.from_numpy(weights)
        return Sequences(torch.from_numpy(ids), torch.from_numpy(labels), documents, token_weights)

    def _weights(self, start: int, stop: int) -> NDArray[np.float64]:
        """Of the documents that these tokens are of."""
        documents = np.searchsorted(self._file.starts, np.arange(start, stop), side="right") - 1
        return self._file.numbers[documents]

    def documents(self, first: int, count: int) -> DocumentStarts | None:
        """Where documents begin in the same sequences. Does not read the tokens."""
        if self._packing != "packed":
            return None
        borders = (self._borders(index) for index in self._indices(first, count))
        return tuple((0, *places[places < self._seq_len].tolist()) for places in borders)

    def _tokens(self, start: int, stop: int) -> NDArray[Any]:
        tokens: NDArray[Any] = self._file.tokens[start:stop]
        if tokens.max() >= self._file.vocab:
            place = start + int((tokens >= self._file.vocab).argmax())
            raise ValueError(
                f"every token of {self._file.folder / TOKENS} must be below the vocabulary of {self._file.vocab}, the "
                f"one at place {place} is {self._file.tokens[place]}; the file is damaged: delete {self._file.folder}, "
                "and it is written again"
            )
        return tokens

    def _range(self, index: int) -> tuple[int, int]:
        """Range in the token file. It has one token more than the sequence: the label of the last one."""
        start = index * self._seq_len
        return start, min(start + self._seq_len + 1, self._file.num_tokens)

    def _padded_range(self, index: int) -> tuple[int, int]:
        """The same, inside one document."""
        document = int(np.searchsorted(self._padded_ends, index, side="right"))
        before = int(self._padded_ends[document - 1]) if document else 0
        starts = self._file.starts
        end = int(starts[document + 1]) if document + 1 < len(starts) else self._file.num_tokens
        start = int(starts[document]) + (index - before) * self._seq_len
        return start, min(start + self._seq_len + 1, end)

    def _borders(self, index: int) -> Integers:
        """Offsets at which documents begin: after the first token of the sequence, up to the one that follows it."""
        start = index * self._seq_len
        low, high = np.searchsorted(self._file.starts, (start, start + self._seq_len), side="right")
        return self._file.starts[low:high] - start

    def _indices(self, first: int, count: int) -> list[int]:
        """Indices in the token file of the sequences with these numbers."""
        places = (divmod(number, len(self)) for number in range(first, first + count))
        return [int(self._order(epoch)[place]) if self._shuffle else place for epoch, place in places]

    def _order(self, epoch: int) -> Integers:
        if self._permutation is None or self._permutation[0] != epoch:
            self._permutation = epoch, np.random.default_rng((self._seed, epoch)).permutation(len(self))
        return self._permutation[1]


class Pairs(Batches):
    """Pairs of texts: each sequence is one document, the chosen ones followed by the rejected ones. Of a text that is
    too long the beginning of the prompt is dropped, then the end."""

    def __len__(self) -> int:
        return self._file.num_documents

    def read(self, first: int, count: int) -> Sequences:
        ids = np.zeros((count, self._seq_len), np.int64)
        labels = np.full((count, self._seq_len), IGNORE, np.int64)
        numbers = self._indices(first, count)
        for row, index in enumerate(numbers):
            start, stop = self._file.document(index)
            prompt, dropped = int(self._file.numbers[index]), self._num_dropped(index)
            tokens = self._tokens(start + dropped, min(stop, start + dropped + self._seq_len + 1))
            ids[row, : len(tokens)] = tokens[: self._seq_len]
            labels[row, : len(tokens) - 1] = tokens[1:]
            labels[row, : max(0, prompt - dropped - 1)] = IGNORE
        return Sequences(torch.from_numpy(ids), torch.from_numpy(labels), None, numbers=tuple(numbers))

    def _num_dropped(self, index: int) -> int:
        """Tokens at the beginning of the prompt that are dropped, of both texts alike, for the longer one to fit."""
        first = index - index % 2
        longest = max(stop - start for start, stop in map(self._file.document, (first, first + 1)))
        return max(0, min(longest - self._seq_len - 1, int(self._file.numbers[index]) - 1))

    def _indices(self, first: int, count: int) -> list[int]:
        """Pairs are shuffled, not their texts."""
        assert first % 2 == 0, "a batch begins with a chosen text"
        places = (divmod(number, len(self)) for number in range(first, first + count))
        return [
            2 * int(self._order(epoch)[place // 2]) + place % 2 if self._shuffle else place for epoch, place in places
        ]

    def _order(self, epoch: int) -> Integers:
        if self._permutation is None or self._permutation[0] != epoch:
            self._permutation = epoch, np.random.default_rng((self._seed, epoch)).permutation(len(self) // 2)
        return self._permutation[1]


class Batch(NamedTuple):
    """Arguments of ``Pipeline.step``. Ranks between the first and the last stage have no tokens."""

    ids: Tensor | None
    labels: Tensor | None
    documents: DocumentStarts | None
    weights: Tensor | None = None
    numbers: tuple[int, ...] = ()


class BatchLoader:
    """Reads this replica's rows of each batch."""

    def __init__(
        self,
        file: TokenFile,
        config: DataConfig,
        pipe: Pipeline,
        *,
        shuffle: bool,
        rows: Rows = "documents",
        whole: bool = False,
    ) -> None:
        """``whole``: ``once`` leaves out a last batch that would have to be filled up."""
        kind = Pairs if rows == "pairs" else Batches
        self._sequences = kind(file, config.seq_len, config.packing, shuffle, config.seed, rows == "weighted")
        self._is_whole = whole
        self._pipe, self._batch_size, self._local_size = pipe, config.batch_size, pipe.plan.batch_size

    def refuse_too_few(self) -> None:
        """Refuses sequences that make no whole batch, of which ``once`` would leave out all."""
        if self._is_whole and len(self._sequences) < self._batch_size:
            raise ValueError(
                f"this objective is evaluated on whole batches of {self._batch_size} sequences (data.batch_size), got "
                f"{len(self._sequences)} in {self._sequences.folder}; give more as data.eval, or a smaller batch"
            )

    def at(self, position: int) -> Batch:
        """The batch that begins with this sequence, counted from the start of training."""
        return self._read(position + self._pipe.dp_rank * self._local_size, self._local_size)

    def once(self, max_batches: int) -> Iterator[Batch]:
        """Every sequence once, up to ``max_batches`` batches (0: all). The last batch is filled up, or left out."""
        total = len(self._sequences)
        if self._is_whole:
            total -= total % self._batch_size
        stop = min(total, max_batches * self._batch_size) if max_batches else total
        yield from self._up_to(stop)

    def everything(self) -> Iterator[Batch]:
        """Every sequence once; the last batch is filled up."""
        yield from self._up_to(len(self._sequences))

    def _up_to(self, stop: int) -> Iterator[Batch]:
        for position in range(0, stop, self._batch_size):
            first = position + self._pipe.dp_rank * self._local_size
            yield self._read(first, max(0, min(self._local_size, stop - first)))

    def _read(self, first: int, count: int) -> Batch:
        missing = self._local_size - count
        if not (self._pipe.is_first or self._pipe.is_last):
            return Batch(None, None, _add_fillers(self._sequences.documents(first, count), missing))
        ids, labels, documents, weights, numbers = self._sequences.read(first, count)
        if weights is not None:
            weights = torch.cat([weights, weights.new_zeros(missing, weights.shape[1])])
        return Batch(*fill_batch(ids, labels, self._local_size), _add_fillers(documents, missing), weights, numbers)

    def count_labels(self, batches: Iterable[Batch]) -> int:
        """Labels in these batches over all replicas. 0 on ranks that do not compute the loss."""
        if not self._pipe.is_last:
            return 0
        return self._pipe.count_labels(*(batch.labels for batch in batches if batch.labels is not None))


def _add_fillers(documents: DocumentStarts | None, missing: int) -> DocumentStarts | None:
    return None if documents is None else documents + ((0,),) * missing
