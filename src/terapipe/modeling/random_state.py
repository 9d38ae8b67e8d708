"""The state of torch's random generators, so that a forward that is computed again draws the same dropout masks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Self

import torch
from torch import Tensor


class RandomState(NamedTuple):
    """Of the CPU's generator and, if the stage runs elsewhere, of its device's. As in torch.utils.checkpoint, tensors
    of other devices are not expected to draw."""

    device: torch.device
    cpu: Tensor
    accelerator: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> Self:
        module = None if device.type == "cpu" else torch.get_device_module(device)
        return cls(device, torch.get_rng_state(), module and module.get_rng_state(device))

    def set(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.get_device_module(self.device).set_rng_state(self.accelerator, self.device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, random numbers are drawn from this state; outside, they go on as if nothing had been drawn."""
        outside = RandomState.now(self.device)
        self.set()
        try:
            yield
        finally:
            outside.set()
