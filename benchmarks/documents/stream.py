"""Batches of packed documents: log-normal lengths, end to end, cut into sequences as `terapipe train` cuts them."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from terapipe import Plan, next_token_labels

Documents = tuple[tuple[int, ...], ...]
MEDIAN, SIGMA, SEED = 200.0, 1.0, 0  # tokens; the mean is 330, one document of a thousand has more than 4400


@dataclass(frozen=True)
class Packed:
    """A batch in which documents follow each other."""

    ids: Tensor
    documents: Documents

    @property
    def labels(self) -> Tensor:
        labels = next_token_labels(self.ids)
        for row, starts in enumerate(self.documents):
            labels[row, [start - 1 for start in starts[1:]]] = -100
        return labels

    def part(self, rows: int) -> "Packed":
        return Packed(self.ids[:rows], self.documents[:rows])

    def padded(self) -> Tensor:
        """Every document a row, filled up to the longest."""
        texts = [
            row[first:last]
            for row, starts in zip(self.ids, self.documents, strict=True)
            for first, last in pairwise([*starts, len(row)])
        ]
        return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)


def padded_labels(packed: Packed) -> Tensor:
    labels = next_token_labels(packed.padded())
    lengths = [b - a for starts in packed.documents for a, b in pairwise([*starts, packed.ids.shape[1]])]
    for row, length in enumerate(lengths):
        labels[row, length - 1 :] = -100
    return labels


def padded_plan(packed: Packed, plan: Plan) -> Plan:
    """Whole rows, as many in a microbatch as have the tokens of a sequence: with so many of them nothing idles."""
    rows, longest = packed.padded().shape
    size = min(rows, max(1, packed.ids.shape[1] // longest))
    return Plan.uniform(
        batch_size=rows, seq_len=longest, microbatch_size=size, boundaries=plan.boundaries, order="1f1b"
    )


def starts_of(batches: int, rows: int, tokens: int) -> list[Documents]:
    """Where documents begin in each sequence of each batch."""
    count = batches * rows
    lengths = np.random.default_rng(SEED).lognormal(np.log(MEDIAN), SIGMA, count * tokens // 16)
    ends = np.cumsum(np.clip(lengths, 16, tokens).astype(np.int64))
    inside = [ends[(ends > first) & (ends < first + tokens)] - first for first in range(0, count * tokens, tokens)]
    sequences = [(0, *places.tolist()) for places in inside]
    return [tuple(sequences[first : first + rows]) for first in range(0, count, rows)]


def stream(batches: int, rows: int, tokens: int, vocab: int) -> list[Packed]:
    generator = torch.Generator().manual_seed(SEED)
    return [
        Packed(torch.randint(vocab, (rows, tokens), generator=generator), documents)
        for documents in starts_of(batches, rows, tokens)
    ]
