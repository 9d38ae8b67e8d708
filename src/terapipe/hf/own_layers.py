"""A stage's own layers in place of all layers of its model.

The forward of a model loops over its layers and reads in its configuration how many there are, and of which kinds. A
stage's copy of the model has its own layers only, and a configuration that says so where that loop is:

    whole model               layers 0 1 2 3 4 5    num_hidden_layers 6    layer_types a b a b a b
    stage of layers 2 and 3   layers     2 3        num_hidden_layers 2    layer_types     a b

The layers keep their names, their numbers (``layer_idx``) and the configuration of the whole model. A loop may do more
with numbers of layers than that. So for each stage it is tried whether its layers are called with the same arguments as
among all layers; a model that is not as simple as that keeps stubs in place of the layers of other stages.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten
from transformers import PretrainedConfig
from transformers.cache_utils import Cache

from terapipe.hf.structure import PassThrough, stub
from terapipe.hf.verify.small_model import for_layers


class LastLayerError(Exception):
    """Ends a model's forward when its last layer has been called: what follows is of no use on this stage."""


class OwnLayers(nn.ModuleList):
    """Some layers of a model, under their numbers in the whole model: names of parameters stay as they are.

    Loops and indices see them from 0 on, as if there were no others.

    Args:
        layers: By number.
        end: Called after a loop over all of them; it may raise a ``LastLayerError`` to leave the model's forward.
    """

    def __init__(self, layers: Mapping[int, nn.Module], end: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        for number, layer in layers.items():
            self.add_module(str(number), layer)
        self._end = end

    @property
    def numbers(self) -> list[int]:
        """The numbers that these layers have in the whole model."""
        return list(map(int, self._modules))

    def __iter__(self) -> Iterator[nn.Module]:
        yield from self._modules.values()
        self._end()

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and index == slice(None, len(self)):  # as models write it that loop over all
            return self
        return list(self._modules.values())[index]


class LayerSwap:
    """Other layers in a model, and what the modules around them then say about layers.

    Args:
        model: Whose layers are swapped.
        path: The name of the list of all layers.
        layers: What to put there.
        depth: How many layers the whole model has.
    """

    def __init__(self, model: nn.Module, path: str, layers: OwnLayers, depth: int) -> None:
        *around, name = path.split(".")
        self._changes: list[tuple[dict[str, Any], dict[str, Any]]] = []  # of a namespace, its new values
        module: Any = model
        for step in around:
            module = module._modules[step]
            self._changes.append((vars(module), _values_for(vars(module), layers.numbers, depth)))
        self._changes.append((module._modules, {name: layers}))

    def apply(self) -> None:
        """For good."""
        for namespace, values in self._changes:
            namespace.update(values)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """For a while. What modules note meanwhile, such as that hooks are in place, is about these layers and goes."""
        before = [(namespace, dict(namespace)) for namespace, _ in self._changes]
        self.apply()
        try:
            yield
        finally:
            for namespace, values in before:
                namespace.clear()
                namespace.update(values)


def _values_for(namespace: Mapping[str, Any], numbers: list[int], depth: int) -> dict[str, Any]:
    """Those values of a module or a configuration that are others if it has only the layers ``numbers``."""
    values: dict[str, Any] = {}
    for name, value in namespace.items():
        if isinstance(value, PretrainedConfig):
            part = copy.copy(value)
            vars(part).update(_values_for(vars(value), numbers, depth))
            values[name] = part
        elif isinstance(value, int | list | tuple | dict) and name not in ("_modules", "_parameters", "_buffers"):
            plain = list(value) if isinstance(value, tuple) else value
            changed = for_layers(name, plain, numbers, depth)
            if changed != plain:
                values[name] = type(value)(changed)
    return values


# Whether it is the same


Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments and named arguments of a layer


def recording(layers: Mapping[int, nn.Module], returns: int, calls: dict[int, Call]) -> dict[int, nn.Module]:
    """Stubs that put what they are called with into ``calls``, by the number of their layer.

    Args:
        layers: By number.
        returns: What they return, see ``structure.RETURNS``.
        calls: Which is filled when the stubs are called.
    """
    return {number: stub(layer, _Recorder(returns, number, calls)) for number, layer in layers.items()}


class _Recorder(PassThrough):
    """The forward of a stub. It returns numbers of its own, by which one sees what the model does with them."""

    def __init__(self, returns: int, number: int, calls: dict[int, Call]) -> None:
        super().__init__(returns)
        self._number, self._calls = number, calls

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._calls[self._number] = arguments, named
        return super().__call__(wave_like(hidden_of(arguments, named), self._number))


def hidden_of(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
    """Returns the hidden states among a layer's arguments: the first one, or the one of that name."""
    hidden: Tensor = arguments[0] if arguments else named["hidden_states"]
    return hidden


def wave_like(x: Tensor, shift: float = 0.0) -> Tensor:
    """Numbers that differ from place to place, and draw nothing from random generators."""
    places = torch.arange(x.numel(), device=x.device, dtype=torch.float32)
    return torch.sin(places + shift).view(x.shape).to(x.dtype)


def are_same(one: Any, other: Any) -> bool:
    """Of arguments of calls. Of tensors without numbers, such as those of a dry run, only the shapes are compared."""
    (mine, form), (theirs, other_form) = tree_flatten(one), tree_flatten(other)
    return form == other_form and all(map(_is_same, mine, theirs))


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        if isinstance(one, Cache):  # each call has one of its own
            return isinstance(other, Cache)
        return one is other or (type(one) is type(other) and bool(one == other))
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if isinstance(one, FakeTensor) or one.is_meta:
        return True
    return bool(((one == other) | (one != one) & (other != other)).all())
