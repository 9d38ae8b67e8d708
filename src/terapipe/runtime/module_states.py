"""What modules were told when a forward ran: modes, adapters on or off, scales, hooks, switches of configurations.

A backward may compute a forward again, and its caller may have switched the model meanwhile: a reference model is often
the model itself with its adapters off. What is computed again must be what was computed, so the state of the modules
belongs to the forward like its random numbers.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

CONTAINERS = (dict, OrderedDict, list, set, tuple)
PLAIN = (bool, int, float, str, type(None))
TREE = ("_modules", "_parameters")  # what a model is made of, not what it was told
DEPTH = 3  # of containers in containers; what is deeper counts as an object

State = dict[str, Any]


def copied(value: Any, depth: int = DEPTH) -> Any:
    """Containers are copied, as they may be changed in place; what they contain is shared."""
    kind = type(value)
    if kind not in CONTAINERS or not depth:
        return value
    if kind in (dict, OrderedDict):
        return kind((name, copied(x, depth - 1)) for name, x in value.items())
    return kind(copied(x, depth - 1) for x in value)


def is_same(old: Any, new: Any, depth: int = DEPTH) -> bool:
    """Plain values that are equal, containers of the same, or one object: tensors are not compared by their numbers."""
    if old is new and type(old) not in CONTAINERS:
        return True
    kind = type(old)
    if kind is not type(new):
        return False
    if kind in PLAIN:
        return bool(old == new)
    if kind not in CONTAINERS or not depth:
        return old is new
    if len(old) != len(new):
        return False
    if not old:
        return True
    if kind in (dict, OrderedDict):
        return all(name in new and is_same(x, new[name], depth - 1) for name, x in old.items())
    if kind is set:
        return bool(old == new)
    return all(is_same(a, b, depth - 1) for a, b in zip(old, new, strict=True))


def state_of(owner: Any) -> State:
    """The attributes of a module or a configuration, without what a model is made of."""
    return {name: copied(value) for name, value in owner.__dict__.items() if name not in TREE}


def configurations(modules: Iterable[nn.Module]) -> list[Any]:
    """The objects that modules look switches up in (``config``), with those inside, each once."""
    waiting = [m.__dict__["config"] for m in modules if "config" in m.__dict__]
    configs: dict[int, Any] = {}
    while waiting:
        config = waiting.pop()
        if id(config) not in configs and hasattr(config, "to_dict") and hasattr(config, "__dict__"):
            configs[id(config)] = config
            waiting += vars(config).values()
    return list(configs.values())


class ModuleStates:
    """Of some modules, their configurations, and which of their parameters are trained, at the moment it is made."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        roots = list(roots)
        modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
        self._states = [(owner, state_of(owner)) for owner in (*modules, *configurations(modules))]
        self._trained = [(p, p.requires_grad) for p in dict.fromkeys(p for root in roots for p in root.parameters())]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, modules are as they were; outside, as somebody has made them since. What nobody changed is not
        touched: a forward may change it itself. Parameters that were frozen since get no gradient, as in autograd."""
        flipped = [p for p, trained in self._trained if p.requires_grad is not trained]
        frozen = [(p, p.grad) for p in flipped if not p.requires_grad]
        outside = [(owner, _switched(owner, state)) for owner, state in self._states]
        for p, _ in frozen:
            p.grad = None
        _flip(flipped)
        try:
            yield
        finally:
            _flip(flipped)
            for p, earlier in frozen:
                p.grad = earlier
            for owner, state in outside:
                _set(owner, state)


_ABSENT = object()


def _switched(owner: Any, state: State) -> State:
    """Gives the owner this state, and returns what it replaced."""
    now = owner.__dict__
    changed = {name: value for name, value in state.items() if name not in now or not is_same(value, now[name])}
    new = [name for name in now if name not in state and name not in TREE]
    if not (changed or new):
        return {}
    replaced = {name: now.get(name, _ABSENT) for name in (*changed, *new)}
    _set(owner, {**{name: copied(value) for name, value in changed.items()}, **dict.fromkeys(new, _ABSENT)})
    return replaced


def _set(owner: Any, state: Mapping[str, Any]) -> None:
    """Without nn.Module's own ``__setattr__``, which would sort values by kind."""
    for name, value in state.items():
        if value is _ABSENT:
            owner.__dict__.pop(name, None)
        else:
            owner.__dict__[name] = value


def _flip(parameters: Iterable[nn.Parameter]) -> None:
    for p in parameters:
        p.requires_grad_(not p.requires_grad)
