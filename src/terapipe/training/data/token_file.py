"""Token files: what is trained on, encoded once, then read through memory maps."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terapipe.config import DataConfig
from terapipe.runtime.checkpoint.manifest import Sum, damage, read_manifest
from terapipe.training.data.tokenizer import Tokenizer, load

FORMAT = 2
TOKENS, STARTS, META = "tokens.bin", "documents.npy", "meta.json"


@dataclass(frozen=True)
class Origin:
    """What token files were made from, as hashes: if either differs, they are made anew."""

    sources: str
    tokenizer: str


@dataclass(frozen=True)
class TokenFile:
    """A folder of documents as tokens, one after the other, each with the tokenizer's end token at its end."""

    folder: Path
    dtype: str
    vocab: int
    num_tokens: int
    num_documents: int
    origin: Origin

    @staticmethod
    def open(folder: Path) -> "TokenFile":
        """Looks at sizes only: a rank that needs no tokens reads none."""
        if not folder.is_dir():
            raise ValueError(f"{folder} holds no token file; prepare the data first")
        wrong = damage(folder, sums=False)
        if not wrong:
            text = (folder / META).read_bytes()
            wrong = [] if Sum().add(text) == read_manifest(folder)[META] else [f"{META} does not match its checksum"]
        if wrong:
            raise ValueError(f"{folder} holds a token file that is damaged: {'; '.join(wrong)}; delete it")
        meta = json.loads(text)
        if meta.pop("format") != FORMAT:
            raise ValueError(f"{folder} holds a token file of another version; delete it")
        return TokenFile(folder, origin=Origin(**meta.pop("origin")), **meta)

    @cached_property
    def tokens(self) -> NDArray[Any]:
        return np.memmap(self.folder / TOKENS, self.dtype, "r")

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Where each document begins."""
        starts: NDArray[np.int64] = np.load(self.folder / STARTS, mmap_mode="r")
        return starts


@dataclass(frozen=True)
class Data:
    train: TokenFile
    eval: TokenFile | None
    tokenizer: Tokenizer


def open_data(config: DataConfig, folder: Path) -> Data:
    """What ``prepare`` wrote."""
    files = {name: TokenFile.open(folder / name) for name in wanted(config)}
    for name, file in files.items():
        if config.packing != "padded" and file.num_tokens < config.seq_len:
            more = "data.eval, or a larger data.eval_share," if name == "eval" else "data.train"
            raise ValueError(
                f"a sequence has {config.seq_len} tokens (data.seq_len), but the {name} data only {file.num_tokens} in "
                f"{file.num_documents} documents; give more as {more} or shorter sequences"
            )
    return Data(files["train"], files.get("eval"), load(config.tokenizer, folder / "tokenizer"))


def wanted(config: DataConfig) -> list[str]:
    return ["train", "eval"] if config.eval or config.eval_share else ["train"]
