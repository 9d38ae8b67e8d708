"""The file of a training run, run.toml, as frozen dataclasses. Every key is documented where it is declared."""

import json
import re
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from terapipe.planning.order import ORDERS

Section = TypeVar("Section")


def key(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True)
class ModelConfig:
    """What is trained. Exactly one of preset, config, folder and factory."""

    preset: str = key("", "a GPT: gpt-tiny, gpt-small, gpt3-1b ..., or a shape: layers=4,hidden=64,heads=4")
    config: str = key("", "a Hugging Face config.json: random weights")
    folder: str = key("", "a Hugging Face folder with weights, to train on")
    factory: str = key("", "your own model: module:function or file.py:function, which returns it when called")
    seed: int = key(0, "of the random weights")
    dtype: Literal["float32", "bfloat16", "float64"] = key(
        "float32", "of parameters and computations; bfloat16 has float32 master weights in the optimizer"
    )
    recompute: Literal["auto", "off", "selective", "full"] = key(
        "auto",
        "what backwards compute again instead of keeping it: nothing, feed-forward layers, a slice's whole stage; "
        "auto: off or full, as the plan says",
    )
    compile: bool = key(False, "torch.compile the layers")


@dataclass(frozen=True)
class DataConfig:
    """What it is trained on."""

    train: tuple[str, ...] = key((), "files or patterns: .txt, .jsonl, .parquet, or folders that datasets saved")
    eval: tuple[str, ...] = key((), "the same, for evaluation")
    eval_share: float = key(0.0, "without eval: this share of the training documents' tokens, the last ones")
    field: str = key("text", "the field of JSONL lines, or the column of tables, that holds the text")
    tokenizer: str = key(
        "bytes",
        'a Hugging Face tokenizer folder, "bytes", or "train": one trained on the data; where it is left out, a '
        "Hugging Face model has the one in its own folder",
    )
    vocab: int = key(4096, 'entries of a tokenizer that is trained; with "bytes" there are 257')
    seq_len: int = key(1024, "tokens per sequence")
    batch_size: int = key(1, "sequences per forward and backward, over all replicas")
    packing: Literal["concat", "packed", "padded"] = key(
        "concat",
        "concat: documents follow each other and attention crosses their borders; packed: it does not; padded: every "
        "sequence is one document or a part of one, filled up with padding",
    )
    shuffle: bool = key(True, "sequences in an order drawn anew for each epoch, the same for the same seed")
    seed: int = key(0, "of the order")
    cache: str = key("", "folder for token files; default: data in the run's folder")
    verify: bool = key(True, "at the start, compare token files with their checksums: reads them once")


@dataclass(frozen=True)
class PlanConfig:
    """How a batch is cut and the model is split. What is left out is chosen."""

    file: str = key(
        "",
        "a plan that `terapipe plan --save` wrote, with its layout; order and cuts are in it",
    )
    profile: str = key("", "what `terapipe profile` wrote; without it the model is measured at start")
    seconds: float = key(20.0, "to measure for, at start; 0: do not measure, cut into equal slices")
    ranks: int = key(0, "processes to start when not under torchrun; default: dp x pp x tp")
    dp: int = key(0, "data parallel replicas")
    pp: int = key(0, "pipeline ranks")
    tp: int = key(1, "tensor parallel ranks")
    shard: bool = key(False, "replicas shard parameters, gradients and optimizer state (FSDP2)")
    order: str = key("", f"one of {', '.join(ORDERS)}")
    num_slices: int = key(0, "so many equal slices")
    slice_lengths: tuple[int, ...] = key((), "or the lengths of slices, such as [704, 688, 656]")
    microbatch_size: int = key(0, "sequences per microbatch")
    chunks: int = key(0, "chunks of layers per rank")
    tile: int = key(8, "slice lengths are multiples of it")
    memory: str = key("", "budget of each device, such as 16GiB; default: what it has")
    drift: float = key(0.2, "say so when measured steps are off the predicted by more than this share; 0: never")
    replan: bool = key(False, "and then measure and plan again at the next checkpoint")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW."""

    lr: float = key(3e-4, "the highest learning rate")
    beta1: float = key(0.9, "decay of the mean of gradients")
    beta2: float = key(0.95, "decay of the mean of their squares")
    eps: float = key(1e-8, "added to the root of the latter")
    weight_decay: float = key(0.1, "of matrices; biases and norms have none")
    steps: int = key(1000, "optimizer steps to train for")
    max_grad_norm: float = key(1.0, "largest norm of all gradients together; 0: no clipping")
    accumulate: int = key(1, "batches whose gradients are added up for one step")
    fused: Literal["auto", "on", "off"] = key("auto", "torch's fused implementation: where there is one")


@dataclass(frozen=True)
class LRConfig:
    """The learning rate on the way."""

    kind: Literal["cosine", "wsd", "linear", "constant"] = key(
        "cosine", "after the warm-up; wsd: constant, then falling in the last part (warm-up, stable, decay)"
    )
    warmup: int = key(100, "steps in which the learning rate rises from 0")
    decay: float = key(0.2, "the share of all steps in which wsd falls")
    min_lr_ratio: float = key(0.1, "the last learning rate, as a share of the highest")


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, and when."""

    every: int = key(100, "steps; 0: only at the end and when stopped")
    keep: int = key(2, "of the latest ones; 0: all")
    best: bool = key(True, "also keep the one with the lowest evaluation loss")
    background: bool = key(True, "write while training goes on")
    resume: str = key(
        "auto",
        "auto: from the latest in the run's folder, if any; off: begin anew, in a folder that has none; or a "
        "checkpoint's folder, to begin with where the run has none of its own",
    )
    verify: bool = key(True, "before resuming, compare every file of a checkpoint with its checksum")
    export: str = key("", "at the end, write a Hugging Face model to this folder")


@dataclass(frozen=True)
class EvaluationConfig:
    """By the same pipeline."""

    every: int = key(100, "steps; 0: never")
    batches: int = key(8, "of the evaluation data, always the same; 0: all")
    sample: int = key(0, "tokens of text to generate each time; 0: none")
    prompt: str = key("", "what it begins with; default: the beginning of the evaluation data")
    temperature: float = key(0.8, "of sampling; 0: the likeliest token")


@dataclass(frozen=True)
class LoggingConfig:
    """What people look at."""

    folder: str = key("runs/default", "of the run: config, plan, profile, metrics, checkpoints, report")
    every: int = key(10, "steps between lines, where there is no terminal, and between looks at timeline and memory")
    tensorboard: bool = key(True, "event files, if tensorboard is installed")
    wandb: str = key("", "a Weights & Biases project")
    trackio: str = key("", "a trackio project")


@dataclass(frozen=True)
class FailureConfig:
    """What may go wrong."""

    timeout: float = key(300.0, "seconds that a rank waits for another before all stop")
    restarts: int = key(0, "when not under torchrun: how often to go on from the last checkpoint after a rank died")
    on_nan: Literal["stop", "skip"] = key("stop", "when loss or gradients are not finite: stop, or leave that step out")
    max_skipped: int = key(10, "with skip: stop after so many in a row")


@dataclass(frozen=True)
class RunConfig:
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
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
        """Every key with its value and what it means; ``parse`` reads it back."""
        return "\n".join(line for part in fields(self) for line in _section_lines(part.name, getattr(self, part.name)))


def load(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """A file, with single keys replaced: ``optimizer.lr=1e-4``."""
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
    made: dict[str, Any] = {part: _section(kind, data.get(part, {}), part, name) for part, kind in sections.items()}
    config = RunConfig(**made)
    _check(config, name)
    return config if "tokenizer" in data.get("data", {}) else _with_own_tokenizer(config)


def _with_own_tokenizer(config: RunConfig) -> RunConfig:
    """A Hugging Face model knows the tokens of one tokenizer only, which lies beside it."""
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
    """As in the file; a word that is no TOML value is taken as a string, so that quotes need not be escaped."""
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


def _typed(wanted: Any, value: Any, where: str) -> Any:
    if get_origin(wanted) is Literal:
        if value not in get_args(wanted):
            raise ValueError(f"{where} must be one of {', '.join(get_args(wanted))}, got {value!r}")
        return value
    if get_origin(wanted) is tuple:
        item = get_args(wanted)[0]
        values = value if isinstance(value, list) else [value]  # one alone needs no brackets
        return tuple(_typed(item, v, where) for v in values)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise ValueError(f"{where} must be {_WORDS[wanted]}, got {value!r}")
    return value


_WORDS = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
_POSITIVE = (
    "data.seq_len", "data.batch_size", "data.vocab", "plan.tp", "plan.tile", "plan.slice_lengths",
    "optimizer.accumulate", "optimizer.steps", "logging.every", "failures.timeout", "failures.max_skipped",
)  # fmt: skip


def _check(config: RunConfig, name: str) -> None:
    """What can be seen in the file alone; the rest is checked where it is used, before the first step."""
    for part in fields(config):
        section = getattr(config, part.name)
        for entry in fields(section):
            held, place = getattr(section, entry.name), f"{part.name}.{entry.name}"
            for value in held if isinstance(held, tuple) else (held,):
                if isinstance(value, int | float) and not isinstance(value, bool):
                    least = "positive" if place in _POSITIVE else "at least 0"
                    if not value >= 0 or (place in _POSITIVE and value == 0):
                        raise ValueError(f"{name}: {place} must be {least}, got {value!r}")
    model = config.model
    kinds = [k for k in ("preset", "config", "folder", "factory") if getattr(model, k)]
    if len(kinds) != 1:
        raise ValueError(
            f"{name}: a model is given by exactly one of model.preset, config, folder and factory, got "
            f"{' and '.join(kinds) or 'none'}"
        )
    if not config.data.train:
        raise ValueError(f'{name}: data.train must name at least one file, such as train = "book.txt"')
    if config.plan.num_slices and config.plan.slice_lengths:
        raise ValueError(
            f"{name}: plan.num_slices is a number of equal slices, plan.slice_lengths their lengths; give one"
        )
    if config.plan.order and config.plan.order not in ORDERS:
        _refuse_unknown({config.plan.order: None}, ORDERS, f"{name}: unknown plan.order {{!r}}")
    if config.plan.memory:
        nbytes(config.plan.memory)
    for place, share in (("data.eval_share", config.data.eval_share), ("lr.decay", config.lr.decay)):
        if share > 1:
            raise ValueError(f"{name}: {place} is a share of the whole, at most 1, got {share}")
    if config.data.batch_size % (config.plan.dp or 1):
        raise ValueError(
            f"{name}: every replica takes the same number of sequences: plan.dp {config.plan.dp} must divide "
            f"data.batch_size {config.data.batch_size}"
        )


def _section_lines(name: str, section: Any) -> list[str]:
    lines = [f"# {section.__doc__.strip()}", f"[{name}]"]
    for entry in fields(section):
        value = _toml(getattr(section, entry.name))
        choices = get_args(get_type_hints(type(section))[entry.name])
        said = f"{' | '.join(choices)}; " if choices and choices[-1] is not ... else ""
        lines += textwrap.wrap(said + entry.metadata["doc"], 100, initial_indent="# ", subsequent_indent="#   ")
        lines.append(f"{entry.name} = {value}")
    return [*lines, ""]


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value)  # strings and booleans are written alike


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def nbytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"a number of bytes reads like 16GiB, 900MB or 17179869184, got {text!r}")
    return int(float(found[1]) * _UNITS[found[2]])
