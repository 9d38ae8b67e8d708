"""Token files: documents as tokens, written once, then read through memory maps.

The cache of ``datasets`` does not replace them. Batches read any range of tokens, for which Arrow's record batches are
no contiguous array; ``datasets`` would be imported by every rank (over a second and 100 MB each); and its cache has no
checksums.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terapipe.config import DataConfig
from terapipe.runtime.checkpoint.manifest import Sum, damage, read_manifest
from terapipe.training.data.tokenizer import Tokenizer, load_tokenizer

FORMAT = 2
TOKENS, STARTS, META = "tokens.bin", "documents.npy", "meta.json"


@dataclass(frozen=True)
class Origin:
    """Hashes of what a token file was made from. If one of them changes, the file is written again."""

    sources: str
    tokenizer: str


@dataclass(frozen=True)
class TokenFile:
    """A folder with the tokens of all documents, each followed by the tokenizer's end token."""

    folder: Path
    dtype: str
    vocab: int
    num_tokens: int
    num_documents: int
    origin: Origin

    @staticmethod
    def open(folder: Path) -> "TokenFile":
        """Checks sizes only, so that ranks without the first or last stage read no tokens."""
        if not folder.is_dir():
            raise ValueError(f"{folder} holds no token file; prepare the data first")
        problems = damage(folder, sums=False)
        if not problems:
            text = (folder / META).read_bytes()
            problems = [] if Sum().add(text) == read_manifest(folder)[META] else [f"{META} does not match its checksum"]
        if problems:
            raise ValueError(f"{folder} holds a token file that is damaged: {'; '.join(problems)}; delete it")
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
    """Open what ``prepare`` wrote."""
    files = {name: TokenFile.open(folder / name) for name in split_names(config)}
    for name, file in files.items():
        if config.packing != "padded" and file.num_tokens < config.seq_len:
            remedy = "data.eval, or a larger data.eval_share," if name == "eval" else "data.train"
            raise ValueError(
                f"a sequence has {config.seq_len} tokens (data.seq_len), but the {name} data only {file.num_tokens} in "
                f"{file.num_documents} documents; give more as {remedy} or shorter sequences"
            )
    return Data(files["train"], files.get("eval"), load_tokenizer(config.tokenizer, folder / "tokenizer"))


def split_names(config: DataConfig) -> list[str]:
    return ["train", "eval"] if config.eval or config.eval_share else ["train"]
