"""The published tables: that all of them can be simulated, and how near the fast ones come."""

from dataclasses import replace
from pathlib import Path

import pytest

from terapipe.published.simulation import Setup
from terapipe.published.table import OOM, Cell, Column, Score, Table, names


@pytest.mark.parametrize("name", names())
def test_every_row_says_what_was_run(name: str) -> None:
    """A typing error in a data file shows when it is loaded, without a simulation."""
    table = Table.load(name)
    columns = {column.name: column for column in table.columns}
    assert table.source
    assert table.hardware
    assert len({row["name"] for row in table.rows}) == len(table.rows)
    for row in table.rows:
        assert set(row) <= {"name", "setup", "published", "reason"}
        for key in row["published"]:
            setup = Setup.of({**table.setup, **row.get("setup", {}), **columns[key].setup})
            assert setup.described or row.get("reason") or columns[key].reason, f"{row['name']}: {key}"


@pytest.mark.parametrize(
    ("name", "mean", "worst"),
    [
        ("terapipe_layer", 0.05, 0.17),
        ("terapipe_schemes", 0.10, 0.21),
        ("terapipe_sweep", 0.10, 0.15),
        ("megatron_sc21", 0.04, 0.09),
        ("zero_bubble_steps", 0.04, 0.08),
        ("seq1f1b", 0.12, 0.45),
        ("trl_context", 0.05, 0.10),
        ("dlperf", 0.07, 0.15),
        ("activation_recomputation", 0.03, 0.09),
        ("llama3_405b", 0.12, 0.12),
        ("torchtitan", 0.22, 0.33),
        ("trl_memory", 0.06, 0.17),
        ("slimpipe_memory", 0.05, 0.10),
        ("streambp_memory", 0.05, 0.15),
        ("zero_bubble_memory", 0.10, 0.16),
    ],
)
def test_tables_that_are_near(name: str, mean: float, worst: float) -> None:
    score = Table.load(name).score()
    assert score is not None
    assert score.mean < mean
    assert abs(score.worst) < worst


@pytest.mark.parametrize(("name", "mean", "worst"), [("foundry_h100", 0.07, 0.20), ("foundry_a100", 0.06, 0.17)])
def test_sharded_models_are_near_where_attention_is_little(name: str, mean: float, worst: float) -> None:
    score = Table.load(name).score("up to 4k tokens")
    assert score is not None
    assert score.mean < mean
    assert abs(score.worst) < worst


def test_bubble_rates_of_1f1b_are_the_published_ones_to_all_digits() -> None:
    table = Table.load("zero_bubble_rates")
    few = replace(table, rows=table.rows[:2])
    for cell in few.cells:
        if cell.column.name == "1F1B":
            assert cell.ours == pytest.approx(cell.published, abs=5.1e-5)
        elif cell.ours is not None:
            assert cell.ours == pytest.approx(cell.published, abs=0.01)


def test_the_sweep_has_the_published_order_and_best() -> None:
    cells = Table.load("terapipe_sweep").cells
    by_ours = sorted(cells, key=lambda cell: cell.ours or 0.0)
    published = sorted(cells, key=lambda cell: float(cell.published))
    assert {cell.row for cell in by_ours[:2]} == {cell.row for cell in published[:2]} == {"16 slices", "32 slices"}
    assert by_ours[-1] == published[-1]


def test_cells_without_a_number() -> None:
    """A run that was out of memory has no error, and a row that we cannot express says why."""
    cells = Table.load("seq1f1b").cells
    failed = {cell.column.name: cell for cell in cells if cell.published == OOM}
    assert set(failed) == {"1F1B", "1F1B-I"}
    assert all(cell.error is None and cell.ours is None for cell in failed.values())
    assert "ours does not fit either" in failed["1F1B-I"].note
    untold = Table.load("kwai_offload")
    assert untold.score() is None
    assert all(cell.note.startswith("not simulated: ") for cell in untold.cells)
    assert untold.to_dict()["not_simulated"] == len(untold.cells)


def test_quotients_do_not_count() -> None:
    table = Table.load("seq1f1b")
    assert not {column.name: column for column in table.columns}["Seq1F1B / 1F1B"].counts
    ratio = next(cell for cell in table.cells if cell.column.name == "Seq1F1B / 1F1B")
    assert ratio.published == pytest.approx(53485 / 48189)
    assert ratio.ours is not None
    assert ratio.error == pytest.approx(ratio.ours / (53485 / 48189) - 1)


def test_a_score_is_of_absolute_errors_and_keeps_the_sign_of_the_worst() -> None:
    column = Column("step", {})
    score = Score.of([Cell("a", column, 2.0, 1.0), Cell("b", column, 2.0, 2.5), Cell("c", column, OOM)])
    assert score == Score(2, 0.375, -0.5, "a: step")
    assert Score.of([Cell("c", column, OOM)]) is None


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown table 'none'; the tables are terapipe"):
        Table.load("none")


OWN = """
title = "Our runs"
source = "us"
hardware = "one host"
unit = "s"

[setup]
model = "llama3-8b"
cluster = "dgx-a100:1"
layout = [1, 4, 2]
batch_size = 8
seq_len = 8192

[columns]
"step" = { order = "1f1b" }

[[rows]]
name = "Monday"
published = { "step" = 3.0 }
"""


def test_measurements_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "ours.toml").write_text(OWN)
    table = Table.load(str(tmp_path / "ours.toml"))
    assert table.name == "ours"
    (cell,) = table.cells
    assert cell.ours is not None
    assert 1 < cell.ours < 10


@pytest.mark.parametrize(
    ("was", "becomes", "message"),
    [
        ('title = "Our runs"', "", "lacks title"),
        ('unit = "s"', 'unit = "hours"', "has the unit 'hours'; the units are s, ms"),
        ('"step" = 3.0', '"stpe" = 3.0', "published numbers of \\['step'\\]"),
        ("seq_len = 8192", "sequence = 8192", "got \\['sequence'\\]"),
        ('"llama3-8b"', '"llama3-9b"', "did you mean 'llama3-8b'"),
        ("layout = [1, 4, 2]", "layout = [1, 4, 2, false, 1]", "model or layout cannot be read"),
        ("[setup]", "[setup", "line"),
    ],
)
def test_a_slip_in_a_file_is_named(tmp_path: Path, was: str, becomes: str, message: str) -> None:
    (tmp_path / "ours.toml").write_text(OWN.replace(was, becomes))
    with pytest.raises(ValueError, match=message):
        Table.load(str(tmp_path / "ours.toml"))


@pytest.mark.parametrize(
    "number", ["(5)", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("(2)", "(3)", "(8)", "(9)"))]
)
def test_the_planner_is_never_worse_than_the_published_slices(number: str) -> None:
    (planned,) = only(Table.load("terapipe"), number, "with slices").cells
    (scheme,) = only(Table.load("terapipe_schemes"), number, "with slices").cells
    assert planned.ours is not None
    assert scheme.ours is not None
    assert planned.ours <= scheme.ours * (1 + 1e-9)


def only(table: Table, row: str, column: str) -> Table:
    """The table with the rows whose names begin so, and one column."""
    rows = tuple(each for each in table.rows if each["name"].startswith(row))
    return replace(table, rows=rows, columns=tuple(each for each in table.columns if each.name == column))


def test_errors_of_rates_are_differences() -> None:
    assert Cell("a", Column("1F1B", {}), 0.25, 0.26, points=True).error == pytest.approx(0.01)
    assert Cell("a", Column("1F1B", {}), 0.25, 0.26).error == pytest.approx(0.04)
