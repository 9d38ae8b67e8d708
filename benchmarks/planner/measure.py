"""Whether the planner finds what a person finds: random requests, each against a wide grid of hand-made plans."""

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from benchmarks.planner.grid import Grid
from terapipe import PRESETS, Cluster, plan
from terapipe.planning import HOSTS
from terapipe.search import ClusterSource, PlanEstimate, Request, layouts

REQUESTS, QUICK = 300, 12
MOST_DEVICES, MOST_TOKENS = 256, 2**21
FIXED = ("dp", "tp", "memory")
MARGIN = 0.0025  # plans of the grid that are faster by less are not looked for
SHOWN = 12  # requests in the table: those that the planner loses by most, or wins by least


@dataclass(frozen=True)
class Case:
    """A request, and what the planner and the grid answer."""

    source: ClusterSource
    request: Request
    planned: PlanEstimate | None  # None: the planner says that nothing fits
    by_hand: PlanEstimate | None  # None: no plan of the grid is faster
    seconds: float  # that planning took
    simulated: int  # plans of the grid that a lower bound did not rule out

    @property
    def loss(self) -> float:
        """By how much the best plan of the grid is faster than the planner's; 0 if none is by more than ``MARGIN``."""
        if self.by_hand is None:
            return 0.0
        return inf if self.planned is None else self.planned.step_time / self.by_hand.step_time - 1

    def row(self) -> list[object]:
        """The request and both plans, in words, for the table."""
        source, request = self.source, self.request
        name = next(name for name, config in PRESETS.items() if config == source.config)
        fixed = {knob: value for knob in FIXED if (value := getattr(request, knob))}
        asked = f"{name}, {source.name}, {request.batch_size} x {request.seq_len}"
        asked += "".join(
            f", {knob} {value / 2**30:.0f} GiB" if knob == "memory" else f", {knob} {value}"
            for knob, value in fixed.items()
        )
        return [asked, words(self.planned), words(self.by_hand), f"{100 * self.loss:.2f} %"]

    def record(self) -> dict[str, Any]:
        """What is left of a request in a file of results."""
        fits = self.planned is not None
        counts = {"seconds": self.seconds, "simulated": self.simulated}
        return {"loss": self.loss, "fits": fits, **counts, "row": self.row()}


def words(estimate: PlanEstimate | None) -> str:
    """A plan in a few words."""
    if estimate is None:
        return "-"
    cuts, layout = estimate.plan, estimate.layout
    chunks = f" chunks {cuts.chunks}," if cuts.chunks > 1 else ""
    return (
        f"{estimate.step_time:.4g} s: {cuts.order},{chunks} dp {layout.dp} pp {layout.pp} tp {layout.tp}, "
        f"microbatches of {cuts.sizes[0]}, {len(cuts.lengths[0])} slices, {'/'.join(cuts.recompute_modes)}"
    )


def requests(count: int, seed: int = 0, most_devices: int = MOST_DEVICES) -> Iterator[tuple[ClusterSource, Request]]:
    """Random requests that are not absurd: the cluster has memory for weights, gradients and optimizer state.

    Args:
        count: How many.
        seed: Of the random numbers. Equal seeds give equal requests.
        most_devices: The largest cluster.
    """
    rng = random.Random(seed)
    while count:
        source = ClusterSource(
            rng.choice(list(PRESETS.values())), Cluster(f"{rng.choice(list(HOSTS))}:{2 ** rng.randrange(10)}")
        )
        device = source.cluster.host.device
        if source.devices > most_devices or 20 * source.config.parameters > 0.8 * source.devices * device.memory:
            continue
        batch, seq_len = rng.randint(1, 64), min(2**20, rng.choice((2, 3)) << rng.randint(10, 19))
        if batch * seq_len > MOST_TOKENS:
            continue
        fixed: dict[str, int] = {"memory": source.budget}
        if rng.random() < 0.3:
            fixed["memory"] = int(device.memory * rng.uniform(0.4, 1.0))
        if rng.random() < 0.3:
            fixed["tp"] = rng.choice(source.tensor_degrees())
        if rng.random() < 0.3:
            fixed["dp"] = rng.choice([d for d in range(1, batch + 1) if batch % d == 0])
        try:
            request = Request(batch, seq_len, **fixed)
            layouts(source, request)
        except ValueError:
            continue
        count -= 1
        yield source, request


def ask(source: ClusterSource, request: Request) -> Case:
    """The planner's answer and the grid's to one request."""
    began, fixed = time.process_time(), {name: getattr(request, name) for name in FIXED}
    try:
        planned = plan(
            source.config, source.cluster, batch_size=request.batch_size, seq_len=request.seq_len, **fixed
        ).estimate
    except ValueError as error:
        if "no plan fits" not in str(error):
            raise
        planned = None
    seconds = time.process_time() - began
    grid = Grid(source, request)
    by_hand = grid.best(inf if planned is None else planned.step_time / (1 + MARGIN))
    return Case(source, request, planned, by_hand, seconds, grid.simulated)


def main() -> None:
    parsed = options()
    numbers = range(parsed.first, parsed.first + (QUICK if parsed.quick else parsed.count))
    records = dict(_read(parsed.out, parsed.seed)) if parsed.out else {}
    todo = [(parsed.seed, number) for number in numbers if number not in records]
    for number, record in _answers(todo, parsed.jobs):
        records[number] = record
        if parsed.out:
            with parsed.out.open("a") as file:
                print(json.dumps({"seed": parsed.seed, "number": number, **record}), file=file)
    summarize([records[number] for number in numbers])


def _answers(todo: list[tuple[int, int]], jobs: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Answers to requests, one after the other or in several processes."""
    if jobs == 1:
        yield from map(answer, todo)
        return
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(answer, todo)


def options() -> argparse.Namespace:
    """Which requests, and where their answers are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} requests")
    parser.add_argument("--seed", type=int, default=0, help="of the random requests")
    parser.add_argument("--first", type=int, default=0, help="the number of the first request")
    parser.add_argument("--count", type=int, default=REQUESTS, help=f"so many requests instead of {REQUESTS}")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="a file of answers: those in it are not asked again, others are added")
    return parser.parse_args()


def _read(path: Path, seed: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """The answers in a file to requests of a seed, by their numbers."""
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        if record["seed"] == seed:
            yield record["number"], record


def answer(which: tuple[int, int]) -> tuple[int, dict[str, Any]]:
    """The number of a request, and what planner and grid say to it.

    Args:
        which: Seed and number.
    """
    seed, number = which
    return number, ask(*next(islice(requests(number + 1, seed), number, None))).record()


def summarize(records: list[dict[str, Any]]) -> None:
    """Prints the requests that the planner loses by most, and the figures of all."""
    losses, seconds = ([record[name] for record in records] for name in ("loss", "seconds"))
    shown = sorted(records, key=lambda record: -record["loss"])[:SHOWN]
    figures = {
        "worst": max(losses),
        "mean": sum(losses) / len(losses),
        "beaten_by_a_percent": sum(loss > 0.01 for loss in losses),
        "requests": len(records),
        "without_a_plan": sum(not record["fits"] for record in records),
        "simulated_by_hand": sum(record["simulated"] for record in records),
        "seconds": sum(seconds),
        "slowest_s": max(seconds),
    }
    report(__doc__ or "", ("request", "planner", "by hand", "faster by"), [r["row"] for r in shown], figures)
