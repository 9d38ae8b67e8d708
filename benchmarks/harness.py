"""Runs contenders on pinned ranks, interleaved, and prints a table and one JSON line."""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from terapipe import GPT, GPTConfig, Pipeline, Plan
from terapipe.launch import keep_memory

Contender = Callable[[], object]


def arguments(description: str, *, parts: Sequence[str] = (), **flags: str) -> argparse.Namespace:
    """``flags`` are further ones, with their help. With ``parts``, some of them can be run alone: ``--part``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under a minute, and noisier")
    if parts:
        parser.add_argument("--part", action="append", choices=parts, help="run this part only; it may be repeated")
    for name, said in flags.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=said)
    return parser.parse_args()


def on_ranks(size: int, function: Callable[..., Any], *args: Any) -> Any:
    """Calls ``function(*args)`` on so many processes, each with one thread on its own core; returns rank 0's result."""
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("spawn").SimpleQueue()
        mp.start_processes(_rank, (size, folder, results, function, args), nprocs=size, start_method="spawn")
        return results.get()


def _rank(rank: int, size: int, folder: str, results: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    pin(rank)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    result = function(*args)
    if rank == 0:
        results.put(result)
    dist.barrier()
    # gloo's threads may still hear of a rank that has left already, and abort a process that takes its groups down.
    sys.stdout.flush()
    os._exit(0)


def pin(rank: int) -> None:
    """One thread on one core, before any other thread is started."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    keep_memory()


def training(config: GPTConfig, plan: Plan) -> Contender:
    """A step of this model by this plan, on tokens drawn once."""
    pipe = Pipeline(GPT(config), plan)
    ids = torch.randint(config.vocab, (plan.batch_size, plan.seq_len), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        pipe.step(ids, ids.roll(-1, 1))
        pipe.zero_grad(set_to_none=False)

    return step


def race(contenders: Mapping[str, Contender], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of every round, the contenders taking turns; ranks start together and the last one's end counts."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(-warmup, rounds):
        for name, contender in contenders.items():
            seconds = timed(contender)
            if turn >= 0:
                times[name].append(seconds)
    return times


def timed(contender: Contender) -> float:
    several = dist.is_initialized()
    if several:
        dist.barrier()
    start = time.perf_counter()
    contender()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    if several:
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def best(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: min(values) for name, values in times.items()}


def report(title: str, header: Sequence[str], rows: Sequence[Sequence[object]], figures: Mapping[str, object]) -> None:
    """A Markdown table, and as the last line the figures as one JSON object."""
    table(title, header, rows)
    summary(figures)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    print(f"## {title}\n")
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(f"{x:.3f}" if isinstance(x, float) else str(x) for x in row) + " |")
    print()


def summary(figures: Mapping[str, object]) -> None:
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, one thread per rank\n")
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}))
