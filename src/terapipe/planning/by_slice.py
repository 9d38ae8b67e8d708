"""Values that a plan has for every stage and slice, in their shortest form: one for all, or an entry for each stage.

::

    "full"                              all slices on all stages
    ("none", "full")                    one value for each of two stages
    ("none", ("none", "full", "full"))  on the second stage one for each of three slices

Equal plans compare equal only if equal values have one form, so ``parse`` shortens whatever it is given.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
BySlice: TypeAlias = T | tuple[T | tuple[T, ...], ...]


def parse(value: Any, num_stages: int, num_slices: int, one: Callable[[Any], T], what: str) -> BySlice[T]:
    """Reads values in any of the three forms, and shortens them.

    Args:
        value: A value for all, or a list with an entry for each stage: a value, or a list with one for each slice.
        num_stages: Of the plan.
        num_slices: Of the plan, of all microbatches together.
        one: Reads a single value, or raises a ValueError.
        what: The values in a few words, for messages: "recompute is one of none, full".
    """
    if not _is_list(value):
        return one(value)
    if len(value) != num_stages:
        raise ValueError(f"{what}, or a list with one entry for each of the {num_stages} stages, got {value!r}")
    stages = tuple(_parse_stage(entry, num_slices, one, what) for entry in value)
    first = stages[0]
    return stages if isinstance(first, tuple) or any(entry != first for entry in stages) else first


def _parse_stage(entry: Any, num_slices: int, one: Callable[[Any], T], what: str) -> T | tuple[T, ...]:
    if not _is_list(entry):
        return one(entry)
    if len(entry) != num_slices:
        raise ValueError(f"for a stage, {what}, or a list with one for each of the {num_slices} slices, got {entry!r}")
    values = tuple(map(one, entry))
    return values[0] if len(set(values)) == 1 else values


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def of_stage(values: BySlice[T], stage: int, num_slices: int) -> tuple[T, ...]:
    """The value of each slice on a stage.

    Args:
        values: Of a plan.
        stage: Its number.
        num_slices: Of the plan.
    """
    entry = values[stage] if isinstance(values, tuple) else values
    return entry if isinstance(entry, tuple) else (entry,) * num_slices


def all_values(values: BySlice[T]) -> set[T]:
    """All values that occur."""
    entries: Iterable[Any] = values if isinstance(values, tuple) else (values,)
    return {value for entry in entries for value in (entry if isinstance(entry, tuple) else (entry,))}


def for_any_slices(values: BySlice[T], choose: Callable[[set[T]], T]) -> BySlice[T]:
    """For a plan with other slices: each stage has one value for all of them.

    Args:
        values: Of the plan as it was.
        choose: Of the values that a stage's slices had, the one that its other slices get.
    """
    if not isinstance(values, tuple):
        return values
    return tuple(choose(set(entry)) if isinstance(entry, tuple) else entry for entry in values)
