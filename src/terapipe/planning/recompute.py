"""What backwards compute again instead of keeping it (activation checkpointing), for each stage and slice."""

from typing import Any, Literal, TypeAlias, get_args

from terapipe.planning import by_slice
from terapipe.planning.by_slice import BySlice

Recompute = Literal["none", "light", "block", "full"]
"""- ``none``: a slice keeps all activations from its forward to its backward.
- ``light``: it keeps the input of each layer, the outputs of its products (linear layers) and of attention; the
  backward computes again what is cheap: norms, activation functions, gates, rotary embeddings, dropout, casts.
- ``block``: it keeps the input of each layer and the output of attention; the backward computes the rest of a layer
  again, without attention.
- ``full``: it keeps the input of the stage; the backward computes the whole forward again."""

MODES: tuple[Recompute, ...] = get_args(Recompute)  # the later, the less is kept

# One mode for all, or for each stage one mode or one mode for each slice.
RecomputeModes: TypeAlias = BySlice[Recompute]


def parse_recompute(value: Any, num_stages: int, num_slices: int) -> RecomputeModes:
    """In its shortest form, so that equal plans compare equal. ``True`` stands for full, ``False`` for none.

    Args:
        value: A mode, or a list with an entry for each stage: a mode, or a list with a mode for each slice.
        num_stages: Of the plan.
        num_slices: Of the plan, of all microbatches together.
    """
    if isinstance(value, bool):
        return "full" if value else "none"
    return by_slice.parse(value, num_stages, num_slices, _mode, f"recompute is one of {', '.join(MODES)}")


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
    return by_slice.of_stage(recompute, stage, num_slices)


def modes_in(recompute: RecomputeModes) -> tuple[Recompute, ...]:
    """All modes that occur, the one that keeps most first."""
    modes = by_slice.all_values(recompute)
    return tuple(mode for mode in MODES if mode in modes)


def for_any_slices(recompute: RecomputeModes) -> RecomputeModes:
    """For a plan with other slices: each stage takes the mode of its slices that keeps least, so that it still fits.

    Args:
        recompute: Of the plan as it was.
    """
    return by_slice.for_any_slices(recompute, lambda modes: max(modes, key=MODES.index))


def recompute_title(recompute: RecomputeModes) -> str:
    """For display: ``none``, ``full``, or such as ``none and block``."""
    return " and ".join(modes_in(recompute))
