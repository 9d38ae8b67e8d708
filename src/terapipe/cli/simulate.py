"""``terapipe simulate``: what a plan's step would look like, as text, pictures, a trace, a page."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from terapipe.cli import show
from terapipe.cli.options import Verbs, add_request, add_source, read, request_of, source_of
from terapipe.planning.layout import Layout
from terapipe.planning.slices import Plan
from terapipe.reporting import html, svg, text, units
from terapipe.reporting.png import write_png
from terapipe.reporting.report import Shown, report
from terapipe.reporting.trace import trace
from terapipe.scheduling.footprint import curves
from terapipe.scheduling.idle import Idle, idle_by_cause
from terapipe.scheduling.orders import schedule
from terapipe.scheduling.simulator import simulate
from terapipe.scheduling.timeline import Timeline
from terapipe.search.choice import Bench, Choice
from terapipe.search.choose import choose
from terapipe.search.request import Request


def add(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "simulate",
        help="draw the step of a plan",
        description="Simulates a saved plan, or the one that `terapipe plan` would choose, and draws its step.",
    )
    parser.add_argument("plan", nargs="?", type=Path, help="a plan saved by `terapipe plan --save`")
    add_source(parser)
    add_request(parser, required=False)  # a saved plan knows its batch and its tokens
    parser.add_argument("--measured", metavar="FILE", type=Path, help="a measured timeline (JSON) to set beside")
    for kind, what in (("html", "a page"), ("svg", "a picture"), ("png", "a picture"), ("trace", "a Perfetto trace")):
        parser.add_argument(f"--{kind}", metavar="FILE", type=Path, help=f"write {what}")
    parser.add_argument("--width", type=int, default=100, help="columns of the drawing in the terminal")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    bench, choice = _judged(parsed)
    timeline = simulate(schedule(choice.plan), bench.cost)
    shown = [shown_of("predicted", timeline, bench)]
    if parsed.measured:
        measured = Timeline.from_json(read(parsed.measured))
        if measured.plan != choice.plan:
            raise ValueError(f"{parsed.measured} was measured with another plan; simulate the plan that was run")
        shown.append(shown_of("measured", measured, bench))
    if parsed.json:
        causes = [cause._asdict() for cause in idle_by_cause(timeline)]
        print(json.dumps({**choice.to_dict(), "makespan": timeline.makespan, "idle_by_cause": causes}))
    else:
        _print(shown, choice, parsed.width)
    _write(parsed, shown, choice, bench.budget)
    return 0


def _judged(parsed: argparse.Namespace) -> tuple[Bench, Choice]:
    if parsed.plan is None:
        if parsed.batch is None or parsed.seq is None:
            raise ValueError("give a saved plan, or --batch and --seq to make one")
        source, request = source_of(parsed), request_of(parsed)
        choice = choose(source, request).chosen
    else:
        plan = Plan.from_json(read(parsed.plan))
        layout = Layout(parsed.data or 1, plan.num_ranks, parsed.tensor or 1)
        parsed.seq, parsed.pipe = plan.tokens, plan.num_ranks
        source = source_of(parsed)
        if plan.num_layers != source.layers:
            raise ValueError(f"the plan splits {plan.num_layers} layers, the model has {source.layers}")
        request = Request(plan.batch * layout.data, plan.tokens)
        choice = Bench(source, request, layout, plan.recompute).judge(plan)
    return Bench(source, request, choice.layout, choice.plan.recompute), choice


def shown_of(name: str, timeline: Timeline, bench: Bench) -> Shown:
    idle = [cause._asdict() for cause in idle_by_cause(timeline)]
    return Shown(name, timeline, idle, curves(timeline, bench.memory))


def _print(shown: Sequence[Shown], choice: Choice, width: int) -> None:
    scale = max(run.timeline.makespan for run in shown)
    for run in shown:
        causes = {name: sum(rank[name] for rank in run.idle) for name in Idle._fields}
        total = run.timeline.makespan * run.timeline.plan.num_ranks
        idle = ", ".join(f"{name} {units.share(value / total)}" for name, value in causes.items())
        show.console.print(f"{run.name}: {units.seconds(run.timeline.makespan)}; idle: {idle}")
        show.console.print(text.draw(run.timeline, width, scale), markup=False)
    for name, value in show.described(choice).items():
        show.console.print(f"  {name:13s} {value}")


def _write(parsed: argparse.Namespace, shown: Sequence[Shown], choice: Choice, budget: int | None) -> None:
    picture = svg.timelines({run.name: run.timeline for run in shown}) if parsed.svg or parsed.png else ""
    if parsed.svg:
        html.write(parsed.svg, picture)
    if parsed.png:
        write_png(parsed.png, picture)
    if parsed.trace:
        html.write(parsed.trace, trace(shown))
    if parsed.html:
        lead = f"{choice.plan.order} on {choice.layout}: {units.seconds(choice.step_time)} per step"
        html.write(parsed.html, report("A pipeline step", lead, shown, facts=show.described(choice), budget=budget))
