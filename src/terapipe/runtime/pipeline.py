"""The library's face: ``Pipeline``, a module that trains this process's part of a model.

Read ``step`` first. A call goes through four objects, in this order::

    preflight   is what this rank was given right, and do all ranks agree?          preflight.py
    executors   the executor for the batch's plan                                   executor.py
    executor    performs this rank's actions: receive, forward, backward, send      executor.py
    sync        sums gradients over replicas while other stages are still at work   gradient_sync.py

For a first reading stop after ``_run``. What follows in the class asks the same four for something else: values of
tokens (``_values``), norms, checkpoints, timelines, and what an ``nn.Module`` has.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer

from terapipe.losses.objective import Objective, Targets
from terapipe.losses.tokens import token_log_probs
from terapipe.modeling.stage import IGNORE, PipelineModel, RandomState, require_model
from terapipe.modeling.weight_grads import summed_in_float32
from terapipe.planning.slices import Plan
from terapipe.runtime.action_lists import communicating_ranks
from terapipe.runtime.checkpoint.frozen import FrozenBase
from terapipe.runtime.checkpoint.state import Checkpoint, Loaded
from terapipe.runtime.checkpoint.writer import CheckpointWriter, Saving
from terapipe.runtime.comm.mesh import ALL, DP, PP
from terapipe.runtime.comm.transport import Transport, transport_for
from terapipe.runtime.executors import Executors
from terapipe.runtime.gradient_sync import (
    TiedWeights,
    ZeroGradients,
    accumulate_step,
    gradient_sync,
    gradients_restored,
    scale_gradients,
    total_norm,
)
from terapipe.runtime.loss_head import (
    Batch,
    Documents,
    LossHead,
    LossSetup,
    PerToken,
    TokenValues,
    logits,
    logits_alone,
)
from terapipe.runtime.model_checks import ModelChecks
from terapipe.runtime.module_tree import attach_stages, copy_shared_buffers, is_placeholder, persistent_buffers
from terapipe.runtime.preflight import Inputs, Preflight, Vary
from terapipe.runtime.random_state import share_random_state
from terapipe.runtime.token_outputs import TokenOutputs, with_backward, without_names
from terapipe.runtime.traits import Traits, flatten, model_traits, part_traits, refuse_differences
from terapipe.scheduling.actions import Schedule
from terapipe.scheduling.orders import schedule
from terapipe.scheduling.timeline import Event, Timeline

T = TypeVar("T")


class Pipeline(nn.Module):
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

    Args:
        model: the whole model, the same on every rank; this process takes its stages out of it.
        plan: how batches are cut into slices and layers into stages, and in what order slices are computed.
        loss_fn: what the model is trained for, see ``terapipe.losses``; by default cross-entropy. A function
            ``loss_fn(logits, targets)`` returns the sum over a slice's tokens; a ``losses.SequenceLoss`` sees whole
            sequences.
        mesh: what ``device_mesh(layout)`` made: replicas of the pipeline (``dp``), its ranks (``pp``), devices that
            share each operator (``tp``); or one dimension of any DeviceMesh, whose ranks then form the pipeline. By
            default all ranks do.
        mesh_dims: the dimensions of a mesh of your own, ``{"pp": "stage", ...}``.
        shard: whether replicas share out parameters, gradients and the optimizer's state between steps (FSDP2) instead
            of all holding all.
        vary: what to do with a batch of another shape than the plan's: ``"refuse"`` it; ``"replan"``, run it by the
            same plan resized (every rank must then be given the batch); or ``"pad"`` it up to the plan's with tokens
            that count for nothing.
        fused_weight_grads: whether ``nn.Linear``, ``nn.Embedding`` and ``Conv1D`` of transformers add gradients of
            their weights to ``.grad`` in place, and orders with split backwards put them off. Turned off,
            autograd computes them all at once.
        verify: whether a model of your own is checked on a few made-up tokens before it trains, see
            ``terapipe.verify``; what would give other gradients than the whole model is refused by name. ``GPT`` and
            Hugging Face models are checked elsewhere.
        device: of this process; by default its GPU, or the CPU where there is none.
        timeout: the longest, in seconds, that a rank waits for another before the step fails on all of them, or before
            those are named that do not make their Pipeline; by default 300.
        transport: of another pipeline or a profiler in this process, in place of ``mesh``, ``device`` and ``timeout``.
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
        timeout: float | None = None,
        transport: Transport | None = None,
    ) -> None:
        super().__init__()
        self.plan = plan
        transport = transport_for(transport, device, mesh, timeout, mesh_dims)
        self._transport, self.device = transport, transport.device
        self._is_warm, self._is_sharded = False, shard
        self.zero_gradients = ZeroGradients()
        options = {"loss_fn": loss_fn, "shard": shard, "vary": vary, "fused_weight_grads": fused_weight_grads}
        with transport.failure.failing_together():
            traits = Traits(model_traits(require_model(model)) | flatten({"plan": plan.to_dict(), **options}))
        refuse_differences(transport, traits)
        checks = ModelChecks(model)
        checks.size(plan, transport.size)
        with transport.failure.failing_together():
            checks.plan(plan)
            transport.connect(communicating_ranks(plan))
            checks.is_verified |= not verify
            # By number, in a dict: not children, as the tree of modules has all that is in them.
            self.stages, tile = checks.make_stages(plan, transport, own_loss=loss_fn is None)
            checks.plan(plan)  # again: modes of recomputation may have turned out not to be exact
            layers = [(plan.boundaries[k], plan.boundaries[k + 1]) for k in self.stages]
            self._base = FrozenBase(model.weight_source(), layers, transport)
            parts = part_traits(model, self.stages, tile, transport)
        refuse_differences(transport, *parts)
        with transport.failure.failing_together():
            self._sync = gradient_sync(self.stages, transport, shard=shard)
            self._tied = TiedWeights(model.tied, self.stages, plan, transport)
            attach_stages(self, self.stages.values())
            self.training = any(stage.training for stage in self.stages.values())
            dtype = next(iter(self.stages.values())).hidden_dtype  # all stages say the same
            sync, fused = self._sync, fused_weight_grads
            self._executors = Executors(plan, sync.stages, transport, dtype, checks.plan, sync.stage_done, fused=fused)
            self._loss = LossSetup(loss_fn, self.stages, plan, transport, shard)
            vocabulary = next(iter(self.stages.values())).vocabulary  # all stages say the same
            inputs = Inputs(plan, vary, tile, self.rank, self.device, vocabulary, loss_fn)
            of_rank = (self.stages, self._tied, self._executors, self._loss, transport)
            self._preflight = Preflight(inputs, model, *of_rank)
            self._token_outputs = TokenOutputs(plan.last_rank, self._executors, self._sync, transport)
            if self.device.type == "cuda":  # now, not hours later: NCCL may work where gloo does not
                CheckpointWriter.ensure(transport)

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
        """Whether this rank has the first stage, and so needs ``input_ids``."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.rank == self.plan.last_rank

    @property
    def schedule(self) -> Schedule:
        """The actions of all ranks, by the pipeline's own plan."""
        return schedule(self.plan)

    @property
    def tied(self) -> tuple[str, ...]:
        """Names of the one parameter that the first and the last stage share, if they do."""
        return self._tied.names

    def failing_together(self) -> AbstractContextManager[None]:
        """For what all ranks do together: an error inside stops the others too, with this rank's error."""
        return self._transport.failure.failing_together(lambda: self._executors.current.at)

    def compare_data(self) -> None:
        """From now on every rank of a pipeline is given all of a batch, and a step is refused if they differ: for
        programs in which each rank reads the data itself. On GPUs the host then waits for every batch."""
        self._preflight.compares_data = True

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
        """Forward and backward of one batch. Gradients are added to ``.grad``.

        Args:
            input_ids: (batch, tokens) as the plan says, where the first stage is; others may pass ``None``.
            labels: of the same shape, where the last stage is; others may pass ``None``. ``labels[b, t]`` is the token
                to predict at place ``t`` (see ``next_token_labels``), or -100 to leave that place out. With a
                ``loss_fn`` these are its targets: tensors, (batch, tokens, ...), or nested dicts and tuples of them.
            documents: where documents begin in each sequence, on every rank: ``((0, 100), (0,))`` for two in the first
                and one in the second. None sees another. By default a sequence is one document.
            plan: another way to cut this batch, the same on every rank, with the same stages.
            total: the number to divide by in place of this batch's labels, where the last stage is (see
                ``count_labels``). When gradients of several batches are accumulated, it is that of all of them, so that
                every label weighs the same. Without labels among its targets a ``loss_fn``'s sum is divided by the
                number of all tokens. With a ``SequenceLoss`` it is a number of sequences, and the loss is the mean over
                microbatches and replicas, weighted by their sequences.

        Returns:
            The mean loss over all labels that count, on every rank.
        """
        return self._train(self._preflight.batch("step", self, input_ids, labels, documents, plan, total))

    def evaluate(
        self,
        input_ids: Tensor | None,
        labels: Targets,
        documents: Documents | None = None,
        *,
        total: float | None = None,
    ) -> Tensor:
        """The loss that ``step`` would return, by forwards only. Gradients are left alone.

        Args:
            input_ids: As for ``step``.
            labels: As for ``step``.
            documents: As for ``step``.
            total: As for ``step``.
        """
        batch = self._preflight.batch("evaluate", self, input_ids, labels, documents, None, total)
        with self.failing_together():
            return self._run(batch, train=False)

    def _train(self, batch: Batch) -> Tensor:
        if self._is_cold:
            self._warm_up(batch, self._loss.head)
        with self.failing_together(), self._accumulate_gradients():
            return self._run(batch, train=True)

    def _run(self, batch: Batch, *, train: bool) -> Tensor:
        executor = self._executors.begin(batch.plan)
        if train and self._transport.tp_size > 1:
            share_random_state(self._transport)
        with self._loss_parallel():
            loss = executor.run(batch, self._loss.head, train=train)
        self._loss.set_metrics(executor.metrics)
        self._sync.finish()
        if self.is_last:
            loss = self._transport.all_reduce(loss, DP)
        return self._transport.broadcast(loss, self.plan.last_rank, "the loss")

    def _accumulate_gradients(self) -> AbstractContextManager[None]:
        """Around the backwards of a batch, whose gradients it adds to ``.grad``. Where any rank has hooks, all wait for
        them: an error in one must not come out later."""
        wait = (lambda: self._transport.gather_numbers((0,), ALL)) if self._preflight.await_hooks else None
        return accumulate_step(self, self._sync, self._tied, self.zero_gradients, wait)

    def _loss_parallel(self) -> AbstractContextManager[None]:
        """A loss over a vocabulary in parts is known to torch within this context only, its gradient too."""
        return loss_parallel() if self._transport.tp_size > 1 else nullcontext()

    def count_labels(self, *batches: Tensor) -> int:
        """How many labels count, over all replicas. Of every pipeline the rank with the last stage calls it.

        Args:
            batches: the labels of this replica's batches.
        """
        with self.failing_together():
            mine = torch.tensor(sum(int((labels != IGNORE).sum()) for labels in batches), device=self.device)
            return int(self._transport.all_reduce(mine, DP))

    def metrics(self) -> dict[str, float]:
        """Numbers beside the loss of the last ``step`` or ``evaluate``, on every rank: what the objective returned with
        it, and auxiliary losses. All ranks must call it together."""
        with self.failing_together():
            return self._loss.metrics()

    def warm_up(self, plan: Plan | None = None) -> None:
        """One step on made-up numbers, without messages between stages.

        All ranks call it, and are at it at the same time: what is compiled, tuned or loaded when first used is ready
        before anybody has to wait for it. Gradients and random generators are as before; hooks of modules are called,
        those of gradients are not. On GPUs the first step does it by itself.

        Args:
            plan: of the batches to come, by default the pipeline's own.
        """
        self._warm_up(Batch.made_up(plan or self.plan, self.rank, self.device), self._loss.warm_up_head)

    @property
    def _is_cold(self) -> bool:
        return self.device.type == "cuda" and not self._is_warm and self._transport.ranks[PP].has_peers

    def _warm_up(self, batch: Batch, loss_head: LossHead) -> None:
        self._is_warm = True
        parameters = list(self.parameters())
        with self.failing_together(), RandomState.now(self.device).restored(), gradients_restored(parameters):
            with summed_in_float32(parameters), self._loss_parallel():
                self._executors.run_alone(batch, loss_head)
                self._sync.finish()
            self._transport.gather(None, ALL)

    # Values of tokens

    def token_outputs(
        self,
        input_ids: Tensor | None,
        labels: Tensor | None,
        per_token: PerToken = token_log_probs,
        documents: Documents | None = None,
        plan: Plan | None = None,
    ) -> Any:
        """Values for each token of a batch, as a differentiable operation: any loss may be computed from them, and its
        ``backward()`` runs the backwards of the pipeline. ::

            log_probs = pipe.token_outputs(input_ids, labels)   # forwards
            loss = my_loss(log_probs)                           # the same on every rank
            loss.backward()                                     # gradients are in .grad

        All ranks must call it together, with the same ``input_ids``, and call ``backward()`` together, before the next
        forward that needs gradients. The order of the plan must have all forwards first. Gradients are summed over
        replicas. Under ``torch.no_grad()`` there are only forwards.

        Args:
            input_ids: (rows, tokens), any number of sequences of any length, cut as the plan cuts its own.
            labels: of the same shape, or None if ``per_token`` does not need them (it then gets an empty dict).
            per_token: ``per_token(logits, labels)`` makes the values of a slice, a tensor or a dict of tensors; by
                default the log-probability of each label. Only the logits of one slice exist at a time, unless they are
                the values; their head runs again in the backward.
            documents: as for ``step``.
            plan: as for ``step``.

        Returns:
            What ``per_token`` returns, (rows, tokens, ...), on every rank.
        """
        return self._values("token_outputs", TokenValues(per_token), input_ids, labels, documents, plan)

    def _values(
        self,
        method: str,
        head: TokenValues,
        input_ids: Tensor | None,
        labels: Tensor | None = None,
        documents: Documents | None = None,
        plan: Plan | None = None,
    ) -> Any:
        """What the head collects, on every rank; None elsewhere than on the last stage if that is hidden states."""
        train, outputs = torch.is_grad_enabled(), self._token_outputs
        if head.per_token is not None:
            of_tokens = method != "token_outputs" or head.per_token is token_log_probs
            outputs.check_logits(self.stages.get(self.plan.num_stages - 1), of_tokens=of_tokens)
        batch, executor = self._preflight.tokens(method, self, input_ids, labels, documents, plan, train=train)
        if train and self._is_cold:
            self.warm_up(batch.plan)
        with self.failing_together(), self._loss_parallel():
            outputs.forwards(batch, executor, head, train=train)
            if head.per_token is None:
                return head.join_all() if self.is_last else None
            values = outputs.broadcast(batch, head)
        if train:
            states = outputs.states(self.stages)  # of modules in the forwards, which are computed again in part

            def backward(gradients: dict[str, Tensor]) -> None:
                executor.check_pending(batch)
                with self.failing_together(), states.restored(), self._accumulate_gradients(), self._loss_parallel():
                    outputs.backwards(batch, executor, head, gradients)

            values = with_backward(values, backward)
        return without_names({name: value[:, : batch.tokens] for name, value in values.items()})

    @torch.no_grad()
    def log_probs(self, input_ids: Tensor | None, labels: Tensor | None, documents: Documents | None = None) -> Tensor:
        """The log-probability of each label, (rows, tokens), on every rank; 0 where the label is -100.

        By forwards only: for reference models and the policies that made completions. Each replica has its own batch,
        but all call it together. Call ``eval()`` before, where it matters.

        Args:
            input_ids: (rows, tokens), any number of sequences of any length, cut as the plan cuts its own. If it is not
                the plan's shape, every rank must be given ``input_ids`` or ``labels``.
            labels: of the same shape, where the last stage is.
            documents: as for ``step``.
        """
        values: Tensor = self._values("log_probs", TokenValues(token_log_probs), input_ids, labels, documents)
        return values.to(self._executors.wide)

    @torch.no_grad()
    def hidden_states(self, input_ids: Tensor | None, documents: Documents | None = None) -> Tensor | None:
        """What the head would be called with, before any norm: (batch, tokens, hidden) where the last stage is, None
        elsewhere. By forwards only, for teachers, whose logits of a whole batch would not fit; see ``logits`` and
        ``losses.distillation``.

        Args:
            input_ids: of the plan's shape, where the first stage is.
            documents: as for ``step``.
        """
        if self._transport.tp_size > 1:
            raise ValueError("hidden states are split over ranks with tensor parallel; take tp 1")
        hidden: Tensor | None = self._values("hidden_states", TokenValues(None), input_ids, None, documents)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """The scores of all tokens, (rows, tokens, vocabulary), where the last stage is. Not with ``shard``: parameters
        are in parts between steps.

        Args:
            hidden: what ``hidden_states`` returned.
        """
        if self._is_sharded:
            raise ValueError("parameters are in parts between steps with shard=True; take shard=False for a teacher")
        return logits(self._sync.stages[self.plan.num_stages - 1], hidden)

    @torch.no_grad()
    def next_token_logits(self, input_ids: Tensor | None) -> Tensor:
        """The scores of the token after each sequence, (rows, vocabulary), on every rank.

        By forwards only. Replicas have their own sequences, but all call it together. Call ``eval()`` where it matters.

        Args:
            input_ids: (rows, tokens), any number of sequences of any length, the same on every rank of a pipeline.
        """
        tokens = 1 if input_ids is None or input_ids.ndim != 2 else input_ids.shape[1]
        values: Tensor = self._values("next_token_logits", TokenValues(logits_alone, tokens - 1), input_ids)
        return values[:, 0].to(self._executors.wide)

    # Gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As that of any module; refused after a failure, of which the loop must not make a next step.

        Args:
            set_to_none: whether gradients become None instead of zeros.
        """
        self._transport.failure.refuse_stopped("zero_grad")
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of the whole model, on every rank; shared parameters count once.

        Args:
            norm_type: the p of the p-norm, or ``inf``.
        """
        self._transport.failure.refuse_stopped("a norm of gradients")
        return total_norm(self.parameters(), self._tied, norm_type, self._transport, self._executors.wide)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As ``torch.nn.utils.clip_grad_norm_``, over the whole model; returns the norm before clipping.

        Args:
            max_norm: gradients of a larger norm are scaled down to it.
            norm_type: the p of the p-norm, or ``inf``.
        """
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
        """A checkpoint of the whole model, and of the optimizer's state, that loads in any layout.

        All ranks call it together. If it cannot be written, all ranks raise the same OSError, and may go on training.
        After a failure between ranks it is refused: weights may be wrong then.

        Args:
            folder: one that all ranks see. What it held before is replaced when all is written.
            optimizer: whose state is saved, too.
            extra: further tensors of this rank, under names that no other rank uses.
            notes: what JSON can hold, the same on all ranks.
            frozen: whether everything is saved. By default frozen weights are left out if the model was loaded from
                files that still have these values: what is saved of an adapter is the adapter. ``load`` then wants a
                model with the same frozen weights.
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
        on. Another save waits until this one is done.

        Args:
            folder: As for ``save``.
            optimizer: As for ``save``.
            extra: As for ``save``.
            notes: As for ``save``.
            frozen: As for ``save``.

        Returns:
            An object whose ``result()`` waits for the end and raises what went wrong. It must be called before the
            process ends.
        """
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
        the like stay as they are. Frozen weights that were left out are compared with those of the model, and a model
        with others is refused.

        Args:
            folder: that of the checkpoint.
            optimizer: whose state is loaded, too. One of which nothing was saved begins anew.
            extra: tensors to fill, as far as the checkpoint has them in the same shape; the others are left.
            verify: whether all files are first compared with their checksums. If one is damaged or missing, or frozen
                weights are others, all ranks raise the same ValueError, and model and optimizer are as before.

        Returns:
            The notes, a dictionary, whose ``extra_names`` names the extra tensors that were there.
        """
        return self._checkpoint(optimizer).load(Path(folder), extra or {}, verify=verify)

    def _checkpoint(self, optimizer: Optimizer | None) -> Checkpoint:
        buffers = persistent_buffers(self.stages.values())
        return Checkpoint(self.named_parameters(), buffers, self._tied, optimizer, self._transport, self._base)

    # Looking back

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank, in the order of the pipeline. All ranks must call it together.

        Args:
            value: this rank's; it must be one that pickle can save.
        """
        return self._transport.gather(value)

    def timeline(self) -> Timeline:
        """What every rank did in the last step, and when. All ranks must call it together."""
        return self._timeline(self.gather(self._executors.current.events()))

    def timeline_on_first(self) -> Timeline | None:
        """The same, on the pipeline's first rank only: the events of many ranks need not go to all of them."""
        events = self._transport.collect(self._executors.current.events())
        return None if events is None else self._timeline(events)

    def _timeline(self, events: list[list[Event]]) -> Timeline:
        return Timeline.of(self._executors.current.plan, [event for rank in events for event in rank])

    # As a module: what nn.Module does is right for all but these

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Refused: a pipeline has no forward of its own."""
        raise NotImplementedError("a Pipeline is not called itself; call step, evaluate or next_token_logits")

    def train(self, mode: bool = True) -> Self:
        """As that of any module. Some modules of the stages may have no place in the tree, so stages are told too."""
        super().train(mode)
        for stage in self.stages.values():
            stage.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """As that of any module: ``fn`` is called with all modules of the stages, then with this one."""
        for stage in self.stages.values():
            stage.apply(fn)
        fn(self)
        return self

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Without the zeros that stand for weights of other ranks."""
        return ((name, b) for name, b in super().named_buffers(*args, **kwargs) if not is_placeholder(b))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copies values to this rank's parameters and buffers.

        Args:
            state_dict: of this rank's part; with ``strict=False`` that of a whole model.
            strict: whether its names must be exactly those of this rank.
            assign: refused; other objects hold the parameters.
        """
        if assign:
            raise ValueError("a Pipeline's parameters cannot be replaced; load with assign=False, which copies to them")
        keys = super().load_state_dict(state_dict, strict)
        copy_shared_buffers(self.state_dict(keep_vars=True), self.stages.values())
        return keys

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What ``to``, ``cuda``, ``half``, ``to_empty`` and the like do. Other ranks, the optimizer and the buffers for
        keys and values count on devices and dtypes as they are."""
        for device, dtype in {(x.device, x.dtype) for x in (*self.parameters(), *self.buffers())}:
            probe = torch.empty(0, device=device, dtype=dtype)
            if fn(probe) is not probe:
                raise ValueError(
                    f"a Pipeline stays on its device and in its dtype, {device} and {dtype}; convert the model "
                    "before, or pass device= to Pipeline"
                )
        return self

    def share_memory(self) -> Self:
        """Refused: the optimizer and other ranks count on the parameters where they are."""
        raise ValueError("a Pipeline's parameters cannot be moved to shared memory; share the model's before")
