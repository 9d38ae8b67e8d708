"""What a step is given, checked before anything is computed: a batch, where its documents begin, how it is cut."""

import hashlib
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from terapipe.losses.objective import Objective, SequenceLoss, Targets, labels_in
from terapipe.modeling.slice_cache import longest_document, on_device
from terapipe.modeling.stage import IGNORE
from terapipe.planning.slices import Plan, Slice

NOT_SHIFTED = (
    "labels must be the tokens to predict, got the input_ids themselves: labels[b, t] is the token after "
    "input_ids[b, t]; make them with terapipe.next_token_labels(input_ids), and set those to leave out to -100"
)


def checksum(data: str | Tensor) -> int:
    """A number of 63 bits, never zero: zero means that a rank has nothing to say.

    Args:
        data: what to compare.
    """
    raw = data.encode() if isinstance(data, str) else data.cpu().contiguous().numpy().tobytes()
    return (int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big") >> 1) or 1


Vary = Literal["refuse", "replan", "pad"]
Documents = Sequence[Sequence[int]]


class Batch(NamedTuple):
    """What an executor runs. Token ids and targets are there only where they are needed."""

    plan: Plan
    input_ids: Tensor | None = None
    targets: Targets = None
    documents: Documents = ()
    scale: Tensor | None = None  # what sums over tokens are multiplied by, or means over sequences by each of them
    row_share: Tensor | None = None  # what auxiliary losses are multiplied by for each of their sequences
    tokens: int | None = None  # of each row, if the rest is padding

    @property
    def longest(self) -> int:
        """The length of the longest document, without padding."""
        return longest_document(self.documents, self.tokens or self.plan.seq_len)

    def targets_of(self, s: Slice) -> Targets:
        """The targets of a slice. Those with one entry for each sequence are cut by sequences only.

        Args:
            s: which slice.
        """
        rows, tokens = slice(s.row, s.row + s.size), slice(s.context, s.end)
        return tree_map(lambda x: x[rows, tokens] if _is_per_token(x, self.plan) else x[rows], self.targets)

    def of_rows(self, rows: slice) -> Targets:
        """The targets of whole sequences.

        Args:
            rows: which sequences.
        """
        return tree_map(lambda x: x[rows], self.targets)


def made_up_batch(plan: Plan, rank: int, device: torch.device) -> Batch:
    """Zeros, for a step that nobody learns from.

    Args:
        plan: whose shape they have.
        rank: of the pipeline; those of the first and the last stage need tokens.
        device: where they are made.
    """
    ids = torch.zeros(plan.batch_size, plan.seq_len, dtype=torch.int64, device=device)
    one = torch.ones((), device=device)
    return Batch(plan, ids if rank == 0 else None, ids if rank == plan.last_rank else None, (), one, one)


def _is_per_token(x: Tensor, plan: Plan) -> bool:
    return x.ndim > 1 and x.shape[1] == plan.seq_len


class Vocabulary(NamedTuple):
    """Token ids must be below the first number, labels below the second; None where the model does not say."""

    inputs: int | None = None
    outputs: int | None = None


class Inputs:
    """Checks what one rank is given, and makes batches of it.

    Args:
        plan: the pipeline's own.
        vary: what to do with a batch of another shape.
        tile: slices' lengths must be multiples of it.
        rank: this one, in the pipeline.
        device: where batches go.
        vocabulary: what token ids and labels must be below.
        objective: the ``loss_fn`` of Pipeline; it decides what targets may be.
    """

    def __init__(
        self,
        plan: Plan,
        vary: Vary,
        tile: int,
        rank: int,
        device: torch.device,
        vocabulary: Vocabulary | None = None,
        objective: Objective | None = None,
    ) -> None:
        self._plan, self._vary, self._tile, self._rank, self._device = plan, vary, tile, rank, device
        self._vocabulary = vocabulary or Vocabulary()
        self._objective = objective
        if objective is not None and vary == "pad":
            raise ValueError(
                "vary='pad' fills up labels with -100, and does not know what an objective's own targets are filled up "
                "with; take vary='replan', or fill up batches yourself"
            )

    def take(self, input_ids: Tensor | None, targets: Targets, documents: Documents | None, plan: Plan | None) -> Batch:
        """A batch for a step.

        Args:
            input_ids: (batch, tokens), needed where the first stage is.
            targets: labels, or what the objective wants, needed where the last stage is.
            documents: where they begin in each row.
            plan: the batch's own, if it has one.
        """
        labels = labels_in(targets)
        plan = self.plan_for(input_ids if input_ids is not None else labels) if plan is None else self.own_plan(plan)
        first, last = self._rank == 0, self._rank == plan.last_rank
        if input_ids is not None and labels is not None:
            _refuse_unshifted(input_ids, labels)
        return Batch(
            plan,
            self.batch("input_ids", input_ids, plan, 0, self._vocabulary.inputs) if first else None,
            self.targets(targets, plan) if last else None,
            self.starts(documents, plan),
        )

    def targets(self, given: Targets, plan: Plan) -> Targets:
        """Targets on the device, if they have the shape that the objective wants.

        Args:
            given: what the caller passed as labels.
            plan: that of the batch.
        """
        if self._objective is None:
            return self.labels(given, plan)
        shape: tuple[int, ...] = (plan.batch_size, plan.seq_len)
        rule = "(batch, seq_len, ...)"
        if isinstance(self._objective, SequenceLoss):
            shape, rule = shape[:1], "(batch, ...)"
        named = tree_flatten_with_path(given)[0] if given is not None else []
        for path, x in named:
            if not isinstance(x, Tensor) or x.shape[: len(shape)] != shape:
                raise ValueError(
                    f"targets must be tensors that begin with {shape}, {rule} of the plan, got {_describe(x)}"
                    f"{f' at {keystr(path)}' if path else ''} on rank {self._rank}"
                )
        if not named:
            raise ValueError(f"the objective needs targets where the last stage is, got {given!r} on rank {self._rank}")
        labels, own = labels_in(given), not isinstance(self._objective, SequenceLoss)
        if labels is not None:  # a function of one's own may leave out places by any negative number
            ignored = labels.clamp(min=0) if own else labels
            _refuse_unknown("labels", ignored, self._vocabulary.outputs, 0 if own else IGNORE)
        return tree_map(lambda x: on_device(x, self._device), given)

    def labels(self, given: Targets, plan: Plan) -> Tensor:
        """Labels on the device, if they are tokens of the vocabulary.

        Args:
            given: what the caller passed as labels.
            plan: that of the batch.
        """
        return self.batch("labels", given, plan, IGNORE, self._vocabulary.outputs)

    def count(self, targets: Targets, plan: Plan) -> int:
        """How many tokens count, or for an objective of sequences how many sequences. Of targets as they were given:
        those on the device would have to be waited for.

        Args:
            targets: as the caller passed them.
            plan: that of the batch.
        """
        if isinstance(self._objective, SequenceLoss):
            return plan.batch_size
        labels = labels_in(targets)
        return plan.batch_size * plan.seq_len if labels is None else int((labels != IGNORE).sum())

    @property
    def takes_labels(self) -> bool:
        """Whether the last stage is on this rank."""
        return self._rank == self._plan.last_rank

    @property
    def pads(self) -> bool:
        """Whether batches may be filled up."""
        return self._vary == "pad"

    def own_plan(self, plan: Plan) -> Plan:
        """A batch's own plan, which must leave the stages where they are.

        Args:
            plan: what the caller passed.
        """
        if plan.placement != self._plan.placement:
            raise ValueError(
                f"a batch's own plan must leave the stages on their ranks: the pipeline has boundaries "
                f"{self._plan.boundaries}, chunks {self._plan.chunks} and order {self._plan.order!r}, got "
                f"{plan.boundaries}, {plan.chunks} and {plan.order!r}"
            )
        if any(length % self._tile for row in plan.lengths for length in row):
            raise ValueError(
                f"tokens are shared out: slice lengths must be multiples of {self._tile}, got {plan.lengths}"
            )
        return plan

    def plan_for(self, given: Tensor | None) -> Plan:
        """The plan of a batch, by its shape alone: other ranks are not asked.

        Args:
            given: token ids or labels.
        """
        if self._vary != "replan" or (
            given is not None and given.shape[:2] == (self._plan.batch_size, self._plan.seq_len)
        ):
            return self._plan
        if given is None or given.ndim < 2:
            raise ValueError(
                f"with vary='replan' every rank must be given input_ids or labels, (batch, tokens), rank {self._rank} "
                f"got {None if given is None else tuple(given.shape)}"
            )
        return self._plan.resize(given.shape[0], given.shape[1], self._tile)

    def batch(self, name: str, tensor: Any, plan: Plan, filler: int, vocabulary: int | None = None) -> Tensor:
        """Token ids or labels on the device, filled up if batches may be.

        Args:
            name: of the argument, for messages.
            tensor: what the caller passed.
            plan: that of the batch.
            filler: what to fill up with.
            vocabulary: what numbers must be below.
        """
        shape = (plan.batch_size, plan.seq_len)
        if self._vary == "pad" and isinstance(tensor, Tensor) and tensor.ndim == 2:
            missing = [most - size for most, size in zip(shape, tensor.shape, strict=True)]
            tensor = F.pad(tensor, (0, max(0, missing[1]), 0, max(0, missing[0])), value=filler)
        if not isinstance(tensor, Tensor) or tensor.shape != shape or tensor.dtype != torch.int64:
            hint = "; other targets need an objective, Pipeline(..., loss_fn=...)" if name == "labels" else ""
            raise ValueError(
                f"{name} on rank {self._rank} must be {shape} of torch.int64, (batch, tokens) of the plan, got "
                f"{_describe(tensor)}{hint}"
            )
        _refuse_unknown(name, tensor, vocabulary, filler)
        return on_device(tensor, self._device)

    def tokens(
        self,
        input_ids: Tensor | None,
        labels: Tensor | None,
        documents: Documents | None,
        *,
        labeled: bool,
        resize: bool,
    ) -> Batch:
        """A batch whose tokens get values.

        Args:
            input_ids: (rows, tokens), where the first stage is.
            labels: of the same shape, where the last stage is.
            documents: where they begin in each row.
            labeled: whether labels are needed. Where they are missing and need not be there, targets are empty.
            resize: whether any shape may come. It is then cut as the plan cuts its own, and filled up to a multiple of
                the tile.
        """
        either = input_ids if input_ids is not None else labels
        plan, rest = self._plan, 0
        if resize and either is not None and either.ndim == 2 and either.shape != (plan.batch_size, plan.seq_len):
            rest = -either.shape[1] % self._tile
            plan = plan.resize(either.shape[0], either.shape[1] + rest, self._tile)
            input_ids = None if input_ids is None else F.pad(input_ids, (0, rest))
            labels = None if labels is None else F.pad(labels, (0, rest), value=IGNORE)
        if input_ids is not None and labels is not None:
            _refuse_unshifted(input_ids, labels)
        targets: Targets = None
        if self._rank == plan.last_rank:
            targets = {} if labels is None and not labeled else self.labels(labels, plan)
        return Batch(
            plan,
            self.batch("input_ids", input_ids, plan, 0, self._vocabulary.inputs) if self._rank == 0 else None,
            targets,
            self.starts(documents, plan),
            tokens=plan.seq_len - rest if rest else None,
        )

    def prompt(self, input_ids: Tensor | None) -> Batch:
        """Sequences that text is to follow, in one slice and filled up to a multiple of the tile: no place sees those
        after it.

        Args:
            input_ids: (rows, tokens), on every rank.
        """
        if input_ids is None or input_ids.ndim != 2 or input_ids.dtype != torch.int64 or not input_ids.numel():
            raise ValueError(
                f"input_ids must be (rows, tokens) of torch.int64, at least one, on every rank; rank {self._rank} "
                f"got {_describe(input_ids)}"
            )
        _refuse_unknown("input_ids", input_ids, self._vocabulary.inputs)
        rows, tokens = input_ids.shape
        rest, own = -tokens % self._tile, self._plan
        plan = Plan((rows,), ((tokens + rest,),), own.boundaries, own.order, own.chunks)
        ids = F.pad(on_device(input_ids, self._device), (0, rest)) if self._rank == 0 else None
        return Batch(plan, ids, {} if self._rank == plan.last_rank else None, tokens=tokens if rest else None)

    def starts(self, documents: Documents | None, plan: Plan) -> Documents:
        """Where documents begin. Every rank cuts attention there, so every rank must be told.

        Args:
            documents: what the caller passed.
            plan: that of the batch.
        """
        try:
            rows = () if documents is None else tuple(tuple(row) for row in documents)
            ordered = all(row[:1] == (0,) and all(a < b for a, b in pairwise(row)) for row in rows)
        except TypeError:  # not numbers, or not lists of them
            rows, ordered = ((),), False
        if self._vary == "pad":
            rows += ((0,),) * (plan.batch_size - len(rows) if rows else 0)
        if rows and (len(rows) != plan.batch_size or not ordered or any(row[-1] >= plan.seq_len for row in rows)):
            raise ValueError(
                f"documents must be, for each of the {plan.batch_size} sequences, the rising places below "
                f"{plan.seq_len} where documents begin, 0 first, got {documents}"
            )
        return rows


def _describe(x: Any) -> str:
    return f"{tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else "None" if x is None else type(x).__name__


def _refuse_unknown(name: str, ids: Tensor, vocabulary: int | None, ignored: int = 0) -> None:
    if vocabulary is None:
        return
    unknown = ((ids < 0) | (ids >= vocabulary)) & (ids != ignored)
    if unknown.any():
        row, place = unknown.nonzero()[0].tolist()
        also = f", or {ignored} to leave a place out" if ignored < 0 else ""
        raise ValueError(
            f"{name} must be tokens of the model's vocabulary, 0 to {vocabulary - 1}{also}, got "
            f"{int(ids[row, place])} at row {row}, place {place}; is the tokenizer the model's?"
        )


def check_total(total: float | Tensor | None) -> float | None:
    """The ``total`` of a step as a number.

    Args:
        total: what the caller passed.
    """
    number = total.item() if isinstance(total, Tensor) and total.numel() == 1 else total
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number) or number <= 0:
        raise ValueError(
            f"total must be a positive finite number, what to divide the sum of losses by, got {total!r}; leave it out "
            "to divide by the number of labels that count"
        )
    return number


def lone_checksums(input_ids: Tensor | None, labels: Tensor | None) -> tuple[int, int]:
    """Checksums for ranks that have one of the two only, so that labels which are the token ids themselves are noticed
    although no rank has both. Labels that are all alike in a row may well be shifted ones.

    Args:
        input_ids: those of this rank.
        labels: those of this rank.
    """
    if (input_ids is None) == (labels is None):
        return 0, 0
    if labels is None:
        assert input_ids is not None
        return checksum(input_ids), 0
    return 0, 0 if bool((labels[:, 1:] == labels[:, :-1]).all()) else checksum(labels)


def _refuse_unshifted(input_ids: Tensor, labels: Tensor) -> None:
    """Shifted labels never look like this: where they equal the token at their place, it is also the one after it."""
    if input_ids.shape != labels.shape or input_ids.ndim != 2:
        return
    ids, targets = input_ids.to(labels.device), labels
    counted = targets != IGNORE
    if bool(((targets == ids) | ~counted).all()):
        later = torch.roll(ids, -1, dims=1)
        shifted = counted.clone()
        shifted[:, -1] = False  # nobody knows the token after the last
        if bool(((targets != later) & shifted).any()):
            raise ValueError(NOT_SHIFTED)
