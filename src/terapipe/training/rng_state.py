"""The states of this rank's random number generators, as tensors named after the rank."""

from collections.abc import Mapping

import torch
from torch import Tensor


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
