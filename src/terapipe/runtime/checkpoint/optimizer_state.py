"""An optimizer's state as part of a checkpoint: each value under its parameter's name in the whole model."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

PART = "optimizer"  # of the checkpoint

Place = tuple[dict[Any, Any], Any]  # a dictionary and a key


class OptimizerState:
    """Of one rank's parameters. Hyperparameters are the run's, and not part of it.

    Names are those of torch's ``get_optimizer_state_dict`` with ``flatten_optimizer_state_dict``. That function and its
    setter do not serve: they save hyperparameters, as pickles; they make a state, which counts one step, where an
    optimizer has none; they round a state to its parameter's dtype; and they know nothing of tied copies.
    """

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
        self._optimizer, self._state = optimizer, optimizer.state
        trained = {p for group in optimizer.param_groups for p in group["params"]}
        self._parameters = {name: p for name, p in parameters.items() if p in trained}

    def _places(self) -> dict[str, Place]:
        found = (_leaves(self._state[p], f"state.{name}") for name, p in self._parameters.items() if p in self._state)
        return {name: place for leaves in found for name, place in leaves}

    def tensors(self) -> dict[str, Tensor]:
        """Those of the state itself; numbers as tensors."""
        return {name: _as_tensor(held[key]) for name, (held, key) in self._places().items()}

    def prepare(self, saved: Iterable[str]) -> None:
        """Makes room for what is saved. What is not begins anew, as it did where it was saved."""
        known = {prefix for name in saved if name.startswith(f"{PART}.state.") for prefix in _prefixes(name)}
        there = {name for name in self._parameters if f"{PART}.state.{name}" in known}
        for name, p in self._parameters.items():
            p.grad = None
            if name not in there:
                self._state.pop(p, None)
        self._make([p for name, p in self._parameters.items() if name in there and p not in self._state])

    def _make(self, parameters: list[Tensor]) -> None:
        """What a first step would make, by one that goes nowhere: of gradients that are zero, at a rate of zero."""
        if not parameters:
            return
        groups = [group for group in self._optimizer.param_groups if "lr" in group]
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * 0
        for p in parameters:
            p.grad = torch.zeros_like(p)
        self._optimizer.step()
        for p in parameters:
            p.grad = None
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def finish(self, loaded: Mapping[str, Tensor]) -> None:
        """Tensors were loaded in place; numbers were not."""
        for name, (held, key) in self._places().items():
            if not isinstance(held[key], Tensor):
                held[key] = type(held[key])(loaded[name].item())

    def copy(self, original: Tensor, copy: Tensor) -> None:
        """A copy of a parameter gets a copy of its state."""
        self._state.pop(copy, None)
        if original in self._state:
            self._state[copy] = _cloned(self._state[original])


def _leaves(state: dict[Any, Any], name: str) -> Iterator[tuple[str, Place]]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{name}.{key}")
        elif isinstance(value, Tensor | int | float):
            yield f"{name}.{key}", (state, key)


def _as_tensor(value: Tensor | int | float) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def _cloned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


def _prefixes(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name
