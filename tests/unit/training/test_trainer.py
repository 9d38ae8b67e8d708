"""The loop of a run: what it keeps, and what it advises."""

from collections.abc import Callable
from pathlib import Path

import pytest

from terapipe import Pipeline, Timeline
from terapipe.training.config import RunConfig
from terapipe.training.logging.metrics import read
from tests.support.ranks import Ranks
from tests.support.training_runs import PRESET, short_run
from tests.unit.training.test_run import train


def watched(config: RunConfig) -> list[bool]:
    """Trains; after each step, whether no gradient is left."""
    found = []

    class Watched(Pipeline):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)
            found.append(all(p.grad is None for p in self.parameters()))

        def timeline(self) -> Timeline:
            raise AssertionError("sent to all ranks")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("terapipe.training.state.Pipeline", Watched)
        train(config)
    return found


def test_replicas_keep_no_zeros_and_one_rank_has_the_timeline(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """Replicas set zeros aside in every step, to add them to new gradients; all events of all ranks went to all."""
    config = short_run(tmp_path, PRESET, "data.batch_size=2", "plan.dp=2", "logging.every=1")
    assert ranks(2)(watched, config) == [[True] * 3] * 2
    config = short_run(tmp_path, PRESET, "plan.pp=2", "logging.every=1", f"logging.folder={tmp_path / '2'}")
    ranks(2)(watched, config)
    assert all({"idle", "memory"} <= row.keys() for row in read(config.folder) if "loss" in row)
    assert Timeline.from_json((config.folder / "timeline.json").read_text()).plan.num_ranks == 2


def test_what_is_set_is_not_advised(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """A run that left out steps already was told to leave them out."""
    config = short_run(tmp_path, PRESET, "optimizer.lr=1e300", "failures.on_nan=skip", "failures.max_skipped=1")
    with pytest.raises(ArithmeticError, match=r"smaller optimizer\.lr, or raise failures\.max_skipped from 1\b"):
        ranks(1)(train, config)
