"""A Hugging Face model of which only a stage's part is made real; the rest stays on the meta device."""

import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from terapipe.modeling.hf.attention_backend import UnsupportedModelError
from terapipe.modeling.hf.structure import AFTER, BEFORE, ModelStructure, shared_names

LISTED = 12  # names in a message

Tensors = dict[str, Any]  # a module's own, by name: parameters or buffers, some of them None


def meta_model(
    config: PretrainedConfig, dtype: torch.dtype | None = None, kind: type[PreTrainedModel] | None = None
) -> PreTrainedModel:
    """A whole model on the meta device; by default the causal LM of this configuration."""
    make: Any = AutoModelForCausalLM.from_config if kind is None else kind._from_config
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = make(copy.deepcopy(config), **({} if dtype is None else {"dtype": dtype}))
    assert isinstance(model, PreTrainedModel)
    return model


class StageWeights:
    """What a stage needs of a model, by the names of modules."""

    def __init__(self, model: PreTrainedModel, parts: ModelStructure, first: int, last: int) -> None:
        self._parts, self._layers, self._held = parts, f"{parts.layers}.", range(first, last)
        ends = last == len(model.get_submodule(parts.layers))  # type: ignore[arg-type]
        self._others = {*((BEFORE,) if first else ()), *(() if ends else (AFTER,))}
        # A stage that holds a weight under one of several names gets the modules of all: transformers then ties them
        # as in a whole model, and a file may have the weight under any of the names. It costs no memory.
        self.tied = [names for names in shared_names(model) if any(self._holds(_module(name)) for name in names)]
        self._shared = {_module(name) for names in self.tied for name in names}

    def has_parameters(self, name: str) -> bool:
        return name in self._shared or self._holds(name)

    def has_buffers(self, name: str) -> bool:
        """All but those of other stages' layers: they are small, and some serve every layer."""
        return name in self._shared or self._is_near(name)

    def _holds(self, name: str) -> bool:
        return self._parts.place(name) not in self._others and self._is_near(name)

    def _is_near(self, name: str) -> bool:
        layer = name.removeprefix(self._layers).partition(".")[0]
        return not name.startswith(self._layers) or int(layer) in self._held


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


class Weights(Protocol):
    """Where a model's weights come from."""

    def fill(self, model: PreTrainedModel, share: StageWeights) -> PreTrainedModel:
        """A model like this one on the meta device, of which the share is real, on the CPU."""


@dataclass(frozen=True)
class RandomWeights:
    """By the model's own rule for each module, with random numbers of the module's own, seeded with its name in the
    whole model: the same seed gives the same weights however the model is split."""

    seed: int = 0

    def fill(self, model: PreTrainedModel, share: StageWeights) -> PreTrainedModel:
        model = copy.deepcopy(model)
        _allocate(model, share)
        tied = {model.get_parameter(name) for names in share.tied for name in names}
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            for name, module, owner in _children_first("", model, model):
                if share.has_buffers(name):
                    self._init_weights(name, module, owner)
                for parameter in tied.intersection(module.parameters(recurse=False)):
                    parameter._is_hf_initialized = True  # type: ignore[attr-defined] # other modules leave it so
        _check_set(model)
        return model

    def _init_weights(self, name: str, module: nn.Module, owner: PreTrainedModel) -> None:
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        # Not torch.manual_seed, which would also seed the devices.
        torch.default_generator.manual_seed(int.from_bytes(digest, "big") >> 1)
        owner._init_weights(module)  # type: ignore[no-untyped-call]


def _children_first(
    name: str, module: nn.Module, owner: PreTrainedModel
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Each module and the model within the model that it belongs to, which knows how to initialise it."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    for step, child in module.named_children():
        yield from _children_first(f"{name}.{step}" if name else step, child, owner)
    yield name, module, owner


def _allocate(model: PreTrainedModel, share: StageWeights) -> None:
    made: dict[Tensor, nn.Parameter] = {}  # tied ones are made once
    for name, module in model.named_modules():
        parameters: Tensors = module._parameters if share.has_parameters(name) else {}
        for key, tensor in parameters.items():
            if tensor is not None and tensor not in made:
                made[tensor] = nn.Parameter(_unset(tensor), tensor.requires_grad)
            parameters[key] = made.get(tensor)
        buffers: Tensors = module._buffers if share.has_buffers(name) else {}
        buffers.update({key: _unset(tensor) for key, tensor in buffers.items() if tensor is not None})


def _unset(like: Tensor) -> Tensor:
    return torch.full_like(like, float("nan") if like.is_floating_point() else 0, device="cpu")


def _check_set(model: PreTrainedModel) -> None:
    tensors = chain(model.named_parameters(), model.named_buffers())
    real = ((name, t) for name, t in tensors if not t.is_meta and t.is_floating_point() and t.numel())
    unset = [name for name, t in real if t.min().isnan()]
    if unset:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not initialise {_some(unset)} after it was built on the meta device; "
            "load weights with Decoder.from_pretrained, or build the whole model and pass it to Decoder"
        )


@dataclass(frozen=True)
class PretrainedWeights:
    """From a folder, by transformers' own ``from_pretrained``: it reads lazily, and only what the model seems to have.
    So its names and formats are transformers' business."""

    folder: Path
    dtype: torch.dtype | None = None

    def config(self) -> PretrainedConfig:
        if not (self.folder / "config.json").is_file():
            raise ValueError(
                f"a saved model is a folder with a file config.json, got {str(self.folder)!r}; nothing is downloaded "
                "here, so fetch the model first"
            )
        config = AutoConfig.from_pretrained(self.folder, local_files_only=True)
        assert isinstance(config, PretrainedConfig)
        return config

    def fill(self, model: PreTrainedModel, share: StageWeights) -> PreTrainedModel:
        kind, aside = type(model), list[Aside]()
        part: Any = _partial(kind, share, aside)
        found, info = part.from_pretrained(
            self.folder, config=model.config, dtype=self.dtype, local_files_only=True, output_loading_info=True
        )
        self._check(found, info["missing_keys"], share)
        found.__class__ = kind
        for attributes, held, left_out in aside:
            for key in left_out:
                del attributes[key]
            held.update(left_out)
        assert isinstance(found, PreTrainedModel)
        return found

    def _check(self, found: PreTrainedModel, missing: set[str], share: StageWeights) -> None:
        if missing:
            raise ValueError(
                f"a saved model must hold all its weights, {self.folder} lacks {_some(sorted(missing))}; "
                "save the model again, or correct config.json"
            )
        for names in share.tied:
            if len({found.get_parameter(name) for name in names}) > 1:
                raise ValueError(
                    f"by its config.json {self.folder} has one weight for {' and '.join(names)}, but the saved ones "
                    "differ; set tie_word_embeddings to false in config.json"
                )


Aside = tuple[Tensors, Tensors, Tensors]  # a module's attributes, its parameters or buffers, those left out of them


def _partial(kind: type[PreTrainedModel], share: StageWeights, aside: list[Aside]) -> type[PreTrainedModel]:
    """A class that makes models without what the share leaves out, which is put aside."""

    def build(self: Any, *arguments: Any, **named: Any) -> None:
        kind.__init__(self, *arguments, **named)
        aside.extend(_set_aside(self, share))
        ties = self.all_tied_weights_keys.items()
        self.all_tied_weights_keys = {a: b for a, b in ties if share.has_parameters(_module(a))}
        self._keys_to_ignore_on_load_unexpected = {"."}  # files have all stages' weights

    # By another name transformers would take it for custom code, and would not convert the names of weights.
    same = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {"__init__": build, **same})


def _set_aside(model: PreTrainedModel, share: StageWeights) -> Iterator[Aside]:
    """Makes plain attributes of parameters and buffers: models still find them to initialise, on the meta device."""
    for name, module in model.named_modules():
        for held, has in ((module._parameters, share.has_parameters), (module._buffers, share.has_buffers)):
            if not has(name):
                left_out: Tensors = dict(held)
                held.clear()
                module.__dict__.update(left_out)
                yield module.__dict__, held, left_out
