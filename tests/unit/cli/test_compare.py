"""``terapipe compare``: its list, its page, and options that it refuses."""

import json
from html import unescape
from pathlib import Path

import pytest

from terapipe import __version__
from terapipe.cli import main
from tests.unit.cli.test_commands import FOUR, SMALL, printed


def test_compare_prints_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, chart = tmp_path / "page.html", tmp_path / "chart.svg"
    rows = printed(capsys, "compare", *SMALL, *FOUR, "--html", str(page), "--svg", str(chart))
    assert [row["name"] for row in rows][:2] == ["gpipe", "1f1b"]
    common = {"name", "step_time", "idle", "peak_bytes", "fits", "tokens_per_second", "mfu", "traffic", "cluster"}
    assert all(common <= set(row) for row in rows)
    assert next(row["name"] for row in rows if row.get("rival")) == "DDP"
    assert "terapipe-1f1b" in page.read_text()
    assert chart.read_text().startswith("<svg")
    assert main(["compare", *SMALL, *FOUR]) == 0
    assert "terapipe, equal slices" in capsys.readouterr().out


def test_a_comparison_says_what_was_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page lacked the ratio, the batch, the budget, that it is simulated, and the version."""
    page = tmp_path / "page.html"
    assert main(["compare", *SMALL, *FOUR, "--html", str(page)]) == 0
    shown, written = capsys.readouterr(), unescape(page.read_text())
    for name in ("step", "tokens/s", "MFU", "peak memory", "sent in host", "dp x pp x tp"):
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


def test_a_comparison_says_what_training_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = printed(capsys, "compare", *SMALL, *FOUR, "--tokens", "50B", "--price", "2.5")
    for row in rows:
        assert row["days"] == pytest.approx(50e9 / row["tokens_per_second"] / 86400)
        assert row["cost"] == pytest.approx(row["days"] * 24 * 8 * 2.5)
    assert main(["compare", *SMALL, *FOUR, "--tokens", "50B"]) == 0
    text = capsys.readouterr().out
    assert "days" in text
    assert "cost" not in text
    assert main(["compare", *SMALL, *FOUR, "--price", "2.5"]) == 2
    assert "needs a number of tokens" in capsys.readouterr().err
    assert main(["compare", *SMALL, *FOUR, "--tokens", "many"]) == 2
    assert "reads like 50B" in capsys.readouterr().err


def test_clusters_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with its best plan and its best rival; a cluster on which nothing fits says so and does not end the rest."""
    page = tmp_path / "page.html"
    model = ["compare", "--model", "layers=8,hidden=2048,heads=16", "--batch-size", "8", "--seq-len", "1024"]
    two = ["--cluster", "dgx-h100:1", "--cluster", "dgx-a100:1"]
    assert main([*model, *two, "--html", str(page), "--tokens", "1B", "--price", "2"]) == 0
    text, written = capsys.readouterr().out, unescape(page.read_text())
    for word in ("dgx-h100:1", "dgx-a100:1", "days", "cost", "MFU", "FSDP2", "1B tokens"):
        assert word in text, word
        assert word in written, word
    for word in ("H100 data sheet", "A100 data sheet", "FlashAttention-3", "8 seq of 1024 tokens", __version__):
        assert word in written, word
    rows = printed(capsys, *model, *two)
    assert {row["cluster"] for row in rows} == {"dgx-h100:1", "dgx-a100:1"}
    assert main([*model, *two, "--svg", str(tmp_path / "chart.svg")]) == 2
    assert "--svg would have no effect with several clusters" in capsys.readouterr().err
    assert main(["compare", "--model", "gpt3-175b", *two, "--cluster", "dgx-h200:4", *model[3:]]) == 0
    text = capsys.readouterr().out
    assert "dgx-a100:1: " in text.splitlines()[-1]
    assert "GiB" in text.splitlines()[-1]


def test_rivals_are_shown_where_no_plan_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """A vocabulary that a shard of each device holds, and the first and the last stage do not."""
    model = ["compare", "--model", "layers=8,hidden=512,heads=8,vocab=128000", "--batch-size", "8", "--seq-len", "1024"]
    tight = [*model, "--cluster", "dgx-a100:1", "--tp", "1", "--memory", "900MiB"]
    rows = printed(capsys, *tight)
    assert not any(row["fits"] for row in rows if not row.get("rival"))
    assert any(row["fits"] for row in rows if row.get("rival"))
    assert main(tight) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Do not use a pipeline here: none fits (the smallest, " in text
    assert "lacks" in text
    assert "fits in no layout: its smallest plan" in text
    assert main([*model, "--cluster", "dgx-a100:1", "--memory", "10MiB"]) == 2
    assert "no plan fits into 0.01 GiB per device: the smallest found needs" in " ".join(
        capsys.readouterr().err.split()
    )
