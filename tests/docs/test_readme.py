"""The programs in the README run as printed."""

import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from terapipe.training.config import parse

README = Path(__file__).parents[2] / "README.md"


def programs() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def program(heading: str) -> str:
    """The one below this heading."""
    section = README.read_text(encoding="utf-8").partition(f"\n### {heading}\n")[2].partition("\n#")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return str(code)


def lines(code: str) -> int:
    return sum(bool(line) for line in code.splitlines())


def run(code: str, folder: Path) -> str:
    (folder / "train.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_newcomers_script_profiles_plans_trains_and_reports(tmp_path: Path) -> None:
    code = programs()[0]
    assert lines(code) <= 12
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d{3})", run(code, tmp_path))]
    assert len(losses) == 20  # ten steps, on both ranks
    assert losses[-1] < losses[0]
    assert "<html" in (tmp_path / "step.html").read_text(encoding="utf-8")


def test_one_device_needs_no_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    exec(program("One device"), {})
    assert re.fullmatch(r"loss \d\.\d{3}\n", capsys.readouterr().out)


@pytest.mark.exhaustive
def test_the_hugging_face_example_leaves_a_folder(tmp_path: Path) -> None:
    code = program("A Hugging Face model")
    assert lines(code) <= 15
    run(code, tmp_path)
    assert {"config.json", "model.safetensors"} <= {f.name for f in (tmp_path / "trained").iterdir()}


def test_the_run_file_is_read() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert parse(text).model.preset == "gpt-small"


def test_the_diff_imports_what_it_uses_and_names_the_extra() -> None:
    text = README.read_text(encoding="utf-8")
    (diff,) = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    names = dict(re.findall(r"^\+ from (\S+) import (\w+)$", diff, re.MULTILINE))
    assert names
    assert all(hasattr(import_module(module), name) for module, name in names.items())
    assert f"+ trainer = {names['terapipe.trainers.trl']}(" in diff
    extras = tomllib.loads((README.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(requirement.startswith("trl") for requirement in extras["trl"])
    assert "pip install '.[hf,trl]'" in text


def test_the_readmes_run_warms_up() -> None:
    """Its learning rate never came near what was asked for: 100 steps of warm-up in a run of 20."""
    (text,) = re.findall(r"```toml\n(.*?)```", README.read_text(), re.DOTALL)
    assert parse(text).lr.warmup <= parse(text).optimizer.steps / 4
