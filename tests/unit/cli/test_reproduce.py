"""``terapipe reproduce``: what it prints, as text and JSON, and what it writes."""

import json
import sys
from pathlib import Path

import pytest

from terapipe.cli import main
from terapipe.cli.reproduce import error_text, notes, table_rows
from terapipe.published.table import Table, names


def test_one_table_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--table", "terapipe_layer"]) == 0
    text = capsys.readouterr().out
    assert "1.458 / 1.46" in text
    assert "forward: mean" in text
    assert "Simulated in" in text


def test_mean_and_worst_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--table", "seq1f1b", "--table", "kwai_offload", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) == {"tables", "seconds"}
    table = data["tables"]["seq1f1b"]
    assert 0 < table["mean"] < abs(table["worst"]) < 0.5
    assert table["out_of_memory"] == 4
    assert set(table["columns"]["1F1B"]) == {"cells", "mean", "worst", "where"}
    assert set(table["rows"][0]) == {"row", "column", "published", "simulated", "error", "note"}
    assert data["tables"]["kwai_offload"]["not_simulated"] == 9


@pytest.mark.exhaustive
def test_all_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert list(tables) == names()
    assert tables["terapipe"]["cells"] == 20
    assert 0 < tables["terapipe"]["mean"] < 0.1


@pytest.mark.parametrize("has_extra", [True, False])
def test_figures_need_no_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_extra: bool) -> None:
    """Without the extra ``png``, nothing at all was written."""
    if not has_extra:
        monkeypatch.setitem(sys.modules, "resvg_py", None)
    chosen = ["--table", "terapipe_layer", "--table", "seq1f1b", "--table", "kwai_offload"]
    assert main(["reproduce", *chosen, "--out", str(tmp_path)]) == 0
    kind = "png" if has_extra else "svg"
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", f"terapipe_layer.{kind}", f"seq1f1b.{kind}"}
    page = (tmp_path / "report.html").read_text()
    assert "Published measurements, simulated" in page
    assert "does not fit either" in page


def test_errors_for_display() -> None:
    assert [error_text(e, False) for e in (0.0, -0.0004, 0.0123, -0.096, 3.43)] == [
        "0 %",
        "0 %",
        "+1.2 %",
        "-10 %",
        "+343 %",
    ]
    assert error_text(0.0091, True) == "+0.9 points"


def test_rows_that_are_not_simulated_are_notes() -> None:
    table = Table.load("slimpipe_memory")
    _, rows = table_rows(table)
    assert len(rows) == len(table.rows)
    assert any(row[1].endswith("/ -") for row in rows)
    assert any("not simulated: experts" in line for line in notes(table))
