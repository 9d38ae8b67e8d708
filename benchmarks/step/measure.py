"""TeraPipe against torch.distributed.pipelining and against the limit: two stages, long sequences, few of them."""

import logging
import math
import warnings
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from benchmarks.harness import Contender, arguments, best, on_ranks, race, report
from benchmarks.step.models import FAMILIES, HIDDEN, LAYERS, VOCAB, Family
from terapipe import Pipeline, Plan

TOKENS, LONG, QUICK = 2048, 8192, 768
QUICK_TORCH = {1: ("GPipe", "InterleavedZeroBubble"), 2: ("InterleavedZeroBubble",), 4: ("InterleavedZeroBubble",)}
TORCH = ("GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def torch_contender(family: Family, name: str, sequences: int, ids: Tensor, labels: Tensor) -> Contender | None:
    """A step under one of torch's schedules, or None if it does not accept so few sequences."""
    try:
        step, parts = torch_step(family, name, sequences, ids, labels)
    except ValueError:
        return None

    def step_and_clear() -> None:
        step()
        parts.zero_grad()

    return step_and_clear


def torch_step(
    family: Family, name: str, sequences: int, ids: Tensor, labels: Tensor
) -> tuple[Contender, nn.ModuleList]:
    """Forward and backward under one of torch's schedules, and this rank's parts of the model; a ValueError where the
    schedule does not accept so few sequences."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    schedule_class: Any = get_schedule_class(name)
    if name in ("GPipe", "1F1B"):
        stages = [_torch_stage(family, rank, ranks)]
        schedule = schedule_class(stages[0], sequences, loss_fn=cross_entropy)
    else:
        numbers = (rank, 2 * ranks - 1 - rank) if name.startswith("ZBV") else (rank, rank + ranks)
        stages = [_torch_stage(family, k, 2 * ranks) for k in numbers]
        schedule = schedule_class(stages, sequences, loss_fn=cross_entropy)
    has_last = any(stage.is_last for stage in stages)

    def step() -> None:
        schedule.step(*([ids] if rank == 0 else []), target=labels if has_last else None)

    return step, nn.ModuleList(stage.submod for stage in stages)


def _torch_stage(family: Family, number: int, count: int) -> PipelineStage:
    layers = LAYERS // count
    part = family.part(number * layers, (number + 1) * layers)
    return PipelineStage(part, number, count, torch.device("cpu"))


def equal_times(tokens: int, slices: int, attention: float = 0.32) -> tuple[int, ...]:
    """Lengths, in steps of 8 tokens, of about equal time; ``attention`` is its share of the whole sequence's time."""
    curve = 2 * attention / (1 - attention) / tokens
    total = tokens + curve * tokens**2 / 2
    ends = [(math.sqrt(1 + 2 * curve * total * i / slices) - 1) / curve for i in range(slices + 1)]
    return tuple(b - a for a, b in pairwise([round(end / 8) * 8 for end in ends]))


def our_contender(family: Family, plan: Plan, ids: Tensor, labels: Tensor) -> Contender:
    pipe = Pipeline(family.whole(), plan)

    def step() -> None:
        pipe.step(ids, labels)
        pipe.zero_grad()

    return step


def limit_contender(family: Family, ids: Tensor, labels: Tensor) -> Contender:
    """This rank's own share of the work, sequence by sequence, with nobody to wait for."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = family.part(rank * LAYERS // ranks, (rank + 1) * LAYERS // ranks)
    hidden = torch.randn(1, ids.shape[1], HIDDEN)

    def step() -> None:
        for row, wanted in zip(ids.split(1), labels.split(1), strict=True):
            out = part(row if rank == 0 else hidden.requires_grad_())
            if part.last:
                cross_entropy(out, wanted).backward()
            else:
                out.backward(hidden)
            hidden.grad = None
        part.zero_grad()

    return step


def measure(title: str, sequences: int, tokens: int, rounds: int, quick: bool) -> dict[str, float]:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    family, generator = FAMILIES[title], torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (sequences, tokens), generator=generator)
    labels = torch.randint(VOCAB, (sequences, tokens), generator=generator)
    contenders: dict[str, Contender] = {}
    for name in QUICK_TORCH[sequences] if quick or tokens == LONG else TORCH:
        if contender := torch_contender(family, name, sequences, ids, labels):
            contenders[f"torch {name}"] = contender
    for plan in plans(family, sequences, tokens, quick):
        chunks = f", {plan.chunks} chunks" if plan.chunks > 1 else ""
        slices = f"{len(plan.slices) / len(plan.sizes):g} slices"
        contenders[f"ours: {plan.order}, {slices}{chunks}"] = our_contender(family, plan, ids, labels)
    contenders["limit"] = limit_contender(family, ids, labels)
    return best(race(contenders, rounds))


def plans(family: Family, sequences: int, tokens: int, quick: bool) -> list[Plan]:
    """The plans that are tried: the more sequences, the fewer slices each needs."""
    folded = Plan((1,) * sequences, family.folded[sequences], (0, 1, 2, 3, 4), "terapipe-v", 2)
    folded = folded.resize(sequences, tokens, 8)
    if quick:
        return [folded]
    many, few = {1: (12, 8), 2: (8, 4), 4: (6, 3)}[sequences]
    if tokens == LONG:
        return [folded, Plan((1,), (equal_times(tokens, 2 * many, 0.65),), (0, 2, 4), "terapipe-deferred")]
    tried = [("terapipe", few, 2), ("terapipe", many, 1), ("terapipe-deferred", many, 1), ("terapipe-deferred", few, 2)]
    return [folded] + [
        Plan((1,) * sequences, (equal_times(tokens, n),) * sequences, tuple(range(0, 5, 2 // chunks)), order, chunks)
        for order, n, chunks in tried
    ]


def settings(quick: bool) -> list[tuple[int, int, int]]:
    """Sequences, tokens and rounds."""
    if quick:
        return [(1, QUICK, 2), (2, QUICK, 1), (4, QUICK, 1)]
    return [(1, TOKENS, 8), (2, TOKENS, 4), (4, TOKENS, 2), (1, LONG, 2)]


def main() -> None:
    quick = arguments(__doc__ or "").quick
    rows: list[list[object]] = []
    figures: dict[str, float] = {}
    for family in FAMILIES.values():
        for sequences, tokens, rounds in settings(quick):
            times: dict[str, float] = on_ranks(2, measure, family.title, sequences, tokens, rounds, quick)
            theirs = min(t for name, t in times.items() if name.startswith("torch"))
            ours = min(t for name, t in times.items() if name.startswith("ours"))
            case = f"{sequences}" if tokens != LONG else f"{sequences}_{tokens}"
            figures[f"{family.key}speedup_{case}"] = theirs / ours
            figures[f"{family.key}over_limit_{case}"] = ours / times["limit"]
            if "torch GPipe" in times and case == "1":
                figures[f"{family.key}speedup_1_over_gpipe"] = times["torch GPipe"] / ours
            rows += [[family.title, sequences, tokens, name, t, theirs / t] for name, t in times.items()]
    header = ("model", "sequences", "tokens", "schedule", "best s", "speed-up over torch's best")
    report((__doc__ or "") + (f" Quick: {QUICK} tokens only." if quick else ""), header, rows, figures)
