"""Makes a stage's part of a Hugging Face model real. The rest stays on the meta device.

A model of 70 billion parameters fits on no single host, so no process may build it. Every rank builds the whole model
on the meta device, which costs nothing, and ``Decoder.stage`` asks for the weights of its own layers:

    meta_model(config)                     all modules, no numbers
    StageWeights(model, structure, 2, 4)   which of them the stage of layers 2 and 3 needs
    weights.fill(model, wanted)            a copy in which those are real, on the CPU
        RandomWeights(seed)                    drawn by the model's own initialization, the same for any split
        PretrainedWeights(folder)              read from files by transformers, only what is wanted

``FolderSource`` reads frozen weights once more when a checkpoint is loaded that left them out.
"""

import copy
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from terapipe.files import check_kind, check_kinds, inside, read_json
from terapipe.hf.backends import UnsupportedModelError
from terapipe.hf.quantized import quantization_of, settle_scales, skip_modules
from terapipe.hf.structure import AFTER, BEFORE, CLASSIFIER, ModelStructure, shared_names
from terapipe.planning.limits import LARGEST

LISTED = 12  # names in a message

Tensors = dict[str, Any]  # parameters or buffers of a module by name, some of them None


def read_config(path: Path) -> PretrainedConfig:
    """The configuration in a Hugging Face folder or config.json.

    Nothing is downloaded, and code that lies beside it is not run: by default transformers would ask on stdin whether
    to run it, and take a piped ``y`` for an answer.

    Args:
        path: Of the folder or the file.

    Raises:
        ValueError: There is no such file, it is no configuration, or it asks for code of its own.
    """
    check_kind(path)
    check_kinds(path)
    _check_layers(path / "config.json" if path.is_dir() else path)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{path} brings Python code of its own (auto_map in its config.json), which terapipe does not run; if you "
            "trust it, make the model in a script, with trust_remote_code=True, and pass it to terapipe.hf.Decoder"
        ) from None
    except (TypeError, KeyError, AttributeError, RecursionError) as error:  # JSON, but not a configuration
        raise ValueError(f"{path} holds no Hugging Face configuration: {error}") from None
    assert isinstance(config, PretrainedConfig)
    return config


def _check_layers(path: Path) -> None:
    """transformers makes a list of all layers before anybody can say that there are too many."""
    entries = read_json(path) if path.is_file() else None
    for name, value in entries.items() if isinstance(entries, dict) else ():
        if "layer" in name and isinstance(value, int) and value > LARGEST["layers"]:
            raise ValueError(f"{path}: {name} must be at most {LARGEST['layers']}, got {value}")


def model_maker(kind: type[PreTrainedModel] | None = None) -> Callable[..., Any]:
    """What makes a model of a configuration: by default its causal LM, as transformers knows it.

    Args:
        kind: The model's class, if it is another one: a sequence classifier, or a subclass of the user's.
    """
    if kind is None:
        return partial(AutoModelForCausalLM.from_config, trust_remote_code=False)
    return kind._from_config


def meta_model(
    config: PretrainedConfig, dtype: torch.dtype | None = None, kind: type[PreTrainedModel] | None = None
) -> PreTrainedModel:
    """A whole model on the meta device: modules, names and shapes, without numbers. Draws no random numbers.

    Args:
        config: Of the model; it is copied.
        dtype: Of the weights, by default the configuration's.
        kind: The model's class, by default the causal LM of the configuration.
    """
    make = model_maker(kind)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = make(copy.deepcopy(config), **({} if dtype is None else {"dtype": dtype}))
    assert isinstance(model, PreTrainedModel)
    return model


def classifier_of(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The sequence classifier that a configuration was saved with; None for any other model.

    Args:
        config: Whose ``architectures`` names the class that wrote it.
    """
    name = next(iter(config.architectures or ()), "")
    kind = getattr(transformers, name, None) if name.endswith(CLASSIFIER) else None
    return kind if isinstance(kind, type) and issubclass(kind, PreTrainedModel) else None


class StageWeights:
    """Which modules of a model a stage needs weights of.

    With 6 layers, the stage of layers 2 and 3, and an embedding that is tied to the head:

                      embedding  layers 0 1  layers 2 3  layers 4 5  norm  head
        parameters        -          -           x           -        -     -
        buffers           x          -           x           -        x     x

    The first stage needs the embedding, and because of the tie also the head under its other name.

    Args:
        model: The whole model, on the meta device or not.
        structure: Which of its modules come before and after its layers.
        first: The number of the stage's first layer.
        last: The number after that of its last layer.
        ends: Whether the stage embeds tokens, and whether it has the head, where the numbers do not tell.

    Attributes:
        tied: The names of each parameter that has several, one of which this stage holds.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        structure: ModelStructure,
        first: int,
        last: int,
        ends: tuple[bool, bool] | None = None,
    ) -> None:
        self._structure, self._layers, self._numbers = structure, f"{structure.layers}.", range(first, last)
        is_first, is_last = ends or (first == 0, last == len(model.get_submodule(structure.layers)))  # type: ignore[arg-type]
        self._elsewhere = {*(() if is_first else (BEFORE,)), *(() if is_last else (AFTER,))}
        # A stage that holds a tied weight under one of its names gets it under all of them: transformers then ties them
        # as in a whole model, and a file may have the weight under any of the names. It costs no memory.
        self.tied = [names for names in shared_names(model) if any(self._holds(_module(name)) for name in names)]
        self._shared = {_module(name) for names in self.tied for name in names}

    def has_parameters(self, name: str) -> bool:
        """Whether the stage needs the parameters of the module of this name."""
        return name in self._shared or self._holds(name)

    def has_buffers(self, name: str) -> bool:
        """Whether the stage needs the module's buffers: all but those of other stages' layers. Buffers are small, and
        some, such as frequencies of rotary embeddings, are used by every layer."""
        return name in self._shared or self._not_in_other_layers(name)

    def unwanted(self, model: PreTrainedModel) -> list[str]:
        """The names of modules that have no parameters for this stage: whole layers, and others that have some."""
        layers = (f"{self._layers}{i}" for i in range(len(list(model.get_submodule(self._layers[:-1]).children()))))
        others = (name for name, m in model.named_modules() if m._parameters and not name.startswith(self._layers))
        return [name for name in chain(layers, others) if not self.has_parameters(name)]

    def _holds(self, name: str) -> bool:
        """Whether the module is in the stage, ties aside."""
        return self._structure.place(name) not in self._elsewhere and self._not_in_other_layers(name)

    def _not_in_other_layers(self, name: str) -> bool:
        layer = name.removeprefix(self._layers).partition(".")[0]
        return not name.startswith(self._layers) or int(layer) in self._numbers


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _some(names: list[str]) -> str:
    """The first names, for a message, and how many more there are."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


class Weights(Protocol):
    """The source of a model's weights."""

    def fill(self, model: PreTrainedModel, wanted: StageWeights) -> PreTrainedModel:
        """A copy of this model on the meta device, of which the wanted weights are real, on the CPU.

        Args:
            model: Which stays as it is.
            wanted: What to make real.
        """


@dataclass(frozen=True)
class RandomWeights:
    """Weights drawn by the model's own ``_init_weights``.

    Each module is seeded with its name in the whole model, so a seed gives the same weights however the model is split.
    They are not those that transformers draws from this seed: it draws module after module from one generator, which a
    stage could only follow by drawing all weights before its own.

    Args:
        seed: Of all weights.
    """

    seed: int = 0

    def fill(self, model: PreTrainedModel, wanted: StageWeights) -> PreTrainedModel:
        if quantization_of(model) is not None:
            raise UnsupportedModelError(
                f"the configuration of {type(model).__name__} says that its weights are quantized, which random ones "
                "are not; take Decoder.from_pretrained, or remove quantization_config"
            )
        model = copy.deepcopy(model)
        _allocate(model, wanted)
        tied = {model.get_parameter(name) for names in wanted.tied for name in names}
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            for name, module, owner in _children_first("", model, model):
                if wanted.has_buffers(name):
                    self._init_weights(name, module, owner)
                for parameter in tied.intersection(module.parameters(recurse=False)):
                    parameter._is_hf_initialized = True  # type: ignore[attr-defined] # other modules then leave it alone
        _check_set(model)
        return model

    def _init_weights(self, name: str, module: nn.Module, owner: PreTrainedModel) -> None:
        """Initializes one module from the seed and its name."""
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        # Not torch.manual_seed, which would also seed all devices.
        torch.default_generator.manual_seed(int.from_bytes(digest, "big") >> 1)
        owner._init_weights(module)  # type: ignore[no-untyped-call]


def _children_first(
    name: str, module: nn.Module, owner: PreTrainedModel
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Each module with the innermost PreTrainedModel around it, whose ``_init_weights`` initializes it."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    for step, child in module.named_children():
        yield from _children_first(f"{name}.{step}" if name else step, child, owner)
    yield name, module, owner


def _allocate(model: PreTrainedModel, wanted: StageWeights) -> None:
    """Gives wanted parameters and buffers memory on the CPU. They are NaN until initialized, so that ``_check_set`` can
    tell what nobody initialized: ``_init_weights`` skips modules that it does not know."""
    real: dict[Tensor, nn.Parameter] = {}  # tied parameters are made once
    for name, module in model.named_modules():
        parameters: Tensors = module._parameters if wanted.has_parameters(name) else {}
        for key, tensor in parameters.items():
            if tensor is not None and tensor not in real:
                real[tensor] = nn.Parameter(_unset(tensor), tensor.requires_grad)
            parameters[key] = real.get(tensor)
        buffers: Tensors = module._buffers if wanted.has_buffers(name) else {}
        buffers.update({key: _unset(tensor) for key, tensor in buffers.items() if tensor is not None})


def _unset(like: Tensor) -> Tensor:
    return torch.full_like(like, float("nan") if like.is_floating_point() else 0, device="cpu")


def _check_set(model: PreTrainedModel) -> None:
    """Refuses a model that left weights or buffers as ``_allocate`` made them."""
    tensors = chain(model.named_parameters(), model.named_buffers())
    real = ((name, t) for name, t in tensors if not t.is_meta and t.is_floating_point() and t.numel())
    unset = [name for name, t in real if t.min().isnan()]
    if unset:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not initialize {_some(unset)} after it was built on the meta device; "
            "load weights with Decoder.from_pretrained, or build the whole model and pass it to Decoder"
        )


@dataclass(frozen=True)
class PretrainedWeights:
    """Weights from a folder, by transformers' ``from_pretrained``, which handles names and formats of weights.

    It reads only weights that the model has, so it gets a model without those of other stages.

    Args:
        folder: As ``save_pretrained`` of transformers or of terapipe writes it.
        dtype: Of the weights, by default as they were saved.
        quantization: How to quantize them as they are read, a ``BitsAndBytesConfig`` or ``TorchAoConfig``. A folder
            that was saved quantized needs none.
    """

    folder: Path
    dtype: torch.dtype | None = None
    quantization: Any = None

    def config(self) -> PretrainedConfig:
        """The configuration in the folder. Refuses a folder without one, and indices that name files outside of it."""
        if not (self.folder / "config.json").is_file():
            raise ValueError(
                f"a pretrained model is a folder with a config.json, got {str(self.folder)!r}; nothing is downloaded "
                "here: for a model of the Hugging Face Hub, first run `hf download MODEL_ID --local-dir FOLDER` and "
                "pass FOLDER"
            )
        self._check_names()
        return read_config(self.folder)

    def _check_names(self) -> None:
        """Weights in several files have an index, which names the file of each weight."""
        for index in self.folder.glob("*.index.json"):
            entries = read_json(index)
            names = entries.get("weight_map") if isinstance(entries, dict) else None
            for name in set(names.values()) if isinstance(names, dict) else ():
                inside(self.folder, name)

    def fill(self, model: PreTrainedModel, wanted: StageWeights) -> PreTrainedModel:
        kind, hidden = type(model), list[_Hidden]()
        part: Any = _partial_class(kind, wanted, hidden)
        options = {"local_files_only": True, "trust_remote_code": False, "output_loading_info": True}
        config = copy.deepcopy(model.config)
        if quantization_of(model) is not None:
            quantization = skip_modules(quantization_of(model), model, wanted.unwanted(model))
            if self.quantization is None:
                config.quantization_config = quantization
            else:  # left in the configuration, it would say that the files are quantized
                del config.quantization_config
                options["quantization_config"] = quantization
        loaded, info = part.from_pretrained(self.folder, config=config, dtype=self.dtype, **options)
        self._check(loaded, info["missing_keys"], wanted)
        if quantization_of(model) is not None:
            loaded.config.quantization_config = quantization_of(model)
        loaded.__class__ = kind
        for one in hidden:
            one.show()
        assert isinstance(loaded, PreTrainedModel)
        return loaded

    def _check(self, loaded: PreTrainedModel, missing: set[str], wanted: StageWeights) -> None:
        if missing:
            raise ValueError(
                f"a saved model must hold all its weights, {self.folder} lacks {_some(sorted(missing))}; "
                "save the model again, or correct config.json"
            )
        for names in wanted.tied:
            if len({loaded.get_parameter(name) for name in names}) > 1:
                raise ValueError(
                    f"by its config.json {self.folder} has one weight for {' and '.join(names)}, but the saved ones "
                    "differ; set tie_word_embeddings to false in config.json"
                )


@dataclass(frozen=True)
class FolderSource:
    """The folder that a model's weights came from, to read them once more: frozen ones need not be saved then.

    Args:
        weights: The folder, and the dtype to read in.
        kind: The model's class.
        structure: Where its layers are.
    """

    weights: PretrainedWeights
    kind: type[PreTrainedModel]
    structure: ModelStructure

    @classmethod
    def of(cls, model: PreTrainedModel, weights: Weights, structure: ModelStructure) -> "FolderSource | None":
        """The folder of a model's weights; None where no folder is known.

        That it has the weights as they are now is for the caller to compare: a name stays in the configuration, even of
        a model that was made with other weights.

        Args:
            model: Whose ``name_or_path`` is looked at, if its weights are real.
            weights: What the Decoder makes weights from, if the model is on the meta device.
            structure: Where its layers are.
        """
        weights = getattr(weights, "base", weights)  # below adapters, which no folder has
        if not isinstance(weights, PretrainedWeights):
            folder = None if any(p.is_meta for p in model.parameters()) else _folder_of(str(model.name_or_path or ""))
            if folder is None:
                return None
            weights = PretrainedWeights(folder, model.dtype, quantization_of(model))
        return cls(weights, type(model), structure)

    def __str__(self) -> str:
        return str(self.weights.folder)

    def read(self, first: int, last: int, names: Iterable[str]) -> dict[str, Tensor]:
        """Reads weights of one stage, on the CPU, by their names in the model. Names that the folder lacks are left
        out.

        The model is built by the configuration in the folder, as the model's own may have been changed, by a larger
        vocabulary, say. Where peft wrapped a module, its weights are looked up under their names before that.

        Args:
            first: The number of the stage's first layer.
            last: The number after that of its last layer.
            names: Of parameters, as they are now.
        """
        weights, config = self.weights, self.weights.config()
        if getattr(config, "quantization_config", None) is not None:
            weights = replace(weights, quantization=None)  # the files are quantized already
        elif weights.quantization is not None:
            config.quantization_config = weights.quantization
        model = meta_model(config, weights.dtype, self.kind)
        with _no_progress_bar():
            filled = weights.fill(model, StageWeights(model, self.structure, first, last))
        settle_scales(filled)
        there = {name: p for name, p in filled.named_parameters(remove_duplicate=False) if not p.is_meta}
        originals = {name: _INSIDE_ADAPTERS.sub("", name) for name in names}
        return {name: there[original] for name, original in originals.items() if original in there}


_INSIDE_ADAPTERS = re.compile(r"(?<=\.)(base_layer|original_module|token_adapter)\.")  # where peft puts what it wraps


def _folder_of(name: str) -> Path | None:
    """A folder, or what was downloaded from the Hub under this name."""
    try:
        if not name or Path(name).is_dir():
            return Path(name).resolve() if name else None
        config = cached_file(name, "config.json", local_files_only=True)
    except (OSError, ValueError):  # not there, or no name that the Hub knows
        return None
    return Path(config).parent if config else None


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """In the middle of training."""
    shown = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers.logging.enable_progress_bar()  # type: ignore[no-untyped-call]


# How a stage's part is loaded. ``from_pretrained`` builds the model on the meta device, looks at its state dict for the
# weights to read, and initializes what files do not have. So parameters of other stages must not be in the state dict,
# but code of the model that touches them must still find them:
#
#     module._parameters["weight"]  --hide-->  module.__dict__["weight"]    while loading
#                                   <--show--                               afterwards, still on the meta device


@dataclass(frozen=True)
class _Hidden:
    """Parameters or buffers of a module that are plain attributes while the model is loaded."""

    attributes: dict[str, Any]  # of the module
    registered: Tensors  # its _parameters or _buffers
    tensors: Tensors

    @classmethod
    def hide(cls, module: nn.Module, registered: Tensors) -> "_Hidden":
        tensors = dict(registered)
        registered.clear()
        module.__dict__.update(tensors)
        return cls(module.__dict__, registered, tensors)

    def show(self) -> None:
        for key in self.tensors:
            del self.attributes[key]
        self.registered.update(self.tensors)


def _partial_class(kind: type[PreTrainedModel], wanted: StageWeights, hidden: list[_Hidden]) -> type[PreTrainedModel]:
    """A subclass whose instances hide what the stage does not want, right after they are built. ``from_pretrained`` is
    a class method that builds the instance itself, so there is no other place to do it."""

    def build(self: Any, *arguments: Any, **named: Any) -> None:
        kind.__init__(self, *arguments, **named)
        hidden.extend(_hide_unwanted(self, wanted))
        ties = self.all_tied_weights_keys.items()
        self.all_tied_weights_keys = {a: b for a, b in ties if wanted.has_parameters(_module(a))}
        self._keys_to_ignore_on_load_unexpected = {"."}  # files have the weights of all stages

    # With another name, transformers would take it for custom code and not convert names of weights.
    same_name = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {"__init__": build, **same_name})


def _hide_unwanted(model: PreTrainedModel, wanted: StageWeights) -> Iterator[_Hidden]:
    for name, module in model.named_modules():
        if not wanted.has_parameters(name):
            yield _Hidden.hide(module, module._parameters)
        if not wanted.has_buffers(name):
            yield _Hidden.hide(module, module._buffers)
