"""The library broken on purpose, to see that random cases notice: ``python -m tests.fuzz --break NAME``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from terapipe.modeling.attention import _EarlierGradients
from terapipe.modeling.stage import RandomState
from terapipe.planning.slices import Slice
from terapipe.runtime.loss_head import TokenLoss


@contextmanager
def no_context_gradients() -> Iterator[None]:
    """Gradients of earlier keys and values are not added."""
    with mock.patch.object(_EarlierGradients, "add", return_value=None):
        yield


@contextmanager
def wrong_scale() -> Iterator[None]:
    """The last slice of a sequence weighs one percent more, if there are several."""
    gradient = TokenLoss.gradient

    def scale(self: TokenLoss, s: Slice, hidden: Tensor) -> Tensor:
        return gradient(self, s, hidden) * (1.01 if s.number > 1 else 1.0)

    with mock.patch.object(TokenLoss, "gradient", scale):
        yield


@contextmanager
def other_masks() -> Iterator[None]:
    """What is computed again draws other random numbers."""
    with mock.patch.object(RandomState, "set", side_effect=lambda: torch.manual_seed(1)):
        yield


BREAKS: dict[str, Callable[[], Any]] = {
    "no-context-gradients": no_context_gradients,
    "wrong-scale": wrong_scale,
    "other-masks": other_masks,
}
