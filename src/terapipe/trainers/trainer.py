"""transformers' Trainer, and any subclass of it, through a pipeline. Needs transformers and accelerate.

::

    class PipelineSFTTrainer(PipelineMixin, SFTTrainer): ...

    trainer = PipelineSFTTrainer(model, args=args, train_dataset=dataset, slices=16)

With one process it computes slice by slice on one device; under torchrun its ranks form a pipeline, or replicas of one.

The Trainer keeps its own loop, callbacks, arguments, logs and folders. What is replaced, and by which of its methods:

- the forward of the model: ``PipelinedModel``, made in ``create_optimizer`` or before an evaluation;
- who shares out data and gathers results: ``PipelineAccelerator``, in ``create_accelerator_and_postprocess``;
- steps of plain cross-entropy: ``training_step``, in any order of the plan;
- what is saved: ``save_model`` and, of private methods, those under "Private methods of Trainer" below.

When Trainer calls what, and what is done here:

    trainer = PipelineTrainer(...)
      create_accelerator_and_postprocess   process groups are made; the Accelerator counts replicas, not ranks
      (end of __init__)                    arguments and model are checked on a small copy: refused here, not later
    trainer.train()
      create_optimizer                     the pipeline is made; the optimizer gets this rank's parameters
      training_step                        plain cross-entropy: one Pipeline.step; else Trainer's own step, through the
                                           model's forward
      _save_optimizer_and_scheduler        Pipeline.save into the checkpoint's folder, for any layout
      _finalize_training                   all weights are gathered into the model

On every rank of a replica the same Trainer runs with the same batches, so whatever it does is done alike on all.
"""

import os
import warnings
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import Trainer

from terapipe.hf.backends import UnsupportedModelError
from terapipe.hf.decoder import Decoder
from terapipe.hf.refusals import switch_checkpointing, without_wrapper
from terapipe.hf.structure import is_classifier
from terapipe.planning.layout import Layout
from terapipe.planning.recompute import Recompute
from terapipe.runtime.comm.environment import rank_and_size
from terapipe.runtime.comm.mesh import DP, device_mesh
from terapipe.runtime.host_optimizer import HostOptimizer, is_torchao_class
from terapipe.trainers.accelerator import PipelineAccelerator
from terapipe.trainers.calls import TESTED
from terapipe.trainers.config import PipelineConfig
from terapipe.trainers.model import PipelinedModel, pipelined, unpatched
from terapipe.trainers.noise import EmbeddingNoise
from terapipe.trainers.refusals import (
    optimizer_of,
    recompute_of,
    refuse_arguments,
    refuse_compiling,
    refuse_recomputation,
    refuse_router_losses,
    refuse_untrainable,
)

__all__ = ["PipelineConfig", "PipelineMixin", "PipelineTrainer"]
STATE = "pipeline"  # weights and optimizer state in a checkpoint's folder, for any layout
SCHEDULER, OPTIMIZER = "scheduler.pt", "optimizer.pt"
# Methods that are called or replaced here and may change without notice.
PRIVATE = (
    "_wrap_model", "_move_model_to_device", "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler",
    "_load_best_model", "_finalize_training", "_get_train_sampler",
)  # fmt: skip


class ResumeThroughAPipelineTrainer:
    """In the place of an optimizer's state in a checkpoint's folder: that is in the folder ``pipeline``.

    The plain Trainer would go on without it if the file were missing, with an optimizer that begins anew. It refuses to
    unpickle a class that it does not know, and says its name: so the name is the message.
    """


class PipelineMixin:
    """Trains through a pipeline, in front of a Trainer class: ``class Mine(PipelineMixin, MyTrainer): ...``.

    The model that is passed stays the trainer's model. Its forward goes through the pipeline, so a ``compute_loss`` of
    one's own works as before; what it costs is that all forwards of a step come first.

    Args:
        *arguments: Those of the Trainer class.
        **named: Those of the Trainer class.
        pipeline: How to split the model and its sequences.
        slices: Short for ``pipeline=PipelineConfig(num_slices=...)``.

    Attributes:
        pipeline_config: What was passed as ``pipeline``, or made of ``slices``.
        pipelined: The model through a pipeline; None before ``make_pipeline``.
        layout: Replicas, stages and tensor-parallel ranks.

    Raises:
        ValueError: An argument, the model or its loss does not go with a pipeline.
        RuntimeError: This transformers has not the private methods of Trainer that are replaced here.
    """

    def __init__(
        self, *arguments: Any, pipeline: PipelineConfig | None = None, slices: int | None = None, **named: Any
    ) -> None:
        if pipeline is not None and slices is not None:
            raise ValueError("slices is short for pipeline=PipelineConfig(slices=...); give one of them")
        missing = [name for name in PRIVATE if not hasattr(Trainer, name)]
        if missing:
            raise RuntimeError(
                f"transformers {transformers.__version__} has no Trainer.{', '.join(missing)}, which this relies on; "
                f"{TESTED}"
            )
        self.pipeline_config = pipeline or PipelineConfig(slices=slices)
        self.pipelined: PipelinedModel | None = None
        self._predicting = False
        super().__init__(*arguments, **named)
        refuse_arguments(self._trainer, self.layout)
        self._trainer.neftune_noise_alpha = None  # or it would put its own hook on the model, which slices do not call
        self._refuse_model()

    @property
    def _trainer(self) -> Any:
        """This object, which is a Trainer."""
        return self

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that have the same batch: stages times tensor-parallel ranks."""
        return self.layout.devices // self.layout.dp

    # The pipeline

    def _noise(self) -> EmbeddingNoise | None:
        """NEFTune's noise, if the arguments ask for it. They do from the start: TRL may make the pipeline while this
        object is made, for the log-probabilities of a reference."""
        alpha = self._trainer.args.neftune_noise_alpha
        return None if alpha is None else EmbeddingNoise(alpha, lambda: self._trainer.is_in_train)

    def create_accelerator_and_postprocess(self) -> None:
        """Trainer's, called in its ``__init__``; then makes the mesh of all ranks, and the Accelerator one of replicas.

        The mesh must be there before data are shared out, and long before the pipeline: Trainer asks its Accelerator
        for the number of processes as soon as it has one.
        """
        args = self._trainer.args
        args._n_gpu = min(1, args.n_gpu)  # never nn.DataParallel
        if args.accelerator_config.dispatch_batches is None:
            args.accelerator_config.dispatch_batches = False  # each rank reads its replica's data itself
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.layout: Layout = self.pipeline_config.layout(rank_and_size()[1])
        timeout = self.pipeline_config.timeout or float(args.ddp_timeout)
        self._mesh = None if self.layout.devices == 1 else device_mesh(self.layout, device=args.device, timeout=timeout)
        group = self._mesh.get_group(DP) if self._mesh is not None and self.layout.dp > 1 else None
        PipelineAccelerator.adopt(self._trainer.accelerator, self.layout, group)

    def make_pipeline(self) -> PipelinedModel:
        """The model through a pipeline, made once; anew if ``model_init`` made another model.

        Every method that needs it calls this, as users may begin anywhere: with ``train``, ``evaluate``, ``predict``,
        ``save_model`` or a single ``training_step``. All ranks must make it together.
        """
        if self.pipelined is None or self.pipelined.outer is not self._trainer.model:
            trainer, args = self._trainer, self._trainer.args
            outer = cast(nn.Module, trainer.model)
            self._stop_checkpointing()
            with trainer.accelerator.autocast():  # which is how steps are to be planned
                optimizer = self.pipeline_config.optimizer or optimizer_of(trainer)
                self.pipelined = pipelined(
                    outer, config=replace(self.pipeline_config, optimizer=optimizer),
                    batch_size=args.per_device_train_batch_size,
                    seq_len=getattr(args, "max_length", None), recompute=self._recompute,
                    device=args.device, mesh=self._mesh, timeout=self._timeout,
                    compile_backend=self._compile_backend, noise=self._noise(),
                )  # fmt: skip
            trainer.accelerator.pipelined = self.pipelined
            self._pipeline_reference(self.pipelined)
            if self.layout.pp > 1 and hasattr(outer, "generate"):
                self._generate_on_first(outer)
        return self.pipelined

    def _pipeline_reference(self, policy: PipelinedModel) -> None:
        """A reference model of the same kind is cut alike: before the first update, both have the same bits, so that
        ties between them are ties. Its weights stay whole on every rank. Any other is called as it is."""
        trainer, layout = self._trainer, self.layout
        reference: Any = getattr(trainer, "ref_model", None)
        if type(without_wrapper(reference)) is not type(policy.model) or layout.tp > 1 or layout.shard:
            return
        own = self.pipeline_config  # the plan says all that is left out
        config = PipelineConfig(plan=policy.pipe.plan, dp=own.dp, timeout=own.timeout)
        wrapped = reference.__dict__.pop("_original_forward", None)  # accelerate's autocast is put around ours instead
        prepared = reference.__dict__.get("forward")
        if wrapped is not None:
            reference.forward = wrapped
        try:
            made = pipelined(
                reference, config=config, device=trainer.args.device, mesh=self._mesh, timeout=self._timeout,
                compile_backend=self._compile_backend,
            )  # fmt: skip
            made.planner = policy.planner
        except UnsupportedModelError:
            if wrapped is not None:
                reference.forward, reference._original_forward = prepared, wrapped
            return
        reference.__dict__.pop("_is_accelerate_prepared", None)
        trainer.ref_model = trainer.accelerator.prepare_model(reference, evaluation_mode=True)

    @property
    def _timeout(self) -> float:
        """Seconds that a rank waits for another, if the configuration of the pipeline says nothing."""
        return float(self._trainer.args.ddp_timeout)

    @property
    def _compile_backend(self) -> str | None:
        """What compiles layers, if ``torch_compile`` says so."""
        args = self._trainer.args
        return str(args.torch_compile_backend) if args.torch_compile else None

    @property
    def _recompute(self) -> Recompute:
        """What gradient checkpointing becomes, unless the configuration of the pipeline says it."""
        return recompute_of(self._trainer.args)

    def _refuse_model(self) -> None:
        """Looks at a small copy of the model, so that what a step would refuse is refused when the trainer is made."""
        trainer, inner = self._trainer, without_wrapper(self._trainer.model)
        with unpatched(inner):
            refuse_untrainable(inner)
        self._stop_checkpointing()
        with unpatched(inner):
            decoder = Decoder(trainer.model)
        refuse_recomputation(decoder, self.pipeline_config, trainer.args)
        refuse_compiling(decoder, self.pipeline_config, trainer.args)
        refuse_router_losses(
            trainer, in_model=decoder.has_auxiliary_losses, is_plain=self._is_plain(), replicas=self.layout.dp
        )

    def _stop_checkpointing(self) -> None:
        """Trainer switches it on in the model; the plan recomputes instead."""
        if self._trainer.args.gradient_checkpointing:
            switch_checkpointing(without_wrapper(self._trainer.model), False)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Trainer's optimizer, of this rank's parameters. They have their names in the whole model, by which Trainer
        chooses those without weight decay.

        Args:
            model: Ignored: the pipeline takes its place.
        """
        self._stop_checkpointing()
        trainer, pipe = self._trainer, self.make_pipeline().pipe  # planned for the class that was asked for
        kind, options = trainer.optimizer_cls_and_kwargs or (None, {})
        if is_torchao_class(kind, itself=True):  # takes gradients before they are clipped
            trainer.optimizer_cls_and_kwargs = HostOptimizer, options
        super().create_optimizer(pipe)  # type: ignore[misc]
        self._adopt_optimizer()
        return cast(torch.optim.Optimizer, trainer.optimizer)

    def _adopt_optimizer(self) -> None:
        """Puts ours in the place of torchao's ``CPUOffloadOptimizer``, whoever made it: the user, a class of theirs, or
        a ``create_optimizer`` of their own, after which Trainer calls ``_wrap_model``."""
        trainer = self._trainer
        if not is_torchao_class(type(trainer.optimizer)):
            return
        if trainer.lr_scheduler is not None:
            raise ValueError(
                "torchao's CPUOffloadOptimizer takes gradients before they are clipped, so another takes its place "
                "here, which a scheduler of it does not know; leave that to the trainer: optimizers=(it, None)"
            )
        trainer.optimizer = HostOptimizer.adopt(trainer.optimizer)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Sequences of a step over all replicas; Trainer would count every rank.

        Args:
            args: The trainer's ``TrainingArguments``.
        """
        return int(self._trainer._train_batch_size * args.gradient_accumulation_steps * self.layout.dp)

    # Steps

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """One forward and backward, of one accumulated batch. Gradients are added to ``.grad``.

        With plain cross-entropy by ``Pipeline.step``, in the plan's own order: forwards and backwards alternate, so
        fewer slices are in memory than through the model's forward. Otherwise Trainer's own step, which calls
        ``compute_loss``.

        Args:
            model: The trainer's model, as Trainer wrapped it.
            inputs: The batch, the same on all ranks of a replica.
            num_items_in_batch: Labels that count in all accumulated batches, if Trainer counted them.

        Returns:
            The loss, detached.
        """
        pipelined = self.make_pipeline()  # a step may come before train()
        if not self._is_plain():
            return cast(Tensor, super().training_step(model, inputs, num_items_in_batch))  # type: ignore[misc]
        trainer = self._trainer
        model.train()
        train = getattr(trainer.optimizer, "train", None)
        if callable(train):
            train()
        inputs = trainer._prepare_inputs(inputs)
        with trainer.compute_loss_context_manager(), trainer.accelerator.autocast():
            return pipelined.step(inputs, lambda counted: self._total(counted, num_items_in_batch)).detach()

    def _is_plain(self) -> bool:
        """Whether a step is Trainer's own, and its loss the model's own cross-entropy: nobody overrides
        ``compute_loss`` or ``training_step``, or passed a loss function, and labels are not smoothed."""
        trainer, following = self._trainer, cast(Any, super())
        own = trainer.compute_loss.__func__ is Trainer.compute_loss
        own &= following.training_step.__func__ is Trainer.training_step
        own &= not is_classifier(without_wrapper(trainer.model))
        return own and trainer.compute_loss_func is None and trainer.label_smoother is None

    def _total(self, counted: int, items: Tensor | int | None) -> float:
        """What the sum over this replica's tokens is divided by, so that the sum over replicas is the mean that
        transformers takes of them."""
        trainer, dp = self._trainer, self.layout.dp
        if items is None or not trainer.model_accepts_loss_kwargs:
            accumulated = getattr(trainer, "current_gradient_accumulation_steps", 1)  # known in train() only
            return float(max(counted, 1) * dp * accumulated)
        return float(items) * (1 if trainer.args.average_tokens_across_devices else dp)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """Trainer's step of an evaluation. Logits are not computed if nobody asks for them.

        Args:
            model: The trainer's model.
            inputs: The batch.
            prediction_loss_only: Whether the loss is all that is wanted.
            ignore_keys: Of outputs, see Trainer.
        """
        pipelined = self.make_pipeline()
        pipelined.loss_only, self._predicting = prediction_loss_only, True
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        finally:
            pipelined.loss_only = self._predicting = False

    def log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        """Trainer's, after a look at the norm of gradients: it is read from the device here anyway, so this is where
        gradients of zero are noticed, and warned of.

        Args:
            logs: What is logged.
            *arguments: Others of Trainer.
            **named: Others of Trainer.
        """
        norm = logs.get("grad_norm")  # None without clipping
        if norm is not None and self.pipelined is not None and self._trainer.is_world_process_zero():
            self.pipelined.pipe.zero_gradients.check_norm(float(norm))
        super().log(logs, *arguments, **named)  # type: ignore[misc]

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Trainer's count for a batch, divided among the ranks that compute it; transformers adds up all processes.

        Args:
            inputs: The batch.
        """
        return int(super().floating_point_ops(inputs)) // self.ranks_per_replica  # type: ignore[misc]

    def _generate_on_first(self, outer: Any) -> None:
        """While a trainer generates text, the whole model does it on the first rank of each pipeline, and sends it to
        the others."""
        pipelined, generate = cast(PipelinedModel, self.pipelined), outer.generate

        def on_first(owner: Any, *arguments: Any, **named: Any) -> Any:
            if owner is not outer:  # a copy of the model
                return type(owner).generate(owner, *arguments, **named)
            if not (self._trainer.is_in_train or self._predicting):
                return generate(*arguments, **named)
            pipelined.gather()
            with pipelined.pipe.failing_together():
                if pipelined.pipe.is_first:
                    outer.to(pipelined.pipe.device)
                text = generate(*arguments, **named) if pipelined.pipe.is_first else None
                return pipelined.pipe.gather(text)[0]

        outer.generate = MethodType(on_first, outer)

    # What is saved

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the whole model as transformers does. All ranks must call it together: the weights of all stages are
        gathered on every rank, and the first one writes.

        Args:
            output_dir: By default the trainer's.
            _internal_call: See Trainer.
        """
        self.make_pipeline().gather()
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def _optimizer(self) -> torch.optim.Optimizer:
        """The optimizer inside accelerate's wrapper."""
        return cast(torch.optim.Optimizer, getattr(self._trainer.optimizer, "optimizer", self._trainer.optimizer))

    # Private methods of Trainer

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Wraps nothing around the model: no DistributedDataParallel, as the pipeline sums over replicas itself."""
        self.make_pipeline()
        if training:
            self._adopt_optimizer()
        return model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Stages are moved when they are made, each to its rank's device."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Each rank writes its part of weights and optimizer; a layout of other ranks can read them."""
        trainer = self._trainer
        self.make_pipeline().pipe.save(Path(output_dir) / STATE, self._optimizer())
        if trainer.args.should_save:
            torch.save(ResumeThroughAPipelineTrainer(), os.path.join(output_dir, OPTIMIZER))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # schedulers warn that optimizers are saved beside them
                torch.save(trainer.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Reads weights, too: Trainer loaded them into the whole model, of which stages on other devices are copies."""
        if checkpoint is None:
            return
        if not (Path(checkpoint) / STATE).is_dir():
            raise ValueError(
                f"{checkpoint} has no folder {STATE!r}, so it was not saved through a pipeline or with "
                "save_only_model=True; load its weights with from_pretrained and begin a new run"
            )
        self.make_pipeline().pipe.load(Path(checkpoint) / STATE, self._optimizer())
        self.make_pipeline().note_update()
        scheduler = self._trainer.lr_scheduler
        scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER), weights_only=True))
        for group, rate in zip(self._optimizer().param_groups, scheduler.get_last_lr(), strict=True):
            if isinstance(group["lr"], Tensor):  # torchao's optimizers have one, and count on it
                group["lr"].fill_(float(rate))
            else:
                group["lr"] = rate  # Pipeline.load leaves it as it is

    def _load_best_model(self) -> None:
        """Into the stages, and from there into the model."""
        pipelined = self.make_pipeline()
        pipelined.pipe.load(Path(str(self._trainer.state.best_model_checkpoint)) / STATE)
        pipelined.note_update()
        pipelined.gather()

    def _finalize_training(self, *arguments: Any) -> Any:
        self.make_pipeline().gather()  # whoever uses the model next, callbacks too, finds it trained
        return super()._finalize_training(*arguments)  # type: ignore[misc]

    def _get_train_sampler(self, *arguments: Any) -> Any:
        """With a generator of its own, where dropout moves that of each rank differently."""
        sampler = super()._get_train_sampler(*arguments)  # type: ignore[misc]
        if self.ranks_per_replica > 1 and getattr(sampler, "generator", self) is None:
            seed = self._trainer.args.data_seed or self._trainer.args.seed
            sampler.generator = torch.Generator().manual_seed(seed)
        return sampler


class PipelineTrainer(PipelineMixin, Trainer):
    """transformers' Trainer through a pipeline."""
