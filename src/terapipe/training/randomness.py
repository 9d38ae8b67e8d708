"""The states of this rank's random generators, as tensors under names of its own."""

from collections.abc import Mapping

import torch
from torch import Tensor


def seeded(seed: int, rank: int) -> dict[str, Tensor]:
    """As they are after this seed."""
    torch.manual_seed(seed * 1_000_003 + rank)
    return states(rank)


def states(rank: int) -> dict[str, Tensor]:
    found = {f"random.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        found[f"random.cuda.{rank}"] = torch.cuda.get_rng_state()
    return found


def restore(found: Mapping[str, Tensor], rank: int) -> None:
    torch.set_rng_state(found[f"random.cpu.{rank}"])
    if f"random.cuda.{rank}" in found:
        torch.cuda.set_rng_state(found[f"random.cuda.{rank}"])
