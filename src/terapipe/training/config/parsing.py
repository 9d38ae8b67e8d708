"""Reads run.toml: keys, their types, and overrides of single keys."""

import tomllib
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from terapipe.files import read
from terapipe.training.config.rules import check, refuse_unknown
from terapipe.training.config.sections import RunConfig

Section = TypeVar("Section")


def load(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a file. Overrides replace single keys: ``optimizer.lr=1e-4``."""
    return parse(read(path), overrides, str(path))


def parse(text: str, overrides: Iterable[str] = (), name: str = "run.toml") -> RunConfig:
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
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def _section(kind: type[Section], data: Any, section: str, name: str) -> Section:
    if not isinstance(data, dict):
        raise ValueError(f"{name}: [{section}] must be a table of keys, got {data!r}")
    hints = get_type_hints(kind)
    refuse_unknown(data, hints, f"{name}: unknown key {section}.{{}}")
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
