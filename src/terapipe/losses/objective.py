"""What a pipeline is trained for: kinds of objectives, and what each is given and returns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor, nn

Targets: TypeAlias = Any  # a tensor, or nested dicts, lists and tuples of tensors
Loss: TypeAlias = Tensor | tuple[Tensor, Mapping[str, Tensor]]  # a scalar, and numbers to be logged with it
LossFn: TypeAlias = Callable[[Tensor, Targets], Loss]
Over = Literal["microbatch", "batch"]


@dataclass(frozen=True)
class HiddenLoss:
    """A sum over tokens by a function that multiplies by the head itself, such as fused linear cross-entropy.

    Models that change logits after the head (a scale, a softcap) are refused.

    Args:
        fn: Called with the hidden states that the head would be called with, the head, an ``nn.Linear``, and the
            slice's targets.
    """

    fn: Callable[[Tensor, nn.Module, Targets], Loss]


@dataclass(frozen=True)
class SequenceLoss:
    """A function of whole sequences, in two phases.

    ::

        forwards    slice 0: logits -> per_token -> values |  slice 1: ...     only values stay, not logits
        then        values of whole sequences -> fn -> loss -> a gradient for each value
        backwards   slice 1: logits and per_token again, with that gradient |  slice 0: ...

    So only the logits of one slice exist at a time, however long sequences are. Targets may also have one entry for
    each sequence, (batch, ...).

    Args:
        fn: Called with the values of whole sequences and their targets; returns a scalar.
        per_token: Called with logits and targets of a slice; returns values for each token, (size, length, ...). By
            default the log-probability of the labels.
        over: What ``fn`` sees at once: one "microbatch", or the "batch", for which all forwards must come before the
            first backward.
    """

    fn: Callable[[Any, Targets], Loss]
    per_token: Callable[[Tensor, Targets], Any] | None = None
    over: Over = "microbatch"

    def __post_init__(self) -> None:
        if self.over not in get_args(Over):
            raise ValueError(f"over is one of {', '.join(get_args(Over))}, got {self.over!r}")


Objective: TypeAlias = LossFn | HiddenLoss | SequenceLoss


def labels_in(targets: Targets) -> Tensor | None:
    """The labels among targets; None if there are none.

    Args:
        targets: Labels are a tensor of whole numbers, (batch, seq_len), that is the targets themselves, or has the name
            "labels" in a dict among them.
    """
    if isinstance(targets, Tensor):
        return targets if not targets.is_floating_point() and targets.ndim == 2 else None
    if isinstance(targets, Mapping) and isinstance(targets.get("labels"), Tensor):
        return labels_in(targets["labels"])
    parts = targets.values() if isinstance(targets, Mapping) else targets if isinstance(targets, list | tuple) else ()
    nested = (labels_in(part) for part in parts if not isinstance(part, Tensor))
    return next((labels for labels in nested if labels is not None), None)


def entry(targets: Targets, name: str, what: str) -> Tensor:
    """One of the tensors that an objective needs beside labels, or a ValueError that says which one is missing.

    Args:
        targets: What the step was called with.
        name: The tensor's name there.
        what: What it is, for the message.
    """
    if not isinstance(targets, Mapping) or name not in targets:
        got = f"a dict with {', '.join(map(repr, targets))}" if isinstance(targets, Mapping) else type(targets).__name__
        raise ValueError(f"targets must be a dict that has {what} under {name!r}, got {got}")
    value: Tensor = targets[name]
    return value
