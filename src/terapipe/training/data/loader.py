"""The part of the data that this rank needs, batch by batch."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from terapipe.config import DataConfig
from terapipe.modeling.stage import fill_batch
from terapipe.runtime.pipeline import Pipeline
from terapipe.training.data.batches import Batches
from terapipe.training.data.token_file import TokenFile

Starts = tuple[tuple[int, ...], ...] | None


class Given(NamedTuple):
    """What a step is given: tokens only where they are needed."""

    ids: Tensor | None
    labels: Tensor | None
    documents: Starts


class Feed:
    """A replica takes its rows of every batch; of its pipeline only the ends read tokens."""

    def __init__(self, file: TokenFile, config: DataConfig, pipe: Pipeline, *, shuffle: bool) -> None:
        self._batches = Batches(file, config.seq_len, config.packing, shuffle, config.seed)
        self._pipe, self._batch, self._mine = pipe, config.batch_size, pipe.plan.batch_size

    def __len__(self) -> int:
        """Sequences of an epoch."""
        return len(self._batches)

    def at(self, position: int) -> Given:
        """The batch that begins with this sequence, counted from the start of training."""
        return self._given(position + self._pipe.dp_rank * self._mine, self._mine)

    def once(self, batches: int) -> Iterator[Given]:
        """Each sequence once, so many batches at most (0: all), the last one filled up."""
        stop = len(self) if not batches else min(len(self), batches * self._batch)
        for position in range(0, stop, self._batch):
            first = position + self._pipe.dp_rank * self._mine
            yield self._given(first, max(0, min(self._mine, stop - first)))

    def _given(self, first: int, count: int) -> Given:
        missing = self._mine - count
        if not (self._pipe.is_first or self._pipe.is_last):
            return Given(None, None, _filled(self._batches.documents(first, count), missing))
        rows = self._batches.rows(first, count)
        ids, labels = fill_batch(rows.ids, rows.labels, self._mine)
        return Given(ids, labels, _filled(rows.documents, missing))

    def count(self, batches: Iterable[Given]) -> int:
        """Labels that count in all replicas' parts of these; known where the loss is computed."""
        if not self._pipe.is_last:
            return 0
        return self._pipe.count_labels(*(given.labels for given in batches if given.labels is not None))


def _filled(starts: Starts, missing: int) -> Starts:
    return None if starts is None else starts + ((0,),) * missing
