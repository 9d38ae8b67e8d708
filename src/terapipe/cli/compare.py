"""``terapipe compare``: the best plan of every order, by time and by memory. In Python: ``terapipe.compare``.

    $ terapipe compare --model gpt3-13b --cluster dgx-a100:4 --batch-size 8 --seq-len 2048 --svg orders.svg
                    step     x  tokens/s  idle  peak memory  fits  dp x pp x tp  microbatches and slices
    gpipe         521 ms  1.33    31,443   29%       14 GiB   yes  1 x 4 x 8     8 x 1 seq
    1f1b          521 ms  1.32    31,465   29%     10.5 GiB   yes  1 x 4 x 8     8 x 1 seq
    terapipe-v *  393 ms  1.00    41,671   18%       13 GiB   yes  1 x 8 x 4     2 x 4 seq in 8 slices, 2 chunks
    ...
    * no other that fits is both faster and smaller

``x`` is relative to the fastest. By default every order gets the layout that suits it best, because that is how it
would be used; ``--same-layout`` compares the orders themselves. Options that fix a cut (``--order``, ``--num-slices``,
...) are refused: the table is about trying them all.
"""

import argparse
import json
from pathlib import Path

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
from terapipe.reporting.plans import comparison_parts
from terapipe.reporting.svg import to_png


def add(verbs: Verbs) -> None:
    """Declares the options of ``terapipe compare``: those of ``plan``, of which the cuts are refused, and where to
    write the chart.

    Args:
        verbs: The subparsers of the command line.
    """
    parser = verbs.add_parser(
        "compare",
        help="compare the best plans of all orders by time and memory",
        description="Finds the best plan of every order on the same devices, each in the layout that suits it best, "
        "with slices and with whole sequences. Prints their step time, idle share, peak memory, and whether they fit.",
    )
    add_source(parser)
    add_request(parser)
    parser.add_argument(
        "--same-layout", action="store_true", help="put every order into the layout of the fastest one instead"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON list instead of text")
    output.add_argument("--html", metavar="FILE", type=Path, help="write a page with table and chart")
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
    with progress_of("comparing") as progress:
        comparison = api.compare(
            parsed.model, costs_of(parsed), **options, same_layout=parsed.same_layout, progress=progress
        )
    if parsed.html:
        comparison.to_html(parsed.html, parsed.model or "The profiled model")
    if parsed.svg:
        comparison.to_svg(parsed.svg)
    if parsed.png:
        files.write(parsed.png, to_png(comparison.to_svg()))
    if parsed.json:
        print(json.dumps([{**e.to_dict(), "seconds_to_plan": comparison.seconds} for e in comparison]))
    else:
        for part in comparison_parts(comparison):
            console.print(part)
    return 0
