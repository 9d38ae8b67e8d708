"""When a run is evaluated."""

from collections.abc import Callable
from pathlib import Path

from terapipe.training.logging.metrics import read
from tests.support.ranks import Ranks
from tests.support.training_runs import PRESET, short_run
from tests.unit.training.test_run import train


def test_the_last_step_is_evaluated(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """README's run, 20 steps with evaluations every 100, ended without any."""
    config = short_run(tmp_path, PRESET, "data.eval_share=0.2", "evaluation.every=2", "evaluation.batches=1")
    ranks(1)(train, config)
    assert [row["step"] for row in read(config.folder) if "eval_loss" in row] == [2, 3]
