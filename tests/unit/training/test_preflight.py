"""What is refused before a rank is started, and when there is nothing to start."""

import json
from pathlib import Path

import pytest

from terapipe.training.preflight import check_run, finished_at
from tests.support.training_runs import PRESET, copy_run, short_run
from tests.unit.training.test_run import train


@pytest.mark.parametrize(
    ("change", "ranks", "message"),
    [
        ("model.factory=nowhere.py:make", 1, r"model\.factory: there is no file nowhere\.py"),
        ("data.train=nowhere-*.txt", 1, r"'nowhere-\*\.txt' matches none"),
        ("objective.kind=nowhere.py:loss", 1, r"objective\.kind: there is no file nowhere\.py"),
        ("plan.pp=3", 3, r"the model has 2, plan\.pp 3 with plan\.chunks 1 asks for 3 stages"),
        ("checkpoints.resume=nowhere", 1, r"checkpoints\.resume must be auto, off or the folder .* got 'nowhere'"),
    ],
)
def test_what_is_refused(tmp_path: Path, change: str, ranks: int, message: str) -> None:
    model = () if change.startswith("model") else (PRESET,)
    with pytest.raises((ValueError, OSError), match=message):
        check_run(short_run(tmp_path, *model, change), ranks)


def test_a_finished_run_has_nothing_to_do(tmp_path: Path) -> None:
    config = short_run(tmp_path, PRESET)
    assert finished_at(config) is None  # never started
    train(config)
    assert finished_at(config) == 3
    assert finished_at(short_run(tmp_path, PRESET, "optimizer.steps=4")) is None
    assert finished_at(short_run(tmp_path, PRESET, "data.seed=1")) is None  # others would be trained on
    stopped = copy_run(config, "stopped")
    (stopped.folder / "ended.json").write_text(json.dumps({"how": "stopped", "step": 3}))
    assert finished_at(stopped) is None
    lost = copy_run(config, "lost")
    next((lost.folder / "checkpoints").glob("step-*/*.distcp")).unlink()
    assert finished_at(lost) is None
