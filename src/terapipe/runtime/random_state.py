"""Random generators of several ranks: those that share operators draw the same numbers, a resumed run goes on."""

from collections.abc import Mapping

import torch
from torch import Tensor

from terapipe.modeling.stage import RandomState
from terapipe.runtime.comm.mesh import TP
from terapipe.runtime.comm.transport import Transport


def share_random_state(transport: Transport) -> None:
    """Devices that share operators hold the same activations between them, so they must draw the same numbers: those of
    the first of them. States are numbers of the host, also those of a GPU."""
    state = RandomState.now(transport.device)
    cpu, accelerator = transport.gather((state.cpu, state.accelerator), TP)[0]
    RandomState(state.device, cpu, accelerator).set()


def seed_rng(seed: int, rank: int) -> dict[str, Tensor]:
    """Seeds the generators and returns their states.

    Args:
        seed: that of the run.
        rank: this one; each draws its own numbers.
    """
    torch.manual_seed(seed * 1_000_003 + rank)
    return rng_state(rank)


def rng_state(rank: int) -> dict[str, Tensor]:
    """The states of the generators, under names that no other rank uses.

    Args:
        rank: this one.
    """
    states = {f"random.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"random.cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


def set_rng_state(states: Mapping[str, Tensor], rank: int) -> None:
    """Sets the generators.

    Args:
        states: what ``rng_state`` returned.
        rank: whose states to take.
    """
    torch.set_rng_state(states[f"random.cpu.{rank}"])
    if f"random.cuda.{rank}" in states:
        torch.cuda.set_rng_state(states[f"random.cuda.{rank}"])
