"""The structure of a Hugging Face decoder, found by running a small one: its layers, and modules before and after.

Transformers has no list that says which module comes when: ``model.layers``, ``transformer.h``, ``gpt_neox.layers``, a
norm before the layers or after, an embedding that is scaled or projected. So ``find_structure`` runs a small copy with
stubs in place of its layers, notes the order in which modules are called, and cuts that list at the layers:

    called     embed_tokens  layers.0  layers.1  layers.2  layers.3  norm  lm_head
               \\__before__/  \\______________layers_____________/  \\___after__/

The first stage holds what comes before, the last one what comes after. Names are the same in a small copy and in the
model, so the structure of the copy is that of the model (``ModelStructure.of``), whose weights need not be loaded.

The rest of the file are the tools for cutting that stages, heads and verification share: stubs (``stub``,
``PassThrough``), copies that share tensors (``with_layers``, ``owned_copy``), and a few questions to configurations.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from terapipe.hf.backends import UnsupportedModelError
from terapipe.hf.quantized import keep_unpacked, settle_scales, share_scales

BEFORE, LAYERS, AFTER = "before", "layers", "after"  # the place of a module in the forward
RETURNS = (0, 3, 2, 1)  # what layers return: 0 is a tensor, n a tuple of n that begins with it


@dataclass(frozen=True)
class ModelStructure:
    """Which modules of a model are its layers, and which come before and after. Names are those in the whole model.

    Args:
        layers: The list of layers, for example ``model.layers``.
        before: Modules that own parameters and are called before the first layer. Modules that are never called are
            here as well: some stage has to hold them.
        after: Modules that own parameters and are called after the last layer only.
        returns: What a layer returns, see ``RETURNS``. Stubs must return the same form.
        takes_positions: Whether the forward takes ``position_ids``. If not, packed documents are refused, as positions
            could not restart with them.
        tied: The two names, before and after, of a parameter that the first and the last stage share; empty if there
            is none. Their gradients are added up after each step.
    """

    layers: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    returns: int
    takes_positions: bool
    tied: tuple[str, ...]

    def place(self, name: str) -> str:
        """``BEFORE``, ``LAYERS`` or ``AFTER``: where a module with parameters is called.

        What an adapter adds to a module has that module's place: ``lm_head.lora_A`` is unknown, so ``lm_head`` is
        looked up, and so on up to a module that contains the layers. The result is empty if the place is unknown: the
        model then has more than its configuration says.

        Args:
            name: Of the module in the whole model.
        """
        around = f"{self.layers}."
        if name.startswith(around):
            return LAYERS
        while name not in self.before and name not in self.after:
            name = name.rpartition(".")[0]
            if not name or around.startswith(f"{name}."):
                return ""
        return BEFORE if name in self.before else AFTER

    def of(self, model: PreTrainedModel) -> "ModelStructure":
        """The structure of a model of which this is the structure of a small copy. Only tied weights may differ.

        Args:
            model: The real one, which may be on the meta device.

        Raises:
            UnsupportedModelError: It has parameters outside of its layers that the copy does not have, or weights that
                are tied in a way that stages cannot follow.
        """
        places = {name: self.place(name) for name, m in model.named_modules() if _has_parameters(m)}
        unknown = [name for name, place in places.items() if not place]
        if unknown:
            raise UnsupportedModelError(
                f"{type(model).__name__} has parameters that its configuration does not describe, so it is "
                f"unknown which stage needs them: {', '.join(unknown[:3])}; remove them, or put them inside its layers"
            )
        return replace(self, tied=_tied_across_stages(model, self.layers, self.place))


# Keys of a configuration that do not change the model.
_VOLATILE = (
    "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "return_dict", "output_attentions",
    "output_hidden_states", "bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id",
)  # fmt: skip


def identity_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without the keys that do not matter, also in nested configurations.

    Ranks compare the result before the first step, and checkpoints hold it: what differs between two hosts or two
    versions of transformers without changing the model must not be in it.

    Args:
        config: What ``to_dict`` of a configuration, or of an adapter, returned.
    """
    lasting = {key: value for key, value in config.items() if not key.startswith("_") and key not in _VOLATILE}
    return {key: identity_of(value) if isinstance(value, dict) else value for key, value in lasting.items()}


def text_config(config: PretrainedConfig) -> Any:
    """The configuration of the decoder.

    Where one configuration is that of an encoder and a decoder (Bart, Marian), transformers gives the encoder's numbers
    of layers and heads as those of the model. A decoder alone has its own numbers, which may be others: the result is
    then a copy in which ``num_hidden_layers`` and the like are the decoder's. Of a multimodal model it is the text
    part.

    Args:
        config: Of the whole model.
    """
    text: Any = config.get_text_config(decoder=True)
    own = {name: f"de{theirs[2:]}" for name, theirs in text.attribute_map.items() if theirs.startswith("encoder_")}
    numbers = {name: getattr(text, theirs, None) for name, theirs in own.items()}
    if all(value in (None, getattr(text, name)) for name, value in numbers.items()):
        return text
    text = copy.deepcopy(text)
    for name, value in numbers.items():
        setattr(text, name, value if value is not None else getattr(text, name))
    return text


CLASSIFIER = "ForSequenceClassification"


def is_classifier(model: PreTrainedModel) -> bool:
    """Whether it is a decoder with scores of classes at each token, of which it takes those at the last one."""
    return type(model).__name__.endswith(CLASSIFIER) and isinstance(getattr(model, "score", None), nn.Module)


class _ScoresError(Exception):
    """Ends a classifier's forward when its scores are known, before it drops all but those of one token."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.scores = scores


def token_logits(model: PreTrainedModel, **inputs: Any) -> Tensor:
    """Scores at each token: (batch, tokens, vocabulary or classes).

    A classifier's forward returns one row of scores for each sequence. Which token that is depends on the padding of
    the whole sequence, which no slice knows, so stages work with the scores of all tokens, and losses choose.

    Args:
        model: A causal LM or a sequence classifier.
        **inputs: What its forward is called with.
    """
    if not is_classifier(model):
        logits: Tensor = model(**inputs).logits
        return logits

    def stop(module: nn.Module, arguments: Any, scores: Tensor) -> None:
        raise _ScoresError(scores)

    head: Any = model.score
    hook = head.register_forward_hook(stop)
    try:
        model(**inputs)
    except _ScoresError as stopped:
        return stopped.scores
    finally:
        hook.remove()
    raise UnsupportedModelError(f"{type(model).__name__} does not call its head")


def find_layers(model: PreTrainedModel) -> str:
    """The name of the ModuleList with as many modules as the configuration has layers.

    Of several, the one nearest to the top: lists inside of layers, such as experts, may have the same length by chance.
    """
    count = text_config(model.config).num_hidden_layers
    lists = {name: len(m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    names = [name for name, length in lists.items() if length == count and "encoder" not in name.split(".")]
    names = names or [name for name, length in lists.items() if length == count]  # a decoder that is named encoder
    if not names:
        raise UnsupportedModelError(f"no list of {count} layers was found in {type(model).__name__}")
    shallowest: str = min(names, key=lambda name: name.count("."))
    return shallowest


class PassThrough:
    """The forward of a layer that another stage holds: returns its input, or ``source()``, in the layer's form.

    Args:
        returns: That form, one of ``RETURNS``.
        source: Returns hidden states to pass on in place of the input; None for the input itself.
    """

    def __init__(self, returns: int, source: Callable[[], Tensor | None] = lambda: None) -> None:
        self.returns, self.source = returns, source

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        hidden = self.source()
        if hidden is None:
            hidden = arguments[0] if arguments else named["hidden_states"]
        return (hidden, *[None] * (self.returns - 1)) if self.returns else hidden


def stub(layer: nn.Module, forward: PassThrough) -> nn.Module:
    """A layer without parameters, modules and hooks. It keeps other attributes: models ask layers for their kind.

    Args:
        layer: Which stays as it is.
        forward: What the stub does when it is called.
    """
    empty = copy.copy(layer)
    hooks: dict[str, Any] = {name: OrderedDict() for name in layer.__dict__ if "_hooks" in name}
    contents: dict[str, Any] = {"_modules": {}, "_parameters": {}, "_buffers": {}, **hooks}
    empty.__dict__ = {**layer.__dict__, **contents, "forward": forward}
    return empty


def with_layers(model: PreTrainedModel, layers: str, change: Callable[[int, nn.Module], nn.Module]) -> PreTrainedModel:
    """A model that shares all modules with this one except its layers, which ``change`` maps.

    Modules on the path to the layers are copied shallowly, so the model itself is not changed:

        model            copy                 shares
        model            model'               everything but .model
          model            model'             everything but .layers
            embed            embed            the module
            layers           layers'          nothing: what ``change`` returned
            norm             norm             the module

    Args:
        model: The model.
        layers: The name of its list of layers.
        change: Takes a layer's number and the layer, and returns what to put in its place.
    """
    clone: Any = _shallow(model)
    *path, last = layers.split(".")
    holder = clone
    for step in path:
        child = _shallow(holder._modules[step])
        holder._modules[step] = child
        holder = child
    layer_list = holder._modules[last]
    holder._modules[last] = nn.ModuleList([change(i, layer) for i, layer in enumerate(layer_list)])
    return clone  # type: ignore[no-any-return]


def _shallow(module: nn.Module) -> nn.Module:
    clone = copy.copy(module)
    own = ("_modules", "_parameters", "_buffers")
    clone.__dict__ = {k: dict(v) if k in own else v for k, v in module.__dict__.items()}
    return clone


def find_structure(small: PreTrainedModel) -> ModelStructure:
    """Tries what layers may return and whether the model takes positions, until a forward works.

    The eight combinations are tried because neither can be read off: signatures have ``**kwargs``, and a loop over
    layers that expects a tuple fails with a tensor, or quietly takes its first row. So the shape of logits is checked.

    Args:
        small: A small copy of a model, with weights. It is called with two rows of three tokens.
    """
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
    """Which modules with parameters are called before the first layer and which after the last.

    Raises whatever the model's own code raises if stubs that return ``returns`` do not suit it.
    """
    pass_input = PassThrough(returns)
    empty = with_layers(model, layers, lambda i, layer: stub(layer, pass_input))
    names = [name for name, module in empty.named_modules() if _has_parameters(module)]
    called: list[str] = []
    with _watched(
        empty, [*names, *(f"{layers}.{i}" for i in range(len(list(model.get_submodule(layers).children()))))], called
    ):
        batch = torch.zeros(2, 3, dtype=torch.int64, device=model.device)
        positions = {"position_ids": torch.arange(3, device=model.device)[None].expand(2, 3)} if takes_positions else {}
        with torch.no_grad():
            out = token_logits(empty, input_ids=batch, use_cache=False, **positions)
    if out.shape[:2] != batch.shape:
        raise ValueError(f"logits of shape {tuple(out.shape)} from a batch of {tuple(batch.shape)}")
    at = [i for i, name in enumerate(called) if name.startswith(f"{layers}.")]
    before = dict.fromkeys(called[: at[0]])
    after = dict.fromkeys(name for name in called[at[-1] + 1 :] if name not in before)
    unused = [name for name in names if name not in called]
    return (*before, *unused), tuple(after)


@contextmanager
def _watched(model: nn.Module, names: list[str], called: list[str]) -> Iterator[None]:
    """Inside, modules ``names`` append their names to ``called`` when they are called."""
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


def _tied_across_stages(model: PreTrainedModel, layers: str, place: Callable[[str], str]) -> tuple[str, ...]:
    """Names of the parameter that the first and the last stage share: the first name before the layers and after them.

    Sharing within a stage needs no care. Sharing between layers is refused: a plan may put them on different stages,
    and only the ends of a pipeline exchange gradients of a weight.
    """
    shared = []
    for names in shared_names(model):
        places = {name: _exact_place(name, layers, place) for name in names}
        if len(set(places.values())) == 1:
            continue
        if set(places.values()) != {BEFORE, AFTER}:
            raise UnsupportedModelError(
                f"a parameter may be shared by the first and the last stage, or within a layer; {type(model).__name__} "
                f"has one for {' and '.join(names[:3])}, which may be on several stages; give each its own"
            )
        shared.append(tuple(next(n for n in names if places[n] == end) for end in (BEFORE, AFTER)))
    if len(shared) > 1:
        raise UnsupportedModelError(
            f"the first and the last stage may share one parameter, those of {type(model).__name__} share "
            f"{len(shared)}: {', '.join(map(' = '.join, shared))}; untie all but one"
        )
    return shared[0] if shared else ()


def _exact_place(name: str, layers: str, place: Callable[[str], str]) -> str:
    """Like ``place``, but with the number of the layer: layers may be on different stages."""
    module = name.rpartition(".")[0]
    where = place(module)
    return f"{LAYERS}.{module.removeprefix(f'{layers}.').partition('.')[0]}" if where == LAYERS else where


def owned_copy(model: PreTrainedModel, *, own_buffers: bool = False) -> PreTrainedModel:
    """A deep copy of modules and configuration that shares all tensors, or all but its buffers.

    So hooks, attributes and class changes of a stage do not reach the user's model, and no weight takes memory twice.

    Args:
        model: Which stays as it is.
        own_buffers: Copy buffers too, for runs that may update them.
    """
    settle_scales(model)
    tensors = chain(model.parameters(), () if own_buffers else model.buffers())
    try:
        clone = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors} | share_scales(model))
    except Exception as error:  # whatever a module that was added to the model raises
        raise UnsupportedModelError(
            f"the modules of {type(model).__name__} cannot be copied, and stages need their own: {error}; undo what "
            "was added to the model"
        ) from None
    keep_unpacked(clone)  # in place, it would reach the user's model
    return clone


def shared_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several names, as tied weights have. One list for each such parameter."""
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    return [names for names in names_of.values() if len(names) > 1]
