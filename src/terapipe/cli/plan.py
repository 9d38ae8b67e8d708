"""``terapipe plan``: how to split a model over devices and cut its batches."""

import argparse
import json
import time
from pathlib import Path

from terapipe.cli import show
from terapipe.cli.options import Verbs, add_request, add_source, read, request_of, source_of
from terapipe.reporting import html
from terapipe.search.choose import Decision, choose
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
    return 0


def decide(parsed: argparse.Namespace) -> Decision:
    request = request_of(parsed)
    if getattr(parsed, "cost_table", None) is not None:
        return choose_by_table(CostTable.from_json(read(parsed.cost_table)), request)
    return choose(source_of(parsed), request)
