"""``terapipe reproduce``: published measurements beside what we simulate for them, and what the TeraPipe paper leaves
open.

    terapipe reproduce                      every published table, in seconds
    terapipe reproduce --table seq1f1b      one of them, or a file of your own measurements
    terapipe reproduce --json               mean and worst of each table, and every number
    terapipe reproduce --question --grow --what-if      the TeraPipe paper's open questions, in minutes

The numbers come from ``terapipe.published``; here they become text, JSON, a page and its figures. The functions without
an underscore also write the tables of docs/predictions.md.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from rich import table as rich_table

from terapipe import files
from terapipe.cli.options import Verbs, console
from terapipe.published.studies import CASES, Outcome, Setting, largest_throughput, orders, outcome
from terapipe.published.table import OOM, Cell, Score, Table, names
from terapipe.reporting import charts, style, svg
from terapipe.reporting.plans import cut_title, way_title
from terapipe.search.evaluator import PlanEstimate

SUMMARY = ("table", "unit", "numbers", "mean error", "worst", "where", "not simulated")


class Section(NamedTuple):
    """A table of the report beyond the published ones.

    Attributes:
        heading: Above it.
        header: Of its columns.
        rows: As text.
        picture: As SVG, or nothing.
    """

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
    settings = Setting.all()
    room = f"the {style.memory(settings[0].source.budget)} of a V100 that are usable"
    if question:
        header: tuple[str, ...] = ("setting", "order", "step", "idle", "peak memory", "dp x pp x tp", CUT)
        rows = [row for setting in settings for row in _orders(setting)]
        yield Section(f"The ten settings with every order in its own best layout, within {room}", header, rows)
    if grow:
        header = ("setting", "order", "tokens/s", "batch", "peak memory", "dp x pp x tp", CUT)
        rows = [row for number in GROWN for row in _grown(settings[number - 1])]
        yield Section(f"With batches up to sixteen times as large, as far as {room} permit", header, rows)
    if what_if:
        header = ("model, cluster, batch x tokens", "way", "step", "x", "peak memory", "how")
        outcomes = [outcome(case) for case in CASES]
        rows = [row for each in outcomes for row in _outcome(each)]
        yield Section("Modern models and clusters, with costs that were not measured", header, rows, picture(outcomes))


def picture(outcomes: Sequence[Outcome]) -> str:
    """Step times relative to the planned one, as SVG. What does not fit has no bar.

    Args:
        outcomes: One for each group of bars.
    """
    ways = ("planned", "best with whole sequences", "best 1F1B", "best without a pipeline (estimate)")
    ratios = {}
    for each in outcomes:
        case, steps = each.case, (each.planned, each.whole, each.best_1f1b, each.rival)
        name = f"{case.model}, {case.where}, {case.batch_size} x {case.seq_len // 1024}k"
        ratios[name] = [way.step_time / each.planned.step_time if way else 0.0 for way in steps]
    return charts.groups(
        ratios, ways, "Step time relative to the planned one", lambda x: f"{x:.2f}" if x else "none fits"
    )


def _orders(setting: Setting) -> Iterator[tuple[str, ...]]:
    """The rows of one setting: each order with its time, idle share, memory and cut."""
    for i, c in enumerate(orders(setting)):
        first = "" if i else setting.name
        yield first, c.title, style.seconds(c.step_time), style.share(c.idle), *_how(c)


def _grown(setting: Setting) -> Iterator[tuple[str, ...]]:
    """The rows of one setting: each order with its highest throughput and the batch that gave it."""
    for i, c in enumerate(largest_throughput(setting).values()):
        first = "" if i else setting.name
        yield first, c.title, f"{c.tokens_per_second:,.0f}", str(c.plan.batch_size * c.layout.dp), *_how(c)


def _how(c: PlanEstimate) -> tuple[str, str, str]:
    """The last three columns of both studies: memory, layout and cut."""
    peak = style.memory(c.peak_bytes) + ("" if c.fits else ", does not fit")
    return peak, f"{c.layout.dp} x {c.layout.pp} x {c.layout.tp}", cut_title(c.plan)


def _outcome(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    """The rows of one case: the plan, then what there is without slices."""
    case, planned = outcome.case, outcome.planned
    first = f"{case.model}, {case.where}, {case.batch_size} x {case.seq_len // 1024}k"
    yield (first, *_row("planned", planned, planned))
    for name, way in (("best with whole sequences", outcome.whole), ("best 1F1B", outcome.best_1f1b)):
        yield ("", *_row(name, way, planned)) if way else ("", name, "none fits", "", "", "")
    if rival := outcome.rival:
        step, peak = style.seconds(rival.step_time), style.memory(rival.peak_bytes)
        how = f"{rival.title}, {way_title(rival)}"
        yield "", "best without a pipeline (estimate)", step, f"{rival.step_time / planned.step_time:.2f}", peak, how


def _row(name: str, estimate: PlanEstimate, best: PlanEstimate) -> tuple[str, ...]:
    """One way of a case: its time, how many times that of the plan, its memory, and what it is."""
    layout = estimate.layout
    how = f"{estimate.title}, {layout.dp} x {layout.pp} x {layout.tp}, {cut_title(estimate.plan)}"
    ratio = f"{estimate.step_time / best.step_time:.2f}"
    return name, style.seconds(estimate.step_time), ratio, style.memory(estimate.peak_bytes), how


def add(verbs: Verbs) -> None:
    """Adds the verb and its options to the command line.

    Args:
        verbs: Of the command line.
    """
    parser = verbs.add_parser(
        "reproduce",
        help="simulate published measurements, and compare",
        description="Simulates published measurements of pipelines on GPUs: the TeraPipe paper's, and those of others. "
        "Prints published and simulated numbers, mean and worst error of each table, and what cannot be simulated.",
    )
    parser.add_argument(
        "--table",
        metavar="NAME",
        action="append",
        help=f"only this table, or a .toml file of your own: {', '.join(names())}",
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
    """Runs the verb. Published tables come first, in seconds; sections that were asked for take minutes.

    Args:
        parsed: The options of the command line.
    """
    if parsed.out is not None:
        _check_folder(parsed.out)
    began = time.perf_counter()
    tables = [Table.load(name) for name in parsed.table or names()]
    for table in tables:
        table.cells  # noqa: B018 (simulated here, so that the time below is that of the simulation)
        if not parsed.json:
            _print(table)
    seconds = time.perf_counter() - began
    if not parsed.json:
        console.print("\nMean and worst error of each table:")
        console.print(_rich(SUMMARY, [summary(table) for table in tables]))
        console.print(f"Simulated in {seconds:.1f} s. Nothing is fitted to a row, except where a table says so.")
    more = list(sections(question=parsed.question, grow=parsed.grow, what_if=parsed.what_if))
    if parsed.json:
        beyond = [{"heading": s.heading, "header": s.header, "rows": s.rows} for s in more]
        data: dict[str, Any] = {"tables": {table.name: table.to_dict() for table in tables}, "seconds": seconds}
        print(json.dumps({**data, **({"beyond": beyond} if more else {})}))
    else:
        for section in more:
            console.print(f"\n{section.heading}:")
            console.print(_rich(section.header, section.rows))
    if parsed.out:
        _write(parsed.out, tables, more)
        if not parsed.json:
            console.print(f"Wrote [bold]{parsed.out / 'report.html'}[/] and its figures.")
    return 0


def _check_folder(path: Path) -> None:
    """Refuses an unusable folder before minutes are spent."""
    parent = next(place for place in (path, *path.resolve().parents) if place.exists())
    if not parent.is_dir():
        raise ValueError(f"--out names a folder to write into, {parent} is a file")


# A table as text


def error_text(error: float, points: bool) -> str:
    """An error for display: in percent, or for rates in percentage points. Small ones have a digit after the point.

    Args:
        error: Relative, or a difference.
        points: Which of both.
    """
    text = f"{error * 100:+.1f}" if abs(error) < 0.095 else f"{error * 100:+.0f}"
    text = text.replace("+0.0", "0").replace("-0.0", "0")
    return f"{text} points" if points else f"{text} %"


def summary(table: Table) -> tuple[str, ...]:
    """A row of the last table: how far off we are in all of this one. As in ``SUMMARY``. Runs that were out of memory
    do not count as not simulated: that we agree or not is among the `notes`.

    Args:
        table: A published table.
    """
    score, points = table.score(), table.measure.points
    missing = sum(cell.ours is None and cell.published != OOM for cell in table.cells)
    return table.name, table.unit, *_score_cells(score, points), str(missing or "")


def _score_cells(score: Score | None, points: bool) -> tuple[str, str, str, str]:
    """How many cells, their mean error, the worst and where it is. A mean has no sign: it is of absolute errors."""
    if score is None:
        return "0", "", "", ""
    mean = error_text(score.mean, points).removeprefix("+")
    return str(score.cells), mean, error_text(score.worst, points), score.where


def cell_text(cell: Cell | None) -> str:
    """Published and simulated number, and the error: ``53485 / 50407, -5.8 %``. Without a simulation, the published.

    Args:
        cell: Of a table, or None where nothing was published.
    """
    if cell is None:
        return ""
    published = cell.published if isinstance(cell.published, str) else _digits(cell.published)
    if cell.ours is None or cell.error is None:
        return f"{published} / -"
    return f"{published} / {_digits(cell.ours)}, {error_text(cell.error, cell.points)}"


def _digits(value: float) -> str:
    """Four digits, more before the point."""
    return f"{value:,.0f}".replace(",", "") if abs(value) >= 1000 else f"{value:.4g}"


def table_rows(table: Table) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of a table, a cell for each column in which anything was simulated. Such as::

        published / ours            1F1B                     Seq1F1B
        32k tokens, 8 microbatches  48189 / 51853, +7.6 %    53485 / 62682, +17 %

    Columns without a simulation are left out: their `notes` say why, once for all rows.

    Args:
        table: A published table.
    """
    cells = {(cell.row, cell.column.name): cell for cell in table.cells}
    shown = {cell.column.name for cell in table.cells if cell.ours is not None or cell.published == OOM}
    columns = [column.name for column in table.columns if column.name in shown]
    rows = [(row["name"], *(cell_text(cells.get((row["name"], name))) for name in columns)) for row in table.rows]
    return ("published / ours", *columns), [row for row in rows if any(row[1:])]


def notes(table: Table) -> list[str]:
    """What was out of memory, what we would refuse, and what is not simulated, each with the cells it is about. Equal
    notes are one line, or a column of 12 cells would say its reason 12 times.

    Args:
        table: A published table.
    """
    lines: dict[str, list[str]] = {}
    for cell in table.cells:
        if cell.note:
            oom = "out of memory; " if cell.published == OOM else ""
            lines.setdefault(oom + cell.note, []).append(f"{cell.row}: {cell.column.name}")
    return [f"{note} ({'; '.join(_shortened(cells))})" for note, cells in lines.items()]


def _shortened(cells: list[str]) -> list[str]:
    """A whole column that is not simulated would fill the screen: three of many cells are enough to find the rest."""
    return cells if len(cells) <= 4 else [*cells[:3], f"and {len(cells) - 3} more"]


def _print(table: Table) -> None:
    """One table: title and source, its rows, its notes, mean and worst of each column."""
    console.print(f"\n[bold]{table.title}[/] [dim]({table.name}, {table.unit})[/]")
    console.print(f"[dim]{table.source}. {table.hardware}. {table.address}[/]", highlight=False)
    header, rows = table_rows(table)
    if rows:
        console.print(_rich(header, rows))
    for line in notes(table):
        console.print(f"  {line}", style="dim", highlight=False)
    for column in table.columns:
        if score := table.score(column.name):
            _, mean, worst, where = _score_cells(score, table.measure.points)
            console.print(f"  {column.name}: mean {mean}, worst {worst} ({where.split(': ')[0]})", highlight=False)


def _rich(header: Sequence[str], cells: Sequence[Sequence[str]]) -> rich_table.Table:
    """A table for the terminal. Numbers stand right; only the last column is broken where the screen is narrow."""
    table = rich_table.Table(box=None, pad_edge=False, header_style="dim")
    for name in header:
        last = name == header[-1]
        table.add_column(name, justify="left" if last or name == header[0] else "right", no_wrap=not last)
    for row in cells:
        table.add_row(*row)
    return table


# The report


def figure(table: Table) -> str:
    """Published and simulated numbers of a table as bars, or nothing if none of them is simulated. A group of bars is a
    row, with two for each column that counts; what is missing has no length.

    Args:
        table: A published table.
    """
    columns = [column.name for column in table.columns if column.counts and table.score(column.name)]
    bars: dict[str, list[float]] = {}
    for cell in table.cells:
        if cell.column.name in columns:
            place = 2 * columns.index(cell.column.name)
            pair = (0.0 if isinstance(cell.published, str) else cell.published, cell.ours or 0.0)
            bars.setdefault(cell.row, [0.0] * 2 * len(columns))[place : place + 2] = pair
    if not bars:
        return ""
    legend = [f"{side}, {name}" for name in columns for side in ("published", "simulated")]
    return charts.groups(bars, legend, f"{table.title} ({table.unit})", lambda x: _digits(x) if x else "")


def _write(folder: Path, tables: Sequence[Table], more: Sequence[Section]) -> None:
    """Writes the page and its figures. Figures are PNG if the extra is installed, else SVG."""
    pictures = [(table.name, figure(table)) for table in tables] + [("beyond", s.picture) for s in more]
    for name, drawn in pictures:
        if drawn and svg.has_png():
            files.write(folder / f"{name}.png", svg.to_png(drawn))
        elif drawn:
            files.write(folder / f"{name}.svg", drawn)
    lead = "Published measurements of pipelines on GPUs, beside what is simulated for them from first principles."
    parts = [("Mean and worst error", style.table(SUMMARY, [summary(table) for table in tables], wrapped=True))]
    for table in tables:
        shown = style.table(*table_rows(table), wrapped=True) if table.score() else ""
        listed = "".join(f"<p>{escape(line)}</p>" for line in (f"{table.source}. {table.note}", *notes(table)))
        parts.append((table.title, figure(table) + shown + listed))
    parts += [(s.heading, s.picture + style.table(s.header, s.rows)) for s in more]
    files.write(folder / "report.html", style.page("Published measurements, simulated", lead, parts))
