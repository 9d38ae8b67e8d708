"""Whether a step can begin: each rank checks what it was given, then all ranks agree.

Where it raises, it raises on all ranks, and nothing has changed.
"""

from collections.abc import Callable
from typing import NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from terapipe.losses.objective import Targets, labels_in
from terapipe.modeling.autocast import Autocast
from terapipe.modeling.stage import IGNORE, PipelineModel, Stage
from terapipe.modeling.verification import check_stage
from terapipe.planning.recompute import Recompute
from terapipe.planning.slices import Plan
from terapipe.runtime.comm.transport import Transport
from terapipe.runtime.executor import Executor
from terapipe.runtime.executors import Executors
from terapipe.runtime.inputs import Batch, Documents, Inputs, Terms, agree, check_total, checksum, lone_checksums
from terapipe.runtime.module_tree import named_parameters_of
from terapipe.runtime.objective import PipelineObjective
from terapipe.runtime.tied_weights import TiedWeights
from terapipe.runtime.traits import Traits, refuse_differences


class ModelChecks:
    """What a model may say of the batches that it is exact with; see PipelineModel."""

    def __init__(self, model: PipelineModel) -> None:
        self._model = model
        self.is_verified = model.is_verified  # before stages change the model's modules
        self._refused_modes: dict[Recompute, str] = {}  # of recomputation, and why
        self._whole_only = False  # whether slices were never checked

    def stage(self, stage: Stage, k: int, plan: Plan, *, own_loss: bool) -> None:
        """Checks a stage of a model that nobody has verified yet. Raises ValueError if it would train wrongly."""
        if self.is_verified:
            return
        self._whole_only = all(len(row) == 1 for row in plan.lengths)
        first, last = k == 0, k == plan.num_stages - 1
        self._refused_modes |= check_stage(
            self._model, stage, first=first, last=last, own_loss=own_loss, plan_lengths=plan.lengths
        )

    def plan(self, plan: Plan) -> None:
        for mode, reason in self._refused_modes.items():
            if mode in plan.recompute_modes:
                raise ValueError(f"this model cannot be trained with recompute={mode!r}: {reason}; take another mode")
        if self._whole_only and any(len(row) > 1 for row in plan.lengths):
            raise ValueError(
                "slices of this model were not checked, because the pipeline's own plan cuts no sequence; make the "
                "Pipeline with a plan that has slices"
            )
        self._model.check_plan(plan)

    def step(self, documents: Documents, *, training: bool, padded: bool) -> None:
        several = any(len(row) > 1 for row in documents)
        self._model.check_step(documents=several, training=training, padded=padded)


class Held(NamedTuple):
    """What matters to other ranks of the parameters that this one holds: users may change it between steps."""

    frozen: dict[str, str]
    hooks: int  # parameters with hooks for their gradients

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        named = named_parameters_of(module)
        frozen = {name: "trained" if p.requires_grad else "frozen" for name, p in named}
        return cls(frozen, sum(bool(p._post_accumulate_grad_hooks or p._backward_hooks) for _, p in named))


class Admission:
    def __init__(
        self,
        inputs: Inputs,
        checks: ModelChecks,
        tied: TiedWeights,
        executors: Executors,
        objective: PipelineObjective,
        transport: Transport,
    ) -> None:
        self._inputs, self._checks, self._tied = inputs, checks, tied
        self._executors, self._objective, self._transport = executors, objective, transport
        self.compares_data = False  # whether all ranks of a pipeline are given all data, and must be given the same
        self.await_hooks = False  # whether any rank has hooks for gradients, which all wait for at the end of a step

    def _data(self, *given: Targets) -> str:
        if not self.compares_data:
            return ""
        return f" of data {[checksum(x) for x in given if isinstance(x, Tensor)]}"

    def batch(
        self,
        method: str,
        input_ids: Tensor | None,
        targets: Targets,
        documents: Documents | None,
        plan: Plan | None,
        total: float | None,
        *,
        training: bool,
        held: Held,
    ) -> Batch:
        """``training``: whether any stage here is in training mode."""
        batch, work, error = None, "", None
        ids = labels = counted = rows = 0
        try:
            batch = self._inputs.take(input_ids, targets, documents, plan)
            self._checks.step(batch.documents, training=training, padded=self._inputs.pads)
            if method == "step":
                _refuse_float16(self._executors.dtype, self._autocast())
            total = check_total(total) if self._inputs.takes_labels else None
            self._objective.check_plan(batch.plan)
            self._executors.get(batch.plan)
            work = f"{method} with {batch.plan} and documents {batch.documents or 'None'}{self._autocast()}"
            work += self._data(input_ids, targets)
            ids, labels = lone_checksums(input_ids, labels_in(targets))
            if batch.targets is not None and self._transport.tp_rank == 0:
                counted, rows = self._inputs.count(targets, batch.plan), batch.plan.batch_size
            if batch.targets is not None:
                self._objective.try_out(batch, self._executors.dtype, train=method == "step")
        except Exception as refusal:  # whatever is wrong, the other ranks must hear of it
            error = refusal
        terms = self._agreed(work, error, held, ids, labels, counted, rows)
        assert batch is not None
        self._tied.check_frozen(terms)
        return self._weighted(batch, terms, total)

    def scored(
        self, input_ids: Tensor | None, labels: Tensor | None, documents: Documents | None
    ) -> tuple[Batch, Executor]:
        """A batch of any shape for forwards only, and the executor for it."""
        return self._for_forwards(
            "log_probs", lambda: self._inputs.scored(input_ids, labels, documents), *(input_ids, labels)
        )

    def outputs(
        self,
        input_ids: Tensor | None,
        labels: Tensor | None,
        documents: Documents | None,
        *,
        train: bool,
        training: bool,
        held: Held,
    ) -> tuple[Batch, Executor]:
        """A batch of any shape, of which every token gets values, and the executor for it. With ``train``, backwards
        follow later. ``training``: whether any stage here is in training mode."""
        made, work, error = None, "", None
        ids = targets = 0
        try:
            batch = self._inputs.scored(input_ids, labels, documents, labeled=False)
            padded = input_ids is not None and input_ids.shape[1] < batch.plan.seq_len
            self._checks.step(batch.documents, training=training, padded=padded)
            if train:
                _refuse_float16(self._executors.dtype, self._autocast())
                self._objective.check_outputs(batch.plan)
            executor = self._executors.get(batch.plan)
            if executor.is_pending and not train:  # its backwards are still to come
                executor = self._executors.make(batch.plan)
            made = batch, executor
            work = f"token_outputs with {batch.plan}, documents {batch.documents or 'None'}{self._autocast()}, {train}"
            work += self._data(input_ids, labels)
            ids, targets = lone_checksums(input_ids, labels)
        except Exception as refusal:
            error = refusal
        terms = self._agreed(work, error, held, ids, targets)
        assert made is not None
        self._tied.check_frozen(terms)
        return made

    def unscored(self, input_ids: Tensor | None, documents: Documents | None) -> tuple[Batch, Executor]:
        """The same without labels, of the plan's shape."""
        return self._for_forwards("hidden_states", lambda: self._inputs.unscored(input_ids, documents))

    def _for_forwards(
        self, method: str, take: Callable[[], Batch], input_ids: Tensor | None = None, labels: Tensor | None = None
    ) -> tuple[Batch, Executor]:
        made, work, error = None, "", None
        ids = targets = 0
        try:
            batch = take()
            self._checks.step(batch.documents, training=False, padded=False)
            made = batch, self._executors.for_forwards(batch.plan)
            work = f"{method} with {batch.plan} and documents {batch.documents or 'None'}{self._autocast()}"
            ids, targets = lone_checksums(input_ids, labels)
        except Exception as refusal:
            error = refusal
        mine = Terms(error is not None, self._transport.dp_rank, checksum(work), ids, targets)
        agree(self._transport, mine, error, work)
        assert made is not None
        return made

    def prompt(self, input_ids: Tensor | None, plan: Plan) -> tuple[Tensor, Executor]:
        """Sequences that text is to follow, filled up, and the executor for their shape."""
        made, work, error = None, "", None
        try:
            padded = self._inputs.prompt(input_ids)
            rows, tokens = padded.shape
            one_slice = Plan((rows,), ((tokens,),), plan.boundaries, plan.order, plan.chunks)
            made = padded, self._executors.make(one_slice)
            work = f"next_token_logits of {rows} rows of {cast(Tensor, input_ids).shape[1]} tokens{self._autocast()}"
        except Exception as refusal:
            error = refusal
        agree(self._transport, Terms(error is not None, self._transport.dp_rank, checksum(work)), error, work)
        assert made is not None
        return made

    def _agreed(
        self, work: str, error: Exception | None, held: Held, ids: int, labels: int, counted: int = 0, rows: int = 0
    ) -> list[Terms]:
        tied, trained = len(self._tied.parameters), self._tied.trained
        here, place, frozen = self._transport.dp_rank, self._transport.rank, checksum(str(held.frozen))
        mine = (here, checksum(work), ids, labels, counted, rows, tied, trained, place, frozen, held.hooks)
        terms = agree(self._transport, Terms(error is not None, *mine), error, work)
        if len({(t.place, t.frozen) for t in terms}) > len({t.place for t in terms}):
            refuse_differences(self._transport, Traits(held.frozen, place))
        self.await_hooks = any(t.hooks for t in terms)
        return terms

    def _autocast(self) -> Autocast:
        return Autocast.current(self._transport.device)

    def _weighted(self, batch: Batch, terms: list[Terms], total: float | None) -> Batch:
        counted, rows = sum(t.counted for t in terms), sum(t.rows for t in terms)
        if total is None and not counted:
            raise ValueError(f"at least one label of a batch must count, got only {IGNORE}; leave such a batch out")
        total = total or counted
        return batch._replace(scale=self._number(1.0 / total), row_share=self._number(counted / total / rows))

    def _number(self, value: float) -> Tensor:
        return torch.full((), value, dtype=self._executors.wide, device=self._transport.device)


def _refuse_float16(dtype: torch.dtype, autocast: Autocast) -> None:
    if torch.float16 in (dtype, autocast.dtype):
        raise ValueError(
            "training in float16 needs a loss scale that all ranks change together, which a pipeline does not have; "
            f"got {'parameters of' if dtype is torch.float16 else 'autocast to'} float16; use bfloat16 or float32"
        )
