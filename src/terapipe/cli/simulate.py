"""``terapipe simulate``: draws the step of a plan as text, picture, trace or page. In Python: ``terapipe.estimate`` and
``terapipe.simulate``, and ``to_html``, ``to_svg``, ``to_perfetto`` of their timelines.

    $ terapipe simulate plan.json --html step.html
    predicted: 137 ms; idle: fill 4.4%, drain 2.4%, imbalance 3.3%, transfer 0.3%
    rank 0 │00000000000000000000000000000·······AAAAAAA··AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA│
    rank 1 │··000000000·000000000000000000000AAA0000000AAAAAAAAA·AAAAAAAAAAAAAAAAAAAAAAAAAA··AAAAAAAAA·AAAA·····│
      order         interleaved
      ...
      step          168 ms: the drawing, and 31 ms once per step (optimizer, gradient all-reduce); as planned

A saved plan has its costs inside. Other costs (``--cluster``, ``--profile``) ask what the same plan would do elsewhere.
Without a saved plan, the verb plans first, with the options of ``terapipe plan``. ``--measured`` puts a real step
beside the simulated one: ``pipe.timeline().to_json()`` of a run, or what `terapipe train` writes. ``--emulate`` runs
the step itself, on emulated devices: one process of this machine for each rank, which sleeps in place of computing.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terapipe import api, files
from terapipe.cli.options import (
    Verbs,
    add_request,
    add_source,
    check_outputs,
    console,
    costs_of,
    load,
    refuse_with,
    request_of,
)
from terapipe.planning.layout import Layout
from terapipe.planning.options import PlanOptions, names_of
from terapipe.planning.slices import Plan
from terapipe.reporting import style, svg, text
from terapipe.reporting.page import report
from terapipe.reporting.plans import describe
from terapipe.reporting.trace import trace
from terapipe.reporting.view import RunView
from terapipe.scheduling.timeline import Idle, Timeline
from terapipe.search.result import PlanResult

if TYPE_CHECKING:
    from terapipe.launch.emulation import EmulatedRun

WIDTH = 100  # columns, of which each is a hundredth of the step
# Options that a saved plan fixes. Those of the layout must agree with it, and tell the layout of a bare plan.
FIXED = [name for name in names_of(PlanOptions) if name not in ("dp", "pp", "tp", "shard", "memory")]
MOST_COLUMNS = 10_000  # more is a slip of the keyboard, and would fill the memory with spaces


def add(verbs: Verbs) -> None:
    """Declares the options of ``terapipe simulate``: a plan or the options to make one, and what to draw.

    Args:
        verbs: The subparsers of the command line.
    """
    parser = verbs.add_parser(
        "simulate",
        help="draw the step of a plan",
        description="Simulates a saved plan, or without one the plan that `terapipe plan` would choose, and draws its "
        "step: what each rank computes when, why it idles, and how much memory it needs.",
    )
    parser.add_argument("plan", nargs="?", type=Path, help="a plan saved by `terapipe plan --save`")
    add_source(parser, required=False)  # a saved plan has its costs and its batch
    add_request(parser, required=False)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--measured", metavar="FILE", type=Path, help="also draw a measured timeline (JSON) of the same plan"
    )
    output.add_argument(
        "--emulate",
        action="store_true",
        help="also run the step on this machine, a process for each pipeline rank of one replica, which sleeps where a "
        "device would compute, and draw what was measured",
    )
    for kind, what in (
        ("html", "an interactive page"),
        ("svg", "a picture as SVG"),
        ("png", "a picture as PNG"),
        ("trace", "a trace for Perfetto"),
    ):
        output.add_argument(f"--{kind}", metavar="FILE", type=Path, help=f"write {what}")
    output.add_argument(
        "--width", type=int, metavar="COLUMNS", help=f"width of the drawing in the terminal (default: {WIDTH})"
    )
    output.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Simulates, writes the files that were asked for, and prints the drawing, or with ``--json`` one object: the
    estimate as ``PlanEstimate.to_dict`` has it, ``makespan`` and ``idle_by_cause`` (seconds, for each rank), the same
    of a ``measured`` run, what ``emulated`` devices took, and ``planned_step_time`` if a saved plan had one.

    Args:
        parsed: The options. A measured timeline must be of this very plan, or bars would be compared that have
            nothing to do with each other.

    Returns:
        0; what cannot be drawn is refused by ValueError.
    """
    if parsed.json:
        refuse_with("--json", parsed, "width")
    if parsed.emulate:
        refuse_with("--emulate, which measures", parsed, "measured")
    if parsed.width is not None and not 1 <= parsed.width <= MOST_COLUMNS:
        raise ValueError(f"--width is a number of columns between 1 and {MOST_COLUMNS}, got {parsed.width}")
    check_outputs(parsed)
    result, saved = _estimate(parsed)
    runs = [RunView.of("predicted", result.simulate(), result.memory)]
    if parsed.measured:
        measured = load(parsed.measured, Timeline.from_json)
        if measured.plan != result.plan:
            raise ValueError(f"{parsed.measured} was measured with another plan; simulate the plan that was run")
        runs.append(RunView.of("measured", measured, result.memory))
    emulated = _emulate(result) if parsed.emulate else None
    if emulated is not None:
        runs.append(RunView.of("measured", emulated.measured, result.memory))
    _write(parsed, runs, result)
    if parsed.json:
        more = {} if emulated is None else {"emulated": _emulated_as_dict(emulated)}
        print(json.dumps(_as_dict(runs, result, saved) | more))
    else:
        _print(runs, result, parsed.width or WIDTH)
        _print_step(runs[0], result, saved)
        if emulated is not None:
            _print_emulated(emulated)
    return 0


def _emulate(result: PlanResult) -> "EmulatedRun":
    """Runs the plan's step on emulated devices of this machine.

    Args:
        result: The plan with its costs.
    """
    from terapipe.launch.emulation import emulate

    return emulate(result.plan, result.known_source().cost(result.layout))


def _emulated_as_dict(emulated: "EmulatedRun") -> dict[str, Any]:
    """What ``--json`` prints of it, in seconds of the plan; those of ``overhead`` and ``ready`` are this machine's."""
    return {
        "predicted": emulated.predicted.makespan,
        "measured": emulated.measured.makespan,
        "ratio": emulated.ratio,
        "stretch": emulated.stretch,
        "overhead": emulated.overhead,
        "ready": emulated.ready,
        "ranks": len(emulated.reports),
    }


def _print_emulated(emulated: "EmulatedRun") -> None:
    """Says what was measured, and what of it is this machine's own."""
    slower = f", everything {emulated.stretch:.3g} times slower" if emulated.stretch > 1 else ""
    measured, predicted = (style.seconds(run.makespan) for run in (emulated.measured, emulated.predicted))
    line = (
        f"{measured} measured by {len(emulated.reports)} processes{slower}; {predicted} predicted for devices alone, "
        f"ratio {emulated.ratio:.3f}; {1e6 * emulated.overhead:.0f} us of this machine for each computation"
    )
    console.print(f"  {'emulated':13s} {line}", markup=False)


def _estimate(parsed: argparse.Namespace) -> tuple[PlanResult, PlanResult | None]:
    """The plan to draw, with costs, and what was saved in the file, if there is one.

    no file                plan now, by the options
    file                   the saved plan with its saved costs
    file and --cluster     the saved plan with other costs; options that a plan fixes are refused in both cases
    """
    if parsed.plan is None:
        if parsed.batch_size is None or parsed.seq_len is None:
            raise ValueError("give a saved plan, or --batch-size and --seq-len to make one")
        return api.plan(parsed.model, costs_of(parsed), **request_of(parsed)), None
    refuse_with("a saved plan, which fixes all that", parsed, *FIXED)
    saved = load(parsed.plan, lambda text: PlanResult.from_json(text, lambda plan: _layout(parsed, plan)))
    _refuse_other_layout(parsed, saved)
    other_costs = parsed.cluster is not None or parsed.profile is not None
    if not other_costs:
        ignored = ("model", "layers_only", "autocast")
        refuse_with("the costs that are saved with the plan, and no --cluster", parsed, *ignored)
    costs = costs_of(parsed) if other_costs else None
    result = api.estimate(
        saved,
        costs,
        model=parsed.model,
        memory=parsed.memory,
        layers_only=parsed.layers_only,
        autocast=parsed.autocast,
    )
    return result, saved


def _layout(parsed: argparse.Namespace, plan: Plan) -> Layout:
    """The layout of a bare plan, by the options. A bare plan is what ``Plan.to_json`` writes: it says how many pipeline
    ranks there are, not how many replicas or tensor parallel ranks.

    Args:
        parsed: With ``--dp``, ``--tp`` and ``--shard``.
        plan: Whose ranks are the layout's ``pp``.
    """
    if parsed.dp is None or parsed.tp is None:
        raise ValueError("this is a bare plan, without its layout; give --dp and --tp")
    layout = Layout(parsed.dp, plan.num_ranks, parsed.tp, bool(parsed.shard))
    if min(layout.dp, layout.tp) < 1 or (layout.shard and layout.dp == 1):
        raise ValueError(f"--dp and --tp are at least 1, and --shard needs several replicas, got {layout}")
    return layout


def _refuse_other_layout(parsed: argparse.Namespace, saved: PlanResult) -> None:
    """Refuses options that do not agree with a saved plan. Those that agree are fine: a script may pass the same
    options to ``plan`` and ``simulate``.

    Args:
        parsed: All options.
        saved: The plan with its layout.
    """
    batch_size, seq_len = saved.plan.batch_size * saved.layout.dp, saved.plan.seq_len
    for name, value in {**asdict(saved.layout), "batch_size": batch_size, "seq_len": seq_len}.items():
        asked = getattr(parsed, name)
        if asked is not None and asked is not False and asked != value:
            option = f"--{name.replace('_', '-')} {asked}"
            raise ValueError(f"{parsed.plan} is for {name} {value}, got {option}; leave it out, or plan again")


def _as_dict(runs: Sequence[RunView], result: PlanResult, saved: PlanResult | None) -> dict[str, Any]:
    """What ``--json`` prints.

    Args:
        runs: The predicted one, and the measured one if there is one. Idle seconds are those of each rank, by cause.
        result: The plan with the costs that it was drawn with.
        saved: What the file said. Its step time is printed beside: with other costs, it is another one.
    """
    predicted, *others = runs
    data = {**result.estimate.to_dict(), "makespan": predicted.timeline.makespan, "idle_by_cause": predicted.idle}
    for run in others:
        data[run.name] = {"makespan": run.timeline.makespan, "idle_by_cause": run.idle}
    if saved is not None and saved.predicted:
        data["planned_step_time"] = saved.step_time
    return data


def _print_step(predicted: RunView, result: PlanResult, saved: PlanResult | None) -> None:
    """Explains how the step time differs from the drawing and from the prediction saved with the plan. The drawing ends
    with the last backward; what comes once per step would make its bars too short to read.

    Args:
        predicted: The simulated run.
        result: The plan with the costs that it was drawn with.
        saved: What the file said, if there was one.
    """
    once = result.step_time - predicted.timeline.makespan
    line = f"{style.seconds(result.step_time)}: the drawing, and {style.seconds(once)} once per step"
    line += " (optimizer, gradient all-reduce)"
    if saved is not None and saved.predicted:
        same = abs(result.step_time / saved.step_time - 1) < 1e-6
        line += "; as planned" if same else f"; {style.seconds(saved.step_time)} when planned, with other costs"
    console.print(f"  {'step':13s} {line}", markup=False)


def _print(runs: Sequence[RunView], result: PlanResult, width: int) -> None:
    """Prints each run as text, all on one time scale, with its idle time by cause; then the facts of the plan. On one
    scale, because a measured step that is longer must look longer.

    Args:
        runs: One below the other.
        result: Whose facts are printed.
        width: Columns of the longest run.
    """
    scale = max(run.timeline.makespan for run in runs)
    for run in runs:
        causes = {name: sum(rank[name] for rank in run.idle) for name in Idle._fields}
        total = run.timeline.makespan * run.timeline.plan.num_ranks
        idle = ", ".join(f"{name} {style.share(value / total)}" for name, value in causes.items())
        console.print(f"{run.name}: {style.seconds(run.timeline.makespan)}; idle: {idle}")
        console.print(text.draw(run.timeline, width, scale), markup=False)
    for name, value in describe(result.estimate).items():
        console.print(f"  {name:13s} {value}")


def _write(parsed: argparse.Namespace, runs: Sequence[RunView], result: PlanResult) -> None:
    """Writes the files that were asked for. The picture is drawn once for SVG and PNG."""
    picture = svg.timelines({run.name: run.timeline for run in runs}) if parsed.svg or parsed.png else ""
    if parsed.svg:
        files.write(parsed.svg, picture)
    if parsed.png:
        files.write(parsed.png, svg.to_png(picture))
    if parsed.trace:
        files.write(parsed.trace, trace(runs))
    if parsed.html:
        once = result.step_time - runs[0].timeline.makespan
        lead = (
            f"{result.estimate.title} on {result.layout}: {style.seconds(result.step_time)} per step, of which "
            f"{style.seconds(once)} once per step (optimizer, gradient all-reduce) are not drawn"
        )
        facts = describe(result.estimate)
        files.write(parsed.html, report("A pipeline step", lead, runs, facts=facts, budget=result.budget))
