"""The programs in the README, and those that pages call whole, run as printed."""

import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from terapipe.training.config import parse

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def run(code: str, folder: Path) -> str:
    """What two ranks print."""
    (folder / "train.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss (\d+\.\d+)", text)]


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 110


def test_the_program_prints_what_the_readme_shows(tmp_path: Path) -> None:
    """It profiles, plans, trains and draws; losses may differ by rounding."""
    (code,) = blocks(README, "python")
    (shown,) = blocks(README, "text")
    printed = run(code, tmp_path)
    assert re.sub(r"\d+\.\d+", "", printed) == re.sub(r"\d+\.\d+", "", shown)
    assert losses(printed) == pytest.approx(losses(shown), abs=0.02)
    assert "<html" in (tmp_path / "step.html").read_text(encoding="utf-8")


def test_the_diff_imports_what_it_uses_and_names_the_extra() -> None:
    (diff,) = blocks(README, "diff")
    names = dict(re.findall(r"^\+ from (\S+) import (\w+)$", diff, re.MULTILINE))
    assert names
    assert all(hasattr(import_module(module), name) for module, name in names.items())
    assert f"+ trainer = {names['terapipe.trainers.trl']}(" in diff
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(requirement.startswith("trl") for requirement in extras["trl"])
    assert "pip install '.[hf,trl]'" in README.read_text(encoding="utf-8")


def test_one_device_needs_no_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks(ROOT / "docs/memory.md", "python")
    exec(code, {})
    assert re.fullmatch(r"loss \d\.\d{3}\n", capsys.readouterr().out)


def test_a_model_of_ones_own_trains(tmp_path: Path) -> None:
    (code,) = blocks(ROOT / "docs/own-model.md", "python")
    values = losses(run(code, tmp_path))
    assert len(values) == 5
    assert values[-1] < values[0]


def test_the_hugging_face_program_leaves_a_folder(tmp_path: Path) -> None:
    run(blocks(ROOT / "docs/huggingface.md", "python")[0], tmp_path)
    assert {"config.json", "model.safetensors"} <= {f.name for f in (tmp_path / "trained").iterdir()}


def test_run_files_warm_up_within_their_steps() -> None:
    """The learning rate of a printed run never came near what was asked for: 100 steps of warm-up in a run of 20."""
    texts = [text for page in (README, *(ROOT / "docs").glob("*.md")) for text in blocks(page, "toml")]
    runs = [parse(text) for text in texts if "steps" in text]
    assert runs
    assert all(run.lr.warmup <= run.optimizer.steps / 4 for run in runs)
