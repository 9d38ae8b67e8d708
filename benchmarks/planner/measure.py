"""Whether the planner finds what a person finds: random requests, each against a wide grid of hand-made plans."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from benchmarks.harness import arguments, report
from benchmarks.planner.grid import Grid
from terapipe import PRESETS, Cluster, plan
from terapipe.planning import HOSTS
from terapipe.search import ClusterSource, PlanEstimate, Request, layouts

REQUESTS, QUICK = 300, 12
MOST_DEVICES, MOST_TOKENS = 256, 2**21
FIXED = ("dp", "tp", "memory")
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
        """By how much the best plan of the grid is faster than the planner's; 0 if none is."""
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
    by_hand = grid.best(inf if planned is None else planned.step_time)
    return Case(source, request, planned, by_hand, seconds, grid.simulated)


def main() -> None:
    count = QUICK if arguments(__doc__ or "").quick else REQUESTS
    cases = []
    for source, request in requests(count):
        cases.append(ask(source, request))
    losses = [case.loss for case in cases]
    shown = sorted(cases, key=lambda case: -case.loss)[:SHOWN]
    seconds = [case.seconds for case in cases]
    figures = {
        "worst": max(losses),
        "mean": sum(losses) / len(losses),
        "beaten_by_a_percent": sum(loss > 0.01 for loss in losses),
        "requests": len(cases),
        "without_a_plan": sum(case.planned is None for case in cases),
        "simulated_by_hand": sum(case.simulated for case in cases),
        "seconds": sum(seconds),
        "slowest_s": max(seconds),
    }
    report(__doc__ or "", ("request", "planner", "by hand", "faster by"), [case.row() for case in shown], figures)
