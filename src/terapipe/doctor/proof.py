"""What one proof of ``terapipe doctor --prove`` is asked and tells, and how its ranks begin."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from terapipe.doctor.examine import share_cores
from terapipe.planning.presets import GPTConfig
from terapipe.runtime.comm.environment import local_device


@dataclass(frozen=True)
class Proof:
    """One line of the table.

    Args:
        name: of the proof.
        holds: whether what it claims is true; None if it is a figure, not a claim.
        says: the result in one sentence.
        figures: all numbers behind it, for the file.
        seconds: how long it took.
    """

    name: str
    holds: bool | None
    says: str
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Size:
    """The size of the models that proofs run. The small one is for machines without GPUs and for tests. Both have a
    layer for each of 8 ranks.

    Args:
        model: the shape of the GPT.
        seq_len: tokens of its sequences.
        heads: sizes of attention heads whose kernels are tried.
        profile_seconds: how long a profile may take.
        steps: how many steps are timed.
    """

    model: GPTConfig
    seq_len: int
    heads: tuple[int, ...]
    profile_seconds: float
    steps: int


SMALL = Size(GPTConfig(layers=8, hidden=64, heads=4, vocab=128, max_seq_len=256), 256, (16, 64), 3.0, 3)
LARGE = Size(
    GPTConfig(layers=16, hidden=2048, heads=16, vocab=32000, max_seq_len=4096), 4096, (16, 64, 80, 128, 256), 30.0, 5
)
FAST = 1e13  # FLOP/s of products in bfloat16, from which on the large models take minutes, not hours

Check = Callable[[int, Size], Proof]


def sizes(name: str | None) -> Size:
    """Returns a size. Without a name it measures whether the GPU is fast enough for large models.

    Args:
        name: "small" or "large", or None.
    """
    by_name = {"small": SMALL, "large": LARGE}
    if name is not None:
        return by_name[name]
    return LARGE if torch.cuda.is_available() and _speed() >= FAST else SMALL


def _speed() -> float:
    """Measures the FLOP/s of a product in bfloat16 on the first GPU."""
    x = torch.ones(1024, 1024, dtype=torch.bfloat16, device="cuda")
    x @ x  # loads the kernel
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(4):
        x @ x
    torch.cuda.synchronize()
    return 4 * 2 * 1024**3 / (time.perf_counter() - began)


def begin_rank() -> torch.device:
    """Sets up a rank of a proof: pins it to its cores, as training does, and has float32 products computed in float32.
    NVIDIA's images set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1, with which they are TF32, and no gradient is exact.

    Returns:
        The device of this rank.
    """
    share_cores()
    torch.set_float32_matmul_precision("highest")
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def dtype_on(device: torch.device) -> torch.dtype:
    """Returns the dtype that training uses on this device."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def meet() -> None:
    """Waits for all ranks at the end of a proof, because the first to leave would cut off the others."""
    if dist.is_initialized():
        dist.barrier()
