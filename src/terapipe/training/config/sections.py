"""The sections of run.toml as frozen dataclasses that document every key."""

import json
import textwrap
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from terapipe.planning.order import ORDERS
from terapipe.planning.presets import LARGEST

MOST = 2**31 - 1  # of whole numbers, unless a key says otherwise
SEEDS = 2**63 - 1  # what torch takes


def key(default: Any, doc: str, *, positive: bool = False, share: bool = False, most: float | None = None) -> Any:
    """A documented key. Numbers are finite and not negative; ``positive`` excludes 0, ``share`` numbers above 1,
    ``most`` larger ones, far beyond what makes sense, so that a typing error is named at once."""
    return field(default=default, metadata={"doc": doc, "positive": positive, "share": share, "most": most})


@dataclass(frozen=True)
class ModelConfig:
    """The model to train. Set exactly one of preset, config, folder and factory."""

    preset: str = key("", "a GPT by name (gpt-tiny, gpt-small, gpt3-1b ...) or by shape: layers=4,hidden=64,heads=4")
    config: str = key("", "path of a Hugging Face config.json; the model starts from random weights")
    folder: str = key("", "a Hugging Face model folder; training starts from its weights")
    factory: str = key("", "a function that returns your own model, as module:function or file.py:function")
    seed: int = key(0, "seed of the random initial weights", most=SEEDS)
    dtype: Literal["float32", "bfloat16", "float64"] = key(
        "float32",
        "dtype of parameters and computation; with bfloat16 the optimizer keeps float32 master weights",
    )
    recompute: Literal["auto", "none", "block", "full"] = key(
        "auto",
        "activations that the backward pass recomputes to save memory. none; block: those of each layer but the "
        "output of attention; full: all of a stage; auto: what the plan needs, by stage and slice",
    )
    compile: bool = key(False, "apply torch.compile to the layers")


@dataclass(frozen=True)
class DataConfig:
    """The texts to train on."""

    train: tuple[str, ...] = key(
        (),
        "training data: files or patterns (.txt, .md, .jsonl, also with .gz; .parquet), or folders that the datasets "
        "library saved",
    )
    eval: tuple[str, ...] = key((), "evaluation data: files, patterns or folders, as in train")
    eval_share: float = key(
        0.0, "if eval is empty: hold out the last documents, about this share of all tokens, for evaluation", share=True
    )
    field: str = key("text", "name of the JSON field or table column that holds the text")
    tokenizer: str = key(
        "bytes",
        'a Hugging Face tokenizer folder, "bytes", or "train" to train a byte-level BPE on the data. If this key is '
        "left out, a Hugging Face model uses the tokenizer in its own folder",
    )
    vocab: int = key(4096, 'vocabulary size with tokenizer = "train"', positive=True, most=LARGEST["vocab"])
    seq_len: int = key(1024, "tokens in a sequence", positive=True, most=LARGEST["max_seq_len"])
    batch_size: int = key(1, "sequences in a batch, over all data parallel replicas", positive=True, most=2**20)
    packing: Literal["concat", "packed", "padded"] = key(
        "concat",
        "how documents fill sequences. concat: they follow each other, and attention crosses their borders; packed: "
        "they follow each other, and attention does not cross their borders; padded: a sequence holds one document or "
        "a part of one, and padding",
    )
    shuffle: bool = key(True, "shuffle the sequences anew in each epoch")
    seed: int = key(0, "seed of the shuffling and of dropout", most=SEEDS)
    cache: str = key("", "folder for tokenized data, which several runs can share; default: data/ in the run's folder")
    verify: bool = key(True, "at the start, verify the checksums of tokenized data, which reads all of it")


OBJECTIVES = ("cross_entropy", "dpo", "distill")


@dataclass(frozen=True)
class ObjectiveConfig:
    """What the model is trained for."""

    kind: str = key(
        "cross_entropy",
        f"one of {', '.join(OBJECTIVES)}; or your own loss as module:name or file.py:name: a function (logits, labels) "
        "that returns the sum over a slice's tokens, or a terapipe.losses.SequenceLoss or HiddenLoss",
    )
    label_smoothing: float = key(
        0.0, "with cross_entropy and dpo: share of the label's weight that others get", share=True
    )
    z_loss: float = key(0.0, "with cross_entropy: coefficient of the squared log-sum-exp of the logits")
    weights: str = key(
        "",
        "with cross_entropy: name of a field of JSON lines with a number that the loss of a document is multiplied by",
    )
    beta: float = key(0.1, "with dpo: how strongly the model is held near the reference", positive=True)
    chosen: str = key("chosen", "with dpo: name of the field with the better text")
    rejected: str = key("rejected", "with dpo: name of the field with the worse text")
    prompt: str = key(
        "",
        "with dpo: name of the field with the text that both follow, which is not trained on; empty: the tokens that "
        "both begin with",
    )
    teacher: str = key("", "with distill: a Hugging Face model folder, with the same tokenizer")
    temperature: float = key(1.0, "with distill: what logits are divided by", positive=True)
    alpha: float = key(1.0, "with distill: weight of the teacher's distribution; the labels get the rest", share=True)
    router_loss_over: Literal["microbatch", "batch", "replicas"] = key(
        "microbatch",
        "what the load-balancing loss of a Hugging Face mixture of experts is computed over, if its configuration has "
        "output_router_logits = true",
    )
    router_z_loss: float = key(0.0, "coefficient of the z-loss of its routers")


@dataclass(frozen=True)
class PlanConfig:
    """How the model is split into stages and a batch into slices. Keys that are left out are chosen by the planner."""

    file: str = key(
        "",
        "a plan written by `terapipe plan --save`. It fixes layout, order, slices and stages",
    )
    profile: str = key("", "a profile written by `terapipe profile`; without it the model is profiled at the start")
    seconds: float = key(20.0, "seconds to profile for at the start; 0: do not profile, use equal slices")
    ranks: int = key(0, "processes to start when not under torchrun; 0: dp x pp x tp")
    dp: int = key(0, "data parallel replicas; 0: any")
    pp: int = key(0, "pipeline parallel ranks; 0: any")
    tp: int = key(1, "tensor parallel ranks", positive=True)
    shard: bool = key(False, "shard parameters, gradients and optimizer state over the replicas (FSDP2)")
    order: str = key("", f"order of forwards and backwards, one of {', '.join(ORDERS)}; empty: any")
    num_slices: int = key(0, "number of equal slices of a sequence; 0: any")
    slice_lengths: tuple[int, ...] = key(
        (),
        "lengths of the slices of a sequence in tokens, such as [704, 688, 656], instead of num_slices",
        positive=True,
    )
    per_batch: bool = key(
        True,
        'with data.packing = "packed": cut every batch by the costs of its own documents; the plan is then that of '
        "whole sequences. Not if num_slices or slice_lengths is set, or model.compile",
    )
    microbatch_size: int = key(0, "sequences in a microbatch; 0: any, with dpo one pair")
    chunks: int = key(0, "model chunks per rank (interleaving); 0: any")
    tile: int = key(8, "slice lengths are multiples of this number of tokens", positive=True)
    memory: str = key("", "memory budget of a device, such as 16GiB; default: what is usable of its memory")
    drift: float = key(
        0.2, "report when step times differ from the prediction by more than this share; 0: never report"
    )
    replan: bool = key(False, "when drift is reported, profile and plan again at the next checkpoint")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW."""

    lr: float = key(3e-4, "peak learning rate")
    beta1: float = key(0.9, "decay rate of the running mean of gradients", share=True)
    beta2: float = key(0.95, "decay rate of the running mean of squared gradients", share=True)
    eps: float = key(1e-8, "added to the denominator of the update")
    weight_decay: float = key(0.1, "weight decay of matrices; biases and norms have none")
    steps: int = key(1000, "optimizer steps to train for", positive=True)
    max_grad_norm: float = key(1.0, "clip the norm of all gradients together to this value; 0: no clipping")
    accumulate: int = key(1, "batches whose gradients are accumulated for one step", positive=True)
    fused: Literal["auto", "on", "off"] = key("auto", "use torch's fused AdamW; auto: if it supports all parameters")


@dataclass(frozen=True)
class LRConfig:
    """The learning rate schedule: a linear warm-up, then the decay that kind names."""

    kind: Literal["cosine", "wsd", "linear", "constant"] = key(
        "cosine", "shape after the warm-up; wsd (warm-up, stable, decay): constant, then linear at the end"
    )
    warmup: int = key(100, "steps in which the learning rate rises from 0 to its peak")
    decay: float = key(0.2, "with wsd: share of all steps in which the learning rate falls", share=True)
    min_lr_ratio: float = key(0.1, "final learning rate as a share of the peak")


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints and the exported model."""

    every: int = key(100, "steps between checkpoints; 0: save only at the end and when stopped")
    keep: int = key(2, "number of latest checkpoints to keep; 0: all")
    best: bool = key(True, "also keep the checkpoint with the lowest evaluation loss")
    background: bool = key(True, "write checkpoints in the background while training continues")
    resume: str = key(
        "auto",
        "auto: resume from the latest checkpoint in the run's folder, if there is one; off: refuse a folder that has "
        "checkpoints; or the path of a checkpoint to start from if the run's folder has none",
    )
    verify: bool = key(True, "before resuming, verify the checksums of all files of the checkpoint")
    export: str = key("", "at the end, write the model and its tokenizer to this folder in the Hugging Face format")


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation during training, by the same pipeline."""

    every: int = key(100, "steps between evaluations; the last step is evaluated, too; 0: never")
    batches: int = key(8, "batches of evaluation data to use, the same each time; 0: all")
    sample: int = key(0, "tokens of text to generate at each evaluation; 0: none")
    prompt: str = key("", "prompt of the generated text; default: the beginning of the evaluation data")
    temperature: float = key(0.8, "sampling temperature of the generated text; 0: greedy")


@dataclass(frozen=True)
class LoggingConfig:
    """The run's folder, its output and experiment trackers."""

    folder: str = key("runs/default", "the run's folder, for config, plan, profile, metrics, checkpoints and report")
    every: int = key(
        10,
        "steps between lines of output (without a terminal), and between records of timeline and memory",
        positive=True,
    )
    tensorboard: bool = key(True, "write TensorBoard event files, if tensorboard is installed")
    wandb: str = key("", "Weights & Biases project to log to; empty: none")
    trackio: str = key("", "trackio project to log to; empty: none")


@dataclass(frozen=True)
class FailureConfig:
    """What to do when something fails."""

    timeout: float = key(300.0, "seconds that a rank waits for another before all ranks stop", positive=True, most=1e8)
    restarts: int = key(0, "when not under torchrun: times to restart from the last checkpoint after a rank has died")
    on_nan: Literal["stop", "skip"] = key(
        "stop", "what to do when loss or gradients are not finite: stop the run, or skip that step"
    )
    max_skipped: int = key(10, 'with on_nan = "skip": stop after this number of skipped steps in a row', positive=True)


@dataclass(frozen=True)
class RunConfig:
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    plan: PlanConfig = PlanConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr: LRConfig = LRConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()
    failures: FailureConfig = FailureConfig()

    @property
    def folder(self) -> Path:
        return Path(self.logging.folder)

    def to_toml(self) -> str:
        """Every key with its value and its documentation. ``parse`` reads it back."""
        return "\n".join(line for part in fields(self) for line in _section_lines(part.name, getattr(self, part.name)))


def _section_lines(name: str, section: Any) -> list[str]:
    lines = [f"# {section.__doc__.strip()}", f"[{name}]"]
    for entry in fields(section):
        value = _toml(getattr(section, entry.name))
        choices = get_args(get_type_hints(type(section))[entry.name])
        prefix = f"{' | '.join(choices)}; " if choices and choices[-1] is not ... else ""
        lines += textwrap.wrap(prefix + entry.metadata["doc"], 100, initial_indent="# ", subsequent_indent="#   ")
        lines.append(f"{entry.name} = {value}")
    return [*lines, ""]


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return (
        repr(value) if isinstance(value, float) else json.dumps(value)
    )  # TOML writes strings and booleans as JSON does
