"""What backwards compute again instead of keeping it (activation checkpointing), for each stage and slice."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

Recompute = Literal["none", "block", "full"]
"""- ``none``: a slice keeps all activations from its forward to its backward.
- ``block``: it keeps the input of each layer and the output of attention; the backward computes the rest of a layer
  again, without attention.
- ``full``: it keeps the input of the stage; the backward computes the whole forward again."""

MODES: tuple[Recompute, ...] = get_args(Recompute)  # the later, the less is kept

# One mode for all, or for each stage one mode or one mode for each slice.
RecomputeModes: TypeAlias = Recompute | tuple[Recompute | tuple[Recompute, ...], ...]


def parse_recompute(value: Any, num_stages: int, num_slices: int) -> RecomputeModes:
    """In its shortest form, so that equal plans compare equal. ``True`` stands for full, ``False`` for none.

    Args:
        value: A mode, or a list with an entry for each stage: a mode, or a list with a mode for each slice.
        num_stages: Of the plan.
        num_slices: Of the plan, of all microbatches together.
    """
    if isinstance(value, bool):
        return "full" if value else "none"
    if isinstance(value, str):
        return _mode(value)
    if not isinstance(value, Sequence) or len(value) != num_stages:
        raise ValueError(
            f"recompute is one of {', '.join(MODES)}, or a list with one entry for each of the {num_stages} stages, "
            f"got {value!r}"
        )
    stages = tuple(_of_stage(entry, num_slices) for entry in value)
    first = stages[0]
    return first if isinstance(first, str) and all(entry == first for entry in stages) else stages


def _of_stage(entry: Any, num_slices: int) -> Recompute | tuple[Recompute, ...]:
    if isinstance(entry, str):
        return _mode(entry)
    if not isinstance(entry, Sequence) or len(entry) != num_slices:
        raise ValueError(
            f"recompute of a stage is one of {', '.join(MODES)}, or a list with one for each of the {num_slices} "
            f"slices, got {entry!r}"
        )
    modes = tuple(map(_mode, entry))
    return modes[0] if len(set(modes)) == 1 else modes


def _mode(value: Any) -> Recompute:
    for mode in MODES:
        if value == mode:
            return mode
    if value == "selective":  # what Megatron calls so keeps more
        raise ValueError("recompute='selective' is called 'block' here: the rest of a layer, without its attention")
    raise ValueError(f"recompute is one of {', '.join(MODES)}, got {value!r}")


def modes_of(recompute: RecomputeModes, stage: int, num_slices: int) -> tuple[Recompute, ...]:
    """The mode of each slice on a stage.

    Args:
        recompute: Of a plan.
        stage: Its number.
        num_slices: Of the plan.
    """
    entry = recompute if isinstance(recompute, str) else recompute[stage]
    return (entry,) * num_slices if isinstance(entry, str) else entry


def modes_in(recompute: RecomputeModes) -> tuple[Recompute, ...]:
    """All modes that occur, the one that keeps most first."""
    entries = (recompute,) if isinstance(recompute, str) else recompute
    modes = {mode for entry in entries for mode in ((entry,) if isinstance(entry, str) else entry)}
    return tuple(mode for mode in MODES if mode in modes)


def for_any_slices(recompute: RecomputeModes) -> RecomputeModes:
    """For a plan with other slices: each stage takes the mode of its slices that keeps least, so that it still fits.

    Args:
        recompute: Of the plan as it was.
    """
    if isinstance(recompute, str):
        return recompute
    return tuple(entry if isinstance(entry, str) else modes_in((entry,))[-1] for entry in recompute)


def recompute_title(recompute: RecomputeModes) -> str:
    """For display: ``none``, ``full``, or such as ``none and block``."""
    return " and ".join(modes_in(recompute))
