"""The configuration file of a training run, run.toml: its sections as frozen dataclasses that document every key, how
it is read, and what is refused.

    text --tomllib--> tables --overrides--> sections, key by key --check--> RunConfig --to_toml--> text

=============  =======================================  ==================================================
section        who reads it                             a change when a run goes on
=============  =======================================  ==================================================
[model]        model.py                                 refused, but for dtype, seed, recompute, compile
[data]         data/prepare.py, data/loader.py          packing, seq_len, tokenizer refused; others told
[objective]    objective.py                             refused
[plan]         run_plan.py                              another plan
[optimizer]    optimizer.py, trainer.py                 told
[lr]           optimizer.py                             told
[checkpoints]  checkpoint_folder.py, export.py          not compared
[evaluation]   evaluation.py                            not compared
[logging]      logging/                                 not compared; another folder is another run
[failures]     run.py, trainer.py                       not compared
=============  =======================================  ==================================================

The docstring of a section is printed above it by `--print-config`, and `key(...)` has what is printed above a key. So
what only a reader of this code wants to know stands in comments.

Only what the file alone tells is checked here, so that reading it does not load torch. Other rules are checked where
the values are used, before the first step.
"""

import json
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from terapipe.files import read
from terapipe.planning.limits import LARGEST
from terapipe.planning.options import PlanOptions, explain, kind_of, with_default

MOST = 2**31 - 1  # of whole numbers, unless a key says otherwise
SEEDS = 2**63 - 1  # what torch takes

Section = TypeVar("Section")


def key(
    default: Any,
    doc: str,
    *,
    positive: bool = False,
    share: bool = False,
    most: float | None = None,
    kinds: tuple[str, ...] = (),
) -> Any:
    """A documented key. Numbers are finite and not negative.

    Args:
        default: Its value if the file does not set it.
        doc: What it does, as ``--print-config`` says it.
        positive: Whether 0 is refused, too.
        share: Whether numbers above 1 are refused.
        most: The largest number, far beyond what makes sense, so that a typing error is named at once.
        kinds: The objectives that the key is for; empty: all.
    """
    told = {"doc": doc, "choices": None, "positive": positive, "share": share, "most": most, "kinds": kinds}
    return field(default=default, metadata=told)


# `recompute` is a key of this section only: `run_plan.from_profile` hands it to the planner, and [plan] has none.
# Presets get vocabulary and positions from the data, unless their shape sets them.
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
    recompute: Literal["auto", "none", "light", "block", "full"] = key(
        "auto",
        "activations that the backward pass recomputes to save memory. none; light: all but the outputs of products "
        "and attention; block: those of each layer but the output of attention; full: all of a stage; auto: what the "
        "plan needs, by stage and slice",
    )
    compile: bool = key(False, "apply torch.compile to the layers")
    lora_rank: int = key(
        0, "with folder: freeze the model, and train LoRA adapters of this rank in its layers; 0: train all", most=4096
    )
    lora_alpha: float = key(16.0, "with lora_rank: the scale of adapters is lora_alpha / lora_rank", positive=True)
    lora_targets: tuple[str, ...] = key(
        ("all-linear",), "with lora_rank: which linear layers get adapters, by the ends of their names"
    )
    quantize: Literal["", "nf4", "nf4-double", "fp4", "int8", "torchao-int8", "torchao-float8"] = key(
        "",
        "with lora_rank: quantize the frozen linear layers as they are read, by bitsandbytes or torchao. nf4, fp4: 4 "
        "bits; nf4-double: their scales, too; int8: 8 bits, to which inputs are rounded, too; torchao-int8, "
        "torchao-float8: weights only, in 8 bits. A folder that was saved quantized needs none",
    )


# Two groups of keys. Tokens depend on the first (train, eval, eval_share, field, tokenizer, vocab): if one changes, the
# token files are written again. The others say how tokens become batches, and cost nothing to change.
# `batch_size` is that of the whole run, not of a replica, so that a run goes on alike on another layout.
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


# `kinds` of a key says which objectives it is for. With another one it is refused, because it would have no effect.
@dataclass(frozen=True)
class ObjectiveConfig:
    """What the model is trained for."""

    kind: str = key(
        "cross_entropy",
        f"one of {', '.join(OBJECTIVES)}; or your own loss as module:name or file.py:name: a function (logits, labels) "
        "that returns the sum over a slice's tokens, or a terapipe.losses.SequenceLoss or HiddenLoss",
    )
    label_smoothing: float = key(
        0.0, "share of the label's weight that others get", share=True, kinds=("cross_entropy", "dpo")
    )
    z_loss: float = key(0.0, "coefficient of the squared log-sum-exp of the logits", kinds=("cross_entropy",))
    weights: str = key(
        "",
        "name of a field of JSON lines with a number that the loss of a document is multiplied by",
        kinds=("cross_entropy",),
    )
    beta: float = key(0.1, "how strongly the model is held near the reference", positive=True, kinds=("dpo",))
    chosen: str = key("chosen", "name of the field with the better text", kinds=("dpo",))
    rejected: str = key("rejected", "name of the field with the worse text", kinds=("dpo",))
    prompt: str = key(
        "",
        "name of the field with the text that both follow, which is not trained on; empty: the tokens that both begin "
        "with",
        kinds=("dpo",),
    )
    teacher: str = key("", "a Hugging Face model folder, with the same tokenizer", kinds=("distill",))
    temperature: float = key(1.0, "what logits are divided by", positive=True, kinds=("distill",))
    alpha: float = key(
        1.0, "weight of the teacher's distribution; the labels get the rest", share=True, kinds=("distill",)
    )
    router_loss_over: Literal["microbatch", "batch", "replicas"] = key(
        "microbatch",
        "what the load-balancing loss of a Hugging Face mixture of experts is computed over, if its configuration has "
        "output_router_logits = true",
    )
    router_z_loss: float = key(0.0, "coefficient of the z-loss of its routers")


# Knobs of the planner are inherited: PlanOptions has each of them once, for this file, the command line and Python.
# What is added here is what only a run has: where costs come from, and what to do when they turn out to be wrong.
# `tp` has another default than in PlanOptions, 1: a run does not choose tensor parallelism unasked.
@dataclass(frozen=True)
class PlanConfig(PlanOptions):
    """How the model is split into stages and a batch into slices. Keys that are left out are chosen by the planner.
    With objective.kind = "dpo" a microbatch is one pair, unless microbatch_size says otherwise."""

    file: str = key(
        "",
        "a plan written by `terapipe plan --save`. It fixes layout, order, slices and stages",
    )
    profile: str = key("", "a profile written by `terapipe profile`; without it the model is profiled at the start")
    seconds: float = key(20.0, "seconds to profile for at the start; 0: do not profile, use equal slices")
    ranks: int = key(0, "processes to start when not under torchrun; 0: dp x pp x tp")
    per_batch: bool = key(
        True,
        'with data.packing = "packed": cut every batch by the costs of its own documents; the plan is then that of '
        "whole sequences. Not if num_slices or slice_lengths is set, or model.compile",
    )
    drift: float = key(
        0.2, "report when step times differ from the prediction by more than this share; 0: never report"
    )
    replan: bool = key(False, "when drift is reported, profile and plan again at the next checkpoint")
    tp: int = with_default("tp", 1)
    shard: bool = with_default("shard", False)
    offload_kv: bool = with_default("offload_kv", False)
    tile: int = with_default("tile", 8)
    recompute: None = field(default=None, init=False)  # no key: model.recompute says it


# beta2 is 0.95, not torch's 0.999, as is usual for language models. `accumulate` counts batches of [data]; slices and
# microbatches are the plan's business and change no result.
@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer."""

    name: Literal["adamw", "adamw-8bit", "adamw-offload"] = key(
        "adamw",
        "adamw: in half precision with a float32 copy of the weights; adamw-8bit: torchao's, two bytes of state for "
        "each weight, for float32 weights; adamw-offload: adamw by torchao's CPUOffloadOptimizer, with its state in "
        "the host's memory, on GPUs only. The last two not with tensor parallel or shards",
    )
    lr: float = key(3e-4, "peak learning rate")
    beta1: float = key(0.9, "decay rate of the running mean of gradients", share=True)
    beta2: float = key(0.95, "decay rate of the running mean of squared gradients", share=True)
    eps: float = key(1e-8, "added to the denominator of the update")
    weight_decay: float = key(0.1, "weight decay of matrices; biases and norms have none")
    steps: int = key(1000, "optimizer steps to train for", positive=True)
    max_grad_norm: float = key(1.0, "clip the norm of all gradients together to this value; 0: no clipping")
    accumulate: int = key(1, "batches whose gradients are accumulated for one step", positive=True)
    fused: Literal["auto", "on", "off"] = key("auto", "use torch's fused AdamW; auto: if it supports all parameters")


# `optimizer.learning_rate` draws it. Steps are those of [optimizer]; with a longer run the whole curve is stretched.
@dataclass(frozen=True)
class LRConfig:
    """The learning rate schedule: a linear warm-up, then the decay that kind names."""

    kind: Literal["cosine", "wsd", "linear", "constant"] = key(
        "cosine", "shape after the warm-up; wsd (warm-up, stable, decay): constant, then linear at the end"
    )
    warmup: int = key(100, "steps in which the learning rate rises from 0 to its peak")
    decay: float = key(0.2, "with wsd: share of all steps in which the learning rate falls", share=True)
    min_lr_ratio: float = key(0.1, "final learning rate as a share of the peak")


# A checkpoint is also saved, between two that are due, at an evaluation that is the best so far (if `best`), when the
# run is asked to stop, and at the end. `keep` counts the latest; the best one comes on top.
# `export` is written once, at the end, from the last step, not from the best one.
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

    @property
    def start(self) -> Path | None:
        """The checkpoint of another run to begin with, while the run has none of its own."""
        return None if self.resume in ("auto", "off") else Path(self.resume)


# Evaluation uses the plan of training, and whole batches of it, on the same ranks. So `batches` times data.batch_size
# sequences are evaluated, and training waits for them.
@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation during training, by the same pipeline."""

    every: int = key(100, "steps between evaluations; the last step is evaluated, too; 0: never")
    batches: int = key(8, "batches of evaluation data to use, the same each time; 0: all")
    sample: int = key(0, "tokens of text to generate at each evaluation; 0: none")
    prompt: str = key("", "prompt of the generated text; default: the beginning of the evaluation data")
    temperature: float = key(0.8, "sampling temperature of the generated text; 0: greedy")


# The folder is the run: whoever starts with the same folder goes on with what is there (training/README.md shows it).
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


# `timeout` is for a rank that is silent, stuck in a kernel or on a machine that was cut off. A rank that dies or raises
# is noticed at once, and does not take that long. Under torchrun, `restarts` is torchrun's (--max-restarts).
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
    """All sections of run.toml. Defaults make a whole configuration, but for the model and the texts, which `check`
    asks for.

    Args:
        model: What to train.
        data: On which texts, by which tokenizer, in which sequences and batches.
        objective: For which loss.
        plan: Cut how, on how many ranks.
        optimizer: AdamW, and how many steps.
        lr: How the learning rate rises and falls.
        checkpoints: When to save, what to keep, where to begin.
        evaluation: When and on how much.
        logging: The run's folder, and who else is told.
        failures: How long to wait for a rank, how often to start again, what to do about NaN.
    """

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
        """The run's folder."""
        return Path(self.logging.folder)

    def to_toml(self) -> str:
        """Returns every key with its value and its documentation, as `--print-config` prints it and the run's folder
        keeps it. `parse` reads it back."""
        return "\n".join(line for part in fields(self) for line in _section_lines(part.name, getattr(self, part.name)))


def keys_of(section: Any) -> list[Field[Any]]:
    """Returns the fields of a section that are keys of the file. Others are fixed by the class.

    Args:
        section: An object of a section's class, or the class.
    """
    return [entry for entry in fields(section) if entry.init]


# Writing


def _section_lines(name: str, section: Any) -> list[str]:
    """One section of the file: its documentation and that of every key as comments, then the values.

    ::

        # AdamW.                        the docstring of the section's class
        [optimizer]
        # peak learning rate            the doc of the key
        lr = 0.0003
    """
    lines = [f"# {line.strip()}" for line in section.__doc__.strip().splitlines()] + [f"[{name}]"]
    for entry in keys_of(section):
        lines += textwrap.wrap(_text_of(entry), 100, initial_indent="# ", subsequent_indent="#   ")
        lines.append(f"{entry.name} = {_toml(_without_none(entry, getattr(section, entry.name)))}")
    return [*lines, ""]


def _text_of(entry: Field[Any]) -> str:
    """What a key does, what to choose from, which objectives it is for, and what stands for None."""
    literals = get_args(entry.type) if get_origin(entry.type) is Literal else ()
    kinds = entry.metadata.get("kinds", ())
    text = (f"{' | '.join(literals)}; " if literals else "") + (f"with {' and '.join(kinds)}: " if kinds else "")
    text += explain(entry)
    if entry.default is None:
        nothing = {0: "0", "": "empty", (): "empty"}[NOTHING[kind_of(entry.type)]]
        text += f"; {nothing}: {entry.metadata['unset']}"
    return text


NOTHING: dict[type, Any] = {int: 0, str: "", tuple: ()}  # TOML has no None: these stand for it


def _without_none(entry: Field[Any], value: Any) -> Any:
    """The value, or what stands for None in the file."""
    return NOTHING[kind_of(entry.type)] if value is None else value


def _toml(value: Any) -> str:
    """A value as TOML writes it. Floats by repr, which gives the same float back; strings and booleans are as in
    JSON."""
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value)  # strings and booleans are as in JSON


# Reading


def load(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Reads a run.toml.

    Args:
        path: The file.
        overrides: What replaces single keys, each as ``optimizer.lr=1e-4``.

    Raises:
        ValueError: It is no TOML, has an unknown key, or breaks a rule. The message names the key and what it may be.
        OSError: It cannot be read.
    """
    return parse(read(path), overrides, str(path))


def parse(text: str, overrides: Iterable[str] = (), name: str = "run.toml") -> RunConfig:
    """Reads the text of a run.toml.

    ::

        "lr = 1"            tomllib     {"optimizer": {"lr": 1}}
        optimizer.lr=2      override    {"optimizer": {"lr": 2}}
                            _section    OptimizerConfig(lr=2.0)          unknown keys and wrong types are refused
                            check       ranges, and keys that do not go together
                            defaults    that depend on other keys: the model's tokenizer, pairs in one microbatch

    Args:
        text: The text.
        overrides: As for `load`.
        name: What messages call the file.
    """
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{name} is not valid TOML: {error}") from None
    for override in overrides:
        _override(data, override)
    sections = {part.name: type(part.default) for part in fields(RunConfig)}
    refuse_unknown(data, sections, f"{name}: unknown section [{{}}]")
    values: dict[str, Any] = {part: _section(kind, data.get(part, {}), part, name) for part, kind in sections.items()}
    config = RunConfig(**values)
    check(config, name)
    if config.objective.kind == "dpo" and not config.plan.microbatch_size:  # the two texts of a pair stay together
        config = replace(config, plan=replace(config.plan, microbatch_size=2))
    return config if "tokenizer" in data.get("data", {}) else _with_model_tokenizer(config)


def _with_model_tokenizer(config: RunConfig) -> RunConfig:
    """A Hugging Face model uses the tokenizer in its own folder. Only if the key is left out: "bytes" that is spelled
    out is meant."""
    model = config.model
    if not model.folder and not model.config:
        return config
    path = Path(model.folder or model.config)
    folder = path.parent if path.is_file() else path
    return replace(config, data=replace(config.data, tokenizer=str(folder)))


def _override(data: dict[str, Any], text: str) -> None:
    """Replaces one key in the tables, before they are checked, so that a value from the command line is checked like
    any other."""
    place, equals, value = text.partition("=")
    section, dot, name = place.strip().partition(".")
    if not equals or not dot or not section or not name:
        raise ValueError(f"a key is replaced by SECTION.KEY=VALUE, such as optimizer.lr=1e-4, got {text!r}")
    table = data.setdefault(section, {})
    if not isinstance(table, dict):
        raise ValueError(f"[{section}] must be a table of keys, got {table!r}")
    table[name] = _value(value.strip())


def _value(text: str) -> Any:
    """A TOML value. Anything else is a string, so that quotes need not be escaped in a shell."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def _section(kind: type[Section], data: Any, section: str, name: str) -> Section:
    """One section as an object of its class. Values that stand for None (0, "", []) are left out where None is the
    default, so that a file that `to_toml` wrote reads back the same."""
    if not isinstance(data, dict):
        raise ValueError(f"{name}: [{section}] must be a table of keys, got {data!r}")
    entries, hints = {entry.name: entry for entry in keys_of(kind)}, get_type_hints(kind)
    refuse_unknown(data, entries, f"{name}: unknown key {section}.{{}}")
    values = {k: _value_of_type(hints[k], v, f"{name}: {section}.{k}") for k, v in data.items()}
    try:
        return kind(**{k: v for k, v in values.items() if v or entries[k].default is not None})
    except ValueError as error:
        raise ValueError(f"{name}: [{section}] {error}") from None


def _value_of_type(kind: Any, value: Any, where: str) -> Any:
    """The value if it has the type of its key, with single values as lists and whole numbers as floats where needed.

    Strict otherwise: "8" is no 8, and true is no 1. A file is read once and trained on for days.
    """
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{where} must be one of {', '.join(get_args(kind))}, got {value!r}")
        return value
    if type(None) in get_args(kind):
        kind = next(hint for hint in get_args(kind) if hint is not type(None))
    if get_origin(kind) in (tuple, Sequence):
        item = get_args(kind)[0]
        values = value if isinstance(value, list) else [value]  # a single value needs no brackets
        return tuple(_value_of_type(item, v, where) for v in values)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where} must be {_TYPE_NAMES[kind]}, got {value!r}")
    return value


_TYPE_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}


# Rules


def refuse_unknown(data: Mapping[str, Any], names: Iterable[str], message: str) -> None:
    """Raises ValueError for a key of `data` that is none of `names`, with the one that is meant most likely.

    A key that is misspelled would otherwise be a default that nobody wanted, for days.

    Args:
        data: What the file says.
        names: What it may say.
        message: How the error begins, with ``{}`` for the name.
    """
    for name in data:
        if name not in names:
            likely = get_close_matches(name, names, 1)
            hint = f"did you mean {likely[0]!r}? " if likely else ""
            raise ValueError(f"{message.format(name)}; {hint}there are {', '.join(names)}")


def check(config: RunConfig, name: str) -> None:
    """Applies the rules that need nothing but the file. Others are checked where the values are used, before the first
    step.

    Args:
        config: All sections.
        name: What messages call the file.
    """
    for part in fields(config):
        section = getattr(config, part.name)
        for entry in keys_of(section):
            _check_range(getattr(section, entry.name), entry, f"{name}: {part.name}.{entry.name}")
    kinds = [kind for kind in ("preset", "config", "folder", "factory") if getattr(config.model, kind)]
    if len(kinds) != 1:
        raise ValueError(
            f"{name}: a model is given by exactly one of model.preset, config, folder and factory, got "
            f"{' and '.join(kinds) or 'none'}"
        )
    _check_adapters(config.model, name)
    if not config.data.train:
        raise ValueError(f'{name}: data.train must name at least one file, such as train = "book.txt"')
    for beta in ("beta1", "beta2"):
        if getattr(config.optimizer, beta) == 1:
            raise ValueError(f"{name}: optimizer.{beta} must be below 1, got 1: nothing new would count")
    _check_objective(config, name)
    _check_plan(config.plan, config.data.seq_len, name)
    if config.data.batch_size % (config.plan.dp or 1):
        raise ValueError(
            f"{name}: every replica takes the same number of sequences: plan.dp {config.plan.dp} must divide "
            f"data.batch_size {config.data.batch_size}"
        )


def _check_adapters(model: ModelConfig, name: str) -> None:
    """Refuses keys of adapters that would have no effect, and a quantized model of which nothing could be trained."""
    if model.lora_rank and not model.folder:
        raise ValueError(f"{name}: model.lora_rank adds adapters to a model with weights; set model.folder")
    for entry in (one for one in fields(model) if one.name in ("lora_alpha", "lora_targets", "quantize")):
        if not model.lora_rank and getattr(model, entry.name) != entry.default:
            raise ValueError(f"{name}: model.{entry.name} is for adapters; set model.lora_rank, or leave it out")
    if model.quantize and (model.dtype == "float64" or model.compile):
        wrong = "compile = true" if model.compile else 'dtype = "float64"'
        raise ValueError(f"{name}: quantized layers are neither compiled nor in float64, got model.{wrong}; change it")


def _check_range(value: Any, entry: Field[Any], where: str) -> None:
    """Refuses negative numbers, and those beyond what the key's metadata says. A list is checked item by item."""
    told = entry.metadata
    if "positive" not in told:
        return  # a knob, which PlanOptions has checked
    for number in value if isinstance(value, tuple) else (value,):
        if not isinstance(number, int | float) or isinstance(number, bool):
            continue
        if not number >= 0 or (told["positive"] and number == 0):
            raise ValueError(f"{where} must be {'positive' if told['positive'] else 'at least 0'}, got {number!r}")
        if told["share"] and number > 1:
            raise ValueError(f"{where} is a share of the whole, at most 1, got {number}")
        most = told["most"] or (MOST if isinstance(number, int) else None)
        if number == inf or (most is not None and number > most):
            raise ValueError(f"{where} must be {'finite' if most is None else f'at most {most:g}'}, got {number}")


def _check_objective(config: RunConfig, name: str) -> None:
    """Refuses keys of another objective, which would have no effect, and data that the objective cannot use.

    Pairs and weights belong to documents. So documents must not be joined without borders (concat), and evaluation data
    must be given: the last share of all tokens could begin between the two texts of a pair.
    """
    objective, data = config.objective, config.data
    if ":" not in objective.kind:
        refuse_unknown({objective.kind: None}, OBJECTIVES, f"{name}: unknown objective.kind {{!r}}")
    for entry in fields(objective):
        kinds = entry.metadata["kinds"]
        if kinds and objective.kind not in kinds and getattr(objective, entry.name) != entry.default:
            raise ValueError(
                f"{name}: objective.{entry.name} is for kind = {' or '.join(kinds)}, got {objective.kind!r}; leave it "
                "out"
            )
    if objective.kind == "distill" and not objective.teacher:
        raise ValueError(f"{name}: kind = 'distill' needs objective.teacher, the folder of a Hugging Face model")
    if objective.kind == "dpo":
        if data.packing != "padded":
            raise ValueError(f"{name}: pairs need data.packing = 'padded', got {data.packing!r}")
        if data.batch_size % (2 * (config.plan.dp or 1)):
            raise ValueError(
                f"{name}: pairs need an even data.batch_size for each replica, got {data.batch_size} and dp "
                f"{config.plan.dp or 1}"
            )
        if data.eval_share:
            raise ValueError(f"{name}: pairs for evaluation are given by data.eval, not by data.eval_share")
    if objective.weights and (objective.kind != "cross_entropy" or data.packing == "concat" or data.eval_share):
        raise ValueError(
            f"{name}: objective.weights are of documents: they need kind = 'cross_entropy', data.packing = 'packed' or "
            "'padded', and data.eval instead of data.eval_share"
        )


def _check_plan(plan: PlanConfig, seq_len: int, name: str) -> None:
    """Slices must cover the sequence, and each must have a token. What depends on the number of ranks is checked by
    `run_plan`."""
    if plan.num_slices is not None and plan.num_slices > seq_len:
        raise ValueError(f"{name}: plan.num_slices must be at most data.seq_len {seq_len}, got {plan.num_slices}")
    if plan.slice_lengths is not None and sum(plan.slice_lengths) != seq_len:
        raise ValueError(
            f"{name}: plan.slice_lengths must sum to data.seq_len {seq_len}, got {list(plan.slice_lengths)}, which sum "
            f"to {sum(plan.slice_lengths)}"
        )
