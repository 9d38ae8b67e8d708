"""Batches for one rank: only the sequences of its replica, and only the tensors that its stages need."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from terapipe.config import DataConfig
from terapipe.modeling.stage import fill_batch
from terapipe.runtime.pipeline import Pipeline
from terapipe.training.data.batches import Batches, DocumentStarts
from terapipe.training.data.token_file import TokenFile


class Batch(NamedTuple):
    """Arguments of ``Pipeline.step``. Ranks between the first and the last stage have no tokens."""

    ids: Tensor | None
    labels: Tensor | None
    documents: DocumentStarts | None


class BatchLoader:
    """Reads this replica's rows of each batch."""

    def __init__(self, file: TokenFile, config: DataConfig, pipe: Pipeline, *, shuffle: bool) -> None:
        self._sequences = Batches(file, config.seq_len, config.packing, shuffle, config.seed)
        self._pipe, self._batch_size, self._local_size = pipe, config.batch_size, pipe.plan.batch_size

    def at(self, position: int) -> Batch:
        """The batch that begins with this sequence, counted from the start of training."""
        return self._read(position + self._pipe.dp_rank * self._local_size, self._local_size)

    def once(self, max_batches: int) -> Iterator[Batch]:
        """Every sequence once, up to ``max_batches`` batches (0: all). The last batch is filled up."""
        total = len(self._sequences)
        stop = min(total, max_batches * self._batch_size) if max_batches else total
        for position in range(0, stop, self._batch_size):
            first = position + self._pipe.dp_rank * self._local_size
            yield self._read(first, max(0, min(self._local_size, stop - first)))

    def _read(self, first: int, count: int) -> Batch:
        missing = self._local_size - count
        if not (self._pipe.is_first or self._pipe.is_last):
            return Batch(None, None, _filled(self._sequences.documents(first, count), missing))
        ids, labels, documents = self._sequences.read(first, count)
        return Batch(*fill_batch(ids, labels, self._local_size), _filled(documents, missing))

    def count_labels(self, batches: Iterable[Batch]) -> int:
        """Labels in these batches over all replicas. 0 on ranks that do not compute the loss."""
        if not self._pipe.is_last:
            return 0
        return self._pipe.count_labels(*(batch.labels for batch in batches if batch.labels is not None))


def _filled(documents: DocumentStarts | None, missing: int) -> DocumentStarts | None:
    return None if documents is None else documents + ((0,),) * missing
