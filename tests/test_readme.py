"""The programs in the README run as printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from terapipe.config import parse

README = Path(__file__).parent.parent / "README.md"


def programs() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


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


@pytest.mark.exhaustive
def test_the_hugging_face_example_leaves_a_folder(tmp_path: Path) -> None:
    code = programs()[1]
    assert lines(code) <= 15
    run(code, tmp_path)
    assert {"config.json", "model.safetensors"} <= {f.name for f in (tmp_path / "trained").iterdir()}


def test_the_run_file_is_read() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert parse(text).model.preset == "gpt-small"
