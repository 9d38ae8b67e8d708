"""Short runs of ``terapipe train``, and damage to their files."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

from terapipe.training.config import RunConfig, parse

TEXT = Path(__file__).parents[2] / "examples" / "data" / "shakespeare.txt"
PRESET = "model.preset=layers=2,hidden=16,heads=4"
TWO_LAYERS = ("model.preset=layers=2,hidden=8,heads=2", "data.seq_len=8", "optimizer.steps=3", "lr.warmup=1",
              "optimizer.accumulate=1", "checkpoints.every=1", "checkpoints.keep=0", "evaluation.every=0")  # fmt: skip


def short_run(folder: Path, *replaced: str) -> RunConfig:
    """A run of three steps on bytes; without a model."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(TEXT.read_text()[:3000])
    lines = f"""
[data]
train = "{text}"
seq_len = 16
[plan]
seconds = 0
[optimizer]
steps = 3
[lr]
warmup = 0
[evaluation]
every = 0
[logging]
folder = "{folder / "run"}"
tensorboard = false
[failures]
timeout = 300
"""
    return parse(lines, replaced)


def copy_run(run: RunConfig, name: str, **more: object) -> RunConfig:
    """Copies a run's folder to a sibling of this name, where ``[checkpoints]`` has these values too."""
    told = replace(run, logging=replace(run.logging, folder=str(run.folder.with_name(name))))
    shutil.copytree(run.folder, told.folder)
    return replace(told, checkpoints=replace(told.checkpoints, **more))  # type: ignore[arg-type]


def flip_bits(path: Path, bits: int = 1) -> None:
    """Damages a file, in the same places every time."""
    content = bytearray(path.read_bytes())
    for place in random.Random(0).sample(range(8 * len(content)), bits):
        content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)
