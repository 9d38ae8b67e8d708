"""``terapipe compare``: GPipe, 1F1B, TeraPipe and their descendants on one's own model, by time and by memory."""

import argparse
import json
import time
from pathlib import Path

from terapipe import files
from terapipe.cli import show
from terapipe.cli.files import check_outputs
from terapipe.cli.options import Verbs, add_request, add_source, request_of, source_of
from terapipe.reporting import charts, html, svg, units
from terapipe.search.compare import compare, frontier
from terapipe.search.evaluator import PlanEstimate


def add(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "compare",
        help="every order at its best, by time and by memory",
        description="Every order at its best on the same devices: step time, idle share, peak memory, what fits.",
    )
    add_source(parser)
    add_request(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page with table and chart")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="write the chart of time against memory")
    parser.add_argument("--png", metavar="FILE", type=Path, help="likewise, as PNG")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    check_outputs(parsed)
    began = time.perf_counter()
    source, request = source_of(parsed), request_of(parsed)
    rows = compare(source, request)
    seconds = time.perf_counter() - began
    budget = request.budget or source.budget
    _write(parsed, rows, budget, source.name)
    if parsed.json:
        print(json.dumps([{**choice.to_dict(), "seconds_to_plan": seconds} for choice in rows]))
    else:
        show.console.print(show.choices(rows))
        show.console.print("\n* no other that fits is both faster and smaller", style="dim")
        if budget:
            show.console.print(f"budget: {units.memory(budget)} per device; compared in {seconds:.1f} s", style="dim")
    return 0


def _write(parsed: argparse.Namespace, rows: list[PlanEstimate], budget: int | None, where: str) -> None:
    if not (parsed.html or parsed.svg or parsed.png):
        return
    points = {c.name: (float(c.peak_bytes), c.step_time) for c in rows}
    front = {c.name for c in frontier(c for c in rows if c.fits)}
    chart = charts.frontier(points, front, "peak memory per device", "step time", budget)
    if parsed.svg:
        files.write(parsed.svg, chart)
    if parsed.png:
        files.write(parsed.png, svg.to_png(chart))
    if parsed.html:
        fastest = min(rows, key=lambda c: (not c.fits, c.step_time))
        lead = f"{parsed.model or 'The profiled model'} on {where}: {fastest.name} is fastest of what fits."
        header = ("", "step time", "tokens/s", "idle", "peak memory", "fits", "layout", "cut")
        cells = [
            (
                c.name, units.seconds(c.step_time), f"{c.tokens_per_second:,.0f}", units.share(c.idle),
                units.memory(c.peak_bytes), "yes" if c.fits else "no", str(c.layout), show.cut(c.plan),
            )
            for c in rows
        ]  # fmt: skip
        sections = [("Time against memory", chart), ("All of them", html.table(header, cells))]
        files.write(parsed.html, html.page("Orders compared", lead, sections))
