"""``terapipe compare``: the best plan of every order, and what there is without a pipeline. In Python:
``terapipe.compare``, ``terapipe.compare_clusters``.

    $ terapipe compare --model gpt3-13b --cluster dgx-a100:4 --batch-size 8 --seq-len 2048 --svg orders.svg
                    step     x  tokens/s  MFU  idle  peak memory  fits  ...  dp x pp x tp  microbatches and slices
    1f1b          521 ms  1.32    31,465  24%   29%     10.5 GiB   yes  ...  1 x 4 x 8     8 x 1 seq
    terapipe-v *  393 ms  1.00    41,671  32%   18%       13 GiB   yes  ...  1 x 8 x 4     2 x 4 seq in 8 slices
    FSDP2 ~       812 ms  2.07    20,177  15%   60%     25.1 GiB   yes  ...  8 x 1 x 1     1 x 1 seq; 8 of 32 devices
    ...
    * no other that fits is both faster and smaller
    ~ not ours, and not simulated: estimates ...

``x`` is relative to the fastest. By default every order gets the layout that suits it best, because that is how it
would be used; ``--same-layout`` compares the orders themselves. Options that fix a cut (``--order``, ``--num-slices``,
...) are refused: the table is about trying them all. Several ``--cluster`` stand side by side.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from terapipe import api, files
from terapipe.cli.options import (
    Verbs,
    add_request,
    add_source,
    check_outputs,
    console,
    costs_of,
    progress_of,
    refuse_with,
    request_of,
)
from terapipe.planning.options import CompareOptions, PlanOptions, names_of
from terapipe.reporting.comparison import cluster_parts, comparison_parts
from terapipe.reporting.svg import to_png
from terapipe.search.evaluator import PlanEstimate
from terapipe.search.result import ClusterComparison, Comparison
from terapipe.search.rivals import Rival


def add(verbs: Verbs) -> None:
    """Declares the options of ``terapipe compare``: those of ``plan``, of which the cuts are refused, and where to
    write the chart.

    Args:
        verbs: The subparsers of the command line.
    """
    parser = verbs.add_parser(
        "compare",
        help="compare the best plans of all orders, and ways without a pipeline, by time, memory, traffic and cost",
        description="Finds the best plan of every order on the same devices, each in the layout that suits it best, "
        "with slices and with whole sequences; beside them, estimates of DDP, FSDP2, context parallel and tensor "
        "parallel. Prints their step time, utilization, idle share, peak memory, traffic, and whether they fit.",
    )
    add_source(parser, several=True)
    add_request(parser)
    parser.add_argument(
        "--same-layout", action="store_true", help="put every order into the layout of the fastest one instead"
    )
    buyer = parser.add_argument_group("days and cost")
    buyer.add_argument("--tokens", metavar="N", help="a number of tokens to train on, such as 50B or 1.5T")
    buyer.add_argument("--price", metavar="X", type=float, help="price of one device for one hour; needs --tokens")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON list instead of text")
    output.add_argument(
        "--html", metavar="FILE", type=Path, help="write a page to pass on: table, chart, and all assumptions"
    )
    output.add_argument("--svg", metavar="FILE", type=Path, help="write the chart of time against memory as SVG")
    output.add_argument("--png", metavar="FILE", type=Path, help="write the chart of time against memory as PNG")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Compares, writes the files that were asked for, and prints the table, or with ``--json`` a list of its rows.

    Args:
        parsed: The options.
    """
    check_outputs(parsed)
    cuts = set(names_of(PlanOptions)) - set(names_of(CompareOptions))
    refuse_with("compare, which tries all orders and slicings", parsed, *sorted(cuts))
    options = {name: value for name, value in request_of(parsed).items() if name not in cuts}
    options |= {name: getattr(parsed, name) for name in ("same_layout", "tokens", "price")}
    clusters = parsed.cluster or []
    with progress_of("comparing") as progress:
        if len(clusters) > 1:
            several = _several(parsed, clusters, {**options, "progress": progress})
            comparisons = list(several.comparisons.values())
            return _print(parsed, comparisons, cluster_parts(comparisons, several.failures))
        parsed.cluster = clusters[0] if clusters else None
        comparison = api.compare(parsed.model, costs_of(parsed), **options, progress=progress)
    if parsed.html:
        comparison.to_html(parsed.html, parsed.model or "The profiled model")
    if parsed.svg:
        comparison.to_svg(parsed.svg)
    if parsed.png:
        files.write(parsed.png, to_png(comparison.to_svg()))
    return _print(parsed, [comparison], comparison_parts(comparison))


def _several(parsed: argparse.Namespace, clusters: list[str], options: dict[str, Any]) -> ClusterComparison:
    """Compares clusters, and writes their page."""
    refuse_with("several clusters; a page (--html) has a chart of each", parsed, "svg", "png")
    if parsed.model is None:
        raise ValueError("--cluster needs --model: a preset, a shape, or a folder")
    several = api.compare_clusters(parsed.model, clusters, **options)
    if parsed.html:
        several.to_html(parsed.html, parsed.model)
    return several


def _print(parsed: argparse.Namespace, comparisons: list[Comparison], parts: Iterator[RenderableType]) -> int:
    """Prints the parts, or with ``--json`` the rows of all clusters as one list."""
    if not parsed.json:
        for part in parts:
            console.print(part)
        return 0
    rows = [
        {**row.to_dict(), "cluster": c.where, "seconds_to_plan": c.seconds, **_paid(c, row)}
        for c in comparisons
        for row in c
    ]
    print(json.dumps(rows))
    return 0


def _paid(comparison: Comparison, row: PlanEstimate | Rival) -> dict[str, float]:
    """Days and cost of a row, if tokens and price were given."""
    tokens, price = comparison.tokens, comparison.price
    paid = {} if tokens is None else {"days": row.days(tokens)}
    return paid if tokens is None or price is None else {**paid, "cost": row.cost(tokens, price)}
