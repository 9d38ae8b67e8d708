"""``terapipe plan``: how to split a model over devices and cut its batches."""

import argparse
import json
import time
from itertools import groupby
from pathlib import Path

from terapipe.cli import show
from terapipe.cli.options import Verbs, add_launch, add_request, add_source, machine_of, read, request_of, source_of
from terapipe.planning.layout import Layout
from terapipe.reporting import html
from terapipe.reporting.launching import Hosts, Launch, hosts_of, launch_of, told, uneven
from terapipe.search.choose import Decision, choose
from terapipe.search.request import ClusterSource
from terapipe.search.sensitivity import mistakes
from terapipe.search.table import CostTable, choose_by_table


def add(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "plan",
        help="choose layout, order, microbatches, slices and recomputation",
        description="Chooses the fastest plan that fits, by simulating the order that will run.",
    )
    add_source(parser, table=True)
    add_request(parser)
    add_launch(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--sensitivity", action="store_true", help="also: what if a constant of the cluster is wrong (30 times as long)"
    )
    parser.add_argument("--save", metavar="FILE", type=Path, help="write the plan that the runtime loads")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    began = time.perf_counter()
    decision = decide(parsed)
    seconds = time.perf_counter() - began
    layout = decision.chosen.layout
    hosts = hosts_of(machine_of(parsed), layout.devices)
    launch = _launch(parsed, layout, hosts)
    _write(parsed, decision, launch)
    if parsed.json:
        price = {} if decision.price is None else {"price_of_distinct": decision.price}
        start = {"launch": launch.to_dict() if launch else None}
        print(json.dumps({**decision.chosen.to_dict(), **price, **start, "seconds_to_plan": seconds}))
    else:
        show.decision(decision, seconds, parsed.save)
        _show_launch(parsed, told(launch, layout, parsed.save) if launch else [f"No launch: {uneven(layout, hosts)}."])
        if parsed.sensitivity:
            _show_sensitivity(parsed)
    return 0


def _launch(parsed: argparse.Namespace, layout: Layout, hosts: Hosts) -> Launch | None:
    """A plan that cannot be spread over the hosts is still a plan; only a job for it is refused."""
    named = {name: getattr(parsed, name) for name in ("script", "endpoint", "name", "image")}
    launch = launch_of(layout, hosts, **named)
    if launch is None and (parsed.slurm or parsed.kubernetes):
        raise ValueError(uneven(layout, hosts))
    return launch


def _write(parsed: argparse.Namespace, decision: Decision, launch: Launch | None) -> None:
    if parsed.save:
        html.write(parsed.save, decision.chosen.plan.to_json() + "\n")
    if launch and parsed.slurm:
        html.write(parsed.slurm, launch.slurm_script())
    if launch and parsed.kubernetes:
        html.write(parsed.kubernetes, launch.kubernetes_job())


def _show_launch(parsed: argparse.Namespace, lines: list[str]) -> None:
    show.console.print("\n" + "\n".join(lines), markup=False)
    for path, command in ((parsed.slurm, "sbatch"), (parsed.kubernetes, "kubectl apply -f")):
        if path:
            show.console.print(f"Wrote {path}; submit it with: {command} {path}", markup=False)


def _show_sensitivity(parsed: argparse.Namespace) -> None:
    source = source_of(parsed)
    if not isinstance(source, ClusterSource):
        raise ValueError("--sensitivity varies the constants of a described cluster; it needs --cluster")
    show.console.print("\nIf a constant is not what it is taken to be: the step time lost, and (*) another choice:")
    for constant, group in groupby(mistakes(source, request_of(parsed)), key=lambda m: m.constant):
        cells = [f"x {m.factor:g}: {m.regret:+.1%}{'' if m.same else ' *'}" for m in group]
        show.console.print(f"  {constant:20s} " + "   ".join(cells))


def decide(parsed: argparse.Namespace) -> Decision:
    request = request_of(parsed)
    if getattr(parsed, "cost_table", None) is not None:
        return choose_by_table(CostTable.from_json(read(parsed.cost_table)), request)
    return choose(source_of(parsed), request)
