"""The simulator: actions per second, from a Schedule to a Timeline, and for the search, from a Plan to a makespan."""

import time
from collections.abc import Callable

from benchmarks.harness import arguments, report
from terapipe import PRESETS, Plan, schedule
from terapipe.planning.analytic import AnalyticCost
from terapipe.planning.hardware import cluster
from terapipe.planning.layout import Layout
from terapipe.scheduling.simulator import measure as makespan
from terapipe.scheduling.simulator import simulate


def best(action: Callable[[], object], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    quick = arguments(__doc__ or "").quick
    config = PRESETS["gpt3-175b"]
    rows: list[list[object]] = []
    rates: dict[str, float] = {}
    for order, ranks, batch, slices in (("terapipe", 96, 2, 20), ("terapipe-1f1b", 48, 8, 16), ("1f1b", 8, 512, 1)):
        cuts = [config.layers * k // ranks for k in range(ranks + 1)]
        plan = Plan.uniform(batch=batch, tokens=2048, slices=slices, boundaries=cuts, order=order)
        cost = AnalyticCost(config, cluster("p3.16xlarge:48"), Layout(1, ranks, 4))
        made = schedule(plan)
        count = sum(map(len, made.ranks))
        whole = best(lambda made=made, cost=cost: simulate(made, cost), 3 if quick else 9)  # type: ignore[misc]
        again = best(lambda plan=plan, cost=cost: makespan(plan, cost), 3 if quick else 9)  # type: ignore[misc]
        rows.append([order, ranks, count, count / whole, count / again])
        rates[order] = count / whole
    header = ("order", "ranks", "actions", "actions/s, timeline", "actions/s, makespan only")
    report(__doc__ or "", header, rows, {"actions_per_second": min(rates.values()), **rates})
