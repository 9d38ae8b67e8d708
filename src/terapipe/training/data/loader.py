"""Batches from a token file, for one rank: the sequences of its replica, the tensors that its stages need.

::

    position      0        B        2B                    sequences since the start of training
                  |--------|--------|------ ... ---|---
    batch         rows of replica 0, replica 1, ...        B = data.batch_size, each replica takes B / dp
    epoch         0 ............................. | 1 ...  a new permutation, of (seed, epoch)
    index         permutation[position in the epoch]       which sequence of the token file

The position is one number, and everything else follows from it and the seed. So a run resumes anywhere, on any number
of replicas, without a sampler's state, and no rank sends tokens to another: each reads what it needs from the memory
map. That is why this is no `torch.utils.data.DataLoader`, whose workers and samplers would have to be wound forward.
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
    """Some sequences, one to a row.

    Args:
        ids: Token ids, int64, (rows, tokens). Padding is 0, which no label looks at.
        labels: The token after each one, in the same shape; IGNORE where there is none to predict.
        documents: For each row the places where documents begin, first of all 0; None unless packed.
        weights: Of each label, float32, if documents have weights.
        indices: Which sequence of the token file each row holds; of pairs, which document.
    """

    ids: Tensor
    labels: Tensor
    documents: DocumentStarts | None
    weights: Tensor | None = None
    indices: tuple[int, ...] = ()


class Batches:
    """A token file as sequences of `seq_len` tokens. Their numbers count from the start of training through all epochs.

    The three ways to cut documents A, B, C with `seq_len` 6 (``.`` ends a document, ``_`` is padding)::

        concat    A A A A . B | B B . C C C     attention crosses the borders of documents
        packed    A A A A . B | B B . C C C     it does not; the first token of a document is not predicted
        padded    A A A A . _ | B B B . _ _ |   a document begins a sequence; a long one takes several

    Args:
        file: The tokens.
        seq_len: Tokens in a sequence.
        packing: As above.
        shuffle: Whether each epoch has an order of its own.
        seed: Of the shuffling.
        weighted: Whether `file.numbers` are weights of documents, to be told for each label.
    """

    GROUP = 1  # sequences that follow each other in any order of an epoch

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
        """Of the token file."""
        return self._file.folder

    def __len__(self) -> int:
        """Sequences in an epoch. With concat and packed, the last tokens that make no whole sequence are left out."""
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
        """Reads sequences from the memory map.

        Args:
            first: The number of the first one.
            count: How many. They continue in the next epoch.
        """
        ids = np.zeros((count, self._seq_len), np.int64)
        labels = np.full((count, self._seq_len), IGNORE, np.int64)
        weights = np.ones((count, self._seq_len), np.float32) if self._weighted else None
        indices = self._indices(first, count)
        for row, index in enumerate(indices):
            start, stop = self._range(index)
            tokens = self._tokens(start, stop)
            ids[row, : len(tokens)] = tokens[: self._seq_len]
            labels[row, : len(tokens) - 1] = tokens[1:]
            labels[row, self._unlabeled(index)] = IGNORE
            if weights is not None:
                weights[row, : len(tokens) - 1] = self._weights(start + 1, stop)
        documents = self.documents(first, count)
        token_weights = None if weights is None else torch.from_numpy(weights)
        return Sequences(torch.from_numpy(ids), torch.from_numpy(labels), documents, token_weights, tuple(indices))

    def _weights(self, start: int, stop: int) -> NDArray[np.float64]:
        """Returns for each of these tokens the weight of its document."""
        documents = np.searchsorted(self._file.starts, np.arange(start, stop), side="right") - 1
        return self._file.numbers[documents]

    def documents(self, first: int, count: int) -> DocumentStarts | None:
        """Tells where documents begin in the same sequences, without reading tokens: stages in the middle of the
        pipeline need no more.

        Args:
            first: As for `read`.
            count: As for `read`.
        """
        if self._packing != "packed":
            return None
        borders = (self._borders(index) for index in self._indices(first, count))
        return tuple((0, *places[places < self._seq_len].tolist()) for places in borders)

    def _tokens(self, start: int, stop: int) -> NDArray[Any]:
        """Reads a range of the file. A token beyond the vocabulary is named here; on a GPU it would be an assertion in
        a kernel of the embedding, which says nothing of the file."""
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
        """The range of a sequence in the token file. It has one token more than the sequence: the label of the last
        one. With padded it ends with the document."""
        if self._packing != "padded":
            start = index * self._seq_len
            return start, min(start + self._seq_len + 1, self._file.num_tokens)
        document = int(np.searchsorted(self._padded_ends, index, side="right"))
        before = int(self._padded_ends[document - 1]) if document else 0
        begin, end = self._file.document(document)
        start = begin + (index - before) * self._seq_len
        return start, min(start + self._seq_len + 1, end)

    def _unlabeled(self, index: int) -> Integers | slice:
        """The places of a sequence whose next token is not to be predicted: with packed, the ends of documents."""
        return self._borders(index) - 1 if self._packing == "packed" else slice(0)

    def _borders(self, index: int) -> Integers:
        """Offsets at which documents begin: after the first token of the sequence, up to the one that follows it."""
        start = index * self._seq_len
        low, high = np.searchsorted(self._file.starts, (start, start + self._seq_len), side="right")
        return self._file.starts[low:high] - start

    def _indices(self, first: int, count: int) -> list[int]:
        """Indices in the token file of the sequences with these numbers. Groups are shuffled, not what is in them."""
        assert first % self.GROUP == 0, "a batch begins with a whole group"
        places = (divmod(number, len(self)) for number in range(first, first + count))
        if not self._shuffle:
            return [place for _, place in places]
        size = self.GROUP
        return [size * int(self._order(epoch)[place // size]) + place % size for epoch, place in places]

    def _order(self, epoch: int) -> Integers:
        """The permutation of an epoch. Only the latest is kept: 8 bytes for each sequence of the file."""
        if self._permutation is None or self._permutation[0] != epoch:
            order = np.random.default_rng((self._seed, epoch)).permutation(len(self) // self.GROUP)
            self._permutation = epoch, order
        return self._permutation[1]


class Pairs(Batches):
    """Pairs of texts for preferences: each sequence is one document, a chosen text followed by the rejected one.

    Of a text that is too long the beginning of the prompt is dropped, then the end::

        prompt   P P P P P P        chosen  C C C        rejected  R R R R R
        row 0        P P P P C C C _ _                   two tokens of the prompt are dropped in both rows,
        row 1        P P P P R R R R R                   so that the longer text fits and the prompts are equal
    """

    GROUP = 2  # the two texts of a pair stay neighbors, and so in one microbatch

    def __len__(self) -> int:
        return self._file.num_documents

    def _range(self, index: int) -> tuple[int, int]:
        start, stop = self._file.document(index)
        start += self._num_dropped(index)
        return start, min(stop, start + self._seq_len + 1)

    def _unlabeled(self, index: int) -> slice:
        """The prompt, which is not trained on. Its last token stays: it predicts the text's first."""
        return slice(max(0, int(self._file.numbers[index]) - self._num_dropped(index) - 1))

    def _num_dropped(self, index: int) -> int:
        """Tokens at the beginning of the prompt that are dropped, of both texts alike, for the longer one to fit."""
        first = index - index % 2
        longest = max(stop - start for start, stop in map(self._file.document, (first, first + 1)))
        return max(0, min(longest - self._seq_len - 1, int(self._file.numbers[index]) - 1))


class Batch(NamedTuple):
    """What one rank passes to `Pipeline.step`. Fields are those of `Sequences`; ranks between the first and the last
    stage have no tokens."""

    ids: Tensor | None
    labels: Tensor | None
    documents: DocumentStarts | None
    weights: Tensor | None = None
    indices: tuple[int, ...] = ()


class BatchLoader:
    """Reads this replica's rows of each batch.

    Args:
        file: The tokens.
        config: How they are cut, shuffled and batched.
        pipe: Says which replica this is, and whether its stages need tokens.
        shuffle: Whether to shuffle; evaluation does not.
        rows: What a row is: part of documents, of documents with weights, or one text of a pair.
        whole: Whether `once` leaves out a last batch that would have to be filled up. Fillers have no labels, so a
            loss over tokens ignores them; one over sequences would count them.
    """

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
        kind = Pairs if rows == "pairs" else Batches
        self._sequences = kind(file, config.seq_len, config.packing, shuffle, config.seed, rows == "weighted")
        self._is_whole = whole
        self._pipe, self._batch_size, self._local_size = pipe, config.batch_size, pipe.plan.batch_size

    def refuse_too_few(self) -> None:
        """Refuses sequences that make no whole batch, of which `once` would leave out all."""
        if self._is_whole and len(self._sequences) < self._batch_size:
            raise ValueError(
                f"this objective is evaluated on whole batches of {self._batch_size} sequences (data.batch_size), got "
                f"{len(self._sequences)} in {self._sequences.folder}; give more as data.eval, or a smaller batch"
            )

    def at(self, position: int) -> Batch:
        """Reads this replica's rows of one batch of training.

        Args:
            position: The number of the batch's first sequence, counted from the start of training.
        """
        return self._read(position + self._pipe.dp_rank * self._local_size, self._local_size)

    def once(self, max_batches: int) -> Iterator[Batch]:
        """Reads every sequence once. The last batch is filled up, or left out.

        Args:
            max_batches: Where to stop; 0: at the end.
        """
        total = len(self._sequences)
        if self._is_whole:
            total -= total % self._batch_size
        stop = min(total, max_batches * self._batch_size) if max_batches else total
        yield from self._up_to(stop)

    def everything(self) -> Iterator[Batch]:
        """Reads every sequence once; the last batch is filled up in any case."""
        yield from self._up_to(len(self._sequences))

    def _up_to(self, stop: int) -> Iterator[Batch]:
        """All replicas yield the same number of batches, some of which may be all fillers: a step is collective."""
        for position in range(0, stop, self._batch_size):
            first = position + self._pipe.dp_rank * self._local_size
            yield self._read(first, max(0, min(self._local_size, stop - first)))

    def _read(self, first: int, count: int) -> Batch:
        """`count` rows, and fillers up to the size that the plan is made for."""
        missing = self._local_size - count
        if not (self._pipe.is_first or self._pipe.is_last):
            return Batch(None, None, _add_fillers(self._sequences.documents(first, count), missing))
        ids, labels, documents, weights, indices = self._sequences.read(first, count)
        if weights is not None:
            weights = torch.cat([weights, weights.new_zeros(missing, weights.shape[1])])
        return Batch(*fill_batch(ids, labels, self._local_size), _add_fillers(documents, missing), weights, indices)

    def count_labels(self, batches: Iterable[Batch]) -> int:
        """Counts the labels of these batches over all replicas, which their losses are divided by.

        Args:
            batches: This replica's rows of them.

        Returns:
            The count; 0 on ranks that do not compute the loss.
        """
        if not self._pipe.is_last:
            return 0
        return self._pipe.count_labels(*(batch.labels for batch in batches if batch.labels is not None))


def _add_fillers(documents: DocumentStarts | None, missing: int) -> DocumentStarts | None:
    """A filler is one document."""
    return None if documents is None else documents + ((0,),) * missing
