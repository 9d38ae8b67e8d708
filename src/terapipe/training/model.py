"""The model of a run, from its configuration: not yet real, so that each rank makes only its own part."""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from terapipe.config import DataConfig, ModelConfig
from terapipe.modeling.gpt import GPT
from terapipe.modeling.stage import Splittable
from terapipe.planning.stages import balance, split_layers
from terapipe.presets import GPTConfig, model


@dataclass(frozen=True)
class Made:
    """A model, and what the planner knows of it."""

    model: Splittable
    shape: GPTConfig | None  # None: nothing is known, and it cannot be measured
    split: Callable[[int], tuple[int, ...]]  # boundaries of so many stages


def make_model(config: ModelConfig, data: DataConfig, vocab: int) -> Made:
    if config.preset:
        return _preset(config, data, vocab)
    return _own(config, data, vocab) if config.own else _hugging_face(config, vocab)


def _preset(config: ModelConfig, data: DataConfig, vocab: int) -> Made:
    """With as many tokens and positions as the data have."""
    named = model(config.preset)
    shape = replace(named, vocab=vocab, max_tokens=max(named.max_tokens, data.tokens))
    with torch.device("meta"):
        selective = config.recompute == "selective"
        gpt = GPT(shape, seed=config.seed, recompute="selective" if selective else "off").to(dtype_of(config))
    return Made(gpt, shape, lambda stages: split_layers(shape, stages, data.tokens))


def _hugging_face(config: ModelConfig, vocab: int) -> Made:
    try:
        import transformers

        from terapipe import hf
        from terapipe.modeling.hf.build import Saved
        from terapipe.modeling.hf.shape import shape_of
    except ImportError as error:
        raise ValueError(f"Hugging Face models need transformers: pip install 'terapipe[hf]' ({error})") from None
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    dtype = dtype_of(config)
    if config.folder:
        decoder = hf.Decoder.from_pretrained(config.folder, dtype)
    else:
        path = Path(config.config)
        found = Saved(path.parent if path.is_file() else path, dtype).config()
        decoder = hf.Decoder.from_config(found, config.seed, dtype)
    shape = shape_of(decoder)
    if shape.vocab < vocab:
        raise ValueError(
            f"the model must know every token of the tokenizer, got a model of {shape.vocab} and a tokenizer of "
            f"{vocab}; take the model's own tokenizer, or another vocab_size"
        )
    if config.recompute == "selective":
        decoder.recompute_layers()
    return Made(decoder, shape, lambda stages: hf.split_layers(decoder, stages))


def _own(config: ModelConfig, data: DataConfig, vocab: int) -> Made:
    function = _found(config.own)
    known = {"vocab": vocab, "tokens": data.tokens, "seed": config.seed, "dtype": dtype_of(config)}
    made = function(**{name: value for name, value in known.items() if name in inspect.signature(function).parameters})
    if not isinstance(made, Splittable):
        raise ValueError(
            f"model.own must return a model with num_layers, tied and stage(), as docs/guide.md describes; "
            f"{config.own} returned {type(made).__name__}"
        )
    if config.recompute == "selective":
        raise ValueError("selective recomputation is the model's own business; take recompute = 'full' or 'off'")
    return Made(made, None, lambda stages: balance([1.0] * made.num_layers, stages))


def _found(place: str) -> Callable[..., Any]:
    where, colon, name = place.rpartition(":")
    if not colon:
        raise ValueError(f"model.own is module:function or file.py:function, got {place!r}")
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        if spec is None or spec.loader is None or not Path(where).is_file():
            raise ValueError(f"model.own: there is no file {where}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise ValueError(f"model.own: {error}; a file is given as path/to/file.py:function") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"model.own: {where} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def dtype_of(config: ModelConfig) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[config.dtype]
