"""Batches of packed documents, each cut by its own, against one plan for all of them, whole sequences and padding."""

import time
from collections.abc import Callable
from typing import NamedTuple, cast

from benchmarks.documents import simulated
from benchmarks.documents.stream import Packed, padded_labels, padded_plan, stream
from benchmarks.harness import Contender, arguments, best, on_ranks, race, report, table
from terapipe import GPT, DocumentPlanner, GPTConfig, Pipeline, Plan, Profile, document_planner, plan
from terapipe.runtime import Profiler


class Setting(NamedTuple):
    config: GPTConfig
    tokens: int  # of a sequence
    rows: int  # sequences of a batch
    batches: int
    rounds: int
    seconds: float  # to profile for
    orders: tuple[str | None, ...]  # None: whichever the planner finds best


FULL = Setting(
    GPTConfig(layers=4, hidden=128, heads=2, vocab=256, max_seq_len=8192), 8192, 16, 3, 2, 60.0, ("terapipe-1f1b", None)
)
QUICK = Setting(
    GPTConfig(layers=4, hidden=64, heads=2, vocab=256, max_seq_len=4096), 4096, 4, 1, 1, 8.0, ("terapipe-1f1b",)
)


class Found(NamedTuple):
    """Of one contender, over all batches that it ran."""

    seconds: float
    tokens: int  # of documents, without padding
    idle: float
    slices: str  # of each sequence

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def planned(setting: Setting, profile: Profile, order: str | None) -> tuple[Plan, DocumentPlanner]:
    """The plan for whole sequences of one document each, and what cuts it for others."""
    found = plan(
        None, profile, batch_size=setting.rows, seq_len=setting.tokens, dp=1, pp=2, tp=1, order=order,
        recompute=False, microbatch_size=1,
    )  # fmt: skip
    return found.plan, document_planner(found)


def training(pipe: Pipeline, packed: Packed, own: Callable[[], Plan]) -> Contender:
    labels = packed.labels

    def step() -> None:
        pipe.step(packed.ids, labels, packed.documents, plan=own())
        pipe.zero_grad(set_to_none=False)

    return step


def padding(pipe: Pipeline, packed: Packed) -> Contender:
    ids, labels, own = packed.padded(), padded_labels(packed), padded_plan(packed, pipe.plan)

    def step() -> None:
        pipe.step(ids, labels, plan=own)
        pipe.zero_grad(set_to_none=False)

    return step


def measure(setting: Setting) -> tuple[dict[str, Found], float]:
    """What was found of each contender, and the share of the step that planning a batch takes."""
    share = setting.config.layers // 2
    profiler = Profiler(GPT(setting.config), layers=share, seq_len=setting.tokens)
    together = profiler.transport.gather
    profile = together(profiler.run(setting.seconds))[0]
    batches = stream(setting.batches, setting.rows, setting.tokens, setting.config.vocab)
    found: dict[str, Found] = {}
    shares = []
    for order in setting.orders:
        fixed, planner = together(planned(setting, profile, order))[0]
        pipe = Pipeline(GPT(setting.config), fixed)
        name = f"{fixed.order}{', the best' if order is None else ''}"
        plans: dict[str, Callable[[Packed], Plan]] = {
            f"{name}: one plan": lambda _, fixed=fixed: fixed,
            f"{name}: by documents": lambda packed, planner=planner: planner.plan_for(packed.documents),
        }
        if order is not None:
            whole = Plan.uniform(
                batch_size=setting.rows, seq_len=setting.tokens, boundaries=fixed.boundaries, order="1f1b"
            )
            plans["1f1b: whole sequences"] = lambda _, whole=whole: whole
        found |= compared(pipe, plans, batches, setting.rounds)
        shares.append(planning(planner, batches) * setting.batches / found[f"{name}: by documents"].seconds)
        if order is not None:
            found["1f1b: padded"] = padded(pipe, batches[0].part(max(1, setting.rows // 4)))
    return found, max(shares)


def compared(
    pipe: Pipeline, plans: dict[str, Callable[[Packed], Plan]], batches: list[Packed], rounds: int
) -> dict[str, Found]:
    """The contenders take turns at every batch; the best of all rounds counts."""
    seconds, idle = dict.fromkeys(plans, 0.0), dict.fromkeys(plans, 0.0)
    counts: dict[str, set[int]] = {name: set() for name in plans}
    for packed in batches:
        steps = {
            name: training(pipe, packed, lambda cut=cut, packed=packed: cut(packed)) for name, cut in plans.items()
        }
        for name, taken in best(race(steps, rounds, warmup=0 if packed is not batches[0] else 1)).items():
            seconds[name] += taken
        for name, step in steps.items():
            step()
            timeline = pipe.timeline()
            idle[name] += timeline.idle / len(batches)
            counts[name] |= {len(row) for row in timeline.plan.lengths}
    tokens = sum(packed.ids.numel() for packed in batches)
    return {name: Found(seconds[name], tokens, idle[name], ", ".join(map(str, sorted(counts[name])))) for name in plans}


def padded(pipe: Pipeline, packed: Packed) -> Found:
    taken = best(race({"padded": padding(pipe, packed)}, rounds=1, warmup=0))["padded"]
    return Found(taken, packed.ids.numel(), pipe.timeline().idle, "1")


def planning(planner: DocumentPlanner, batches: list[Packed]) -> float:
    """Seconds to plan a batch, the fastest of some."""
    seconds = []
    for packed in batches * 5:
        start = time.perf_counter()
        planner.plan_for(packed.documents)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    quick = arguments(__doc__ or "").quick
    setting = QUICK if quick else FULL
    found: dict[str, Found]
    found, share = on_ranks(2, measure, setting)
    fixed, own = found["terapipe-1f1b: one plan"], found["terapipe-1f1b: by documents"]
    figures = {
        "speedup": own.rate / fixed.rate,
        "speedup_over_whole_sequences": own.rate / found["1f1b: whole sequences"].rate,
        "speedup_over_padding": own.rate / found["1f1b: padded"].rate,
        "planning_share": share,
    }
    best_order = [f.rate for name, f in found.items() if "the best" in name]
    if best_order:
        figures["speedup_of_the_best_order"] = best_order[1] / best_order[0]
    title = f"{__doc__} {setting.rows} sequences of {setting.tokens} tokens." + (" Quick: small." if quick else "")
    table(
        title,
        ("plan", "slices", "s", "idle", "tokens/s", "over one plan"),
        [[name, f.slices, f.seconds, f"{f.idle:.1%}", round(f.rate), f.rate / fixed.rate] for name, f in found.items()],
    )
    header = (
        "ranks",
        "order",
        "sequences",
        "slices: one plan, by documents",
        "idle: one plan, by documents",
        "speed-up",
    )
    simulation = simulated.rows(quick=quick)
    figures |= {f"simulated_{row[0]}_{row[1]}_{row[2]}": cast(float, row[-1]) for row in simulation}
    report(simulated.__doc__ or "", header, simulation, figures)
