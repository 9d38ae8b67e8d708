"""Tokenizers: bytes, a Hugging Face folder, or one trained on the data."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from terapipe.files import beside, put_in_place, recover
from terapipe.training.data.bpe import train
from terapipe.training.data.hf_tokenizer import FastTokenizer, SlowTokenizer
from terapipe.training.data.tokenizer_files import END, read, write, write_config

MARK = "made.json"  # in a folder that ``make`` wrote: from what


class Tokenizer(Protocol):
    """Texts to numbers and back."""

    @property
    def vocab(self) -> int:
        """All tokens are below it."""

    @property
    def end(self) -> int:
        """The token that ends a document."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each, with none added at its ends."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text, without tokens that stand for none."""

    def save(self, folder: Path) -> None:
        """As files that ``transformers.AutoTokenizer`` opens; what else is in the folder stays."""


class ByteTokenizer:
    """The bytes of UTF-8, and one token more."""

    vocab, end = 257, 256

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """As a byte-level BPE without merges, which is the same."""
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        end = {"id": self.end, "content": END, "single_word": False, "lstrip": False, "rstrip": False}
        whole = {
            "version": "1.0",
            "added_tokens": [{**end, "normalized": False, "special": True}],
            "pre_tokenizer": level,
            "decoder": level,
            "model": {"type": "BPE", "vocab": {c: byte for byte, c in enumerate(_characters())}, "merges": []},
        }
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "tokenizer.json", whole)
        write_config(folder, END)


def _characters() -> list[str]:
    """The character that byte-level tokenizers write for each byte: its own, if that is a visible one of Latin-1."""
    others = iter(range(256, 512))
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("ÿ") + 1)} - {0xAD}
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]


def load(spec: str, folder: Path) -> Tokenizer:
    """The tokenizer that ``make`` left in the folder; or the one in any folder."""
    if spec == "bytes":
        return ByteTokenizer()
    return FastTokenizer(folder) if (folder / "tokenizer.json").is_file() else SlowTokenizer(folder)


def make(spec: str, vocab: int, texts: Callable[[], Iterator[str]], folder: Path) -> Tokenizer:
    """The tokenizer that ``data.tokenizer`` asks for, saved to the folder.

    One that was trained there before is taken again, even if the texts have changed: a model that knows its tokens
    may go on being trained. To train another, delete the folder.
    """
    mark = {"tokenizer": spec, "vocab": vocab} if spec == "train" else {"tokenizer": spec}
    recover(folder)
    if spec == "train" and read(folder / MARK) == mark:
        return load(spec, folder)
    source = Path(spec).expanduser()
    if spec not in ("bytes", "train"):
        _check_folder(source)
        if folder.exists() and source.samefile(folder):
            return load(spec, folder)
    if folder.exists() and not (folder / MARK).exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is to hold a tokenizer, but holds something else; set another data.cache")
    partial = beside(folder, "partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if spec == "train":
        train(vocab, texts(), partial)
    else:
        load(spec, source).save(partial)
    write(partial / MARK, mark)
    put_in_place(folder, partial)
    return load(spec, folder)


# The names of files that a tokenizer may be made of; a few kinds have no vocabulary, but all have some of these.
_NAMES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "merges.txt", "special_tokens_map.json")


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(
            f'data.tokenizer must be "bytes", "train" or a folder with a Hugging Face tokenizer (by default that of '
            f"the model), got {str(folder)!r}, and there is no such folder in {Path.cwd()}; one from the Hub must be "
            f"downloaded before: hf download NAME --local-dir FOLDER"
        )
    if not any(True for name in _NAMES for _ in folder.glob(name)):
        raise ValueError(
            f"{folder} holds no tokenizer (there is no tokenizer.json, vocab.json, tokenizer.model or the like), and a "
            "model knows only the tokens that it was trained with; save its tokenizer there, or set data.tokenizer to "
            'its folder; "bytes" and "train" are for models that begin with random weights'
        )
