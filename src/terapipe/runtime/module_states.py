"""What modules were told when a forward ran: modes, adapters on or off, scales, hooks, switches of configurations.

A backward may compute a forward again, and its caller may have switched the model meanwhile: a reference model is often
the model itself with its adapters off. What is computed again must be what was computed, so the state of the modules
belongs to the forward like its random numbers::

    forward of slice 0     adapters on     states = ModuleStates(stage)
    disable_adapters()     adapters off    (the reference's log-probs are computed)
    backward of slice 0    adapters off    with states.restored(): on again, the forward is computed again, then off

Attributes are compared, not methods intercepted: any library may switch its modules in any way, and a list of known
ways would miss the next one.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import Tensor, nn

CONTAINERS = (dict, OrderedDict, list, set, tuple)
PLAIN = (bool, int, float, str, type(None))  # compared by value; all but these and containers by identity
TREE = ("_modules", "_parameters")  # what a model is made of, not what it was told
DEPTH = 3  # of containers in containers; what is deeper counts as an object
ABSENT = object()  # in the place of an attribute that an owner does not have; None may be a value


class Snapshot:
    """The attributes of a module or a configuration at one moment. Containers are copied, as they may be changed in
    place; what they contain is shared.

    Args:
        owner: anything with a ``__dict__``. Its class is compared, too: a module of another class runs another forward.
    """

    def __init__(self, owner: Any) -> None:
        self.owner, self.kind = owner, type(owner)
        self.attributes = {name: _copy(value) for name, value in owner.__dict__.items()}
        # Python's == takes a tensor of one number for another that has the same number.
        self._lone = [name for name, value in self.attributes.items() if _has_lone_number(value)]

    def is_current(self) -> bool:
        """Quick, as it is asked of all modules in each step: == looks whether objects are the same before it compares
        them, and other tensors in place of the same cannot be compared."""
        try:
            same = type(self.owner) is self.kind and self.owner.__dict__ == self.attributes
        except (RuntimeError, TypeError, ValueError):
            return False
        return same and not (self._lone and any(map(self._differs, self._lone)))

    def differences(self) -> list[str]:
        """The names of attributes that are others now, new or gone. Slower than ``is_current``, and exact."""
        names = dict.fromkeys(chain(self.attributes, self.owner.__dict__))
        return [name for name in names if self._differs(name)]

    def _differs(self, name: str) -> bool:
        return not _is_same(self.attributes.get(name, ABSENT), self.owner.__dict__.get(name, ABSENT))

    def update(self, name: str) -> None:
        """Takes the attribute as it is now.

        Args:
            name: of an attribute, which may be gone.
        """
        self.attributes.pop(name, None)
        if name in self.owner.__dict__:
            self.attributes[name] = _copy(self.owner.__dict__[name])
        self._lone = [other for other in self._lone if other != name]
        if _has_lone_number(self.attributes.get(name)):
            self._lone.append(name)

    def switch(self) -> dict[str, Any]:
        """Gives the owner these attributes. Its parameters and children stay: they are what a model is made of.

        Returns:
            The attributes that it had instead, for ``set_attributes``; ABSENT for one that it did not have.
        """
        if self.is_current():
            return {}
        changed = [name for name in self.differences() if name not in TREE]
        replaced = {name: self.owner.__dict__.get(name, ABSENT) for name in changed}
        set_attributes(self.owner, {name: _copy(self.attributes.get(name, ABSENT)) for name in changed})
        return replaced


def set_attributes(owner: Any, attributes: Mapping[str, Any]) -> None:
    """Sets or removes attributes without nn.Module's own ``__setattr__``, which would sort values by kind: an ordinary
    attribute that is a parameter would be registered as one.

    Args:
        owner: a module or a configuration.
        attributes: the values by name, ABSENT to remove one.
    """
    for name, value in attributes.items():
        if value is ABSENT:
            owner.__dict__.pop(name, None)
        else:
            owner.__dict__[name] = value


def is_plain(value: Any) -> bool:
    """Tells whether a value is a number, a text or the like, or a container of such: a switch, not a part of the model.

    Args:
        value: of an attribute; ABSENT counts as plain.
    """
    if type(value) in CONTAINERS:
        return all(map(is_plain, value.values() if isinstance(value, dict) else value))
    return value is ABSENT or type(value) in PLAIN


def _copy(value: Any, depth: int = DEPTH) -> Any:
    """Copies containers in containers, down to some depth, and nothing that is in them. Types are compared exactly:
    a subclass of dict may hold more than its items, and counts as an object."""
    kind = type(value)
    if kind not in CONTAINERS or not depth:
        return value
    if not value:
        return kind()
    if kind in (dict, OrderedDict):
        return kind((name, _copy(x, depth - 1)) for name, x in value.items())
    return kind(_copy(x, depth - 1) for x in value)


def _is_same(old: Any, new: Any, depth: int = DEPTH) -> bool:
    """Plain values that are equal, containers of the same, or one object: tensors are not compared by their numbers."""
    kind = type(old)
    if kind is not type(new):
        return False
    if kind in PLAIN:
        return bool(old == new)
    if kind not in CONTAINERS or not depth:
        return old is new
    if len(old) != len(new):
        return False
    if kind in (dict, OrderedDict):
        return list(old) == list(new) and all(_is_same(x, new[name], depth - 1) for name, x in old.items())
    return bool(old == new) if kind is set else all(_is_same(a, b, depth - 1) for a, b in zip(old, new, strict=True))


def _has_lone_number(value: Any, depth: int = DEPTH) -> bool:
    """Tells whether a tensor of a single number is in a value. ``==`` of two such gives a truth value instead of an
    error, so that dictionaries with different ones seem equal."""
    if type(value) in CONTAINERS and depth:
        inside = value.values() if isinstance(value, dict) else value
        return any(_has_lone_number(x, depth - 1) for x in inside)
    return isinstance(value, Tensor) and value.numel() == 1


def configurations(modules: Iterable[nn.Module]) -> list[Any]:
    """The objects that modules look switches up in (``config``), with those inside, each once. transformers' layers
    share one: a switch in it changes the next forward of all of them, without any attribute of a module changing.

    Args:
        modules: whose ``config`` is looked at. Only objects with a ``to_dict`` count, as those of transformers and
            peft.
    """
    waiting = [m.__dict__["config"] for m in modules if "config" in m.__dict__]
    configs: dict[int, Any] = {}
    while waiting:
        config = waiting.pop()
        if id(config) not in configs and hasattr(config, "to_dict") and hasattr(config, "__dict__"):
            configs[id(config)] = config
            waiting += vars(config).values()
    return list(configs.values())


class ModuleStates:
    """Remembers some modules' settings, their configurations, and which of their parameters are trained, at the moment
    it is made; ``restored`` gives them back for a while.

    The next forward takes the same one again if nothing was switched meanwhile (``is_current``): comparing is cheaper
    than remembering.

    Args:
        roots: modules, remembered with all that is inside them.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
        self._snapshots = [Snapshot(owner) for owner in (*modules, *configurations(modules))]
        parameters = dict.fromkeys(p for module in modules for p in module._parameters.values() if p is not None)
        self._parameters = list(parameters)
        self._trained = [p.requires_grad for p in parameters]

    def is_current(self) -> bool:
        """Whether another one, made now, would be the same."""
        trained = [p.requires_grad for p in self._parameters] == self._trained
        return trained and all(snapshot.is_current() for snapshot in self._snapshots)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, modules are as they were; outside, as somebody has made them since. What nobody changed is not
        touched: a forward may change it itself. Parameters that were frozen since get no gradient, as in autograd: they
        are trained inside, for the same graph as in the forward, and what their gradients become is thrown away."""
        flags = zip(self._parameters, self._trained, strict=True)
        flipped = [p for p, trained in flags if p.requires_grad is not trained]
        frozen = [(p, p.grad) for p in flipped if not p.requires_grad]
        outside = [(snapshot.owner, snapshot.switch()) for snapshot in self._snapshots]
        for p, _ in frozen:
            p.grad = None
        _flip(flipped)
        try:
            yield
        finally:
            _flip(flipped)
            for p, earlier in frozen:
                p.grad = earlier
            for owner, attributes in outside:
                set_attributes(owner, attributes)


def _flip(parameters: Iterable[nn.Parameter]) -> None:
    for p in parameters:
        p.requires_grad_(not p.requires_grad)
