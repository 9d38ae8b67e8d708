"""How a Hugging Face decoder is built, found out by running a small one: its layers, what comes before and after."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from terapipe.modeling.hf.attention_backend import UnsupportedModelError

BEFORE, LAYERS, AFTER = "before", "layers", "after"  # where in a model a module is
RETURNS = (0, 3, 2, 1)  # what a layer may return: a tensor, or a tuple of so many that begins with it


@dataclass(frozen=True)
class ModelStructure:
    """``before`` and ``after`` are modules with parameters of their own, by their names in the whole model."""

    layers: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    returns: int
    takes_positions: bool
    tied: tuple[str, ...]  # the names of a parameter that both have

    def place(self, name: str) -> str:
        """Where a module with parameters is; what adapters add to a module, or wrap it with, is where that is.
        Nowhere ("") if it is part of none: the model then has more than its configuration says."""
        around = f"{self.layers}."
        if name.startswith(around):
            return LAYERS
        while name not in self.before and name not in self.after:
            name = name.rpartition(".")[0]
            if not name or around.startswith(f"{name}."):
                return ""
        return BEFORE if name in self.before else AFTER

    def of(self, model: PreTrainedModel) -> "ModelStructure":
        """The same for a model of which this describes a small copy. Weights may be tied, or untied, by hand."""
        known = {name: self.place(name) for name, m in model.named_modules() if _has_parameters(m)}
        strange = [name for name, place in known.items() if not place]
        if strange:
            raise UnsupportedModelError(
                f"{type(model).__name__} has parameters that its configuration does not describe, and of which it is "
                f"unknown what stage needs them: {', '.join(strange[:3])}; remove them, or put them inside its layers"
            )
        return replace(self, tied=_across(model, self.layers, self.place))


def text_config(config: PretrainedConfig) -> Any:
    return config.get_text_config(decoder=True)


def find_layers(model: PreTrainedModel) -> str:
    """The list of as many modules as the configuration has layers."""
    count = text_config(model.config).num_hidden_layers
    lists = {name: len(m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    found = [name for name, length in lists.items() if length == count and "encoder" not in name.split(".")]
    found = found or [name for name, length in lists.items() if length == count]  # a decoder made of an encoder
    if not found:
        raise UnsupportedModelError(f"no list of {count} layers was found in {type(model).__name__}")
    shallowest: str = min(found, key=lambda name: name.count("."))
    return shallowest


class PassThrough:
    """Stands for the forward of a layer that another stage holds: hands on a tensor, as the layer's kind of result."""

    def __init__(self, returns: int, source: Callable[[], Tensor | None] = lambda: None) -> None:
        self.returns, self.source = returns, source

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        hidden = self.source()
        if hidden is None:
            hidden = arguments[0] if arguments else named["hidden_states"]
        return (hidden, *[None] * (self.returns - 1)) if self.returns else hidden


def stub(layer: nn.Module, forward: PassThrough) -> nn.Module:
    """A layer without its contents that keeps its attributes: models ask their layers what kind they are."""
    empty = copy.copy(layer)
    hooks: dict[str, Any] = {name: OrderedDict() for name in layer.__dict__ if "_hooks" in name}
    contents: dict[str, Any] = {"_modules": {}, "_parameters": {}, "_buffers": {}, **hooks}
    empty.__dict__ = {**layer.__dict__, **contents, "forward": forward}
    return empty


def with_layers(model: PreTrainedModel, layers: str, change: Callable[[int, nn.Module], nn.Module]) -> PreTrainedModel:
    """A model that shares all modules with this one but its layers, which are changed."""
    clone: Any = _shallow(model)
    *path, last = layers.split(".")
    holder = clone
    for step in path:
        child = _shallow(holder._modules[step])
        holder._modules[step] = child
        holder = child
    found = holder._modules[last]
    holder._modules[last] = nn.ModuleList([change(i, layer) for i, layer in enumerate(found)])
    return clone  # type: ignore[no-any-return]


def _shallow(module: nn.Module) -> nn.Module:
    clone = copy.copy(module)
    own = ("_modules", "_parameters", "_buffers")
    clone.__dict__ = {k: dict(v) if k in own else v for k, v in module.__dict__.items()}
    return clone


def find_structure(small: PreTrainedModel) -> ModelStructure:
    """From a small model of the same kind, on the CPU."""
    layers = find_layers(small)
    faults = []
    for takes_positions in (True, False):
        for returns in RETURNS:
            try:
                before, after = _order(small, layers, returns, takes_positions)
            except (TypeError, ValueError, AttributeError, IndexError, RuntimeError, KeyError) as error:
                faults.append(f"{type(error).__name__}: {error}")
                continue
            return ModelStructure(layers, before, after, returns, takes_positions, ()).of(small)
    raise UnsupportedModelError(f"its layers cannot be replaced: {faults[0]}")


def _order(
    model: PreTrainedModel, layers: str, returns: int, takes_positions: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Which modules with parameters are called before the first layer and which after the last."""
    stand_in = PassThrough(returns)
    empty = with_layers(model, layers, lambda i, layer: stub(layer, stand_in))
    names = [name for name, module in empty.named_modules() if _has_parameters(module)]
    called: list[str] = []
    with _watched(
        empty, [*names, *(f"{layers}.{i}" for i in range(len(list(model.get_submodule(layers).children()))))], called
    ):
        batch = torch.zeros(2, 3, dtype=torch.int64)
        positions = {"position_ids": torch.arange(3)[None].expand(2, 3)} if takes_positions else {}
        with torch.no_grad():
            out = empty(input_ids=batch, use_cache=False, **positions)
    if out.logits.shape[:2] != batch.shape:
        raise ValueError(f"logits of shape {tuple(out.logits.shape)} from a batch of {tuple(batch.shape)}")
    at = [i for i, name in enumerate(called) if name.startswith(f"{layers}.")]
    before = dict.fromkeys(called[: at[0]])
    after = dict.fromkeys(name for name in called[at[-1] + 1 :] if name not in before)
    idle = [name for name in names if name not in called]
    return (*before, *idle), tuple(after)


@contextmanager
def _watched(model: nn.Module, names: list[str], called: list[str]) -> Iterator[None]:
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: called.append(name)) for name in names
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _has_parameters(module: nn.Module) -> bool:
    return any(p is not None for p in module._parameters.values())


def _across(model: PreTrainedModel, layers: str, place: Callable[[str], str]) -> tuple[str, ...]:
    """Names of the parameter that the first and the last stage share; one within a stage is that stage's own."""
    found = []
    for names in shared_names(model):
        places = {name: _exact_place(name, layers, place) for name in names}
        if len(set(places.values())) == 1:
            continue
        if set(places.values()) != {BEFORE, AFTER}:
            raise UnsupportedModelError(
                f"a parameter may be shared by the first and the last stage, or within a layer; {type(model).__name__} "
                f"has one for {' and '.join(names[:3])}, which may be on several stages; give each its own"
            )
        found.append(tuple(next(n for n in names if places[n] == end) for end in (BEFORE, AFTER)))
    if len(found) > 1:
        raise UnsupportedModelError(
            f"the first and the last stage may share one parameter, those of {type(model).__name__} share "
            f"{len(found)}: {', '.join(map(' = '.join, found))}; untie all but one"
        )
    return found[0] if found else ()


def _exact_place(name: str, layers: str, place: Callable[[str], str]) -> str:
    """A layer is one of several, which may be on different stages."""
    module = name.rpartition(".")[0]
    where = place(module)
    return f"{LAYERS}.{module.removeprefix(f'{layers}.').partition('.')[0]}" if where == LAYERS else where


def owned_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A model with modules and a configuration of its own, and with the same tensors."""
    tensors = chain(model.parameters(), model.buffers())
    try:
        return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    except Exception as error:  # whatever a module that was put into the model raises
        raise UnsupportedModelError(
            f"the modules of {type(model).__name__} cannot be copied, and stages need their own: {error}; undo what "
            "was added to the model"
        ) from None


def shared_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append(name)
    return [names for names in found.values() if len(names) > 1]
