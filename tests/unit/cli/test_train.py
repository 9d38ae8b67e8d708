"""``terapipe train`` tells a failure where failures are told."""

from pathlib import Path

import pytest

from terapipe.cli import main
from tests.support.training_runs import PRESET, short_run


def test_a_failure_is_told_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was part of what a run prints, and lost where that went to a file."""
    path = tmp_path / "run.toml"
    path.write_text(short_run(tmp_path, PRESET, "plan.pp=2").to_toml())
    monkeypatch.setattr("terapipe.launch.processes.launch_module", lambda *given: "rank 1 ended with signal SIGKILL")
    assert main(["train", str(path)]) == 1
    assert capsys.readouterr() == ("", "terapipe train: rank 1 ended with signal SIGKILL\n")
