"""The examples in the README run as printed, and files of runs are read as printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from terapipe.config import parse

README = Path(__file__).parent.parent / "README.md"


def run(number: int, folder: Path) -> str:
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[number]
    (folder / "train.py").write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_trains_under_torchrun(tmp_path: Path) -> None:
    losses = [float(x) for x in re.findall(r"step \d+: loss ([\d.]+)", run(0, tmp_path))]
    assert len(losses) == 10
    assert losses[-1] < losses[0]


def test_the_hugging_face_example_leaves_a_folder(tmp_path: Path) -> None:
    run(1, tmp_path)
    assert {"config.json", "model.safetensors"} <= {f.name for f in (tmp_path / "trained").iterdir()}
    lines = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1].splitlines()
    assert sum(bool(line) for line in lines) <= 15


@pytest.mark.parametrize("page", ["README.md", "docs/training.md"])
def test_files_of_runs_are_read(page: str) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", (README.parent / page).read_text(), re.DOTALL)
    assert parse(text).model.preset == "gpt-small"
