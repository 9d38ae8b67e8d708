"""One run per folder."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from terapipe.training.lock import FILE, Holder, Lock
from tests.support.ranks import Ranks
from tests.support.training_runs import PRESET, short_run
from tests.unit.training.test_run import losses, train


def test_a_second_run_in_a_folder_is_refused(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """Two runs in one folder mangled each other's metrics and mixed their checkpoints."""
    config = short_run(tmp_path, PRESET)
    with Lock(config.folder), pytest.raises(ValueError, match=rf"in use by process {os.getpid()} on .*, since 20"):
        ranks(1)(train, config)
    assert {file.name for file in config.folder.iterdir()} == {FILE}, "nothing was written"
    (config.folder / FILE).write_text(json.dumps(asdict(Holder.this())))  # as one that was killed leaves it
    ranks(1)(train, config)
    assert len(losses(config.folder)) == 3


def test_a_lock_of_a_process_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system knows no locks, its text decides; the number of a process alone tells nothing."""
    monkeypatch.setattr("terapipe.training.lock._try_lock", lambda file: None)
    this = asdict(Holder.this())

    def left(**changed: object) -> None:
        (tmp_path / FILE).write_text(json.dumps({**this, **changed}))

    left()
    with pytest.raises(ValueError, match="in use by process"), Lock(tmp_path):
        pass
    left(ticks="of another process with this number")
    with Lock(tmp_path):
        pass
    left(host="another", job="7")
    with pytest.raises(ValueError, match=r"on another, .* surely gone, delete"), Lock(tmp_path):
        pass
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with Lock(tmp_path):  # torchrun has moved the first rank
        pass
