from collections.abc import Callable
from pathlib import Path

import pytest

from terapipe.training.config import RunConfig
from tests.support.ranks import Ranks
from tests.support.training_runs import TEXT, TWO_LAYERS
from tests.unit.training.test_run import config, train


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short text."""
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "text.txt").write_text(TEXT.read_text()[:2000])
    return folder


@pytest.fixture(scope="module")
def finished_run(ranks: Callable[[int], Ranks], text_folder: Path) -> RunConfig:
    """A finished run of two ranks: checkpoints of steps 1, 2 and 3, each of two shards."""
    told = config(text_folder / "straight", "", *TWO_LAYERS)
    ranks(2)(train, told)
    return told
