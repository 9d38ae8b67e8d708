"""The paper's tables, simulated: how near they come, and that the planner is never worse than the published schemes."""

import json
import sys
from pathlib import Path

import pytest

from terapipe.cli import main
from terapipe.planning.analytic import AnalyticCost
from terapipe.planning.cost import StageSpec
from terapipe.planning.hardware import Cluster
from terapipe.planning.layout import Layout
from terapipe.planning.presets import PRESETS
from terapipe.published.reproduce import CASES, ONE_LAYER, SETTINGS, SWEEP, Row, mean_error, orders, outcome, row, sweep


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [row(setting) for setting in SETTINGS]


def test_every_latency_and_speed_up_is_near_the_published(rows: list[Row]) -> None:
    for found in rows:
        without, sliced, speedup = found.errors
        assert abs(without) <= 0.20, found.setting
        assert abs(sliced) <= 0.20, found.setting
        assert abs(speedup) <= 0.15, found.setting
    assert mean_error(rows) < 0.10


def test_the_planner_is_never_worse_than_the_published_scheme(rows: list[Row]) -> None:
    compared = [found for found in rows if found.scheme]
    assert len(compared) == 5
    for found in compared:
        assert found.scheme is not None
        assert found.sliced.step_time <= found.scheme.step_time * (1 + 1e-9)


def test_the_sweep_has_the_published_order_and_best(rows: list[Row]) -> None:
    points = sweep(rows[8].sliced.step_time)
    even = {point["slices"]: point["simulated"] for point in points if point["slices"] != "planned"}
    assert sorted(even, key=lambda n: even[n]) == sorted(SWEEP, key=lambda n: SWEEP[n])
    assert min(even, key=lambda n: even[n]) == 16
    assert points[-1]["simulated"] <= min(even.values())


def test_single_layers_are_near_the_published() -> None:
    cost = AnalyticCost(PRESETS["gpt3-1b"], Cluster("p3.16xlarge:24"), Layout(8, 24, 1))
    for tokens, milliseconds in ONE_LAYER.items():
        assert float(cost.forward(StageSpec(1), 1, tokens, 0)) == pytest.approx(milliseconds * 1e-3, rel=0.17)


@pytest.mark.exhaustive
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--json", "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [setting["id"] for setting in found["settings"]] == list(range(1, 11))
    assert set(found["settings"][0]) >= {"without", "with", "speedup", "slices"}
    assert set(found["settings"][0]["without"]) == {"published", "simulated"}
    assert len(found["sweep"]) == len(SWEEP) + 1
    assert 0 < found["mean_error"] < 0.2
    assert "TeraPipe, reproduced" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("has_extra", [True, False])
def test_figures_need_no_extra(
    rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_extra: bool
) -> None:
    """Without the extra ``png``, nothing at all was written."""
    monkeypatch.setattr("terapipe.cli.reproduce.rows", lambda: rows)
    monkeypatch.setattr(
        "terapipe.cli.reproduce.sweep", lambda planned: [{"slices": 8, "published": 2.0, "simulated": planned}]
    )
    if not has_extra:
        monkeypatch.setitem(sys.modules, "resvg_py", None)
    assert main(["reproduce", "--out", str(tmp_path)]) == 0
    kind = "png" if has_extra else "svg"
    names = {"report.html", *(f"{name}.{kind}" for name in ("step-times", "speed-ups", "sweep"))}
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.exhaustive
def test_the_open_question_in_one_setting() -> None:
    """Few sequences on many stages: 1F1B saves memory, not time; slices save time."""
    by_name = {choice.name: choice for choice in orders(SETTINGS[7])}
    assert by_name["1f1b"].peak_bytes < by_name["gpipe"].peak_bytes
    assert by_name["1f1b"].step_time > 0.95 * by_name["gpipe"].step_time
    assert by_name["terapipe-1f1b"].step_time < 0.6 * by_name["1f1b"].step_time


@pytest.mark.exhaustive
def test_what_if_cases_have_an_outcome() -> None:
    found = outcome(CASES[0])
    assert found.best_1f1b is not None
    assert found.whole is not None
    assert found.planned.step_time <= found.whole.step_time * 1.006  # but for preferring whole sequences
    assert found.whole.step_time <= found.best_1f1b.step_time
    assert found.planned.fits
    assert found.others
