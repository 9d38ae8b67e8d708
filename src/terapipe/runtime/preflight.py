"""Whether a step can begin: each rank checks what it was given, then all ranks agree.

A rank that refuses its batch must not leave the others waiting for its messages, and ranks with different plans would
send each other messages of the wrong shape. So every method that runs the pipeline first exchanges one row of numbers::

    rank 0   batch is right   (work 7f3a.., ids 91c2..)  \\
    rank 1   batch is right   (work 7f3a..)               >  all-gather  ->  all go on, or all raise the same error
    rank 2   refused: ...     (refused 1)                /

Where it raises, it raises on all ranks, and nothing has changed.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from terapipe.losses.objective import Targets, labels_in
from terapipe.modeling.stage import IGNORE, Autocast, PipelineModel, Stage, TensorParallel, require_stage
from terapipe.modeling.verification import check_stage
from terapipe.planning.recompute import Recompute
from terapipe.planning.slices import Plan
from terapipe.runtime.comm.errors import describe_error
from terapipe.runtime.comm.mesh import ALL, TP
from terapipe.runtime.comm.transport import Transport
from terapipe.runtime.executor import Executor
from terapipe.runtime.executors import Executors
from terapipe.runtime.gradient_sync import TiedWeights, named_parameters_of
from terapipe.runtime.inputs import NOT_SHIFTED, Batch, Documents, Inputs, check_total, checksum, lone_checksums
from terapipe.runtime.loss_head import LossSetup
from terapipe.runtime.traits import Traits, refuse_differences

T = TypeVar("T")


class ModelChecks:
    """What a model may say of the plans and batches that it is exact with; see PipelineModel.

    Args:
        model: the whole model.
    """

    def __init__(self, model: PipelineModel) -> None:
        self._model = model
        self.is_verified = model.is_verified  # before stages change the model's modules
        self._refused_modes: dict[Recompute, str] = {}  # of recomputation, and why
        self._whole_only = False  # whether slices were never checked

    def size(self, plan: Plan, ranks: int) -> None:
        """Refuses a plan of another number of layers or ranks.

        Args:
            plan: the same on all ranks, so that all refuse it alike.
            ranks: those of the pipeline.
        """
        if plan.num_layers != self._model.num_layers:
            raise ValueError(
                f"the plan splits {plan.num_layers} layers, the model has {self._model.num_layers}; "
                "the last of the plan's boundaries must be the number of layers"
            )
        if ranks != plan.num_ranks:
            raise ValueError(
                f"the plan is for {plan.num_ranks} ranks ({plan.num_stages} stages, {plan.chunks} per rank), got "
                f"{ranks} processes; start {plan.num_ranks} (torchrun --nproc-per-node {plan.num_ranks}) or make "
                "another plan"
            )

    def make_stages(self, plan: Plan, transport: Transport, *, own_loss: bool) -> tuple[dict[int, Stage], int]:
        """Makes the stages of this rank, and checks them. Where operators are split, the check runs on whole stages
        before.

        Args:
            plan: which layers they have.
            transport: tells which stages are this rank's, and by how many devices each operator is shared.
            own_loss: whether the last stage's own loss is used.

        Returns:
            The stages by number, and the number that slice lengths must be multiples of.
        """
        cuts, parts, device = plan.boundaries, transport.tp_size, transport.device
        tp: tuple[TensorParallel, ...] = ()
        tile = 1
        if parts > 1:
            even = all(length % parts == 0 for lengths in plan.lengths for length in lengths)
            tp = (TensorParallel(transport.ranks.submesh(TP), sequence_parallel=even),)
            tile = parts if even else 1
        stages = {}
        for k in plan.stages_of(transport.rank):
            if tp and not self.is_verified:
                whole = require_stage(self._model.stage(cuts[k], cuts[k + 1], device))
                self.stage(whole, k, plan, own_loss=own_loss)
            stages[k] = require_stage(self._model.stage(cuts[k], cuts[k + 1], device, *tp))
            if not tp:
                self.stage(stages[k], k, plan, own_loss=own_loss)
        return stages, tile

    def stage(self, stage: Stage, k: int, plan: Plan, *, own_loss: bool) -> None:
        """Runs a few made-up tokens through a stage of a model that nobody has verified yet. Raises ValueError if it
        would train wrongly.

        Args:
            stage: whole, not split over devices.
            k: its number.
            plan: whose slice lengths are tried.
            own_loss: whether the last stage's own loss is used.
        """
        if self.is_verified:
            return
        self._whole_only = all(len(row) == 1 for row in plan.lengths)
        first, last = k == 0, k == plan.num_stages - 1
        self._refused_modes |= check_stage(
            self._model, stage, first=first, last=last, own_loss=own_loss, plan_lengths=plan.lengths
        )

    def plan(self, plan: Plan) -> None:
        """Refuses slices and modes of recomputation that the model is not exact with.

        Args:
            plan: of a pipeline or of one batch.
        """
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
        """Refuses a batch that the model is not exact with.

        Args:
            documents: where they begin in each row.
            training: whether any stage is in training mode.
            padded: whether rows may have been filled up.
        """
        several = any(len(row) > 1 for row in documents)
        self._model.check_step(documents=several, training=training, padded=padded)


class ParameterFlags(NamedTuple):
    """What matters to other ranks of this one's parameters: users may change it between steps."""

    frozen: dict[str, str]
    hooks: int  # parameters with hooks for their gradients

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        named = named_parameters_of(module)
        frozen = {name: "trained" if p.requires_grad else "frozen" for name, p in named}
        return cls(frozen, sum(bool(p._post_accumulate_grad_hooks or p._backward_hooks) for _, p in named))


class StepTerms(NamedTuple):
    """What one rank tells the others before a step, each number within an int64. Zero where it has nothing to say."""

    refused: int
    replica: int
    work: int = 0  # checksum of what all ranks of a pipeline must be given alike
    ids: int = 0  # checksum of token ids, and ...
    labels: int = 0  # ... of labels, where a rank has only one of the two
    counted: int = 0  # labels that are not ignored
    rows: int = 0  # sequences
    tied: int = 0  # copies of the parameter that the first and the last stage share, and ...
    trained: int = 0  # ... how many of them are not frozen
    place: int = 0  # in the pipeline: ranks of the same place hold the same stages
    frozen: int = 0  # checksum of which parameters are frozen
    hooks: int = 0  # how many parameters have hooks for their gradients


class Proposal(NamedTuple, Generic[T]):
    """What this rank is ready to run, and what the others must know of it."""

    value: T
    work: str  # in words; must be the same on all ranks of a pipeline
    ids: int = 0  # as in StepTerms
    labels: int = 0
    counted: int = 0
    rows: int = 0


class Preflight:
    """The checks of one pipeline before each of its steps.

    Args:
        inputs: checks what this rank was given.
        checks: what the model says.
        stages: those of this rank.
        tied: the parameter that the first and the last stage share.
        executors: run the batches.
        loss: what the pipeline is trained for.
        transport: to the other ranks.
    """

    def __init__(
        self,
        inputs: Inputs,
        checks: ModelChecks,
        stages: dict[int, Stage],
        tied: TiedWeights,
        executors: Executors,
        loss: LossSetup,
        transport: Transport,
    ) -> None:
        self._inputs, self._checks, self._stages, self._tied = inputs, checks, stages, tied
        self._executors, self._loss, self._transport = executors, loss, transport
        self.compares_data = False  # whether all ranks of a pipeline are given all data, and must be given the same
        self.await_hooks = False  # whether any rank has hooks for gradients, which all wait for at the end of a step

    def agree_on(self, module: nn.Module, build: Callable[[], Proposal[T]]) -> tuple[T, list[StepTerms]]:
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
        mine = StepTerms(
            refused=error is not None,
            replica=transport.dp_rank,
            tied=len(self._tied.parameters),
            trained=self._tied.trained,
            place=transport.rank,
            frozen=checksum(str(flags.frozen)),
            hooks=flags.hooks,
        )
        work = ""
        if proposal is not None:
            work = proposal.work
            mine = mine._replace(
                work=checksum(work),
                ids=proposal.ids,
                labels=proposal.labels,
                counted=proposal.counted,
                rows=proposal.rows,
            )
        terms = agree(transport, mine, error, work)
        if len({(t.place, t.frozen) for t in terms}) > len({t.place for t in terms}):
            refuse_differences(transport, Traits(flags.frozen, transport.rank))
        self._tied.check_frozen(sum(t.trained for t in terms), sum(t.tied for t in terms))
        self.await_hooks = any(t.hooks for t in terms)
        assert proposal is not None
        return proposal.value, terms

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
            self._checks.step(batch.documents, training=self._is_training, padded=self._inputs.pads)
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
            sums = lone_checksums(input_ids, labels_in(targets))
            return Proposal((batch, divisor), self._describe(method, batch, input_ids, targets), *sums, counted, rows)

        (batch, divisor), terms = self.agree_on(module, build)
        return self._weigh(batch, terms, divisor)

    def tokens(
        self,
        method: str,
        module: nn.Module,
        input_ids: Tensor | None,
        labels: Tensor | None,
        documents: Documents | None,
        *,
        train: bool,
    ) -> tuple[Batch, Executor]:
        """A batch whose tokens get values, and the executor for it.

        Args:
            method: that of Pipeline, which says what labels and shapes are allowed.
            module: the Pipeline.
            input_ids: as for the method, like labels and documents.
            train: whether backwards follow later.
        """
        differentiable, is_prompt = method == "token_outputs", method == "next_token_logits"
        resize = method != "hidden_states"

        def build() -> Proposal[tuple[Batch, Executor]]:
            if is_prompt:
                batch = self._inputs.prompt(input_ids)
            else:
                labeled = method == "log_probs"
                batch = self._inputs.tokens(input_ids, labels, documents, labeled=labeled, resize=resize)
            padded = differentiable and batch.tokens is not None
            self._checks.step(batch.documents, training=differentiable and self._is_training, padded=padded)
            if train:
                _refuse_float16(self._executors.dtype, self._autocast)
                self._loss.check_outputs(batch.plan)
            executor = self._executors.for_tokens(batch.plan, train=train, keep=differentiable)
            work = self._describe(method, batch, input_ids, labels) + (", with gradients" if train else "")
            sums = lone_checksums(input_ids, labels) if resize and not is_prompt else (0, 0)
            return Proposal((batch, executor), work, *sums)

        return self.agree_on(module, build)[0]

    def _describe(self, method: str, batch: Batch, *data: Targets) -> str:
        """What all ranks of a pipeline must be given alike, in words."""
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

    def _weigh(self, batch: Batch, terms: list[StepTerms], total: float | None) -> Batch:
        """Only now is it known how many labels of all replicas count."""
        counted, rows = sum(t.counted for t in terms), sum(t.rows for t in terms)
        if total is None and not counted:
            raise ValueError(f"at least one label of a batch must count, got only {IGNORE}; leave such a batch out")
        total = total or counted
        return batch._replace(scale=self._number(1.0 / total), row_share=self._number(counted / total / rows))

    def _number(self, value: float) -> Tensor:
        return torch.full((), value, dtype=self._executors.wide, device=self._transport.device)


def agree(transport: Transport, mine: StepTerms, error: Exception | None, description: str) -> list[StepTerms]:
    """Every rank's terms, if all accept.

    Args:
        transport: to the other ranks.
        mine: this rank's terms.
        error: why this rank refuses.
        description: what ``work`` is the checksum of, in words.
    """
    terms = [StepTerms(*numbers) for numbers in transport.gather_numbers(mine, ALL)]
    if any(t.refused for t in terms):
        reasons = transport.gather("" if error is None else describe_error(error), ALL)
        if error is not None:
            raise error
        rank = next(i for i, t in enumerate(terms) if t.refused)
        raise ValueError(f"{transport.ranks.name(rank)} refused what it was given: {reasons[rank]}")
    if len({(t.replica, t.work) for t in terms}) > len({t.replica for t in terms}):
        raise ValueError(_difference(transport, terms, transport.gather(description, ALL)))
    if {(t.replica, t.ids) for t in terms if t.ids} & {(t.replica, t.labels) for t in terms}:
        raise ValueError(NOT_SHIFTED)
    return terms


def _difference(transport: Transport, terms: list[StepTerms], descriptions: list[str]) -> str:
    """Names the first two ranks of a pipeline that differ."""
    for i, mine in enumerate(terms):
        first = next(j for j, other in enumerate(terms) if other.replica == mine.replica)
        if mine.work != terms[first].work:
            return (
                "all ranks of a pipeline must call the same method with the same plan, documents and shape of batch: "
                f"{transport.ranks.name(first)} has {descriptions[first]}, "
                f"{transport.ranks.name(i)} has {descriptions[i]}"
            )
    raise AssertionError("no two ranks differ")


def _refuse_float16(dtype: torch.dtype, autocast: Autocast) -> None:
    if torch.float16 in (dtype, autocast.dtype):
        raise ValueError(
            "training in float16 needs a loss scale that all ranks change together, which a pipeline does not have; "
            f"got {'parameters of' if dtype is torch.float16 else 'autocast to'} float16; use bfloat16 or float32"
        )
