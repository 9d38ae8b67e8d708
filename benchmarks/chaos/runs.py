"""The run that faults happen to: its configuration, its processes, its checkpoints."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

STEPS, EVERY = 20, 2
TEXT = Path(__file__).parents[2] / "examples" / "data" / "shakespeare.txt"
CONFIG = f"""
[model]
preset = "layers=6,hidden=64,heads=4"
[data]
train = "{TEXT}"
seq_len = 256
batch_size = 2
eval_share = 0.05
[plan]
pp = 2
seconds = 0
[optimizer]
steps = {STEPS}
accumulate = 2
[lr]
warmup = 5
[checkpoints]
every = {EVERY}
keep = 3
[evaluation]
every = 5
batches = 2
[logging]
tensorboard = false
[failures]
timeout = 20
"""
COMMAND = (sys.executable, "-u", "-m", "terapipe", "train")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def opened(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    with tempfile.NamedTemporaryFile() as file:
        dcp_to_torch_save(checkpoint, file.name)
        state: dict[str, Any] = torch.load(file.name, weights_only=True)
    return dict(_flat(state))


def _flat(state: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in state.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, torch.Tensor) and not name.startswith("random"):
            yield f"{prefix}{name}", value
