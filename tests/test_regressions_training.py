"""What went wrong in training runs once, and must not again: one short story each."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from terapipe.config import RunConfig, parse
from terapipe.training.lock import FILE, Holder, Lock
from terapipe.training.metrics import read
from terapipe.training.tokenizer import ByteTokenizer
from tests.ranks import Ranks
from tests.training.test_run import TEXT, losses, train


def told(folder: Path, *replaced: str) -> RunConfig:
    """A run of three steps on bytes; without a model."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(TEXT.read_text()[:3000])
    lines = f"""
[data]
train = "{text}"
tokens = 16
[plan]
seconds = 0
[schedule]
steps = 3
warmup = 0
[evaluation]
every = 0
[logging]
folder = "{folder / "run"}"
tensorboard = false
[failures]
timeout = 30
"""
    return parse(lines, replaced)


GPT = "model.preset=layers=2,hidden=16,heads=4"


# One run per folder


def test_a_second_run_in_a_folder_is_refused(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """Two runs in one folder mangled each other's metrics and mixed their checkpoints."""
    config = told(tmp_path, GPT)
    with Lock(config.folder), pytest.raises(ValueError, match=rf"in use by process {os.getpid()} on .*, since 20"):
        ranks(1)(train, config)
    assert {file.name for file in config.folder.iterdir()} == {FILE}, "nothing was written"
    (config.folder / FILE).write_text(json.dumps(asdict(Holder.this())))  # as one that was killed leaves it
    ranks(1)(train, config)
    assert len(losses(config.folder)) == 3


def test_a_lock_of_a_process_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system knows no locks, its text decides; the number of a process alone tells nothing."""
    monkeypatch.setattr("terapipe.training.lock._locked", lambda file: None)
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


# Going on


def test_going_on_compares_what_must_not_change(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """Four heads became two without a word, as all tensors have the same shapes."""
    ranks(1)(train, told(tmp_path, GPT))
    more = "schedule.steps=4"
    with pytest.raises(
        ValueError, match=r"step-00000003 has others: model.heads: 4 -> 2; model.kv_heads: 4 -> 2; set what"
    ):
        ranks(1)(train, told(tmp_path, "model.preset=layers=2,hidden=16,heads=2", more))
    with pytest.raises(ValueError, match=r"others: data.packing: joined -> alone"):
        ranks(1)(train, told(tmp_path, GPT, more, "data.packing=alone"))
    with pytest.raises(ValueError, match=r"tokenizer.end: 256 -> 0; the tokenizer's files are others; set"):
        ranks(1)(train, told(tmp_path, f"{GPT},vocab=257", more, "data.tokenizer=train", "data.vocab=257"))
    (tmp_path / "text.txt").write_text(TEXT.read_text()[:4000])
    ranks(1)(train, told(tmp_path, GPT, more, "optimizer.lr=1e-5", "data.seed=5"))
    said = next(row["message"] for row in read(tmp_path / "run") if row.get("event") == "changed")
    assert said == (
        "data.train: 3001 tokens in 1 documents -> 4001 tokens in 1 documents; data.seed: 0 -> 5; "
        "optimizer.lr: 0.0003 -> 1e-05; schedule.steps: 3 -> 4"
    )


def test_a_vocabulary_is_refused_not_replaced(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """A shape's vocabulary and positions were those of the data, whatever the shape said."""
    with pytest.raises(ValueError, match=r"a model of 100 and a tokenizer of 257; .* vocab=257 in model.preset"):
        ranks(1)(train, told(tmp_path, f"{GPT},vocab=100"))
    with pytest.raises(ValueError, match=r"max_tokens=8 in model.preset and data.tokens 16"):
        ranks(1)(train, told(tmp_path, f"{GPT},max_tokens=8"))


# Tokenizers


def test_the_tokenizer_follows_the_model(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """A pretrained model was trained on bytes, which were the default whatever the model."""
    from transformers import LlamaConfig

    folder = tmp_path / "llama"
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(**sizes, vocab_size=300).save_pretrained(folder)
    own = f"model.config={folder / 'config.json'}"
    with pytest.raises(ValueError, match=r"llama holds no tokenizer .* set data.tokenizer"):
        ranks(1)(train, told(tmp_path, own))
    ByteTokenizer().save(folder)
    config = told(tmp_path, own)
    assert config.data.tokenizer == str(folder)
    assert told(tmp_path, own, "data.tokenizer=bytes").data.tokenizer == "bytes"
    LlamaConfig(**sizes, vocab_size=200).save_pretrained(folder)
    with pytest.raises(ValueError, match="a model of 200 and a tokenizer of 257; take the model's own"):
        ranks(1)(train, config)
