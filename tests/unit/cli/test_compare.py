"""``terapipe compare``: its list, its page, and options that it refuses."""

import json
from html import unescape
from pathlib import Path

import pytest

from terapipe import __version__
from terapipe.cli import main
from terapipe.reporting.plans import HEADER
from tests.unit.cli.test_commands import FOUR, SMALL, printed


def test_compare_prints_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, chart = tmp_path / "page.html", tmp_path / "chart.svg"
    rows = printed(capsys, "compare", *SMALL, *FOUR, "--html", str(page), "--svg", str(chart))
    assert [row["name"] for row in rows][:2] == ["gpipe", "1f1b"]
    assert all({"name", "step_time", "idle", "peak_bytes", "fits", "tokens_per_second"} <= set(row) for row in rows)
    assert "terapipe-1f1b" in page.read_text()
    assert chart.read_text().startswith("<svg")
    assert main(["compare", *SMALL, *FOUR]) == 0
    assert "terapipe, equal slices" in capsys.readouterr().out


def test_a_comparison_says_what_was_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page lacked the ratio, the batch, the budget, that it is simulated, and the version."""
    page = tmp_path / "page.html"
    assert main(["compare", *SMALL, *FOUR, "--html", str(page)]) == 0
    shown, written = capsys.readouterr(), unescape(page.read_text())
    for name in HEADER:
        assert name in shown.out
        assert f"<th scope='col'>{name}</th>" in written
    for fact in ("simulated", "1 seq of 2048 tokens", "16 GiB, 2.97 GiB less for driver", "the best for each row"):
        assert fact in shown.out, fact
        assert fact in written, fact
    assert __version__ in written
    assert "times as fast as the best with whole sequences (" in shown.out
    assert shown.err == ""  # progress is for terminals
    assert main(["compare", *SMALL, "--same-layout", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len({tuple(row["layout"].items()) for row in rows}) == 1


def test_a_comparison_takes_no_cut(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *SMALL, "--order", "1f1b", "--num-slices", "4"]) == 2
    assert "--num-slices and --order would have no effect with compare" in capsys.readouterr().err
