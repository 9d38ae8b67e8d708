"""Writes numbers of the simulator into docs/predictions.md, docs/reproduction.md (the TeraPipe paper) and README.md.

    python docs/predictions.py

Tables are simulated anew, in a few seconds. Text by hand stays: only what is between the marks is written.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from terapipe.cli.reproduce import SUMMARY, cell_text, error_text, notes, summary, table_rows
from terapipe.published.table import Table, names

ROOT = Path(__file__).resolve().parent.parent
PAGE, README, PAPER = ROOT / "docs" / "predictions.md", ROOT / "README.md", ROOT / "docs" / "reproduction.md"
SLOW = ("terapipe", "zero_bubble_rates", "slimpipe_bubble")  # seconds each; the others take less together
HEADLINE = (
    ("megatron_sc21", "Megatron-LM from 1.7B to 1T on A100s"),
    ("activation_recomputation", "recomputation on A100s, blind,"),
    ("zero_bubble_steps", "measured zero-bubble steps"),
    ("trl_context", "one to four million tokens on H100s"),
    ("foundry_h100", "FSDP on up to 512 H100s"),
    ("seq1f1b", "Seq1F1B's slices"),
)
OPENING = "Predictions are held against [published GPU runs](docs/predictions.md):"


def markdown(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def wrapped(text: str, indent: str = "") -> str:
    """Text in lines of at most 120 characters, as the other pages have it."""
    return textwrap.fill(text, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def section(table: Table) -> str:
    """One table: its source, what is to know about it, published and simulated numbers, and what is missing."""
    source = f"[{table.source}]({table.address})" if table.address else table.source
    origin = f"{source}. {table.hardware}. In {table.unit}; `--table {table.name}`."
    parts = [f"### {table.title}", origin if table.address else wrapped(origin)]
    if table.note:
        parts.append(wrapped(table.note))
    header, rows = table_rows(table)
    if len(header) > 1:
        parts.append(markdown(header, rows))
    if listed := notes(table):
        parts.append("\n".join(wrapped(f"- {line}", "  ") for line in listed))
    return "\n\n".join(parts)


def between(text: str, mark: str, content: str) -> str:
    """The text with this content between two marks of a name."""
    start, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    return re.sub(f"{start}.*?{end}", lambda _: f"{start}\n\n{content}\n\n{end}", text, flags=re.DOTALL)


def in_order(tables: list[Table]) -> list[Table]:
    """Times first, then bubbles, then memory."""
    return sorted(tables, key=lambda table: (not table.measure.timed, not table.measure.points))


def page(tables: list[Table], text: str) -> str:
    """The page with the numbers of these tables. Others keep theirs, and so does the table of blind figures, which are
    those of one day."""
    start, summaries, rest = re.split("(<!-- summary -->.*<!-- end of summary -->)", text, flags=re.DOTALL)
    for table in tables:
        row = f"| {' | '.join(summary(table))} |"
        summaries = re.sub(rf"^\| {table.name} \|.*$", lambda _, row=row: row, summaries, flags=re.MULTILINE)  # type: ignore[misc]
        rest = between(rest, table.name, section(table))
    return start + summaries + rest


def skeleton() -> Iterator[str]:
    """A page without numbers: a row and a section for every table."""
    tables = in_order([Table.load(name) for name in names()])
    yield markdown(SUMMARY, [(table.name, *[""] * (len(SUMMARY) - 1)) for table in tables])
    yield "\n\n".join(f"<!-- {table.name} -->\n<!-- end of {table.name} -->" for table in tables)


def readme(text: str) -> str:
    """The README with the mean and worst errors of the tables of ``HEADLINE``, which take no time."""
    parts = []
    for name, what in HEADLINE:
        score = Table.load(name).score()
        if score is not None:
            mean = error_text(score.mean, False).removeprefix("+")
            worst = error_text(abs(score.worst), False).removeprefix("+")
            parts.append(f"{what} {mean} off on average, {worst} at worst" if not parts else f"{what} {mean}, {worst}")
    lines = textwrap.fill(f"{OPENING} {'; '.join(parts)}.", 118, break_on_hyphens=False).splitlines()
    quoted = "\n".join(f"> {line}" for line in lines)
    return re.sub(rf"^> {re.escape(OPENING)}.*\n(?:> .*\n)*", lambda _: f"{quoted}\n", text, flags=re.MULTILINE)


def paper(settings: Table, text: str) -> str:
    """The page about the TeraPipe paper with its ten settings and its sweep."""
    sweep, mean = Table.load("terapipe_sweep"), summary(settings)[3]
    points = "; ".join(f"{cell.row} {cell_text(cell)}" for cell in sweep.cells)
    summed = wrapped(f"The mean error of the 20 step times is {mean}. Equal slices in setting (9): {points}.")
    return between(text, "terapipe", f"{markdown(*table_rows(settings))}\n\n{summed}")


if __name__ == "__main__":
    listed, sections = skeleton()
    text = between(between(PAGE.read_text(encoding="utf-8"), "summary", listed), "tables", sections)
    PAGE.write_text(page([Table.load(name) for name in names()], text), encoding="utf-8")
    settings = Table.load("terapipe")
    PAPER.write_text(paper(settings, PAPER.read_text(encoding="utf-8")), encoding="utf-8")
    mean = f"simulated with a mean error of {summary(settings)[3]}"
    text = re.sub(r"simulated with a mean error of [0-9.]+ %", mean, README.read_text(encoding="utf-8"))
    README.write_text(readme(text), encoding="utf-8")
