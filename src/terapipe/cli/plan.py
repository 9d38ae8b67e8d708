"""``terapipe plan``: how to split a model over devices and cut its batches."""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from terapipe import files
from terapipe.cli import show
from terapipe.cli.files import check_outputs
from terapipe.cli.options import Verbs, add_launch, add_request, add_source, load, refuse_with, request_of, source_of
from terapipe.launch.job import HOST0, Hosts, Launch, hosts_of, instructions, launch_of, why_uneven
from terapipe.planning.hardware import Cluster
from terapipe.planning.layout import Layout
from terapipe.planning.profile import Profile
from terapipe.search.choose import PlanResult, choose
from terapipe.search.request import ClusterSource, ProfileSource, Request, Source
from terapipe.search.saved import SavedPlan, dtype_of, origin
from terapipe.search.sensitivity import Mistake, mistakes
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
    parser.add_argument(
        "--save", metavar="FILE", type=Path, help="write the plan, with its layout and costs, for train and simulate"
    )
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Planned:
    decision: PlanResult
    request: Request
    source: Source | None  # None: a cost table
    seconds: float  # that it took


def run(parsed: argparse.Namespace) -> int:
    _refuse_ignored(parsed)
    check_outputs(parsed)
    planned = decide(parsed)
    layout = planned.decision.chosen.layout
    hosts = hosts_of(_machine(planned.source), layout.devices)
    launch = _launch(parsed, layout, hosts)
    source = planned.source if parsed.sensitivity else None
    wrong = list(mistakes(source, planned.request)) if isinstance(source, ClusterSource) else []
    _write(parsed, planned, launch)
    if parsed.json:
        print(json.dumps(_as_dict(planned, launch, wrong)))
    else:
        show.decision(planned.decision, planned.seconds, parsed.save)
        _show_launch(
            parsed,
            instructions(launch, layout, parsed.save) if launch else [f"No launch: {why_uneven(layout, hosts)}."],
        )
        _show_sensitivity(wrong)
    return 0


def decide(parsed: argparse.Namespace) -> Planned:
    began = time.perf_counter()
    request = request_of(parsed)
    if parsed.cost_table is not None:
        source, decision = None, choose_by_table(load(parsed.cost_table, CostTable.from_json), request)
    else:
        source = source_of(parsed)
        decision = choose(source, request)
    return Planned(decision, request, source, time.perf_counter() - began)


def _refuse_ignored(parsed: argparse.Namespace) -> None:
    if parsed.cost_table is not None:
        refuse_with("--cost-table", parsed, "model", "layers_only", "tile", "sensitivity")
    if parsed.profile is not None:
        refuse_with("--profile, whose costs were measured", parsed, "sensitivity")
    if parsed.image is not None and parsed.kubernetes is None:
        raise ValueError("--image is for the containers of --kubernetes FILE; give both, or neither")


def _machine(source: Source | None) -> Cluster | Profile | None:
    """What is known of the hosts; a cost table says nothing of them."""
    if isinstance(source, ClusterSource):
        return source.cluster
    return source.profile if isinstance(source, ProfileSource) else None


def _launch(parsed: argparse.Namespace, layout: Layout, hosts: Hosts) -> Launch | None:
    """A plan that cannot be spread over the hosts is still a plan; only a job for it is refused."""
    defaults = {"script": "train.py", "endpoint": HOST0, "name": "terapipe", "image": "YOUR_IMAGE"}
    given = {name: getattr(parsed, name) for name in defaults if getattr(parsed, name) is not None}
    launch = launch_of(layout, hosts, **{**defaults, **given})
    if launch is None and (parsed.slurm or parsed.kubernetes):
        raise ValueError(why_uneven(layout, hosts))
    if launch is not None and launch.hosts == 1:
        refuse_with("a plan for one host, whose processes need no meeting place", parsed, "endpoint")
        if not (parsed.slurm or parsed.kubernetes):
            refuse_with("a plan for one host and no job to write", parsed, "name")
    return launch


def _write(parsed: argparse.Namespace, planned: Planned, launch: Launch | None) -> None:
    if parsed.save:
        files.write(parsed.save, _saved(parsed, planned).to_json() + "\n")
    if launch and parsed.slurm:
        files.write(parsed.slurm, launch.slurm_script())
    if launch and parsed.kubernetes:
        files.write(parsed.kubernetes, launch.kubernetes_job())


def _saved(parsed: argparse.Namespace, planned: Planned) -> SavedPlan:
    choice, source = planned.decision.chosen, planned.source
    if source is None:
        costs: dict[str, Any] = {"cost_table": str(parsed.cost_table)}
        return SavedPlan(choice.plan, choice.layout, None, costs, None, choice.step_time)
    costs, budget = origin(source, parsed.profile), planned.request.budget or source.budget
    return SavedPlan(choice.plan, choice.layout, dtype_of(source), costs, budget, choice.step_time)


def _as_dict(planned: Planned, launch: Launch | None, wrong: Sequence[Mistake]) -> dict[str, Any]:
    decision = planned.decision
    found = {**decision.chosen.to_dict(), "launch": launch.to_dict() if launch else None}
    if decision.price is not None:
        found["price_of_distinct"] = decision.price
    if wrong:
        found["sensitivity"] = [
            {"constant": m.constant, "factor": m.factor, "regret": m.regret, "same": m.same} for m in wrong
        ]
    return {**found, "seconds_to_plan": planned.seconds}


def _show_launch(parsed: argparse.Namespace, lines: list[str]) -> None:
    show.console.print("\n" + "\n".join(lines), markup=False)
    for path, command in ((parsed.slurm, "sbatch"), (parsed.kubernetes, "kubectl apply -f")):
        if path:
            show.console.print(f"Wrote {path}; submit it with: {command} {path}", markup=False)


def _show_sensitivity(wrong: Sequence[Mistake]) -> None:
    if wrong:
        show.console.print("\nIf a constant is not what it is taken to be: the step time lost, and (*) another choice:")
    for constant, group in groupby(wrong, key=lambda m: m.constant):
        cells = [f"x {m.factor:g}: {m.regret:+.1%}{'' if m.same else ' *'}" for m in group]
        show.console.print(f"  {constant:20s} " + "   ".join(cells))
