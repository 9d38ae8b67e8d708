"""The command line as a user meets it: its contract, its messages, its exit codes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from terapipe import Plan, Timeline, schedule
from terapipe.cli import main
from terapipe.planning.profile import Profile
from terapipe.scheduling.simulator import simulate
from tests.support.costs import SimpleCost
from tests.unit.planning.test_profile import made

BIG = ["--model", "gpt3-175b", "--cluster", "p3.16xlarge:48", "--batch-size", "2", "--seq-len", "2048"]
LAYOUT = ["--dp", "1", "--pp", "48", "--tp", "8"]
SMALL = [
    "--model",
    "layers=8,hidden=4096,heads=32",
    "--cluster",
    "p3.16xlarge:1",
    "--batch-size",
    "1",
    "--seq-len",
    "2048",
]
FOUR = ["--dp", "1", "--pp", "4", "--tp", "2"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_alone_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("usage: terapipe")
    assert "train a model as described in run.toml" in printed.out
    assert not printed.err


@pytest.mark.parametrize(
    ("word", "hint"),
    [("trian", "; did you mean 'train'? See"), ("repro", "; did you mean 'reproduce'? See"), ("x", ". See")],
)
def test_a_wrong_verb_is_told_the_right_one(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word, "run.toml"]) == 2
    said = capsys.readouterr().err
    assert said == f"{said.partition(', got')[0]}, got '{word}'{hint} terapipe --help\n"
    assert "doctor, train, profile" in said


def test_plan_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "plan", *BIG, *LAYOUT, "--order", "terapipe")
    keys = {"step_time", "order", "layout", "sizes", "lengths", "idle", "peak_bytes", "seconds_to_plan"}
    assert keys <= set(found)
    assert found["layout"] == {"dp": 1, "pp": 48, "tp": 8, "shard": False}
    assert sum(found["sizes"]) == 2
    assert all(sum(row) == 2048 for row in found["lengths"])
    assert found["order"] == "terapipe"
    assert 0.5 < found["step_time"] < 2


def test_planning_and_comparing_do_not_load_torch() -> None:
    for verb in ("plan", "compare", "simulate"):
        code = (
            f"import sys; from terapipe.cli import main; main([{verb!r}, *{[*SMALL, *FOUR, '--json']!r}]); "
            "sys.exit(3 if 'torch' in sys.modules else 0)"
        )
        assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_a_saved_plan_is_what_the_runtime_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "plan.json"
    found = printed(capsys, "plan", *SMALL, *FOUR, "--save", str(saved))
    plan = Plan.from_json(saved.read_text())
    assert [list(row) for row in plan.lengths] == found["lengths"]
    again = printed(capsys, "simulate", str(saved))
    assert again["step_time"] == found["step_time"]


def test_plan_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, *FOUR]) == 0
    shown = capsys.readouterr().out
    assert "times as fast as the best without slicing" in shown
    assert "Runners-up" in shown
    assert main(["plan", *SMALL, "--dp", "1", "--pp", "1", "--tp", "1", "--memory", "64GiB"]) == 0
    assert "do not slice" in capsys.readouterr().out


def test_microbatches_are_written_in_one_way(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan said "sequences x microbatches", its table "microbatches x sequences"."""
    eight = [word if word != "1" else "8" for word in SMALL]
    assert main(["plan", *eight, *FOUR, "--order", "1f1b", "--microbatch-size", "2"]) == 0
    assert "microbatches  4 x 2 seq" in capsys.readouterr().out
    rows = printed(capsys, "compare", *eight, *FOUR, "--microbatch-size", "2")
    assert rows[0]["sizes"] == [2] * 4
    assert main(["compare", *eight, *FOUR, "--microbatch-size", "2"]) == 0
    assert "4 x 2 seq" in capsys.readouterr().out


def test_simulate_writes_what_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {kind: tmp_path / f"step.{kind}" for kind in ("html", "svg", "trace")}
    options = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    assert main(["simulate", *SMALL, *FOUR, *options]) == 0
    shown = capsys.readouterr().out
    assert "predicted:" in shown
    assert "rank 0" in shown
    assert "fill" in shown
    assert json.loads(files["trace"].read_text())
    assert "<html" in files["html"].read_text()


def test_simulate_sets_a_measured_timeline_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan((1,), ((1024, 1024),), (0, 2, 4, 6, 8))
    saved, measured = tmp_path / "plan.json", tmp_path / "timeline.json"
    saved.write_text(plan.to_json())
    measured.write_text(simulate(schedule(plan), SimpleCost(token=1e-5)).to_json())
    options = ["simulate", str(saved), *SMALL[:4], "--dp", "1", "--tp", "1", "--measured", str(measured)]
    assert main(options) == 0
    assert "measured:" in capsys.readouterr().out
    other = Timeline(Plan((1,), ((2048,),), (0, 2, 4, 6, 8)), ())
    measured.write_text(other.to_json())
    assert main(options) == 2
    assert "measured with another plan" in capsys.readouterr().err


def test_a_profile_takes_the_clusters_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    path.write_text(made().to_json())
    found = printed(capsys, "plan", "--profile", str(path), "--batch-size", "1", "--seq-len", "2048")
    assert found["layout"]["pp"] * found["layout"]["dp"] == 2
    four = printed(capsys, "plan", "--profile", str(path), "--batch-size", "1", "--seq-len", "2048", "--pp", "3")
    assert four["layout"]["pp"] == 3


def test_a_cost_table_is_solved_on_its_own_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "table.json"
    seconds = {(1, 0): 1.0, (1, 1): 1.5, (1, 2): 9.0, (2, 0): 4.0, (2, 1): 2.0, (3, 0): 10.0}
    rows = [{"size": 1, "length": 64 * n, "context": 64 * c, "seconds": s} for (n, c), s in seconds.items()]
    path.write_text(json.dumps(rows))
    common = [
        "plan",
        "--cost-table",
        str(path),
        "--batch-size",
        "1",
        "--seq-len",
        "192",
        "--pp",
        "3",
        "--order",
        "terapipe",
    ]
    found = printed(capsys, *common)
    assert found["lengths"] == [[64, 128]]
    assert found["step_time"] == pytest.approx(3.0 + 2 * 2.0)


def broken(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_bad_input_is_one_message_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = made().to_json()
    whole, cut = broken(tmp_path / "whole.json", profile), broken(tmp_path / "cut.json", profile[:500])
    nan = broken(tmp_path / "nan.json", '[{"size": 1, "length": 8, "context": 0, "seconds": NaN}]')
    negative = broken(tmp_path / "negative.json", '[{"size": 1, "length": 8, "context": 0, "seconds": -1}]')
    size = ["--batch-size", "2", "--seq-len", "2048"]
    cases: list[tuple[list[str], str]] = [
        (["plan", "--model", "gpt3-175", *BIG[2:]], "did you mean 'gpt3-175b'"),
        (["plan", *BIG, "--dp", "3"], "not divisible by dp 3"),
        (["plan", *BIG, *LAYOUT, "--memory", "1GiB"], "no plan fits into 1.00 GiB"),
        (["plan", *BIG, "--memory", "lots"], "a number of bytes reads like"),
        (
            ["plan", *BIG, "--num-slices", "1024,1024"],
            "lengths are given by --slice-lengths",
        ),
        (["plan", *BIG, "--slice-lengths", "a,b"], "lengths are whole numbers"),
        (["plan", "--cluster", "p3.16xlarge:48", *size], "--cluster needs --model"),
        (["plan", "--profile", cut, *size], "damaged or cut off"),
        (["plan", "--profile", whole, "--model", "gpt-tiny", *size], "the profile is of another model"),
        (["plan", "--profile", str(tmp_path / "none.json"), *size], "No such file"),
        (["plan", "--cost-table", nan, "--pp", "2", *size], "finite and at least 0"),
        (["plan", "--cost-table", negative, "--pp", "2", *size], "finite and at least 0"),
        (["compare", *BIG, "--order", "gpipe"], "--order would have no effect with compare"),
        (["simulate", cut, "--cluster", "cpu", "--model", "gpt-tiny"], "not JSON"),
        (["simulate", "--cluster", "cpu", "--model", "gpt-tiny"], "give a saved plan, or --batch-size and --seq-len"),
        (["profile", "--model", "gpt-tiny", "--seq-len", "64", "--ranks", "9"], "every rank measures"),
        (["profile", "--model", "gpt-tiny", "--seq-len", "64", "--sizes", "x"], "--sizes lists numbers"),
    ]
    for arguments, said in cases:
        assert main(arguments) == 2, arguments
        captured = capsys.readouterr()
        assert said in captured.err, arguments
        assert "Traceback" not in captured.err
        assert captured.out == ""


def test_the_installed_command_answers() -> None:
    done = subprocess.run([sys.executable, "-m", "terapipe", "plan", "--nonsense"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert subprocess.run([sys.executable, "-m", "terapipe", "--version"], capture_output=True).returncode == 0


@pytest.mark.exhaustive
def test_profile_measures_a_small_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two real ranks, started as a user would; what they measured makes a plan."""
    out = tmp_path / "profile.json"
    assert main(["profile", "--model", "gpt-tiny", "--seq-len", "128", "--seconds", "2", "--out", str(out)]) == 0
    assert "error on held-out points" in capsys.readouterr().out
    profile = Profile.from_json(out.read_text())
    assert profile.ranks == 2
    assert profile.transfers
    assert {s.kind for s in profile.samples} >= {"forward", "backward", "weights", "head", "embedding"}
    assert any(s.context for s in profile.samples)
    assert main(["plan", "--profile", str(out), "--batch-size", "1", "--seq-len", "128", "--json"]) == 0
