"""What must not change when a run goes on."""

from collections.abc import Callable
from pathlib import Path

import pytest

from terapipe.training.logging.metrics import read
from tests.support.ranks import Ranks
from tests.support.training_runs import PRESET, short_run
from tests.unit.training.test_run import TEXT, train


def test_going_on_compares_what_must_not_change(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """Four heads became two without a word, as all tensors have the same shapes."""
    ranks(1)(train, short_run(tmp_path, PRESET))
    more = "optimizer.steps=4"
    with pytest.raises(
        ValueError, match=r"step-00000003 has others: model.heads: 4 -> 2; model.kv_heads: 4 -> 2; set what"
    ):
        ranks(1)(train, short_run(tmp_path, "model.preset=layers=2,hidden=16,heads=2", more))
    with pytest.raises(ValueError, match=r"others: data.packing: concat -> padded"):
        ranks(1)(train, short_run(tmp_path, PRESET, more, "data.packing=padded"))
    with pytest.raises(ValueError, match=r"tokenizer.end: 256 -> 0; the tokenizer's files are others; set"):
        ranks(1)(train, short_run(tmp_path, f"{PRESET},vocab=257", more, "data.tokenizer=train", "data.vocab=257"))
    (tmp_path / "text.txt").write_text(TEXT.read_text()[:4000])
    ranks(1)(train, short_run(tmp_path, PRESET, more, "optimizer.lr=1e-5", "data.seed=5", "lr.warmup=1"))
    said = next(row["message"] for row in read(tmp_path / "run") if row.get("event") == "changed")
    assert said == (
        "data.train: 3001 tokens in 1 documents -> 4001 tokens in 1 documents; data.seed: 0 -> 5; lr.warmup: 0 -> 1; "
        "optimizer.lr: 0.0003 -> 1e-05; optimizer.steps: 3 -> 4"
    )
