"""The state of the random generators: a forward computed again draws the same dropout masks, a resumed run goes on."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Self

import torch
from torch import Tensor

from terapipe.runtime.mesh import TP
from terapipe.runtime.transport import Transport


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


def share_random_state(transport: Transport) -> None:
    """Devices that share operators hold the same activations between them, so they must draw the same numbers: those of
    the first of them. States are numbers of the host, also those of a GPU."""
    state = RandomState.now(transport.device)
    cpu, accelerator = transport.gather((state.cpu, state.accelerator), TP)[0]
    RandomState(state.device, cpu, accelerator).set()


def seed_rng(seed: int, rank: int) -> dict[str, Tensor]:
    """Seed the generators and return their states."""
    torch.manual_seed(seed * 1_000_003 + rank)
    return rng_state(rank)


def rng_state(rank: int) -> dict[str, Tensor]:
    states = {f"random.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"random.cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


def set_rng_state(states: Mapping[str, Tensor], rank: int) -> None:
    torch.set_rng_state(states[f"random.cpu.{rank}"])
    if f"random.cuda.{rank}" in states:
        torch.cuda.set_rng_state(states[f"random.cuda.{rank}"])
