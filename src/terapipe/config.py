"""The configuration file of a training run, run.toml, as frozen dataclasses that document every key."""

import json
import re
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from terapipe.planning.order import ORDERS

Section = TypeVar("Section")


def key(default: Any, doc: str, *, positive: bool = False, share: bool = False) -> Any:
    """A documented key. Numbers must not be negative; ``positive`` excludes 0, ``share`` numbers above 1."""
    return field(default=default, metadata={"doc": doc, "positive": positive, "share": share})


@dataclass(frozen=True)
class ModelConfig:
    """The model to train. Set exactly one of preset, config, folder and factory."""

    preset: str = key("", "a GPT by name (gpt-tiny, gpt-small, gpt3-1b ...) or by shape: layers=4,hidden=64,heads=4")
    config: str = key("", "path of a Hugging Face config.json; the model starts from random weights")
    folder: str = key("", "a Hugging Face model folder; training starts from its weights")
    factory: str = key("", "a function that returns your own model, as module:function or file.py:function")
    seed: int = key(0, "seed of the random initial weights")
    dtype: Literal["float32", "bfloat16", "float64"] = key(
        "float32",
        "dtype of parameters and computation; with bfloat16 the optimizer keeps float32 master weights",
    )
    recompute: Literal["auto", "off", "selective", "full"] = key(
        "auto",
        "activations that the backward pass recomputes to save memory. off: none; selective: those inside feed-forward "
        "layers; full: all of a stage; auto: off or full, whichever the plan needs",
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
    vocab: int = key(4096, 'vocabulary size with tokenizer = "train"', positive=True)
    seq_len: int = key(1024, "tokens in a sequence", positive=True)
    batch_size: int = key(1, "sequences in a batch, over all data parallel replicas", positive=True)
    packing: Literal["concat", "packed", "padded"] = key(
        "concat",
        "how documents fill sequences. concat: they follow each other, and attention crosses their borders; packed: "
        "they follow each other, and attention does not cross their borders; padded: a sequence holds one document or "
        "a part of one, and padding",
    )
    shuffle: bool = key(True, "shuffle the sequences anew in each epoch")
    seed: int = key(0, "seed of the shuffling and of dropout")
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
    microbatch_size: int = key(0, "sequences in a microbatch; 0: any, with dpo one pair")
    chunks: int = key(0, "model chunks per rank (interleaving); 0: any")
    tile: int = key(8, "slice lengths are multiples of this number of tokens", positive=True)
    memory: str = key("", "memory budget of a device, such as 16GiB; default: all of its memory")
    drift: float = key(
        0.2, "report when step times differ from the prediction by more than this share; 0: never report"
    )
    replan: bool = key(False, "when drift is reported, profile and plan again at the next checkpoint")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW."""

    lr: float = key(3e-4, "peak learning rate")
    beta1: float = key(0.9, "decay rate of the running mean of gradients")
    beta2: float = key(0.95, "decay rate of the running mean of squared gradients")
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

    every: int = key(100, "steps between evaluations; 0: never")
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

    timeout: float = key(300.0, "seconds that a rank waits for another before all ranks stop", positive=True)
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


def load(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a file. Overrides replace single keys: ``optimizer.lr=1e-4``."""
    return parse(path.read_text(encoding="utf-8"), overrides, str(path))


def parse(text: str, overrides: Iterable[str] = (), name: str = "run.toml") -> RunConfig:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{name} is not valid TOML: {error}") from None
    for override in overrides:
        _override(data, override)
    sections = {part.name: type(part.default) for part in fields(RunConfig)}
    _refuse_unknown(data, sections, f"{name}: unknown section [{{}}]")
    values: dict[str, Any] = {part: _section(kind, data.get(part, {}), part, name) for part, kind in sections.items()}
    config = RunConfig(**values)
    _check(config, name)
    if config.objective.kind == "dpo" and not config.plan.microbatch_size:  # the two texts of a pair stay together
        config = replace(config, plan=replace(config.plan, microbatch_size=2))
    return config if "tokenizer" in data.get("data", {}) else _with_model_tokenizer(config)


def _with_model_tokenizer(config: RunConfig) -> RunConfig:
    """A Hugging Face model uses the tokenizer in its own folder."""
    model = config.model
    if not model.folder and not model.config:
        return config
    path = Path(model.folder or model.config)
    folder = path.parent if path.is_file() else path
    return replace(config, data=replace(config.data, tokenizer=str(folder)))


def _override(data: dict[str, Any], text: str) -> None:
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
    except tomllib.TOMLDecodeError:
        return text


def _refuse_unknown(data: Mapping[str, Any], known: Mapping[str, Any], message: str) -> None:
    for name in data:
        if name not in known:
            likely = get_close_matches(name, known, 1)
            hint = f"did you mean {likely[0]!r}? " if likely else ""
            raise ValueError(f"{message.format(name)}; {hint}there are {', '.join(known)}")


def _section(kind: type[Section], data: Any, section: str, name: str) -> Section:
    if not isinstance(data, dict):
        raise ValueError(f"{name}: [{section}] must be a table of keys, got {data!r}")
    hints = get_type_hints(kind)
    _refuse_unknown(data, hints, f"{name}: unknown key {section}.{{}}")
    values = {k: _typed(hints[k], v, f"{name}: {section}.{k}") for k, v in data.items()}
    return kind(**values)


def _typed(kind: Any, value: Any, where: str) -> Any:
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{where} must be one of {', '.join(get_args(kind))}, got {value!r}")
        return value
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        values = value if isinstance(value, list) else [value]  # a single value needs no brackets
        return tuple(_typed(item, v, where) for v in values)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where} must be {_TYPE_NAMES[kind]}, got {value!r}")
    return value


_TYPE_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}


def _check(config: RunConfig, name: str) -> None:
    """Rules that need nothing but the file. Others are checked where the values are used, before the first step."""
    for part in fields(config):
        section = getattr(config, part.name)
        for entry in fields(section):
            _check_range(getattr(section, entry.name), entry, f"{name}: {part.name}.{entry.name}")
    kinds = [kind for kind in ("preset", "config", "folder", "factory") if getattr(config.model, kind)]
    if len(kinds) != 1:
        raise ValueError(
            f"{name}: a model is given by exactly one of model.preset, config, folder and factory, got "
            f"{' and '.join(kinds) or 'none'}"
        )
    if not config.data.train:
        raise ValueError(f'{name}: data.train must name at least one file, such as train = "book.txt"')
    _check_objective(config, name)
    _check_plan(config.plan, name)
    if config.data.batch_size % (config.plan.dp or 1):
        raise ValueError(
            f"{name}: every replica takes the same number of sequences: plan.dp {config.plan.dp} must divide "
            f"data.batch_size {config.data.batch_size}"
        )


def _check_range(value: Any, entry: Field[Any], where: str) -> None:
    for number in value if isinstance(value, tuple) else (value,):
        if not isinstance(number, int | float) or isinstance(number, bool):
            continue
        if not number >= 0 or (entry.metadata["positive"] and number == 0):
            least = "positive" if entry.metadata["positive"] else "at least 0"
            raise ValueError(f"{where} must be {least}, got {number!r}")
        if entry.metadata["share"] and number > 1:
            raise ValueError(f"{where} is a share of the whole, at most 1, got {number}")


def _check_objective(config: RunConfig, name: str) -> None:
    objective, data = config.objective, config.data
    if ":" not in objective.kind:
        _refuse_unknown({objective.kind: None}, dict.fromkeys(OBJECTIVES), f"{name}: unknown objective.kind {{!r}}")
    for entry in fields(objective):
        kinds = re.match(r"with (\w+)(?: and (\w+))?:", entry.metadata["doc"])
        if kinds and objective.kind not in kinds.groups() and getattr(objective, entry.name) != entry.default:
            raise ValueError(
                f"{name}: objective.{entry.name} is for kind = {' or '.join(filter(None, kinds.groups()))}, got "
                f"{objective.kind!r}; leave it out"
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


def _check_plan(plan: PlanConfig, name: str) -> None:
    if plan.num_slices and plan.slice_lengths:
        raise ValueError(
            f"{name}: plan.num_slices is a number of equal slices, plan.slice_lengths their lengths; give one"
        )
    if plan.order:
        _refuse_unknown({plan.order: None}, ORDERS, f"{name}: unknown plan.order {{!r}}")
    if plan.memory:
        nbytes(plan.memory)


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


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def nbytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"a number of bytes reads like 16GiB, 900MB or 17179869184, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])
