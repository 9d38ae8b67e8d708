"""Clusters on two cores: real ranks whose devices sleep, predicted and measured, for all orders and 4 to 64 ranks."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.emulated.failure import step_until_failure
from benchmarks.emulated.overhead import overhead
from benchmarks.harness import arguments, summary, table
from terapipe import Plan
from terapipe.launch import EmulatedRun, ForkedRanks, emulate
from terapipe.runtime import Emulation
from terapipe.scheduling import schedule, simulate
from tests.support.costs import SimpleCost

ORDERS = {
    "gpipe": 1, "1f1b": 1, "terapipe": 1, "terapipe-deferred": 1, "terapipe-v": 2, "interleaved": 2, "terapipe-1f1b": 1,
    "terapipe-zb": 1, "terapipe-zb2": 1,
}  # fmt: skip
SECONDS = {4: 0.04, 8: 0.04, 16: 0.05, 32: 0.06, 64: 0.08}  # of a mean forward: cores must serve all ranks meanwhile
TOKENS = 1024
EVEN = (128,) * 8
UNEVEN = (192, 160, 144, 128, 112, 104, 96, 88)  # of about equal time where later slices attend to more
LAYERS = 12  # of a stage
STRAGGLER = 1.5
PATIENCE = 60.0


class Case(NamedTuple):
    ranks: int
    order: str
    what: str = "even"
    lengths: tuple[int, ...] = EVEN
    microbatches: int = 2
    layers: tuple[int, ...] = ()  # of the stages, by default all LAYERS
    sent: float = 0.0  # seconds of a mean message, relative to a mean forward

    @property
    def plan(self) -> Plan:
        chunks = ORDERS[self.order]
        layers = self.layers or (LAYERS // chunks,) * (self.ranks * chunks)
        cuts = [sum(layers[:k]) for k in range(len(layers) + 1)]
        whole = self.order in ("gpipe", "1f1b")
        batch = 8 * self.microbatches if whole else self.microbatches  # of as many computations
        lengths = (TOKENS,) if whole else self.lengths
        return Plan((1,) * batch, (lengths,) * batch, tuple(cuts), self.order, chunks)

    @property
    def cost(self) -> SimpleCost:
        """Two thirds of a slice's time are for its tokens, one third for the scores, which its context adds to."""
        seconds, tokens = SECONDS[self.ranks], TOKENS if self.order in ("gpipe", "1f1b") else TOKENS / 8
        layer = seconds / LAYERS / tokens
        return SimpleCost(token=layer * 2 / 3, score=layer / 3 / (TOKENS / 2), sent=self.sent * seconds / tokens)


def cases(quick: bool) -> list[Case]:
    if quick:
        return [Case(4, order, microbatches=1) for order in ("terapipe", "terapipe-zb", "interleaved")]
    grown = [Case(ranks, order) for ranks in (4, 16, 32, 64) for order in ("terapipe-1f1b", "interleaved")]
    uneven = [Case(8, order, "uneven slices", UNEVEN) for order in ("terapipe", "terapipe-1f1b", "terapipe-v")]
    layers = [Case(8, "terapipe-zb", "uneven layers", layers=(12, 10, 14, 12, 9, 15, 12, 12))]
    links = [Case(8, order, "slow links", sent=0.8) for order in ("terapipe-1f1b", "interleaved")]
    return [Case(8, order) for order in ORDERS] + uneven + layers + links + grown


def main() -> None:
    quick = arguments(__doc__ or "").quick
    steps = 3 if quick else 6
    runs = [(case, emulate(case.plan, case.cost, steps=steps, stretch=1.0)) for case in cases(quick)]
    show(runs)
    own = overhead(4 * steps)
    grown = [(ranks, start_and_kill(ranks)) for ranks in ((64,) if quick else (4, 8, 16, 32, 64))]
    header = (
        "ranks",
        "pipelines made, s",
        "MiB of each rank",
        "all have told of a killed one, s",
        "ranks that named it",
    )
    table("Start and failure", header, [[ranks, *each] for ranks, each in grown])
    late = straggling(*((4, 1) if quick else (8, 4)), steps)
    errors = [abs(run.ratio - 1) for _, run in runs]
    figures = {"worst": max(errors), "median": median(errors), **own}
    for ranks, (ready, mebibytes, told, _) in grown:
        figures |= {f"startup_{ranks}_s": ready, f"failure_{ranks}_s": told, f"mebibytes_{ranks}": mebibytes}
    summary(figures | late)


def show(runs: Sequence[tuple[Case, EmulatedRun]]) -> None:
    header = (
        "ranks",
        "order",
        "plan",
        "computations",
        "predicted s",
        "measured s",
        "ratio",
        "us/computation",
        "CPU us",
    )
    rows = []
    for case, run in runs:
        spans = run.predicted.makespan, run.measured.makespan, run.ratio
        rows.append([case.ranks, case.order, case.what, run.actions, *spans, round(1e6 * run.overhead), cpu_us(run)])
    table("Predicted and measured steps", header, rows)


def cpu_us(run: EmulatedRun) -> int:
    """Microseconds of CPU for each computation, with its messages and its part of what a step does once; of the rank
    that took most."""
    return round(1e6 * max(min(report.cpu[1:]) for report in run.reports) / run.actions)


def start_and_kill(ranks: int) -> tuple[float, float, float, str]:
    """Seconds until all ranks had their pipelines, mebibytes of a rank in the middle, seconds from the end of one rank
    until all others have told of it, and how many of them named it."""
    case, victim = Case(ranks, "terapipe-1f1b"), ranks // 2
    stretch = SECONDS[8] / SECONDS[ranks]  # steps need not be exact here
    emulation = Emulation.of(case.plan, case.cost, stretch=stretch)
    with tempfile.TemporaryDirectory() as folder:
        at_work = Path(folder) / "at work"
        work = (emulation, time.monotonic(), PATIENCE, at_work)
        with ForkedRanks(ranks, step_until_failure, *work) as processes:
            deadline = time.monotonic() + 2 * PATIENCE
            while not at_work.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(stretch * simulated(case) / 2)  # in the middle of a step
            killed = time.monotonic() - processes.start
            processes.kill(victim)
            answers = processes.answers(2 * PATIENCE)
    others = [answer for rank, answer in enumerate(answers) if rank != victim]
    if errors := [answer.error for answer in others if answer.error]:
        raise RuntimeError(f"{len(errors)} ranks did not tell of the one that was killed, but: {errors[0]}")
    named = sum(answer.value.words.startswith(f"rank {victim} is gone") for answer in others)
    ready, told = max(a.value.ready for a in others), max(a.seconds for a in others) - killed
    return ready, others[0].value.mebibytes, told, f"{named} of {ranks - 1}"


def straggling(ranks: int, microbatches: int, steps: int) -> dict[str, float]:
    """A step whose middle rank is slower than planned for, and one planned for that: with fewer layers there."""
    case, slow = Case(ranks, "terapipe-1f1b", microbatches=microbatches), ranks // 2
    slowdown = tuple(STRAGGLER if rank == slow else 1.0 for rank in range(ranks))
    again = min((moved(case, slow, layers) for layers in range(1, LAYERS + 1)), key=lambda c: simulated(c, slowdown))
    contenders = {
        "all alike": (case, ()),
        f"rank {slow} {STRAGGLER} times slower": (case, slowdown),
        "planned again": (again, slowdown),
    }
    spans, rows = [], []
    for name, (each, factors) in contenders.items():
        run = emulate(each.plan, each.cost, steps=steps, stretch=1.0, slowdown=factors)
        layers = [b - a for a, b in zip(each.plan.boundaries, each.plan.boundaries[1:], strict=False)]
        spans.append(run.measured.makespan)
        rows.append(
            [name, " ".join(map(str, layers)), run.predicted.makespan, spans[-1], run.ratio, spans[-1] / spans[0]]
        )
    table("A straggler", ("step", "layers", "predicted s", "measured s", "ratio", "of all alike"), rows)
    return {"straggler": spans[1] / spans[0], "straggler_planned_again": spans[2] / spans[0]}


def simulated(case: Case, slowdown: tuple[float, ...] = ()) -> float:
    return simulate(schedule(case.plan), case.cost, slowdown).makespan


def moved(case: Case, slow: int, layers: int) -> Case:
    """The same with so many layers on the slow rank; the others share the rest, those after it more of it."""
    rest, others = case.ranks * LAYERS - layers, case.ranks - 1
    shares = [rest // others + (i >= others - rest % others) for i in range(others)]
    return case._replace(layers=(*shares[:slow], layers, *shares[slow:]))
