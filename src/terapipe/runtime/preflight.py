"""Whether a step can begin: each rank checks what it was given, then all ranks agree.

A rank that refuses its batch must not leave the others waiting for its messages, and ranks with different plans would
send each other messages of the wrong shape. So every method that runs the pipeline first exchanges one row of numbers::

    rank 0   batch is right   (work 7f3a.., ids 91c2..)  \\
    rank 1   batch is right   (work 7f3a..)               >  all-gather  ->  all go on, or all raise
    rank 2   refused: ...     (refused 1)                /

Where it raises, it raises on all ranks, with the same cause, and nothing has changed. Here rank 2 raises its own error,
ranks 0 and 1 a ValueError "rank 2 refused what it was given: ..." with the words of that error.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Generic, Literal, NamedTuple, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from terapipe.losses.objective import Objective, SequenceLoss, Targets, labels_in
from terapipe.modeling.slice_cache import on_device
from terapipe.modeling.stage import IGNORE, Autocast, PipelineModel, Stage
from terapipe.planning.cost import Ints
from terapipe.planning.slices import Plan
from terapipe.runtime.comm.errors import describe_error
from terapipe.runtime.comm.mesh import ALL
from terapipe.runtime.comm.transport import Transport, checksum
from terapipe.runtime.executor import Executor
from terapipe.runtime.executors import Executors
from terapipe.runtime.gradient_sync import TiedWeights, named_parameters_of
from terapipe.runtime.loss_head import Batch, Documents, LossSetup
from terapipe.runtime.traits import Traits, refuse_differences

NOT_SHIFTED = (
    "labels must be the tokens to predict, got the input_ids themselves: labels[b, t] is the token after "
    "input_ids[b, t]; make them with terapipe.next_token_labels(input_ids), and set those to leave out to -100"
)


Vary = Literal["refuse", "replan", "pad"]
T = TypeVar("T")


# What one rank is given


class Inputs:
    """Checks what one rank is given, and makes batches of it. Nothing here talks to other ranks.

    What happens to a batch of another shape than the plan's (``vary``)::

        "refuse"   ValueError, with both shapes
        "replan"   the plan is resized to the batch; every rank computes that by itself, from the shape alone
        "pad"      the batch is filled up: ids with 0, labels with -100, documents with one per new row

    Args:
        plan: the pipeline's own.
        vary: what to do with a batch of another shape.
        tile: slices' lengths must be multiples of it.
        rank: this one, in the pipeline.
        device: where batches go.
        vocabulary: what token ids must be below, and labels; None where the model does not say.
        objective: the ``loss_fn`` of Pipeline; it decides what targets may be.
    """

    def __init__(
        self,
        plan: Plan,
        vary: Vary,
        tile: int,
        rank: int,
        device: torch.device,
        vocabulary: tuple[int | None, int | None] = (None, None),
        objective: Objective | None = None,
    ) -> None:
        self._plan, self._vary, self._tile, self._rank, self._device = plan, vary, tile, rank, device
        self._input_vocabulary, self._label_vocabulary = vocabulary
        self.takes_labels = rank == plan.last_rank  # whether the last stage is on this rank
        self.pads = vary == "pad"  # whether batches may be filled up
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
        plan = self._plan_for(input_ids if input_ids is not None else labels) if plan is None else self._own_plan(plan)
        first, last = self._rank == 0, self._rank == plan.last_rank
        if input_ids is not None and labels is not None:
            _refuse_unshifted(input_ids, labels)
        return Batch(
            plan,
            self._tokens("input_ids", input_ids, plan, 0, self._input_vocabulary) if first else None,
            self._targets(targets, plan) if last else None,
            self._starts(documents, plan),
        )

    def _targets(self, targets: Targets, plan: Plan) -> Targets:
        """Targets on the device, if they have the shape that the objective wants: (batch, seq_len, ...) for a function
        of logits, (batch, ...) for one of sequences. Without an objective they are labels, tokens of the vocabulary."""
        if self._objective is None:
            return self._tokens("labels", targets, plan, IGNORE, self._label_vocabulary)
        shape: tuple[int, ...] = (plan.batch_size, plan.seq_len)
        rule = "(batch, seq_len, ...)"
        if isinstance(self._objective, SequenceLoss):
            shape, rule = shape[:1], "(batch, ...)"
        named = tree_flatten_with_path(targets)[0] if targets is not None else []
        for path, x in named:
            if not isinstance(x, Tensor) or x.shape[: len(shape)] != shape:
                raise ValueError(
                    f"targets must be tensors that begin with {shape}, {rule} of the plan, got {_describe(x)}"
                    f"{f' at {keystr(path)}' if path else ''} on rank {self._rank}"
                )
        if not named:
            raise ValueError(
                f"the objective needs targets where the last stage is, got {targets!r} on rank {self._rank}"
            )
        labels, own = labels_in(targets), not isinstance(self._objective, SequenceLoss)
        if labels is not None:  # a function of one's own may leave out places by any negative number
            ignored = labels.clamp(min=0) if own else labels
            _refuse_unknown("labels", ignored, self._label_vocabulary, 0 if own else IGNORE)
        return tree_map(lambda x: on_device(x, self._device), targets)

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

    def _own_plan(self, plan: Plan) -> Plan:
        """A batch's own plan, which must leave the stages where they are: weights do not move between steps.
        Microbatches, slices and recomputation may be others."""
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

    def _plan_for(self, data: Tensor | None) -> Plan:
        """The plan of a batch, by the shape of its token ids or labels alone: other ranks are not asked, and come to
        the same plan because they are given a batch of the same shape."""
        if self._vary != "replan" or (
            data is not None and data.shape[:2] == (self._plan.batch_size, self._plan.seq_len)
        ):
            return self._plan
        if data is None or data.ndim < 2:
            raise ValueError(
                f"with vary='replan' every rank must be given input_ids or labels, (batch, tokens), rank {self._rank} "
                f"got {None if data is None else tuple(data.shape)}"
            )
        return self._plan.resize(data.shape[0], data.shape[1], self._tile)

    def _tokens(self, name: str, tensor: Any, plan: Plan, filler: int, vocabulary: int | None) -> Tensor:
        """Token ids or labels on the device. With ``vary="pad"`` they are filled up to the plan's shape first.

        Args:
            name: that of the argument, for messages.
            tensor: what the caller passed: int64, (batch, tokens) of the plan.
            plan: that of the batch.
            filler: in places that are filled up: 0 for token ids, which no label counts, and -100 for labels.
            vocabulary: tokens must be below it; None if the model does not tell.
        """
        shape = (plan.batch_size, plan.seq_len)
        if self.pads and isinstance(tensor, Tensor) and tensor.ndim == 2:
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
        plan: Plan | None,
        *,
        labeled: bool,
        resize: bool,
    ) -> Batch:
        """A batch whose tokens get values.

        Args:
            input_ids: (rows, tokens), where the first stage is.
            labels: of the same shape, where the last stage is.
            documents: where they begin in each row.
            plan: how to cut it, with the same stages; by default as the pipeline's own plan.
            labeled: whether labels are needed. Where they are missing and need not be there, targets are empty.
            resize: whether any shape may come. It is then cut as the plan cuts its own, and filled up to a multiple of
                the tile.
        """
        either = input_ids if input_ids is not None else labels
        plan, rest = self._plan if plan is None else self._own_plan(plan), 0
        if resize and either is not None and either.ndim == 2 and either.shape != (plan.batch_size, plan.seq_len):
            rest = -either.shape[1] % self._tile
            plan = plan.resize(either.shape[0], either.shape[1] + rest, self._tile)
            input_ids = None if input_ids is None else F.pad(input_ids, (0, rest))
            labels = None if labels is None else F.pad(labels, (0, rest), value=IGNORE)
        if input_ids is not None and labels is not None:
            _refuse_unshifted(input_ids, labels)
        targets: Targets = None if self._rank != plan.last_rank else {}
        if targets is not None and (labeled or labels is not None):
            targets = self._tokens("labels", labels, plan, IGNORE, self._label_vocabulary)
        return Batch(
            plan,
            self._tokens("input_ids", input_ids, plan, 0, self._input_vocabulary) if self._rank == 0 else None,
            targets,
            self._starts(documents, plan),
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
        _refuse_unknown("input_ids", input_ids, self._input_vocabulary)
        rows, tokens = input_ids.shape
        rest, own = -tokens % self._tile, self._plan
        plan = Plan((rows,), ((tokens + rest,),), own.boundaries, own.order, own.chunks)
        ids = F.pad(on_device(input_ids, self._device), (0, rest)) if self._rank == 0 else None
        return Batch(plan, ids, {} if self._rank == plan.last_rank else None, tokens=tokens if rest else None)

    def _starts(self, documents: Documents | None, plan: Plan) -> Documents:
        """Where documents begin, a tuple for each row. Every rank cuts attention there, so every rank must be told.

        Args:
            documents: what the caller passed; None if each row is one document.
            plan: that of the batch. With ``vary="pad"``, rows that are filled up are one document each.
        """
        try:
            rows = () if documents is None else tuple(tuple(row) for row in documents)
            ordered = all(row[:1] == (0,) and all(a < b for a, b in pairwise(row)) for row in rows)
        except TypeError:  # not numbers, or not lists of them
            rows, ordered = ((),), False
        if self.pads:
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
    """Refuses token ids that the embedding has no row for. On a GPU they would end in a device assertion, after which
    the process is of no use; on a CPU the message would not say which token it was.

    Args:
        name: that of the argument, for the message.
        ids: as the caller passed them, mostly on the host: to look at those on a GPU, the host must wait.
        vocabulary: tokens must be below it; None to look at nothing.
        ignored: the one other number that may occur.
    """
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
    are_alike = bool((labels[:, 1:] == labels[:, :-1]).all())
    return 0, (0 if are_alike else checksum(labels))


def _refuse_unshifted(input_ids: Tensor, labels: Tensor) -> None:
    """Refuses labels that are the token ids themselves, from which a model learns to copy, with a loss near zero::

        input_ids      the  cat  sat  on        labels are those of the next token, where transformers' models shift
        labels         cat  sat  on   -100      them inside: users who come from there pass the ids

    Shifted labels never look like this: where they equal the token at their place, it is also the one after it.
    """
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


# What all ranks agree on


class ParameterFlags(NamedTuple):
    """What matters to other ranks of this one's parameters: users may change it between steps.

    Args:
        frozen: by name, "trained" or "frozen". Replicas of a stage that differ in it would wait for gradients that one
            of them never sends.
        hooks: how many parameters have hooks for their gradients, which are called when a gradient is complete.
    """

    frozen: dict[str, str]
    hooks: int

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        named = named_parameters_of(module)
        frozen = {name: "trained" if p.requires_grad else "frozen" for name, p in named}
        return cls(frozen, sum(bool(p._post_accumulate_grad_hooks or p._backward_hooks) for _, p in named))


class StepTerms(NamedTuple):
    """What one rank tells the others before a step, each number within an int64. Zero where it has nothing to say.

    Numbers only, so that all of it is one small message: it is exchanged before every step. Words follow where the
    numbers show that something is wrong.
    """

    work: int = 0  # checksum of what all ranks of a pipeline must be given alike
    ids: int = 0  # checksum of token ids, and ...
    labels: int = 0  # ... of labels, where a rank has only one of the two
    counted: int = 0  # labels that are not ignored
    rows: int = 0  # sequences
    refused: int = 0  # whether this rank cannot run what it was given
    replica: int = 0  # of the pipeline that this rank is in
    place: int = 0  # in the pipeline: ranks of the same place hold the same stages
    tied: int = 0  # copies of the parameter that the first and the last stage share, and ...
    trained: int = 0  # ... how many of them are not frozen
    frozen: int = 0  # checksum of which parameters are frozen
    hooks: int = 0  # how many parameters have hooks for their gradients


class AllTerms:
    """The terms of all ranks. Checks look at whole columns: of 10,000 ranks a loop over them would take as long as a
    layer.

    Args:
        rows: a row for each rank, in the order of ranks.
    """

    def __init__(self, rows: Ints) -> None:
        self._columns: dict[str, Ints] = dict(zip(StepTerms._fields, rows.T, strict=True))

    def __getitem__(self, name: str) -> Ints:
        """One number of all ranks."""
        return self._columns[name]

    def total(self, name: str) -> int:
        return int(self[name].sum())

    def differ(self, name: str, among: str) -> bool:
        """Whether ranks have different numbers of this name, though they have the same one of the other name."""
        numbers, groups = self[name], self[among]
        if (numbers == numbers[0]).all():
            return False
        order = np.argsort(groups, kind="stable")
        together, are_unlike = np.diff(groups[order]) == 0, np.diff(numbers[order]) != 0
        return bool((together & are_unlike).any())

    def have_unshifted(self) -> bool:
        """Whether a rank has the very tokens as ids that another one of its pipeline has as labels. Only ranks that
        have one of the two tell; the others say 0."""
        return not self._told("ids").isdisjoint(self._told("labels"))

    def _told(self, name: str) -> set[tuple[int, int]]:
        """Replicas and numbers of ranks that have told it."""
        told = self[name].nonzero()
        return {*zip(self["replica"][told].tolist(), self[name][told].tolist(), strict=True)}


class Proposal(NamedTuple, Generic[T]):
    """What this rank is ready to run, and what the others must know of it."""

    value: T
    work: str  # in words; must be the same on all ranks of a pipeline
    terms: StepTerms  # those about the batch; ``agree_on`` fills in the work and those about this rank


class Preflight:
    """The checks of one pipeline before each of its steps.

    ``batch`` and ``tokens`` each write a ``build`` that checks what this rank was given and may raise. ``agree_on``
    calls it, tells the others whether it raised and what it came to, and raises on all ranks or on none::

        build() -> Proposal (batch, words, terms)     this rank alone; no messages
        agree_on: gather_numbers(terms)               one message of twelve numbers
        any refused?          gather the reasons      only now words are sent: refusals may take time, steps must not
        different work?       gather the words

    Args:
        inputs: checks what this rank was given.
        model: the whole model, which may refuse a batch.
        stages: those of this rank.
        tied: the parameter that the first and the last stage share.
        executors: run the batches.
        loss: what the pipeline is trained for.
        transport: to the other ranks.
    """

    def __init__(
        self,
        inputs: Inputs,
        model: PipelineModel,
        stages: dict[int, Stage],
        tied: TiedWeights,
        executors: Executors,
        loss: LossSetup,
        transport: Transport,
    ) -> None:
        self._inputs, self._model, self._stages, self._tied = inputs, model, stages, tied
        self._executors, self._loss, self._transport = executors, loss, transport
        self.compares_data = False  # whether all ranks of a pipeline are given all data, and must be given the same
        self.await_hooks = False  # whether any rank has hooks for gradients, which all wait for at the end of a step

    def agree_on(self, module: nn.Module, build: Callable[[], Proposal[T]]) -> tuple[T, AllTerms]:
        """Builds what is to be run, on each rank, and returns it when all ranks have the same.

        Args:
            module: whose parameters are run.
            build: checks what this rank was given; raises if it is wrong.

        Returns:
            The proposal's value, and the terms of all ranks.
        """
        proposal, error = None, None
        try:
            proposal = build()
        except Exception as refusal:  # whatever is wrong, the other ranks must hear of it
            error = refusal
        flags, transport = ParameterFlags.of(module), self._transport
        terms, work = (proposal.terms, proposal.work) if proposal is not None else (StepTerms(), "")
        mine = terms._replace(
            work=checksum(work) if work else 0,
            refused=error is not None,
            replica=transport.dp_rank,
            place=transport.rank,
            tied=len(self._tied.parameters),
            trained=self._tied.trained,
            frozen=checksum(str(flags.frozen)),
            hooks=flags.hooks,
        )
        everyone = agree(transport, mine, error, work)
        if everyone.differ("frozen", among="place"):
            refuse_differences(transport, Traits(flags.frozen, transport.rank))
        self._tied.check_frozen(everyone.total("trained"), everyone.total("tied"))
        self.await_hooks = everyone.total("hooks") > 0
        assert proposal is not None
        return proposal.value, everyone

    def batch(
        self,
        method: str,
        module: nn.Module,
        input_ids: Tensor | None,
        targets: Targets,
        documents: Documents | None,
        plan: Plan | None,
        total: float | None,
    ) -> Batch:
        """A batch for ``step`` or ``evaluate``, with what its losses are multiplied by.

        Args:
            method: that of Pipeline.
            module: the Pipeline.
            input_ids: as for ``Pipeline.step``, like the rest.
        """
        train = method == "step"

        def build() -> Proposal[tuple[Batch, float | None]]:
            batch = self._inputs.take(input_ids, targets, documents, plan)
            self._check_model(batch, training=self._is_training, padded=self._inputs.pads)
            if train:
                _refuse_float16(self._executors.dtype, self._autocast)
            divisor = check_total(total) if self._inputs.takes_labels else None
            self._loss.check_plan(batch.plan)
            self._executors.get(batch.plan)
            counted = rows = 0
            if batch.targets is not None:
                self._loss.try_out(batch, self._executors.dtype, train=train)
                if self._transport.tp_rank == 0:
                    counted, rows = self._inputs.count(targets, batch.plan), batch.plan.batch_size
            terms = StepTerms(0, *lone_checksums(input_ids, labels_in(targets)), counted, rows)
            return Proposal((batch, divisor), self._describe(method, batch, input_ids, targets), terms)

        (batch, divisor), terms = self.agree_on(module, build)
        return self._weigh(batch, terms, divisor)

    def tokens(
        self,
        method: str,
        module: nn.Module,
        input_ids: Tensor | None,
        labels: Tensor | None,
        documents: Documents | None,
        plan: Plan | None,
        *,
        train: bool,
    ) -> tuple[Batch, Executor]:
        """A batch whose tokens get values, and the executor for it.

        Args:
            method: that of Pipeline, which says what labels and shapes are allowed.
            module: the Pipeline.
            input_ids: as for the method, like labels, documents and plan.
            train: whether backwards follow later.
        """
        differentiable, is_prompt = method == "token_outputs", method == "next_token_logits"
        resize = method != "hidden_states"

        def build() -> Proposal[tuple[Batch, Executor]]:
            if is_prompt:
                batch = self._inputs.prompt(input_ids)
            else:
                labeled = method == "log_probs"
                batch = self._inputs.tokens(input_ids, labels, documents, plan, labeled=labeled, resize=resize)
            padded = differentiable and batch.tokens is not None
            self._check_model(batch, training=differentiable and self._is_training, padded=padded)
            if train:
                _refuse_float16(self._executors.dtype, self._autocast)
                self._loss.check_outputs(batch.plan)
            executor = self._executors.for_tokens(batch.plan, train=train, keep=differentiable)
            work = self._describe(method, batch, input_ids, labels) + (", with gradients" if train else "")
            sums = lone_checksums(input_ids, labels) if resize and not is_prompt else (0, 0)
            return Proposal((batch, executor), work, StepTerms(0, *sums))

        return self.agree_on(module, build)[0]

    def _check_model(self, batch: Batch, *, training: bool, padded: bool) -> None:
        several = any(len(row) > 1 for row in batch.documents)
        self._model.check_step(documents=several, training=training, padded=padded)

    def _describe(self, method: str, batch: Batch, *data: Targets) -> str:
        """What all ranks of a pipeline must be given alike, in words. Their checksum is compared in each step, the
        words themselves are for the message. Data is part of it where ranks are asked to compare it, which costs a pass
        over each tensor."""
        padded = "" if batch.tokens is None else f" of {batch.tokens} tokens"
        words = f"{method} with {batch.plan}{padded} and documents {batch.documents or 'None'}{self._autocast}"
        if self.compares_data:
            words += f" of data {[checksum(x) for x in data if isinstance(x, Tensor)]}"
        return words

    @property
    def _is_training(self) -> bool:
        return any(stage.training for stage in self._stages.values())

    @property
    def _autocast(self) -> Autocast:
        return Autocast.current(self._transport.device)

    def _weigh(self, batch: Batch, terms: AllTerms, total: float | None) -> Batch:
        """Gives a batch the factors of its loss. Only now is it known how many labels of all replicas count: a replica
        with few labels must not weigh as much as one with many.

        Args:
            batch: of this rank.
            terms: those of all ranks, agreed on.
            total: what the caller wants to divide by; None for the labels that count.
        """
        counted, rows = terms.total("counted"), terms.total("rows")
        if total is None and not counted:
            raise ValueError(f"at least one label of a batch must count, got only {IGNORE}; leave such a batch out")
        total = total or counted
        return batch._replace(scale=self._number(1.0 / total), row_share=self._number(counted / total / rows))

    def _number(self, value: float) -> Tensor:
        return torch.full((), value, dtype=self._executors.wide, device=self._transport.device)


def agree(transport: Transport, mine: StepTerms, error: Exception | None, description: str) -> AllTerms:
    """Every rank's terms, if all accept.

    Args:
        transport: to the other ranks.
        mine: this rank's terms.
        error: why this rank refuses.
        description: what ``work`` is the checksum of, in words.
    """
    terms = AllTerms(transport.gather_numbers(mine, ALL))
    if terms.total("refused"):
        reasons = transport.gather("" if error is None else describe_error(error), ALL)
        if error is not None:
            raise error
        rank = int(terms["refused"].argmax())
        raise ValueError(f"{transport.ranks.name(rank)} refused what it was given: {reasons[rank]}")
    if terms.differ("work", among="replica"):
        raise ValueError(_difference(transport, terms, transport.gather(description, ALL)))
    if terms.have_unshifted():
        raise ValueError(NOT_SHIFTED)
    return terms


def _difference(transport: Transport, terms: AllTerms, descriptions: list[str]) -> str:
    """Names the first two ranks of a pipeline that differ. Ranks of different replicas may: each has its own batch."""
    first: dict[int, int] = {}  # rank of each replica
    for rank, replica in enumerate(terms["replica"].tolist()):
        other = first.setdefault(replica, rank)
        if terms["work"][rank] != terms["work"][other]:
            return (
                "all ranks of a pipeline must call the same method with the same plan, documents and shape of batch: "
                f"{transport.ranks.name(other)} has {descriptions[other]}, "
                f"{transport.ranks.name(rank)} has {descriptions[rank]}"
            )
    raise AssertionError("no two ranks differ")


def _refuse_float16(dtype: torch.dtype, autocast: Autocast) -> None:
    """Refuses to train in float16. Its smallest gradients are zero without a loss scale, and torch's GradScaler looks
    at one process's gradients only: stages would skip different steps."""
    if torch.float16 in (dtype, autocast.dtype):
        raise ValueError(
            "training in float16 needs a loss scale that all ranks change together, which a pipeline does not have; "
            f"got {'parameters of' if dtype is torch.float16 else 'autocast to'} float16; use bfloat16 or float32"
        )
