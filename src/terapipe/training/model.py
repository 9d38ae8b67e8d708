"""The model of a run, from its configuration. It is on the meta device: each rank materializes only its stages."""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from terapipe.config import DataConfig, ModelConfig, ObjectiveConfig
from terapipe.modeling.gpt import GPT
from terapipe.modeling.stage import Splittable
from terapipe.planning.layout import balance, split_layers
from terapipe.presets import GPTConfig, gpt_config
from terapipe.recompute import MODES, Recompute


@dataclass(frozen=True)
class RunModel:
    """A model, and what the planner knows of it."""

    model: Splittable
    shape: GPTConfig | None  # None: nothing is known, and it cannot be measured
    split: Callable[[int], tuple[int, ...]]  # boundaries of so many stages
    identity: dict[str, Any]  # its configuration: another one is another model, whatever its weights
    shortest: int = 1  # tokens that a slice must have
    recompute_modes: tuple[Recompute, ...] = MODES  # that the model supports


def make_model(config: ModelConfig, data: DataConfig, vocab: int, objective: ObjectiveConfig | None = None) -> RunModel:
    if config.preset:
        return _preset(config, data, vocab)
    if config.factory:
        return _from_factory(config, data, vocab)
    return _hugging_face(config, vocab, objective or ObjectiveConfig())


def _preset(config: ModelConfig, data: DataConfig, vocab: int) -> RunModel:
    """Vocabulary and positions are those that the data needs, unless the shape sets them."""
    shape = gpt_config(config.preset)
    keys = {item.partition("=")[0].strip() for item in config.preset.split(",")}
    if "vocab" not in keys:
        shape = replace(shape, vocab=vocab)
    if "max_seq_len" not in keys:
        shape = replace(shape, max_seq_len=max(shape.max_seq_len, data.seq_len))
    _check_vocab(shape.vocab, vocab, f"vocab={vocab} in model.preset")
    if shape.max_seq_len < data.seq_len:
        raise ValueError(
            f"the model must have a position for every token of a sequence, got max_seq_len={shape.max_seq_len} in "
            f"model.preset and data.seq_len {data.seq_len}; raise the one or lower the other"
        )
    with torch.device("meta"):
        gpt = GPT(shape, seed=config.seed).to(dtype_of(config))
    identity = {**asdict(shape), "kind": "gpt", "kv_heads": shape.num_kv_heads, "ffn": shape.ffn_hidden}
    return RunModel(gpt, shape, lambda stages: split_layers(shape, stages, data.seq_len), identity)


def _check_vocab(model: int, tokenizer: int, remedy: str) -> None:
    if model < tokenizer:
        raise ValueError(
            f"the model must know every token of the tokenizer, got a model of {model} and a tokenizer of {tokenizer}; "
            f"take the model's own tokenizer (data.tokenizer), or {remedy}"
        )


def _hugging_face(config: ModelConfig, vocab: int, objective: ObjectiveConfig) -> RunModel:
    try:
        import transformers

        from terapipe import hf
        from terapipe.modeling.hf.decoder import shape_of
        from terapipe.modeling.hf.structure import identity_of
        from terapipe.modeling.hf.weights import PretrainedWeights
    except ImportError as error:
        raise ValueError(f"Hugging Face models need transformers: pip install 'terapipe[hf]' ({error})") from None
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    dtype = dtype_of(config)
    routers: dict[str, Any] = {
        "router_loss_over": objective.router_loss_over,
        "router_z_loss": objective.router_z_loss,
    }
    if config.folder:
        decoder = hf.Decoder.from_pretrained(config.folder, dtype, **routers)
    else:
        path = Path(config.config)
        hf_config = PretrainedWeights(path.parent if path.is_file() else path, dtype).config()
        decoder = hf.Decoder.from_config(hf_config, config.seed, dtype, **routers)
    shape = shape_of(decoder)
    _check_vocab(shape.vocab, vocab, f"a model with a vocab_size of {vocab}")
    if config.recompute not in ("auto", "none"):
        decoder.check_slices(decoder.shortest, (config.recompute,))
    identity = identity_of(decoder.model.config.to_dict())
    split = partial(hf.split_layers, decoder)
    return RunModel(decoder, shape, split, identity, decoder.shortest, decoder.recompute_modes)


def _from_factory(config: ModelConfig, data: DataConfig, vocab: int) -> RunModel:
    function = import_object(config.factory, "model.factory")
    if not callable(function):
        raise ValueError(f"model.factory: {config.factory} is no function")
    arguments = {"vocab": vocab, "seq_len": data.seq_len, "seed": config.seed, "dtype": dtype_of(config)}
    accepted = inspect.signature(function).parameters
    result = function(**{name: value for name, value in arguments.items() if name in accepted})
    if not isinstance(result, Splittable):
        raise ValueError(
            f"model.factory must return a model with num_layers, tied and stage(), as docs/guide.md describes; "
            f"{config.factory} returned {type(result).__name__}"
        )
    return RunModel(result, None, lambda stages: balance([1.0] * result.num_layers, stages), {"kind": "own"})


def import_object(place: str, key: str) -> Any:
    """What ``module:name`` or ``file.py:name`` names; ``key`` is that of the configuration."""
    source, colon, name = place.rpartition(":")
    if not colon:
        raise ValueError(f"{key} is module:function or file.py:function, got {place!r}")
    if source.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(source).stem, source)
        if spec is None or spec.loader is None or not Path(source).is_file():
            raise ValueError(f"{key}: there is no file {source}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(source)
        except ModuleNotFoundError as error:
            raise ValueError(f"{key}: {error}; a file is given as path/to/file.py:function") from None
    if not hasattr(module, name):
        raise ValueError(f"{key}: {source} has no function {name!r}")
    return getattr(module, name)


def dtype_of(config: ModelConfig) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[config.dtype]
