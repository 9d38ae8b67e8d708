"""``torch.autocast`` around a step: what it does with the inputs of products that torch does not know, and its state.

Only forwards are autocast, those that a backward begins with too. All else in a step (backwards, sums, transfers) runs
without it, as torch recommends for ``backward()``.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Self

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast, where it is on, computes such a product in. None where it leaves the tensor as it is:
    float64 is never cast."""
    device = x.device.type
    if x.dtype is torch.float64 or not x.is_floating_point() or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def autocasted(x: Tensor) -> Tensor:
    """In that dtype. Its gradient is cast back."""
    dtype = autocast_dtype(x)
    return x if dtype is None else x.to(dtype)


class Autocast(NamedTuple):
    """The state of autocast where a step was called; all ranks must have the same."""

    device_type: str
    dtype: torch.dtype | None  # None where it is off

    @classmethod
    def current(cls, device: torch.device) -> Self:
        enabled = torch.is_autocast_enabled(device.type)
        return cls(device.type, torch.get_autocast_dtype(device.type) if enabled else None)

    def on(self) -> AbstractContextManager[object]:
        """For a forward. torch keeps the casts of weights only if gradients are recorded: older versions take a cast
        that was made without them for one with them, and the weight's gradient is lost."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, self.dtype, cache_enabled=torch.is_grad_enabled())

    def off(self) -> AbstractContextManager[object]:
        return nullcontext() if self.dtype is None else torch.autocast(self.device_type, enabled=False)

    def forget_casts(self) -> None:
        """Casts of weights that torch keeps are of no use before a step or after it: weights change."""
        if self.dtype is not None:
            torch.clear_autocast_cache()

    def __str__(self) -> str:
        return "" if self.dtype is None else f" under autocast to {self.dtype}"
