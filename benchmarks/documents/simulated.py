"""The same batches by simulation, also on more ranks than this machine has, at costs of one core of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from benchmarks.documents.stream import Documents, starts_of
from terapipe import Plan
from terapipe.planning import Array, DocumentCosts, DocumentPlanner, LinkBehavior, StageSpec
from terapipe.scheduling import makespan

TOKENS, LAYERS, HIDDEN, BATCHES = 8192, 16, 128, 4
# Seconds of a layer, forward plus backward: of a slice, a token, a token of its context, a token and one that it sees.
SLICE, TOKEN, CONTEXT, PAIR = 1.2e-3, 21e-6, 0.56e-6, 27.3e-9
SLICES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128)
CASES = (
    (2, "terapipe-1f1b", 1, 1),
    (2, "terapipe-1f1b", 1, 4),
    (2, "terapipe-1f1b", 1, 16),
    (2, "terapipe-v", 2, 1),
    (2, "terapipe-v", 2, 16),
    (8, "terapipe-1f1b", 1, 1),
    (8, "terapipe-1f1b", 1, 4),
    (8, "interleaved", 2, 4),
    (8, "terapipe-v", 2, 1),
    (8, "terapipe-v", 2, 4),
)


@dataclass(frozen=True)
class Core:
    """Costs of slices; those of one plan's, with ``seen``: how many tokens each token of a slice sees, on average."""

    seen: Array | None = None

    def _seconds(self, stage: StageSpec, size: Array, length: Array, context: Array) -> Array:
        size, length, context = (np.asarray(x, dtype=np.float64) for x in (size, length, context))
        seen = context + (length + 1) / 2 if self.seen is None else self.seen
        context = np.maximum(seen - (length + 1) / 2, 0.0)
        return stage.layers * (SLICE + size * (TOKEN * length + CONTEXT * context + PAIR * length * seen))

    def forward(self, stage: StageSpec, size: Array, length: Array, context: Array) -> Array:
        return self._seconds(stage, size, length, context) / 3

    def backward(self, stage: StageSpec, size: Array, length: Array, context: Array) -> Array:
        return self._seconds(stage, size, length, context) * 2 / 3

    def weights(self, stage: StageSpec, size: Array, length: Array) -> Array:
        return np.asarray(stage.layers * TOKEN * np.multiply(size, length) / 3, dtype=np.float64)

    def transfer(self, source: int, target: int, size: Array, length: Array) -> Array:
        return np.asarray(1e-4 + np.multiply(size, length) * HIDDEN * 4 / 2e9, dtype=np.float64)

    def link_behavior(self, source: int, target: int) -> LinkBehavior:
        return LinkBehavior(overlapped=False, latency=5e-5)

    def per_step(self, stages: Sequence[StageSpec]) -> float:
        return 0.0


def seen(plan: Plan, documents: Documents) -> Array:
    """How many tokens the tokens of each slice see, on average; microbatches are single sequences."""
    places = np.arange(plan.seq_len)
    ages = [places - np.array(row)[np.searchsorted(row, places, side="right") - 1] + 1 for row in documents]
    before = [np.concatenate(([0], np.cumsum(age))) for age in ages]
    return np.array([float(before[s.row][s.end] - before[s.row][s.context]) / s.length for s in plan.slices])


def seconds(plan: Plan, documents: Documents) -> tuple[float, float]:
    """Of a step, and the share in which ranks idle."""
    return makespan(plan, Core(seen(plan, documents)))


def equal_costs(slices: int) -> tuple[int, ...]:
    """Of one document, in steps of 8 tokens."""
    costs = TOKEN * np.arange(TOKENS + 1) + PAIR * np.cumsum(np.arange(TOKENS + 1))
    ends = np.searchsorted(costs, costs[-1] * np.arange(1, slices) / slices)
    edges = sorted({0, TOKENS, *(int(end) // 8 * 8 for end in ends)})
    return tuple(b - a for a, b in pairwise(edges))


def one_plan(ranks: int, order: str, chunks: int, rows: int) -> Plan:
    """The best of slices of equal cost for sequences of one document each."""
    edges = tuple(accumulate([LAYERS // (ranks * chunks)] * (ranks * chunks), initial=0))
    plans = [Plan((1,) * rows, (equal_costs(n),) * rows, edges, order, chunks) for n in SLICES]
    return min(plans, key=lambda plan: makespan(plan, Core())[0])


def rows(*, quick: bool) -> list[list[object]]:
    """Of a table: one for each number of ranks, order and number of sequences."""
    found: list[list[object]] = []
    for ranks, order, chunks, sequences in CASES[:2] if quick else CASES:
        plan = one_plan(ranks, order, chunks, sequences)
        planner = DocumentPlanner(plan, DocumentCosts.of(Core(), plan))
        batches = starts_of(BATCHES, sequences, TOKENS)
        fixed = np.array([seconds(plan, documents) for documents in batches])
        cuts = [planner.plan_for(documents) for documents in batches]
        own = np.array([seconds(cut, documents) for cut, documents in zip(cuts, batches, strict=True)])
        counts = sorted({len(row) for cut in cuts for row in cut.lengths})
        slices = f"{len(plan.lengths[0])}, {' and '.join(map(str, counts))}"
        idle = f"{fixed[:, 1].mean():.1%}, {own[:, 1].mean():.1%}"
        found.append([ranks, order, sequences, slices, idle, float(fixed[:, 0].sum() / own[:, 0].sum())])
    return found
