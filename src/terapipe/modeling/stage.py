"""What the runtime asks of a model: that it can be taken apart into stages, and what a stage can do."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from terapipe.modeling.attention import SliceCache

IGNORE = -100  # labels with this value count for nothing, as in torch.nn.functional.cross_entropy


@runtime_checkable
class Stage(Protocol):
    """Some consecutive layers of a model, as an ``nn.Module``."""

    def make_cache(self, size: int, tokens: int) -> SliceCache:
        """A place for what must outlive a slice, for one microbatch of ``size`` sequences of ``tokens`` tokens."""

    def __call__(self, x: Tensor, cache: SliceCache) -> Tensor:
        """From token ids (first stage) or the hidden states of the stage before, those of this stage."""

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Last stage only: the sum of the losses of all labels that are not ``IGNORE``."""

    def hidden_shape(self, size: int, length: int) -> tuple[int, ...]:
        """The shape of the hidden states of one slice, which every stage but the first receives."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the names they have in the whole model."""


@runtime_checkable
class Splittable(Protocol):
    """A whole model that can be taken apart."""

    @property
    def num_layers(self) -> int: ...

    @property
    def tied(self) -> tuple[str, ...]:
        """Names of parameters that both the first and the last stage hold, each its own copy."""

    def stage(self, first: int, last: int, device: torch.device) -> nn.Module:
        """The layers ``first`` to ``last`` on the device, as a ``Stage``; made real there from a model on meta."""


def next_token_labels(input_ids: Tensor) -> Tensor:
    """Labels for predicting the next token: at each place the token after it, ``IGNORE`` at the end of a sequence."""
    labels = torch.full_like(input_ids, IGNORE)
    labels[:, :-1] = input_ids[:, 1:]
    return labels
