"""The simulator: actions per second, from a Schedule to a Timeline, and for the search, from a Plan to a makespan."""

from functools import partial

from benchmarks.harness import arguments, best, race, report
from terapipe import PRESETS, Cluster, Layout, Plan, schedule
from terapipe.planning import AnalyticCost
from terapipe.scheduling import makespan, simulate


def main() -> None:
    quick = arguments(__doc__ or "").quick
    config = PRESETS["gpt3-175b"]
    rows: list[list[object]] = []
    rates: dict[str, float] = {}
    for order, ranks, batch, slices in (("terapipe", 96, 2, 20), ("terapipe-1f1b", 48, 8, 16), ("1f1b", 8, 512, 1)):
        cuts = [config.layers * k // ranks for k in range(ranks + 1)]
        plan = Plan.uniform(batch_size=batch, seq_len=2048, num_slices=slices, boundaries=cuts, order=order)
        cost = AnalyticCost(config, Cluster("p3.16xlarge:48"), Layout(1, ranks, 4))
        made = schedule(plan)
        count = sum(map(len, made.ranks))
        contenders = {"timeline": partial(simulate, made, cost), "makespan": partial(makespan, plan, cost)}
        times = best(race(contenders, 3 if quick else 9))
        rows.append([order, ranks, count, count / times["timeline"], count / times["makespan"]])
        rates[order] = count / times["timeline"]
    header = ("order", "ranks", "actions", "actions/s, timeline", "actions/s, makespan only")
    report(__doc__ or "", header, rows, {"actions_per_second": min(rates.values()), **rates})
