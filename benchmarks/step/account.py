"""Where a step's time over the limit goes: ``python -m benchmarks.step.account``.

The limit is each rank's own work in one piece, with nobody to wait for. A step of slices takes longer by

    slices     products of fewer tokens, attention in parts, backwards in two halves     measured on one rank
    beside     two ranks share the machine's memory, and wake each other                 computations in the step, more
    filling    before a rank's first computation, and after its last                     the timeline
    gaps       between two computations: waiting for a message, and the executor         the timeline
    outside    before and after the computations: checks, agreement, sums                the step less the timeline
"""

from collections.abc import Sequence
from statistics import median

import torch

from benchmarks.harness import arguments, on_ranks, race, report, timed
from benchmarks.step.measure import TOKENS, limit_contender, plans
from benchmarks.step.models import FAMILIES, LAYERS, VOCAB
from terapipe import Event, Pipeline, Plan


def batch(sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (sequences, TOKENS), generator=generator)
    return ids, torch.randint(VOCAB, (sequences, TOKENS), generator=generator)


def measure_alone(title: str, sequences: int, rounds: int) -> tuple[float, float]:
    """On one rank, with nobody beside it: slices over whole sequences, and seconds between two computations."""
    family, (ids, labels) = FAMILIES[title], batch(sequences)
    cuts = plans(family, sequences, TOKENS, quick=True)[0]
    one = Plan(cuts.sizes, cuts.lengths, (0, LAYERS), "terapipe-deferred")
    pipe = Pipeline(family.whole(), one)

    def step() -> None:
        pipe.step(ids, labels)
        pipe.zero_grad()

    times = race({"whole": limit_contender(family, ids, labels), "slices": step}, rounds)
    events = pipe.timeline().by_rank[0]
    gap = (pipe.timeline().makespan - sum(e.end - e.start for e in events)) / (len(events) - 1)
    return min(times["slices"]) / min(times["whole"]), gap


def measure_step(title: str, sequences: int, rounds: int) -> dict[str, float]:
    """On two ranks: the parts of a step, each relative to the limit, of the rank that ends last; medians of rounds."""
    family, (ids, labels) = FAMILIES[title], batch(sequences)
    pipe = Pipeline(family.whole(), plans(family, sequences, TOKENS, quick=True)[0])
    limit = limit_contender(family, ids, labels)

    def step() -> None:
        pipe.step(ids, labels)
        pipe.zero_grad()

    limits, parts = list[float](), list[dict[str, float]]()
    for turn in range(-1, rounds):
        seconds, whole = timed(limit), timed(step)
        timeline = pipe.timeline()
        if turn >= 0:
            limits.append(seconds)
            own = shares(timeline.by_rank, timeline.makespan)
            parts.append({"step": whole, "outside": whole - timeline.makespan, **own})
    fastest = min(limits)
    return {name: median(part[name] for part in parts) / fastest for name in parts[0]}


def shares(by_rank: Sequence[Sequence[Event]], makespan: float) -> dict[str, float]:
    """Seconds of the rank that computes longest: computing, before and after that, and between computations."""
    events = max(by_rank, key=lambda own: sum(e.end - e.start for e in own))
    computing = sum(e.end - e.start for e in events)
    filling = events[0].start + makespan - events[-1].end
    return {"computing": computing, "filling": filling, "gaps": makespan - filling - computing}


def main() -> None:
    quick = arguments(__doc__ or "").quick
    rows: list[list[object]] = []
    figures: dict[str, float] = {}
    for family in FAMILIES.values():
        for sequences in (1, 2):
            rounds = 3 if quick else 10
            sliced, gap = on_ranks(1, measure_alone, family.title, sequences, rounds)
            parts = on_ranks(2, measure_step, family.title, sequences, rounds)
            beside = parts["computing"] - sliced
            rest = [parts[name] for name in ("filling", "gaps", "outside")]
            rows.append([family.title, sequences, parts["step"], sliced - 1, beside, *rest, 1e6 * gap])
            figures |= {f"{family.key}{name}_{sequences}": value for name, value in parts.items()}
            figures |= {f"{family.key}slices_{sequences}": sliced, f"{family.key}gap_us_{sequences}": 1e6 * gap}
    header = (
        "model",
        "sequences",
        "step over limit",
        "slices",
        "beside",
        "filling",
        "gaps",
        "outside",
        "gap alone, us",
    )
    report(__doc__ or "", header, rows, figures)


if __name__ == "__main__":
    main()
