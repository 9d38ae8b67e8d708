"""``terapipe reproduce``: simulates the experiments of the TeraPipe paper and compares with the published numbers."""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from terapipe import files
from terapipe.cli.options import Verbs, console
from terapipe.published.reproduce import (
    CASES,
    SETTINGS,
    SWEPT,
    Outcome,
    Row,
    Setting,
    largest_throughput,
    mean_error,
    orders,
    outcome,
    rows,
    source_of,
    sweep,
)
from terapipe.reporting import charts, style, svg
from terapipe.reporting.plans import cut_title, runs
from terapipe.search.evaluator import PlanEstimate


class Section(NamedTuple):
    """A table of the report beyond the published ones, with a picture or none."""

    heading: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    picture: str = ""


GROWN = (5, 8, 10)  # settings, one of each model in which slicing matters


CUT = "microbatches and slices"


def sections(*, question: bool, grow: bool, what_if: bool) -> Iterator[Section]:
    """Simulates what the paper leaves open.

    Args:
        question: Whether to try every order in the ten settings.
        grow: Whether to try larger batches.
        what_if: Whether to plan newer models on newer clusters.
    """
    room = f"the {style.memory(source_of(SETTINGS[0]).budget)} of a V100 that are usable"
    if question:
        header: tuple[str, ...] = ("setting", "order", "step", "idle", "peak memory", "dp x pp x tp", CUT)
        rows = [row for setting in SETTINGS for row in _orders(setting)]
        yield Section(f"The ten settings with every order in its own best layout, within {room}", header, rows)
    if grow:
        header = ("setting", "order", "tokens/s", "batch", "peak memory", "dp x pp x tp", CUT)
        rows = [row for number in GROWN for row in _grown(SETTINGS[number - 1])]
        yield Section(f"With batches up to sixteen times as large, as far as {room} permit", header, rows)
    if what_if:
        header = ("model, cluster, batch x tokens", "way", "step", "x", "peak memory", "how")
        outcomes = [outcome(case) for case in CASES]
        rows = [row for each in outcomes for row in _outcome(each)]
        yield Section("Modern models and clusters, with costs that were not measured", header, rows, picture(outcomes))


def picture(outcomes: Sequence[Outcome]) -> str:
    """Step times relative to the planned one. What does not fit has no bar."""
    names = ("planned", "best with whole sequences", "best 1F1B", "FSDP, sequences over devices (estimate)")
    ratios = {}
    for each in outcomes:
        case, ways = each.case, (each.planned, each.whole, each.best_1f1b, each.others[0] if each.others else None)
        steps = [way.step_time / each.planned.step_time if way else 0.0 for way in ways]
        ratios[f"{case.model}, {case.where}, {case.batch_size} x {case.seq_len // 1024}k"] = steps
    return charts.groups(
        ratios, names, "Step time relative to the planned one", lambda x: f"{x:.2f}" if x else "none fits"
    )


def _orders(setting: Setting) -> Iterator[tuple[str, ...]]:
    """The rows of one setting: each order with its time, idle share, memory and cut."""
    for i, c in enumerate(orders(setting)):
        first = "" if i else f"({setting.number}) {setting.model}"
        yield first, c.title, style.seconds(c.step_time), style.share(c.idle), *_how(c)


def _grown(setting: Setting) -> Iterator[tuple[str, ...]]:
    """The rows of one setting: each order with its highest throughput and the batch that gave it."""
    for i, c in enumerate(largest_throughput(setting).values()):
        first = "" if i else f"({setting.number}) {setting.model}"
        yield first, c.title, f"{c.tokens_per_second:,.0f}", str(c.plan.batch_size * c.layout.dp), *_how(c)


def _how(c: PlanEstimate) -> tuple[str, str, str]:
    peak = style.memory(c.peak_bytes) + ("" if c.fits else ", does not fit")
    return peak, f"{c.layout.dp} x {c.layout.pp} x {c.layout.tp}", cut_title(c.plan)


def _outcome(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    case, planned = outcome.case, outcome.planned
    first = f"{case.model}, {case.where}, {case.batch_size} x {case.seq_len // 1024}k"
    yield (first, *_row("planned", planned, planned))
    for name, way in (("best with whole sequences", outcome.whole), ("best 1F1B", outcome.best_1f1b)):
        yield ("", *_row(name, way, planned)) if way else ("", name, "none fits", "", "", "")
    for e in outcome.others:
        step, peak = style.seconds(e.step_time), style.memory(e.peak_bytes)
        yield "", e.name, step, f"{e.step_time / planned.step_time:.2f}", peak, e.note


def _row(name: str, estimate: PlanEstimate, best: PlanEstimate) -> tuple[str, ...]:
    layout = estimate.layout
    how = f"{estimate.title}, {layout.dp} x {layout.pp} x {layout.tp}, {cut_title(estimate.plan)}"
    ratio = f"{estimate.step_time / best.step_time:.2f}"
    return name, style.seconds(estimate.step_time), ratio, style.memory(estimate.peak_bytes), how


HEADER = ("setting", "without", "", "with slices", "", "speed-up", "", "planned microbatch and slices")


def add(verbs: Verbs) -> None:
    """Adds the verb and its options to the command line."""
    parser = verbs.add_parser(
        "reproduce",
        help="simulate the experiments of the TeraPipe paper",
        description="Simulates the ten settings of the TeraPipe paper, and its sweep over numbers of slices, on "
        "p3.16xlarge hosts. Prints published and simulated step times.",
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=Path,
        help="write report.html and its figures to this folder, as PNG with the extra png and as SVG without",
    )
    parser.add_argument(
        "--question", action="store_true", help="also simulate all orders in the ten settings (minutes)"
    )
    parser.add_argument(
        "--grow", action="store_true", help="also simulate batches as large as memory permits (minutes)"
    )
    parser.add_argument("--what-if", action="store_true", help="also plan modern models on other clusters (minutes)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Runs the verb. Published tables come first, in seconds; sections that were asked for take minutes."""
    if parsed.out is not None:
        _check_folder(parsed.out)
    began = time.perf_counter()
    settings = rows()
    swept = sweep(settings[SWEPT - 1].sliced.step_time)
    error = mean_error(settings)
    if not parsed.json:
        _print(settings, swept, error, time.perf_counter() - began)
    more = list(sections(question=parsed.question, grow=parsed.grow, what_if=parsed.what_if))
    if parsed.json:
        data = {"settings": [row.to_dict() for row in settings], "sweep": swept, "mean_error": error}
        tables = [{"heading": s.heading, "header": s.header, "rows": s.rows} for s in more]
        print(json.dumps({**data, **({"beyond": tables} if more else {})}))
    else:
        for section in more:
            console.print(f"\n{section.heading}:")
            console.print(_table(section.header, section.rows))
    if parsed.out:
        _write(parsed.out, settings, swept, error, more)
        if not parsed.json:
            console.print(f"Wrote [bold]{parsed.out / 'report.html'}[/] and its figures.")
    return 0


def _check_folder(path: Path) -> None:
    """Refuses an unusable folder before minutes are spent."""
    parent = next(place for place in (path, *path.resolve().parents) if place.exists())
    if not parent.is_dir():
        raise ValueError(f"--out names a folder to write into, {parent} is a file")


def _cells(row: Row) -> tuple[str, ...]:
    """A row of the main table, published and simulated beside each other: as in ``HEADER``."""
    s = row.setting
    without, sliced, speedup = row.errors
    lengths = row.sliced.plan.lengths[0]
    return (
        f"({s.number}) {s.model}, {s.layout.dp} x {s.layout.pp} x {s.layout.tp}",
        f"{s.without:.2f} / {row.without.step_time:.2f} s",
        f"{without:+.0%}",
        f"{s.sliced:.2f} / {row.sliced.step_time:.2f} s",
        f"{sliced:+.0%}",
        f"{s.speedup:.2f} / {row.speedup:.2f}",
        f"{speedup:+.0%}",
        f"{row.sliced.plan.sizes[0]} seq in {len(lengths)} of {max(lengths)} to {min(lengths)}",
    )


def _print(settings: list[Row], swept: list[dict[str, object]], error: float, seconds: float) -> None:
    console.print("Published / simulated, and the difference:")
    console.print(_table(HEADER, [_cells(row) for row in settings]))
    console.print(f"\nSetting {SWEPT} with equal slices, published / simulated:")
    for point in swept:
        console.print(f"  {point['slices']!s:>8}  {point['published']:.3f} / {point['simulated']:.3f} s")
    console.print(f"\nmean error of the step times: {error:.1%}; simulated in {seconds:.1f} s")


def _table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in header:
        last = name == header[-1]
        table.add_column(name, justify="left" if last or name == header[0] else "right", no_wrap=not last)
    for row in cells:
        table.add_row(*row)
    return table


def figures(settings: list[Row], swept: list[dict[str, object]]) -> dict[str, str]:
    """The charts of the report, by name."""
    names = ("published, without slices", "simulated, without", "published, with slices", "simulated, with")
    times = {
        f"({r.setting.number}) {r.setting.model}": (
            r.setting.without,
            r.without.step_time,
            r.setting.sliced,
            r.sliced.step_time,
        )
        for r in settings
    }
    speedups = {f"({r.setting.number}) {r.setting.model}": (r.setting.speedup, r.speedup) for r in settings}
    swept_times = {f"{p['slices']}": (float(str(p["published"])), float(str(p["simulated"]))) for p in swept}
    return {
        "step-times": charts.groups(times, names, "Step time in the ten settings"),
        "speed-ups": charts.groups(
            speedups, ("published", "simulated"), "Speed-up by slicing along tokens", lambda x: f"{x:.2f} x"
        ),
        "sweep": charts.groups(
            swept_times,
            ("published", "simulated"),
            f"Setting {SWEPT}: step time by number of slices",
        ),
    }


def _write(
    folder: Path, settings: list[Row], swept: list[dict[str, object]], error: float, more: Sequence[Section]
) -> None:
    """Writes the page and its figures. Figures are PNG if the extra is installed, else SVG."""
    drawn = figures(settings, swept)
    pictures = list(drawn.items()) + [("beyond", s.picture) for s in more if s.picture]
    for name, picture in pictures:
        if svg.has_png():
            files.write(folder / f"{name}.png", svg.to_png(picture))
        else:
            files.write(folder / f"{name}.svg", picture)
    lead = (
        "GPT-3 on clusters of p3.16xlarge, simulated from first principles; "
        f"the step times differ from the published ones by {error:.1%} on average."
    )
    schemes = [
        (
            f"({r.setting.number})",
            runs(r.setting.scheme or ()),
            style.seconds(r.scheme.step_time),
            runs(r.sliced.plan.lengths[0]),
            style.seconds(r.sliced.step_time),
        )
        for r in settings
        if r.scheme
    ]
    sections = [
        ("Step times", drawn["step-times"]),
        ("Speed-ups", drawn["speed-ups"]),
        ("Equal slices against planned ones", drawn["sweep"]),
        ("All figures", style.table(HEADER, [_cells(row) for row in settings])),
        (
            "Slicing schemes under the same costs",
            style.table(("setting", "published", "takes", "planned", "takes"), schemes),
        ),
    ]
    sections += [(s.heading, s.picture + style.table(s.header, s.rows)) for s in more]
    files.write(folder / "report.html", style.page("TeraPipe, reproduced", lead, sections))
