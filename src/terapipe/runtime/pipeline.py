"""The library's face: a model, a plan, and ``step``."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from terapipe.losses.objective import Objective, Targets
from terapipe.modeling.main_grads import summed_in_float32
from terapipe.modeling.random_state import RandomState
from terapipe.modeling.stage import IGNORE, PipelineModel, Stage, TensorParallel, require_model, require_stage
from terapipe.planning.slices import Plan
from terapipe.runtime.checkpoint.frozen import FrozenBase
from terapipe.runtime.checkpoint.state import Checkpoint, Loaded, Saving, verify_files
from terapipe.runtime.checkpoint.writer import ensure_channel
from terapipe.runtime.comm.environment import device_of
from terapipe.runtime.comm.mesh import ALL, DP, TP
from terapipe.runtime.comm.transport import Transport
from terapipe.runtime.executors import Executors
from terapipe.runtime.generation import Generation
from terapipe.runtime.gradient_sync import (
    gradient_sync,
    gradients_put_back,
    scale_gradients,
    total_norm,
)
from terapipe.runtime.inputs import Batch, Documents, Inputs, Vary, Vocabulary
from terapipe.runtime.loss_head import OutputHead
from terapipe.runtime.messages import Wire
from terapipe.runtime.module_tree import persistent_buffers
from terapipe.runtime.objective import PipelineObjective
from terapipe.runtime.preflight import Admission, Held, ModelChecks
from terapipe.runtime.random_state import share_random_state
from terapipe.runtime.tied_weights import TiedWeights
from terapipe.runtime.token_outputs import OutputBroadcast, TokenOutputSteps
from terapipe.runtime.traits import (
    Traits,
    flatten,
    model_traits,
    parameter_traits,
    refuse_differences,
    stage_traits,
    weight_traits,
)
from terapipe.runtime.zero_gradients import ZeroGradients
from terapipe.scheduling.actions import Schedule
from terapipe.scheduling.orders import schedule
from terapipe.scheduling.timeline import Event, Timeline

T = TypeVar("T")


class Pipeline(TokenOutputSteps):
    """This process's part of a model that is trained by several, each sequence cut along its tokens.

    ::

        pipe = Pipeline(model, plan)                        # under torchrun; one process per stage
        optimizer = torch.optim.AdamW(pipe.parameters())    # this rank's parameters
        loss = pipe.step(input_ids, labels)                 # gradients are in .grad, as after backward()
        pipe.clip_grad_norm_(1.0)
        optimizer.step()

    As a module it holds this rank's part of the model under the names of the whole model: ``state_dict``,
    ``named_parameters``, ``get_submodule`` and torch.distributed.checkpoint's ``get_state_dict`` know these. It is not
    called itself: ``step``, ``evaluate`` and ``next_token_logits`` are. Under ``torch.autocast`` they compute what the
    plain model computes under it. A hook of ``register_post_accumulate_grad_hook`` is called once per step, at its end,
    when the parameter's gradient is complete: summed over slices, replicas and tied copies. One of
    ``Tensor.register_hook`` is called once, too, with what the step adds, and may return another gradient.

    ``mesh`` is what ``device_mesh(layout)`` made: replicas of the pipeline (``dp``), its ranks (``pp``), devices that
    share each operator (``tp``); or a mesh of your own, whose dimensions ``mesh_dims={"pp": "stage", ...}`` names; or
    one dimension of any DeviceMesh, whose ranks then form the pipeline; by default all ranks do. With ``shard``,
    replicas share out parameters, gradients and the optimizer's state between steps (FSDP2) instead of all holding all.
    ``vary`` says what to do with a batch of another shape than the plan's: refuse it, run it by the same plan resized
    (every rank must then be given the batch), or fill it up to the plan's with tokens that count for nothing.
    ``loss_fn`` is what the model is trained for, see ``terapipe.losses``; by default cross-entropy. A function
    ``loss_fn(logits, targets)`` returns the sum over a slice's tokens; a ``losses.SequenceLoss`` sees whole sequences.
    ``fused_weight_grads``: linear layers (``nn.Linear``, ``Conv1D`` of transformers) add gradients of their weights to
    ``.grad`` in place, and orders with split backwards put them off; turned off, autograd computes them all at once.
    ``verify``: a model of your own is checked on a few made-up tokens before it trains, see ``terapipe.verify``; what
    would give other gradients than the whole model is refused by name. ``GPT`` and Hugging Face models are checked
    elsewhere.
    ``timeout`` is the longest, in seconds, that a rank waits for another before the step fails on all of them, or
    before those are named that do not make their Pipeline.
    """

    def __init__(
        self,
        model: PipelineModel,
        plan: Plan,
        *,
        loss_fn: Objective | None = None,
        mesh: DeviceMesh | None = None,
        mesh_dims: Mapping[str, str] | None = None,
        shard: bool = False,
        vary: Vary = "refuse",
        fused_weight_grads: bool = True,
        verify: bool = True,
        device: torch.device | str | None = None,
        timeout: float = 300.0,
    ) -> None:
        super().__init__()
        self.plan = plan
        self.device = device_of(device)
        self._transport = self._make_transport(mesh, timeout, mesh_dims)
        self._executors: Executors | None = None
        self._is_warm, self._is_sharded = False, shard
        self.zero_gradients = ZeroGradients()
        options = {"loss_fn": loss_fn, "shard": shard, "vary": vary, "fused_weight_grads": fused_weight_grads}
        with self.failing_together():
            traits = Traits(model_traits(require_model(model)) | flatten({"plan": plan.to_dict(), **options}))
        refuse_differences(self._transport, traits)
        self._check(model)
        with self.failing_together():
            checks = ModelChecks(model)
            checks.plan(plan)
            self._tile = 1
            self._transport.connect(_pairs(plan))
            checks.is_verified |= not verify
            self.stages.update(self._make_stages(model, checks, own_loss=loss_fn is None))
            checks.plan(plan)  # again: modes of recomputation may have turned out not to be exact
            self._base = self._frozen_base(model)
            parts = self._compared_parts(model)
        refuse_differences(self._transport, *parts)
        with self.failing_together():
            self._sync = gradient_sync(self.stages, self._transport, shard=shard)
            self._tied = TiedWeights(model.tied, self.stages, plan, self._transport)
            self.attach_stages()
            self._objective = PipelineObjective(loss_fn, self.stages, plan, self._transport, shard)
            self._assemble(checks, vary, fused_weight_grads)

    def _make_transport(
        self, mesh: DeviceMesh | None, timeout: float, mesh_dims: Mapping[str, str] | None
    ) -> Transport:
        return Transport(self.device, mesh, timeout, mesh_dims)

    def _assemble(self, checks: ModelChecks, vary: Vary, fused: bool) -> None:
        wire = Wire(next(self.parameters()).dtype)
        stages, done, objective = self._sync.stages, self._sync.stage_done, self._objective
        inputs = Inputs(self.plan, vary, self._tile, self.rank, self.device, self._vocabulary(), objective.objective)
        self._executors = executors = Executors(
            self.plan, stages, self._transport, wire, checks.plan, done, fused=fused
        )
        self._admission = Admission(inputs, checks, self._tied, executors, objective, self._transport)
        if self.device.type == "cuda":  # now, not hours later: NCCL may work where gloo does not
            ensure_channel(self._transport)
        self._generation = Generation(self.plan, self._sync, executors, self._transport)
        self._broadcast_outputs = OutputBroadcast(self._transport, self.plan.last_rank)

    def _make_stages(self, model: PipelineModel, checks: ModelChecks, *, own_loss: bool) -> dict[int, Stage]:
        """Those of this rank, checked. Where operators are split, the check runs on whole stages before."""
        cuts, parts = self.plan.boundaries, self._transport.tp_size
        tp: tuple[TensorParallel, ...] = ()
        if parts > 1:
            even = all(length % parts == 0 for lengths in self.plan.lengths for length in lengths)
            tp = (TensorParallel(self._transport.submesh(TP), sequence_parallel=even),)
            self._tile = parts if even else 1
        stages = {}
        for k in self.plan.stages_of(self.rank):
            if tp and not checks.is_verified:
                whole = require_stage(model.stage(cuts[k], cuts[k + 1], self.device))
                checks.stage(whole, k, self.plan, own_loss=own_loss)
            stages[k] = require_stage(model.stage(cuts[k], cuts[k + 1], self.device, *tp))
            if not tp:
                checks.stage(stages[k], k, self.plan, own_loss=own_loss)
        return stages

    def _frozen_base(self, model: PipelineModel) -> FrozenBase:
        cuts = self.plan.boundaries
        return FrozenBase(model.weight_source(), [(cuts[k], cuts[k + 1]) for k in self.stages], self._transport)

    def _vocabulary(self) -> Vocabulary:
        """What the stages here say of it: all of them the same."""
        return Vocabulary(*next(iter(self.stages.values())).vocabulary)

    def _compared_parts(self, model: PipelineModel) -> tuple[Traits, ...]:
        """What all ranks must agree on once their stages are made, what those that hold the same stages must, and what
        those that hold the same parts of them."""
        held = [named for stage in self.stages.values() for named in stage.named_parameters()]
        place = self.rank * self._transport.tp_size + self._transport.tp_rank
        return (
            Traits(stage_traits(model, self.stages, self._tile), is_partial=True),
            Traits(parameter_traits(held, trained=True), self.rank),
            Traits(weight_traits(held) if self._transport.dp_size > 1 else {}, place),
        )

    def _check(self, model: PipelineModel) -> None:
        """All ranks have the same plan and as many layers: all refuse them alike."""
        if self.plan.num_layers != model.num_layers:
            raise ValueError(
                f"the plan splits {self.plan.num_layers} layers, the model has {model.num_layers}; "
                "the last of the plan's boundaries must be the number of layers"
            )
        size, ranks = self._transport.size, self.plan.num_ranks
        if size != ranks:
            raise ValueError(
                f"the plan is for {ranks} ranks ({self.plan.num_stages} stages, {self.plan.chunks} per rank), got "
                f"{size} processes; start {ranks} (torchrun --nproc-per-node {ranks}) or make another plan"
            )

    def compare_data(self) -> None:
        """From now on every rank of a pipeline is given all of a batch, and a step is refused if they differ: for
        programs in which each rank reads the data itself. On GPUs the host then waits for every batch."""
        self._admission.compares_data = True

    # Where this process is

    @property
    def transport(self) -> Transport:
        """What the ranks decide together goes through it."""
        return self._transport

    @property
    def rank(self) -> int:
        """This process's place in the pipeline."""
        return self._transport.rank

    @property
    def dp_rank(self) -> int:
        """Which of the replicas this process belongs to, and so which part of the batch it takes."""
        return self._transport.dp_rank

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.rank == self.plan.last_rank

    @property
    def schedule(self) -> Schedule:
        return schedule(self.plan)

    @property
    def tied(self) -> tuple[str, ...]:
        """Names of the one parameter that the first and the last stage share, if they do."""
        return self._tied.names

    # Training

    def step(
        self,
        input_ids: Tensor | None,
        labels: Targets,
        documents: Documents | None = None,
        *,
        plan: Plan | None = None,
        total: float | None = None,
    ) -> Tensor:
        """Forward and backward of one batch. The mean loss over all labels that count, on every rank.

        ``input_ids`` is needed where the first stage is and ``labels`` where the last is; others may pass ``None``.
        Both are (batch, tokens) as the plan says; ``labels[b, t]`` is the token to predict at place ``t`` (see
        ``next_token_labels``), or -100 to leave that place out. Gradients are added to ``.grad``. With a ``loss_fn``,
        ``labels`` are its targets: a tensor, or nested dicts and tuples of tensors, (batch, tokens, ...).

        ``documents`` says, on every rank, where documents begin in each sequence: ``((0, 100), (0,))`` for two in the
        first and one in the second. None sees another. By default a sequence is one document. ``plan`` is another way
        to cut this batch, the same on every rank, with the same stages. ``total``, where the last stage is, is the
        number to divide by in place of this batch's labels (see ``count_labels``): when gradients of several batches
        are accumulated, that of all of them, so that every label weighs the same. Without labels among its targets a
        ``loss_fn``'s sum is divided by the number of all tokens. With a ``SequenceLoss``, ``total`` is a number of
        sequences, and the loss is the mean over microbatches and replicas, weighted by their sequences.
        """
        return self._train(self._admit("step", input_ids, labels, documents, plan, total))

    def _train(self, batch: Batch) -> Tensor:
        if self.device.type == "cuda" and not self._is_warm and self._transport.size > 1:
            self._warm_up(batch, self._objective.output_head)
        with self.failing_together(), self._gradients_added():
            return self._run(batch, train=True)

    def warm_up(self, plan: Plan | None = None) -> None:
        """One step on made-up numbers, without messages between stages. All ranks call it, and are at it at the same
        time: what is compiled, tuned or loaded when first used is ready before anybody has to wait for it. Gradients
        and random generators are as before; hooks of modules are called, those of gradients are not. On GPUs the first
        step does it by itself."""
        self._warm_up(self._made_up(plan or self.plan), self._objective.made_up)

    def _warm_up(self, batch: Batch, output_head: OutputHead) -> None:
        assert self._executors is not None
        self._is_warm = True
        held = list(self.parameters())
        with self.failing_together(), RandomState.now(self.device).restored(), gradients_put_back(held):
            with summed_in_float32(held), self._loss_parallel():
                self._executors.run_alone(batch, output_head)
                self._sync.finish()
            self._transport.gather(None, ALL)

    def _made_up(self, plan: Plan) -> Batch:
        ids = torch.zeros(plan.batch_size, plan.seq_len, dtype=torch.int64, device=self.device)
        one = torch.ones((), device=self.device)
        return Batch(plan, ids if self.is_first else None, ids if self.is_last else None, (), one, one)

    def evaluate(
        self,
        input_ids: Tensor | None,
        labels: Targets,
        documents: Documents | None = None,
        *,
        total: float | None = None,
    ) -> Tensor:
        """The loss that ``step`` would return, by forwards only. Gradients are left alone."""
        batch = self._admit("evaluate", input_ids, labels, documents, None, total)
        with self.failing_together():
            return self._run(batch, train=False)

    def count_labels(self, *batches: Tensor) -> int:
        """How many count, over all replicas. Of every pipeline the rank with the last stage calls it, with its own."""
        with self.failing_together():
            mine = torch.tensor(sum(int((labels != IGNORE).sum()) for labels in batches), device=self.device)
            return int(self._transport.all_reduce(mine, DP))

    def _admit(self, method: str, *given: Any) -> Batch:
        training = any(stage.training for stage in self.stages.values())
        return self._admission.batch(method, *given, training=training, held=Held.of(self))

    def _run(self, batch: Batch, *, train: bool) -> Tensor:
        assert self._executors is not None
        executor = self._executors.begin(batch.plan)
        if train and self._transport.tp_size > 1:
            share_random_state(self._transport)
        with self._loss_parallel():
            loss = executor.run(batch, self._objective.output_head, train=train)
        self._objective.keep(executor.metrics)
        self._sync.finish()
        if self.is_last:
            loss = self._transport.all_reduce(loss, DP)
        return self._transport.broadcast(loss, self.plan.last_rank, "the loss")

    def metrics(self) -> dict[str, float]:
        """Numbers beside the loss of the last ``step`` or ``evaluate``, on every rank: what the objective returned with
        it, and auxiliary losses. All ranks must call it together."""
        with self.failing_together():
            return self._objective.metrics()

    # Gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As that of any module; refused after a failure, of which the loop must not make a next step."""
        self._transport.refuse_stopped("zero_grad")
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of the whole model, on every rank; shared parameters count once."""
        self._transport.refuse_stopped("a norm of gradients")
        assert self._executors is not None
        return total_norm(self.parameters(), self._tied, norm_type, self._transport, self._executors.wide)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As ``torch.nn.utils.clip_grad_norm_``, over the whole model; returns the norm before clipping."""
        norm = self.grad_norm(norm_type)
        if self.device.type == "cpu":  # the host would wait for a GPU
            self.zero_gradients.check_norm(float(norm))
        scale_gradients(self.parameters(), torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    # Checkpoints

    def save(
        self,
        folder: str | Path,
        optimizer: Optimizer | None = None,
        *,
        extra: Mapping[str, Tensor] | None = None,
        notes: Mapping[str, Any] | None = None,
        frozen: bool = False,
    ) -> None:
        """A checkpoint of the whole model, and of the optimizer's state, that loads in any layout. All ranks call it
        together, with a folder that all of them see. What the folder held before is replaced when all is written.

        ``extra`` are further tensors of this rank, under names that no other rank uses; ``notes`` is what JSON can
        hold, the same on all ranks. If it cannot be written, all ranks raise the same OSError, and may go on training.
        After a failure between ranks it is refused: weights may be wrong then.

        Frozen weights are left out if the model was loaded from files that still have these values: what is saved of an
        adapter is the adapter. ``load`` then wants a model with the same frozen weights. With ``frozen``, everything is
        saved.
        """
        self._checkpoint(optimizer).save(Path(folder), extra or {}, notes, frozen)

    def save_in_background(
        self,
        folder: str | Path,
        optimizer: Optimizer | None = None,
        *,
        extra: Mapping[str, Tensor] | None = None,
        notes: Mapping[str, Any] | None = None,
        frozen: bool = False,
    ) -> Saving:
        """As ``save``, of the state at this moment: it is copied to the host's memory, and written while training goes
        on. Another save waits until this one is done. ``result()`` of what is returned waits for it and raises what
        went wrong; it must be called before the process ends."""
        return self._checkpoint(optimizer).begin(Path(folder), extra or {}, notes, frozen, copy=True)

    def load(
        self,
        folder: str | Path,
        optimizer: Optimizer | None = None,
        *,
        extra: Mapping[str, Tensor] | None = None,
        verify: bool = True,
    ) -> Loaded:
        """What ``save`` wrote, in this or any other layout; nothing in it is run, whoever wrote it. Learning rate and
        the like stay as they are. An optimizer of which nothing was saved begins anew. Frozen weights that were left
        out are compared with those of the model, and a model with others is refused.

        Fills the ``extra`` tensors that the checkpoint has in the same shape, and leaves the others. Returns the notes,
        a dictionary, whose ``found`` names the extra tensors that were there.

        With ``verify``, all files are first compared with their checksums. If one is damaged or missing, or frozen
        weights are others, all ranks raise the same ValueError, and model and optimizer are as before.
        """
        wrong = verify_files(Path(folder), self._transport) if verify else ""
        if wrong:
            raise ValueError(wrong)
        checkpoint = self._checkpoint(optimizer)
        checkpoint.check_base(Path(folder))
        with self.failing_together():
            return checkpoint.load(Path(folder), extra or {})

    def _checkpoint(self, optimizer: Optimizer | None) -> Checkpoint:
        buffers = persistent_buffers(self.stages.values())
        return Checkpoint(self.named_parameters(), buffers, self._tied, optimizer, self._transport, self._base)

    # Looking back

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank, in the order of the pipeline. All ranks must call it together."""
        return self._transport.gather(value)

    def timeline(self) -> Timeline:
        """What every rank did in the last step, and when. All ranks must call it together."""
        return self._timeline(self.gather(self._events()))

    def timeline_on_first(self) -> Timeline | None:
        """The same, on the pipeline's first rank only: the events of many ranks need not go to all of them."""
        events = self._transport.collect(self._events())
        return None if events is None else self._timeline(events)

    def _events(self) -> list[Event]:
        assert self._executors is not None
        return self._executors.current.events()

    def _timeline(self, events: list[list[Event]]) -> Timeline:
        assert self._executors is not None
        return Timeline.of(self._executors.current.plan, [event for rank in events for event in rank])


def _pairs(plan: Plan) -> set[tuple[int, int]]:
    """The ranks that send each other something: those of neighboring stages, and those of the first and the last."""
    ranks = [plan.rank_of(k) for k in range(plan.num_stages)]
    return {*pairwise(ranks), (ranks[0], ranks[-1])}
