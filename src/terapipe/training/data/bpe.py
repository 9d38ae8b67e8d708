"""Tokenizers that are trained on the data."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from terapipe.training.data.hf_tokenizer import library
from terapipe.training.data.pieces import cut
from terapipe.training.data.tokenizer_files import END, write_config

ENOUGH = 50_000_000  # characters to train on
LONGEST = 100  # characters without a space, where a tokenizer is trained


def train(vocab: int, texts: Iterable[str], folder: Path) -> None:
    """A byte-level BPE: it can say any text."""
    if vocab < 257:
        raise ValueError(f"a tokenizer has at least 257 entries, one for each byte and the end, got data.vocab {vocab}")
    tools: Any = library("tokenizers", "data")
    level = {"add_prefix_space": False}
    tokenizer = tools.Tokenizer(tools.models.BPE())
    tokenizer.pre_tokenizer = tools.pre_tokenizers.ByteLevel(**level)
    tokenizer.decoder = tools.decoders.ByteLevel(**level)
    trainer = tools.trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=sorted(tools.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_some(texts), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_config(folder, END)


def _some(texts: Iterable[str]) -> Iterator[str]:
    """As many as are enough. What has no spaces is broken: training takes as long as its longest words are."""
    taken = 0
    for text in texts:
        for part in cut(text):
            yield re.sub(rf"\S{{{LONGEST}}}", r"\g<0>\n", part)
            taken += len(part)
            if taken >= ENOUGH:
                return
