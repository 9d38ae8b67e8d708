"""What one proof of ``terapipe doctor --prove`` is asked and tells."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from terapipe.presets import GPTConfig


@dataclass(frozen=True)
class Proof:
    """One line of the table: what was tried, whether it holds (None: it is a figure, not a claim), and the figures."""

    name: str
    holds: bool | None
    says: str
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Size:
    """Of the models that are run. A small one is for machines without GPUs, and for tests."""

    model: GPTConfig
    seq_len: int
    heads: tuple[int, ...]
    profile_seconds: float
    steps: int


SMALL = Size(GPTConfig(layers=4, hidden=64, heads=4, vocab=128, max_seq_len=256), 256, (16, 64), 3.0, 3)
LARGE = Size(
    GPTConfig(layers=16, hidden=2048, heads=16, vocab=32000, max_seq_len=4096), 4096, (16, 64, 80, 128, 256), 30.0, 5
)

Check = Callable[[int, Size], Proof]


def sizes(name: str | None) -> Size:
    """By name, or by whether there is a GPU."""
    known = {"small": SMALL, "large": LARGE}
    return known[name] if name else (LARGE if torch.cuda.is_available() else SMALL)


def meet() -> None:
    """Before ranks leave: the first to go would cut off the others."""
    if dist.is_initialized():
        dist.barrier()
