"""``terapipe plan``: how to split a model over devices and cut its batches."""

import argparse
import json
import time
from itertools import groupby
from pathlib import Path

from terapipe.cli import show
from terapipe.cli.options import Verbs, add_request, add_source, read, request_of, source_of
from terapipe.reporting import html
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
    if parsed.save:
        html.write(parsed.save, decision.chosen.plan.to_json() + "\n")
    if parsed.json:
        price = {} if decision.price is None else {"price_of_distinct": decision.price}
        print(json.dumps({**decision.chosen.to_dict(), **price, "seconds_to_plan": seconds}))
    else:
        show.decision(decision, seconds, parsed.save)
        if parsed.sensitivity:
            _show_sensitivity(parsed)
    return 0


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
