"""The same by transformers' Trainer: plain, with gradient checkpointing, and through slices. A whole training step."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from terapipe.planning import Recompute
from terapipe.runtime import MemoryCounter
from terapipe.trainers import PipelineConfig, PipelineTrainer

STEPS = 3  # the first is not counted


class Setup(NamedTuple):
    name: str
    checkpointing: bool = False
    slices: int = 0
    recompute: Recompute = "none"


SETUPS = (
    Setup("Trainer"),
    Setup("Trainer, gradient_checkpointing=True", checkpointing=True),
    Setup("PipelineTrainer, slices=16, recompute='block'", slices=16, recompute="block"),
    Setup("PipelineTrainer, slices=16, recompute='full'", slices=16, recompute="full"),
)


class Clock(TrainerCallback):
    """The fastest step after the first."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)

    @property
    def best(self) -> float:
        return min(self.seconds[1:])


def rows(tokens: int, vocab: int, rounds: int) -> tuple[list[list[object]], dict[str, float]]:
    """Of a table, relative to gradient checkpointing, and figures. Setups take turns, each in a process of its own."""
    found: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for setup in SETUPS:
            mine = _in_process(setup, tokens, vocab)
            before = found.setdefault(setup.name, mine)
            before["seconds"] = min(before["seconds"], mine["seconds"])
    base = found[SETUPS[1].name]
    table: list[list[object]] = [
        [
            name,
            one["seconds"],
            one["seconds"] / base["seconds"],
            one["counted"] / 2**20,
            one["counted"] / base["counted"],
        ]
        for name, one in found.items()
    ]
    ours = [row for row in table if "Pipeline" in str(row[0])]
    figures: dict[str, float] = {}
    for row, way in zip(ours, ("block", "full"), strict=True):
        figures |= {f"trainer_time_{way}": float(str(row[2])), f"trainer_memory_{way}": float(str(row[4]))}
    return table, figures


def _in_process(setup: Setup, tokens: int, vocab: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.one_device", "--trainer", json.dumps([setup, tokens, vocab])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def child(given: list[Any], tokens: int, vocab: int) -> None:
    from benchmarks.one_device.measure import llama

    torch.set_num_threads(1)
    setup = Setup(*given)
    ids = torch.randint(vocab, (STEPS, tokens), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in ids]
    clock, model = Clock(), llama(tokens, vocab)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, max_steps=STEPS, per_device_train_batch_size=1, save_strategy="no",
            report_to=[], disable_tqdm=True, logging_strategy="no", gradient_checkpointing=setup.checkpointing,
            optim="sgd", bf16=False,
        )  # fmt: skip
        given_to_both: dict[str, Any] = {"args": arguments, "train_dataset": data, "callbacks": [clock]}
        if setup.slices:
            config = PipelineConfig(slices=setup.slices, recompute=setup.recompute)
            trainer: Trainer = PipelineTrainer(model, **given_to_both, pipeline=config)
        else:
            trainer = Trainer(model, **given_to_both)
        counter = MemoryCounter(torch.device("cpu"))
        counter.count(model)
        known = counter.current + sum(p.numel() * p.element_size() for p in model.parameters())  # gradients
        with counter:
            trainer.train()
    print(json.dumps({"seconds": clock.best, "counted": counter.peak - known}))
