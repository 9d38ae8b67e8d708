"""Tokenizers from Hugging Face folders, by tokenizers or by transformers."""

import shutil
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from terapipe.training.data.tokenizer_files import FILES, read, write_config


class FastTokenizer:
    """A tokenizer.json, by the tokenizers library. Special tokens that a text spells out are taken as such."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        kind = library("tokenizers", "data").Tokenizer
        try:
            self._tokenizer = kind.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # that is all it says of its kind
            raise ValueError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
        self._tokenizer.no_truncation()  # a file may ask for both
        self._tokenizer.no_padding()
        self.end = self._find_end()

    def _find_end(self) -> int:
        """As a token, or as a number in the configuration of the model beside it."""
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            token = read(self._folder / name).get("eos_token")
            found = self._tokenizer.token_to_id(token["content"] if isinstance(token, dict) else token or "")
            if found is not None:
                return int(found)
        number = read(self._folder / "config.json").get("eos_token_id")
        first = number[0] if isinstance(number, list) and number else number
        if not isinstance(first, int) or self._tokenizer.id_to_token(first) is None:
            raise _endless(self._folder)
        return first

    @cached_property
    def vocab(self) -> int:
        return 1 + int(max(self._tokenizer.get_vocab().values()))  # not their number: some may be left out

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.resolve() != self._folder.resolve():
            for name in FILES:
                if (self._folder / name).is_file():
                    shutil.copyfile(self._folder / name, folder / name)
        write_config(folder, self._tokenizer.id_to_token(self.end))


class SlowTokenizer:
    """Any other that transformers knows."""

    def __init__(self, folder: Path) -> None:
        auto = library("transformers", "hf").AutoTokenizer
        try:
            self._tokenizer = auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # of many kinds
            raise ValueError(f"transformers finds no tokenizer in {folder}: {error}") from error
        # Where the file with the vocabulary is missing, transformers makes a tokenizer that knows no text.
        if set(self._tokenizer.get_vocab()) <= set(self._tokenizer.all_special_tokens):
            raise ValueError(f"the tokenizer in {folder} has no vocabulary; add the file that holds it")
        if self._tokenizer.eos_token_id is None:
            raise _endless(folder)
        self.end = int(self._tokenizer.eos_token_id)

    @cached_property
    def vocab(self) -> int:
        return 1 + int(max(self._tokenizer.get_vocab().values()))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer(list(texts), add_special_tokens=False, truncation=False, verbose=False)
        return [list(ids) for ids in encoded["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)


def _endless(folder: Path) -> ValueError:
    return ValueError(
        f"a tokenizer must have a token that ends a document, {folder} names none; add "
        f'"eos_token": "..." to its tokenizer_config.json'
    )


def library(name: str, extra: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise ValueError(
            f"this tokenizer needs {name}, which is not installed; pip install terapipe[{extra}]"
        ) from None
