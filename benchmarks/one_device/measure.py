"""One long sequence on one device: a Hugging Face Llama plain, with its gradient checkpointing, and in slices."""

import ctypes
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.harness import Contender, arguments, best, pin, race, summary, table
from benchmarks.one_device import trainers
from terapipe import Pipeline, Plan
from terapipe.hf import Decoder
from terapipe.planning import Recompute
from terapipe.runtime import MemoryCounter

LAYERS = 8
SMALL, LARGE = 8192, 32_000  # vocabularies
LIMIT = 4 << 30  # bytes of the process with the longest sequence
SLICE = 512  # tokens of its slices
LIGHT = 8  # slices of the steps with light recomputation and with none


class Way(NamedTuple):
    """A way to train: slices and recomputation of ours, or Hugging Face without or with gradient checkpointing."""

    name: str
    slices: int = 0
    recompute: Recompute = "none"
    offload: bool = False

    def __str__(self) -> str:
        if not self.slices:
            return self.name
        return f"{self.slices} slices, recompute {self.recompute}" + (", offload" if self.offload else "")


PLAIN, CHECKPOINTING = Way("plain"), Way("gradient checkpointing")


def llama(tokens: int, vocab: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=vocab, max_position_embeddings=tokens,
    )  # fmt: skip
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.train()


def step_of(way: Way, tokens: int, vocab: int) -> tuple[Contender, nn.Module, Any]:
    """Forward and backward of one sequence, to gradients that exist already; the model; where offloaded slices wait."""
    model = llama(tokens, vocab)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    ids = torch.randint(vocab, (1, tokens), generator=torch.Generator().manual_seed(0))
    if not way.slices:
        if way == CHECKPOINTING:
            model.gradient_checkpointing_enable()
        return lambda: model(input_ids=ids, labels=ids, use_cache=False).loss.backward(), model, None
    plan = Plan.uniform(
        batch_size=1, seq_len=tokens, num_slices=way.slices, boundaries=(0, LAYERS), recompute=way.recompute
    )
    pipe = Pipeline(Decoder(model), replace(plan, offload=way.offload))
    labels = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)
    return lambda: pipe.step(ids, labels), model, pipe._executors.copier.host


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(*json.loads(sys.argv[2]))
        return
    if sys.argv[1:2] == ["--trainer"]:
        trainers.child(*json.loads(sys.argv[2]))
        return
    chosen = arguments(__doc__ or "", parts=PARTS)
    parts = chosen.part or [part for part in PARTS if not (chosen.quick and part == "longest")]
    pin(1)
    figures: dict[str, float] = {}
    for part in parts:
        figures |= PARTS[part](chosen.quick)
    summary(figures)


def steps(quick: bool) -> dict[str, float]:
    """Time and memory of a step, by tokens, vocabulary and way."""
    figures: dict[str, float] = {}
    rows: list[list[object]] = []
    for tokens, vocab, rounds, ways in settings(quick):
        contenders = {str(way): step_of(way, tokens, vocab)[0] for way in ways} if rounds else {}
        times = best(race(contenders, rounds))
        alone = {str(way): in_process(way, tokens, vocab) for way in ways}
        seconds = {name: times.get(name, one["seconds"]) for name, one in alone.items()}
        base, held = seconds[str(CHECKPOINTING)], alone[str(CHECKPOINTING)]
        points = []
        for way in ways:
            name, mine = str(way), alone[str(way)]
            mib, shares = zip(*((mine[key], mine[key] / held[key]) for key in ("counted", "resident")), strict=True)
            rows.append([tokens, vocab, name, seconds[name], seconds[name] / base, *(n / 2**20 for n in mib), *shares])
            points += [(seconds[name] / base, shares[0])] if way.slices else []
        figures |= summarized(points, f"{tokens}_vocab_{vocab}")
        figures |= lightness(seconds, alone, f"{tokens}_vocab_{vocab}")
    header = ("tokens", "vocabulary", "way", "best s", "time", "MiB counted", "MiB resident", "counted", "resident")
    table(f"{__doc__} Time and memory relative to gradient checkpointing.", header, rows)
    return figures


def lightness(seconds: dict[str, float], alone: dict[str, dict[str, float]], case: str) -> dict[str, float]:
    """Time and memory of light recomputation relative to none, where both have the same slices."""
    none, light = str(Way("", LIGHT, "none")), str(Way("", LIGHT, "light"))
    if none not in alone or light not in alone:
        return {}
    memory = alone[light]["counted"] / alone[none]["counted"]
    return {f"light_time_{case}": seconds[light] / seconds[none], f"light_memory_{case}": memory}


def settings(quick: bool) -> list[tuple[int, int, int, list[Way]]]:
    """Tokens, vocabulary, rounds, and the ways that are compared. Without rounds, the one step counts that each way
    does in its own process, one after the other."""
    if quick:
        return [(1024, SMALL, 1, [PLAIN, CHECKPOINTING, Way("", 8, "none"), Way("", 8, "block")])]
    ours = [(LIGHT, "none"), (LIGHT, "light"), (8, "block"), (16, "block"), (24, "full")]
    away = [Way("", n, mode, True) for n, mode in ((16, "light"), (16, "block"), (24, "block"))]
    short = [PLAIN, CHECKPOINTING, *(Way("", n, mode) for n, mode in ours), *away]
    large = [CHECKPOINTING, *(Way("", 16, mode) for mode in ("light", "block", "full")), Way("", 16, "block", True)]
    long = [CHECKPOINTING, Way("", 32, "block"), Way("", 32, "block", True), Way("", 64, "full")]
    return [(4096, SMALL, 2, short), (4096, LARGE, 2, large), (16384, SMALL, 0, long)]


def summarized(points: list[tuple[float, float]], case: str) -> dict[str, float]:
    """The least time at a quarter and at half of the memory, and the least memory at no more time."""
    found = {
        f"time_at_quarter_memory_{case}": [time for time, memory in points if memory <= 0.25],
        f"time_at_half_memory_{case}": [time for time, memory in points if memory <= 0.5],
        f"memory_at_equal_time_{case}": [memory for time, memory in points if time <= 1.0],
        f"least_memory_{case}": [memory for _, memory in points],
    }
    return {name: min(values) for name, values in found.items() if values}


# Memory, in a fresh process


class OutOfMemoryError(Exception):
    pass


def in_process(way: Way, tokens: int, vocab: int, limit: int = 0) -> dict[str, float]:
    """Bytes that a step adds to weights and gradients: of tensors ("counted"), and of the resident set. With a limit,
    only whether a process of so many bytes is enough."""
    command = [sys.executable, "-m", "benchmarks.one_device", "--child", json.dumps([way, tokens, vocab, limit])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    if done.returncode and limit and ("allocate" in done.stderr or "MemoryError" in done.stderr):
        raise OutOfMemoryError
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def child(way: list[object], tokens: int, vocab: int, limit: int) -> None:
    torch.set_num_threads(2 if limit else 1)
    give_back_memory()
    step, model, host = step_of(Way(*way), tokens, vocab)  # type: ignore[arg-type]
    before = status("VmRSS")
    if limit:
        room = status("VmSize") + limit - before
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
    counter = MemoryCounter(torch.device("cpu"), host=host)
    counter.count(model)
    with counter:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
    known, start = counter.current, time.perf_counter()
    with counter:
        step()
    seconds = time.perf_counter() - start
    found = {"counted": counter.peak - known, "resident": status("VmHWM") - before, "seconds": seconds}
    print(json.dumps(found))


def give_back_memory() -> None:
    """Has glibc map each large tensor by itself, so that what is freed leaves the resident set at once."""
    mmap_threshold = -3
    ctypes.CDLL("libc.so.6").mallopt(mmap_threshold, 1 << 17)


def status(name: str) -> int:
    """Bytes, of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def longest(quick: bool) -> dict[str, float]:
    """Tokens of the longest sequence in a process of ``LIMIT`` bytes with gradient checkpointing, in steps of an
    eighth, and how many times as many fit with ours: eight or four. More is not tried, for a step takes half an hour
    on two cores."""
    tokens = 4096
    while fits(CHECKPOINTING, tokens * 9 // 8):
        tokens = tokens * 9 // 8
    ways: dict[int, Recompute] = {8: "full", 4: "block"}
    times = (n for n, mode in ways.items() if fits(Way("", n * tokens // SLICE, mode), n * tokens))
    return {"longest_checkpointing": tokens, "longest_over_checkpointing": next(times, 0)}


def fits(way: Way, tokens: int) -> bool:
    try:
        in_process(way, tokens, LARGE, LIMIT)
    except OutOfMemoryError:
        return False
    return True


def in_trainers(quick: bool) -> dict[str, float]:
    """Whole training steps of transformers' Trainer."""
    lines, figures = trainers.rows(*((1024, SMALL, 1) if quick else (4096, LARGE, 2)))
    table(trainers.__doc__ or "", ("trainer", "best s", "time", "MiB counted", "memory"), lines)
    return figures


PARTS: dict[str, Callable[[bool], dict[str, float]]] = {"steps": steps, "longest": longest, "trainers": in_trainers}
