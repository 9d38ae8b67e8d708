"""TeraPipe against torch.distributed.pipelining and against the limit: two stages, 2048 tokens, few sequences."""

import logging
import math
import warnings
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from benchmarks.harness import Contender, arguments, best, on_ranks, race, report
from terapipe import GPT, GPTConfig, Pipeline, Plan

TOKENS = 2048
QUICK = 768
CONFIG = GPTConfig(layers=4, hidden=512, heads=8, vocab=256, max_seq_len=TOKENS)
QUICK_TORCH = {1: ("GPipe", "InterleavedZeroBubble"), 2: ("InterleavedZeroBubble",), 4: ("InterleavedZeroBubble",)}
TORCH = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")

# As the planner cuts them, from a profile of this model on two such cores.
FOLDED = {
    1: ((152, 280, 384, 384, 392, 272, 128, 56),),
    2: ((264, 448, 392, 344, 312, 288), (504, 416, 368, 328, 304, 128)),
    4: ((200, 360, 584, 904), (2048,), (2048,), (1272, 480, 208, 88)),
}


class StageSpec(nn.Module):
    """A stage for torch's schedules: the same modules, whole sequences, torch's own attention."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.stage = GPT(CONFIG).stage(first, last, torch.device("cpu"))
        self.last = last == CONFIG.layers

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stage(x)
        return self.stage.head(self.stage.norm(hidden)) if self.last else hidden


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def torch_contender(name: str, sequences: int, ids: Tensor, labels: Tensor) -> Contender | None:
    """A step under one of torch's schedules, or None if it does not accept so few sequences."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    schedule_class = get_schedule_class(name)
    try:
        if name in ("GPipe", "1F1B"):
            stages = [_torch_stage(rank, ranks)]
            schedule = schedule_class(stages[0], sequences, loss_fn=cross_entropy)
        else:
            numbers = (rank, 2 * ranks - 1 - rank) if name.startswith("ZBV") else (rank, rank + ranks)
            stages = [_torch_stage(k, 2 * ranks) for k in numbers]
            schedule = schedule_class(stages, sequences, loss_fn=cross_entropy)
    except ValueError:
        return None
    has_last = any(stage.is_last for stage in stages)

    def step() -> None:
        schedule.step(*([ids] if rank == 0 else []), target=labels if has_last else None)
        for stage in stages:
            stage.submod.zero_grad()

    return step


def _torch_stage(number: int, count: int) -> PipelineStage:
    layers = CONFIG.layers // count
    part = StageSpec(number * layers, (number + 1) * layers)
    return PipelineStage(part, number, count, torch.device("cpu"))


def equal_times(tokens: int, slices: int, attention: float = 0.32) -> tuple[int, ...]:
    """Lengths, in steps of 8 tokens, of about equal time; ``attention`` is its share of the whole sequence's time."""
    curve = 2 * attention / (1 - attention) / tokens
    total = tokens + curve * tokens**2 / 2
    ends = [(math.sqrt(1 + 2 * curve * total * i / slices) - 1) / curve for i in range(slices + 1)]
    return tuple(b - a for a, b in pairwise([round(end / 8) * 8 for end in ends]))


def our_contender(plan: Plan, ids: Tensor, labels: Tensor) -> Contender:
    pipe = Pipeline(GPT(CONFIG), plan)

    def step() -> None:
        pipe.step(ids, labels)
        pipe.zero_grad()

    return step


def limit_contender(ids: Tensor, labels: Tensor) -> Contender:
    """This rank's own share of the work, whole, with nobody to wait for."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = StageSpec(rank * CONFIG.layers // ranks, (rank + 1) * CONFIG.layers // ranks)
    hidden = torch.randn(*ids.shape, CONFIG.hidden)

    def step() -> None:
        x = ids if rank == 0 else hidden.requires_grad_()
        out = part(x)
        if part.last:
            cross_entropy(out, labels).backward()
        else:
            out.backward(hidden)
        part.zero_grad()
        hidden.grad = None

    return step


def measure(sequences: int, rounds: int, quick: bool) -> dict[str, float]:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    generator = torch.Generator().manual_seed(0)
    tokens = QUICK if quick else TOKENS
    ids = torch.randint(CONFIG.vocab, (sequences, tokens), generator=generator)
    labels = torch.randint(CONFIG.vocab, (sequences, tokens), generator=generator)
    contenders: dict[str, Contender] = {}
    for name in QUICK_TORCH[sequences] if quick else TORCH:
        if contender := torch_contender(name, sequences, ids, labels):
            contenders[f"torch {name}"] = contender
    for plan in plans(sequences, tokens, quick):
        chunks = f", {plan.chunks} chunks" if plan.chunks > 1 else ""
        slices = f"{len(plan.slices) / len(plan.sizes):g} slices"
        contenders[f"ours: {plan.order}, {slices}{chunks}"] = our_contender(plan, ids, labels)
    if sequences == 1:
        contenders["limit"] = limit_contender(ids, labels)
    return best(race(contenders, rounds))


def plans(sequences: int, tokens: int, quick: bool) -> list[Plan]:
    """The plans that are tried: the more sequences, the fewer slices each needs."""
    folded = Plan((1,) * sequences, FOLDED[sequences], (0, 1, 2, 3, 4), "terapipe-v", 2).resized(sequences, tokens, 8)
    if quick:
        return [folded]
    many, few = {1: (12, 8), 2: (8, 4), 4: (6, 3)}[sequences]
    tried = [("terapipe", few, 2), ("terapipe", many, 1), ("terapipe-deferred", many, 1), ("terapipe-deferred", few, 2)]
    return [folded] + [
        Plan((1,) * sequences, (equal_times(tokens, n),) * sequences, tuple(range(0, 5, 2 // chunks)), order, chunks)
        for order, n, chunks in tried
    ]


def main() -> None:
    quick = arguments(__doc__ or "").quick
    rows: list[list[object]] = []
    figures: dict[str, float] = {}
    for sequences, rounds in ((1, 2), (2, 1), (4, 1)) if quick else ((1, 10), (2, 5), (4, 3)):
        times: dict[str, float] = on_ranks(2, measure, sequences, rounds, quick)
        theirs = min(t for name, t in times.items() if name.startswith("torch"))
        ours = min(t for name, t in times.items() if name.startswith("ours"))
        figures[f"speedup_{sequences}"] = theirs / ours
        if sequences == 1:
            figures["speedup_1_over_gpipe"] = times["torch GPipe"] / ours
            figures["over_limit_1"] = ours / times["limit"]
        rows += [[sequences, name, t, theirs / t] for name, t in times.items()]
    title = (__doc__ or "") + (f" Quick: {QUICK} tokens only." if quick else "")
    report(title, ("sequences", "schedule", "best s", "speed-up over torch's best"), rows, figures)
