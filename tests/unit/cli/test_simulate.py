"""``terapipe simulate``, of saved plans and bare ones."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from terapipe import Plan
from terapipe.cli import main
from terapipe.search.result import PlanResult
from tests.unit.planning.test_profile import made

SHAPE = [
    "--model",
    "layers=8,hidden=1024,heads=16",
    "--cluster",
    "dgx-a100:1",
    "--batch-size",
    "4",
    "--seq-len",
    "2048",
]


EIGHT = ["--dp", "2", "--pp", "2", "--tp", "2"]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2, arguments
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_simulating_a_saved_plan_repeats_what_plan_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A saved plan forgot its layout, so 906 ms became 3.3 s."""
    monkeypatch.chdir(tmp_path)
    fixed = ["--order", "terapipe", "--num-slices", "4", "--recompute", "none"]
    planned = answer(capsys, "plan", *SHAPE, *EIGHT, *fixed, "--shard", "--memory", "40GB", "--save", "plan.json")
    again = answer(capsys, "simulate", "plan.json")
    for key in ("step_time", "layout", "peak_bytes", "fits", "lengths"):
        assert again[key] == planned[key]
    assert Plan.from_json(Path("plan.json").read_text()) == PlanResult.from_json(Path("plan.json").read_text()).plan
    assert "saved with the plan" in refused(capsys, "simulate", "plan.json", "--model", "gpt-tiny")
    assert "is for tp 2, got --tp 4" in refused(capsys, "simulate", "plan.json", "--tp", "4")
    assert not answer(capsys, "simulate", "plan.json", "--memory", "1MiB")["fits"]

    Path("profile.json").write_text(made().to_json())
    by_profile = ["--profile", "profile.json", "--batch-size", "1", "--seq-len", "2048"]
    planned = answer(capsys, "plan", *by_profile, *fixed, "--save", "other.json")
    assert answer(capsys, "simulate", "other.json")["step_time"] == planned["step_time"]
    Path("profile.json").write_text(replace(made(), optimizer=(1.0,)).to_json())
    assert "has changed since" in refused(capsys, "simulate", "other.json")
    Path("profile.json").unlink()
    assert "give the profile" in refused(capsys, "simulate", "other.json")


def test_a_bare_plan_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was simulated as one replica without tensor parallelism, and options about memory were dropped."""
    bare = tmp_path / "plan.json"
    bare.write_text(Plan.uniform(batch_size=2, seq_len=4, num_slices=2, boundaries=(0, 4, 8)).to_json())
    assert "without its layout; give --dp and --tp" in refused(capsys, "simulate", str(bare), *SHAPE[:4])
    layout = ["--dp", "2", "--tp", "2"]
    assert "the costs of this plan are not in the file" in refused(capsys, "simulate", str(bare), *layout)
    whole = answer(capsys, "simulate", str(bare), *SHAPE[:4], *layout)
    shared = answer(capsys, "simulate", str(bare), *SHAPE[:4], *layout, "--shard", "--memory", "1MiB")
    assert whole["fits"]
    assert not shared["fits"]
    assert shared["peak_bytes"] != whole["peak_bytes"]
    said = refused(capsys, "simulate", str(bare), *SHAPE[:4], *layout, "--tile", "2", "--chunks", "1")
    assert "--tile and --chunks would have no effect" in said


@pytest.mark.parametrize("verb", ["compare", "simulate"])
def test_a_missing_extra_for_png_is_one_message_before_all_work(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a traceback, at the very end."""
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    assert "in a clone of terapipe, pip install '.[png]'" in refused(
        capsys, verb, *SHAPE, "--png", str(tmp_path / "x.png")
    )


def test_emulated_devices_run_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four processes. That every slice went through every stage is checked inside; nothing is said of its time."""
    fixed = ["--dp", "2", "--pp", "4", "--tp", "1", "--order", "terapipe-1f1b", "--num-slices", "4"]
    file = str(tmp_path / "plan.json")
    answer(capsys, "plan", *SHAPE, *fixed, "--save", file)
    data = answer(capsys, "simulate", file, "--emulate")
    emulated = data["emulated"]
    assert emulated["ranks"] == 4
    assert emulated["measured"] == data["measured"]["makespan"] > 0
    assert emulated["ratio"] == pytest.approx(emulated["measured"] / emulated["predicted"])
    assert emulated["stretch"] >= 1
    assert "no effect with --emulate" in refused(capsys, "simulate", file, "--emulate", "--measured", file)
