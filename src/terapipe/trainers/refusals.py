"""What a trainer through a pipeline refuses: arguments, models and losses that it would ignore or get wrong.

All of it is refused when the trainer is made, before training begins, but for a loss of the model's own, which only a
step with labels asks for. What no pipeline could compute exactly, ``Decoder`` refuses itself (hf/refusals.py).
"""

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from terapipe.hf.backends import UnsupportedModelError
from terapipe.hf.decoder import Decoder
from terapipe.hf.quantized import has_quantized
from terapipe.hf.refusals import find_dropouts, refuse_unfit, untrainable
from terapipe.hf.routers import with_router_logits
from terapipe.hf.verify.small_model import shrink_config, small_model
from terapipe.planning.layout import Layout
from terapipe.planning.recompute import Recompute
from terapipe.planning.slices import Plan
from terapipe.runtime.host_optimizer import HostOptimizer, is_torchao_class, refuse_host_state
from terapipe.search.result import PlanResult
from terapipe.trainers.config import PipelineConfig

PER_LAYER = ("layerwise", "lomo")  # how the names of optimizers end that update weights as soon as a gradient is there


def refuse_arguments(trainer: Any, layout: Layout) -> None:
    """Refuses arguments of a trainer that a pipeline would ignore or get wrong, before training.

    A table of name, remedy and whether it is asked for; docs/trainers.md has the same table for users. Each is refused
    for one of three reasons: something else does it here (fsdp, deepspeed, recomputation), it changes the forward in a
    way that cannot be verified (Liger kernels), or it counts ranks of a pipeline as replicas.

    Args:
        trainer: Which has read its arguments, but made no pipeline yet.
        layout: Of all ranks. Some arguments are refused only if several ranks have the same batch, or shards.
    """
    several = layout.pp * layout.tp > 1
    args = trainer.args
    makes_text = hasattr(trainer, "_generate_and_score_completions")
    generates = makes_text and not hasattr(trainer, "generates_on_first")
    if several and generates:
        raise ValueError(
            f"{type(trainer).__name__} generates text on every rank, so ranks of a pipeline would have different data; "
            "use one process, or PipelineGRPOTrainer"
        )
    best_only = args.load_best_model_at_end and args.save_only_model
    optim = str(getattr(args.optim, "value", args.optim))
    per_layer = optim.endswith(PER_LAYER)
    if "bit" in optim and (layout.tp > 1 or layout.shard):
        raise ValueError(
            f"optim={optim!r} does not go with {layout}: its states are quantized in blocks of whole parameters, and "
            "shards would have other blocks; take tp=1 and shard=False, or another optimizer"
        )
    if optimizer_of(trainer) == "adamw-offload":
        refuse_host_state(args.device, in_parts=layout.tp > 1 or layout.shard)
    synced = several and getattr(args, "sync_ref_model", False)
    rebalanced = several and args.train_sampling_strategy == "batch_rebalance"
    named = {
        "save_only_model": ("load_best_model_at_end needs what it leaves out", best_only),
        "sync_ref_model": ("ranks have only their own stage's weights as they are; leave it off", synced),
        "train_sampling_strategy": ("'batch_rebalance' counts ranks as replicas; take another", rebalanced),
        "optim": ("it updates weights in the middle of a backward, with a slice's part; take another", per_layer),
        "cast_lm_head_to_fp32": ("leave it off", getattr(args, "cast_lm_head_to_fp32", None)),
        "fsdp": ("PipelineConfig(shard=True) shards over replicas", args.fsdp),
        "deepspeed": ("a pipeline takes its place", args.deepspeed),
        "parallelism_config": ("PipelineConfig(dp=..., pp=..., tp=...) says it", args.parallelism_config),
        "fp16": ("use bf16=True", args.fp16),
        "torch_compile_mode": (
            "layers are compiled one by one, in torch's default mode; others record graphs of whole steps or try "
            "kernels for each length of slice; leave it off", args.torch_compile_mode not in (None, "default")
        ),
        "auto_find_batch_size": ("PipelineConfig(plan='auto', memory=...) fits", args.auto_find_batch_size),
        "neftune_noise_alpha": (
            "ranks of tensor parallel would draw different noise for the same tokens, and so would text that the "
            "trainer generates; take tp=1 and a trainer that generates none, or leave it off",
            args.neftune_noise_alpha is not None and (layout.tp > 1 or makes_text)
        ),
        "use_liger_kernel": (
            "it replaces norms, MLPs and rotations of transformers' modules by kernels that run on GPUs only, for the "
            "whole process, so that no small copy of the model can be compared with slices of it; and it binds them to "
            "the modules of the model, of which stages have copies; leave it off, and take torch_compile=True, which "
            "fuses the same operations of each layer; only one slice's logits exist anyway", args.use_liger_kernel
        ),
        "activation_offloading": ("use PipelineConfig(recompute=...)", getattr(args, "activation_offloading", None)),
    }  # fmt: skip
    for name, (remedy, value) in named.items():
        if value:
            raise ValueError(f"{name}={getattr(args, name)!r} does not go with a pipeline: {remedy}")


def optimizer_of(trainer: Any) -> str:
    """Whose state counts within a memory budget, as ``PipelineConfig.optimizer`` names it. Optimizers that it has no
    name for count as AdamW, which has as much state as any.

    Args:
        trainer: Whose arguments name one, or which was given another.
    """
    chosen, args = getattr(trainer, "optimizer_cls_and_kwargs", None), trainer.args
    kind = chosen[0] if chosen else type(getattr(trainer, "optimizer", None))
    if kind is HostOptimizer or is_torchao_class(kind):
        return "adamw-offload"
    optim = str(getattr(args.optim, "value", args.optim))
    if "adam" in optim and "8bit" in optim:
        return "adamw-8bit"
    return "sgd" if optim == "sgd" else "adamw"


def refuse_untrainable(model: PreTrainedModel) -> None:
    """Refuses weights and dropout with which no step would be right, before anything is made of the model.

    Args:
        model: The model itself, not a wrapper of peft.
    """
    refuse_unfit(model)
    name = type(model).__name__
    halves = [weight for weight, p in model.named_parameters() if p.dtype == torch.float16]
    if halves:
        raise ValueError(
            f"weights of {name} are torch.float16 ({halves[0]}), whose small gradients are lost without a loss "
            "scale, which a pipeline does not have; load the model with dtype=torch.bfloat16 or torch.float32"
        )
    if reason := untrainable(model, find_dropouts(model)):
        raise ValueError(f"{name}: {reason}")


def recompute_of(args: Any) -> Recompute:
    """What gradient checkpointing becomes, unless the configuration of the pipeline says it.

    Args:
        args: The trainer's ``TrainingArguments``.
    """
    return "full" if args.gradient_checkpointing else "none"


def refuse_recomputation(decoder: Decoder, config: PipelineConfig, args: Any) -> None:
    """Refuses recomputation that the model cannot do: one that is cut through its own cache would change it twice.

    Args:
        decoder: The model.
        config: Which may say a mode, or a plan that has one.
        args: The trainer's ``TrainingArguments``, whose ``gradient_checkpointing`` is taken for full recomputation.
    """
    recompute = config.recompute or recompute_of(args)
    if config.plan is None and recompute not in decoder.recompute_modes:
        asked = "recompute" if config.recompute else "gradient_checkpointing"
        raise ValueError(
            f"slices of {type(decoder.model).__name__} cannot be computed again, as it is cut through its own cache; "
            f"got {asked}={getattr(config if asked == 'recompute' else args, asked)!r}; take "
            f"{'recompute=None and ' * (asked == 'recompute')}gradient_checkpointing=False"
        )


def refuse_compiling(decoder: Decoder, config: PipelineConfig, args: Any) -> None:
    """Refuses ``torch_compile`` where layers are not compiled, which making a pipeline would find out later.

    Args:
        decoder: The model.
        config: Which may say tensor parallel, a mode of recomputation, or a plan with either.
        args: The trainer's ``TrainingArguments``.
    """
    plan = config.plan.plan if isinstance(config.plan, PlanResult) else config.plan
    modes = plan.recompute_modes if isinstance(plan, Plan) else (config.recompute,)
    tp = config.plan.layout.tp if isinstance(config.plan, PlanResult) else config.tp
    reasons = {
        f"{type(decoder.model).__name__} is cut through its own cache, which compiled layers would not change": (
            decoder.backend == "cache"
        ),
        "quantized layers were not verified compiled": has_quantized(decoder.model),
        "operators of compiled layers are not split over devices (tp)": tp > 1,
        "recompute='light' cannot look into compiled layers": "light" in modes,
    }
    for reason, holds in reasons.items():
        if args.torch_compile and holds:
            raise ValueError(f"torch_compile=True does not go with this: {reason}; leave it off")


def refuse_router_losses(trainer: Any, *, in_model: bool, is_plain: bool, replicas: int) -> None:
    """Refuses losses of routers that would not be transformers' own.

    Args:
        trainer: Which may add one itself, as TRL's do.
        in_model: Whether the model adds them to its own loss.
        is_plain: Whether a step is Trainer's own, and its loss the model's.
        replicas: How many there are.
    """
    args = trainer.args
    if getattr(trainer, "aux_loss_enabled", False):
        raise ValueError(
            f"{type(trainer).__name__} adds a loss of routers, with router_aux_loss_coef="
            f"{trainer.router_aux_loss_coef}, which a pipeline cannot compute beside a loss of outputs; set "
            "router_aux_loss_coef=0.0"
        )
    if in_model and not is_plain:
        raise ValueError(
            "output_router_logits=True adds losses of routers, which a pipeline cannot compute beside a loss of "
            "outputs; set output_router_logits=False in the model's configuration"
        )
    if in_model and (args.gradient_accumulation_steps > 1 or replicas > 1):
        raise ValueError(
            f"transformers adds losses of routers for each accumulated batch of each replica, got "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} and dp={replicas}; take 1 of "
            "each and larger batches, or set output_router_logits=False in the model's configuration"
        )


def refuse_other_losses(model: PreTrainedModel) -> None:
    """Refuses a model whose loss from labels is not the cross-entropy of next tokens.

    The two are compared on a small copy, which does not have a loss that was given to the model itself: so that is
    refused before. Called at the first step with labels, as only that asks for the model's loss: TRL's trainers compute
    theirs from values of tokens.

    Args:
        model: The model itself, not a wrapper of peft.
    """
    if "_loss_function" in model.__dict__:
        raise UnsupportedModelError(
            f"{type(model).__name__} was given a loss of its own (loss_function), which a pipeline would not compute; "
            "compute it from logits, with compute_loss_func"
        )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        small = small_model(with_router_logits(shrink_config(model.config), False), torch.float32, kind=type(model))
        small.train(False)
        ids = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(0))
        small.loss_type = model.loss_type
        output = small(input_ids=ids, labels=ids, use_cache=False)
        wanted = F.cross_entropy(output.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    if not torch.allclose(output.loss.float(), wanted, rtol=1e-4):
        raise UnsupportedModelError(
            f"the loss of {type(model).__name__} is not the cross-entropy of the next tokens ({float(output.loss):.4f} "
            f"against {float(wanted):.4f} for a small copy); compute it from logits, with compute_loss_func"
        )
