"""Activation memory of the orders: 4 stages, 8 sequences, 8 slices each; peak of what autograd saves, per rank."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import arguments, on_ranks, report
from terapipe import GPT, GPTConfig, Pipeline, Plan

STAGES, BATCH, SLICES = 4, 8, 8


class SavedBytes:
    """Bytes of all storages that autograd holds for backward, each counted once; parameters left out."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._ignored = {p.untyped_storage().data_ptr() for p in parameters}
        self._held: Counter[int] = Counter()
        self.now = self.peak = 0

    def pack(self, x: Tensor) -> "Held":
        return Held(self, x)

    def change(self, x: Tensor, by: int) -> None:
        storage = x.untyped_storage()
        key = storage.data_ptr()
        if key in self._ignored:
            return
        before, after = self._held[key] > 0, self._held[key] + by > 0
        self._held[key] += by
        self.now += (after - before) * storage.nbytes()
        self.peak = max(self.peak, self.now)


class Held:
    def __init__(self, counter: SavedBytes, x: Tensor) -> None:
        self.counter, self.x = counter, x
        counter.change(x, +1)

    def __del__(self) -> None:
        self.counter.change(self.x, -1)


def peak_bytes(pipe: Pipeline, ids: Tensor, labels: Tensor) -> int:
    counter = SavedBytes(list(pipe.parameters()))
    with torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda held: held.x):
        pipe.step(ids, labels)
    pipe.zero_grad()
    return counter.peak


def plan_for(config: GPTConfig, tokens: int, order: str, batch: int, slices: int, chunks: int) -> Plan:
    cuts = tuple(config.layers * k // (STAGES * chunks) for k in range(STAGES * chunks + 1))
    return Plan.uniform(
        batch_size=batch, seq_len=tokens, num_slices=slices, boundaries=cuts, order=order, chunks=chunks
    )


def measure(config: GPTConfig, tokens: int, orders: list[tuple[str, int, int]]) -> list[Any]:
    """For each order every rank's peak, and one whole microbatch's on the same rank."""
    ids = torch.randint(config.vocab, (BATCH, tokens), generator=torch.Generator().manual_seed(0))

    def all_ranks(order: str, batch: int, slices: int, chunks: int) -> list[int]:
        pipe = Pipeline(GPT(config), plan_for(config, tokens, order, batch, slices, chunks))
        return pipe.gather(peak_bytes(pipe, ids[:batch], ids[:batch]))

    one = all_ranks("gpipe", 1, 1, 1)
    return [one] + [all_ranks(order, BATCH, slices, chunks) for order, slices, chunks in orders]


def main() -> None:
    quick = arguments(__doc__ or "").quick
    tokens = 256 if quick else 1024
    config = GPTConfig(layers=8, hidden=256, heads=4, vocab=256, max_seq_len=tokens)
    expected = {
        ("gpipe", 1, 1): float(BATCH),
        ("1f1b", 1, 1): float(min(BATCH, STAGES)),
        ("interleaved", 1, 2): STAGES + (STAGES - 1) / 2,
        ("terapipe", SLICES, 1): float(BATCH),
        ("terapipe-1f1b", SLICES, 1): 1 + (STAGES - 1) / SLICES,
        ("interleaved", SLICES, 2): 1 + 2 * (STAGES - 1) / (2 * SLICES),
    }
    one, *peaks = on_ranks(STAGES, measure, config, tokens, list(expected))
    rows: list[list[object]] = []
    figures: dict[str, float] = {}
    for (order, slices, chunks), ranks in zip(expected, peaks, strict=True):
        shares = [peak / whole for peak, whole in zip(ranks, one, strict=True)]
        name = order + ("-sliced" if order == "interleaved" and slices > 1 else "")
        figures[name] = max(shares)
        rows.append([name, slices, chunks, max(ranks) / 2**20, max(shares), expected[order, slices, chunks]])
    header = ("order", "slices", "chunks", "peak MiB", "in microbatches", "formula")
    report(__doc__ or "", header, rows, figures)
