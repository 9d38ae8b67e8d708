"""Tokenizers from Hugging Face folders, by the ``tokenizers`` library or by ``transformers``."""

import json
import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from terapipe.training.data.text_reader import import_extra

END = "<|endoftext|>"

# The files of a tokenizer in a folder that may also hold a model.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip


class FastTokenizer:
    """A tokenizer.json, by the tokenizers library. Special tokens that are spelled out in a text are recognized."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        kind = import_extra("tokenizers", "data", "this tokenizer").Tokenizer
        try:
            self._tokenizer = kind.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
        self._tokenizer.no_truncation()  # the file can ask for both
        self._tokenizer.no_padding()
        self.end = self._find_end()

    def _find_end(self) -> int:
        """By name from the tokenizer's configuration, or by number from that of the model beside it."""
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            token = read_json(self._folder / name).get("eos_token")
            end = self._tokenizer.token_to_id(token["content"] if isinstance(token, dict) else token or "")
            if end is not None:
                return int(end)
        number = read_json(self._folder / "config.json").get("eos_token_id")
        first = number[0] if isinstance(number, list) and number else number
        if not isinstance(first, int) or self._tokenizer.id_to_token(first) is None:
            raise _no_end(self._folder)
        return first

    @cached_property
    def vocab(self) -> int:
        return 1 + int(max(self._tokenizer.get_vocab().values()))  # not their count: ids may have gaps

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.resolve() != self._folder.resolve():
            for name in TOKENIZER_FILES:
                if (self._folder / name).is_file():
                    shutil.copyfile(self._folder / name, folder / name)
        write_config(folder, self._tokenizer.id_to_token(self.end))


class SlowTokenizer:
    """Any other tokenizer that transformers can open."""

    def __init__(self, folder: Path) -> None:
        auto = import_extra("transformers", "hf", "this tokenizer").AutoTokenizer
        try:
            self._tokenizer = auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # of many types
            raise ValueError(f"transformers finds no tokenizer in {folder}: {error}") from error
        # If the vocabulary file is missing, transformers creates a tokenizer with special tokens only.
        if set(self._tokenizer.get_vocab()) <= set(self._tokenizer.all_special_tokens):
            raise ValueError(f"the tokenizer in {folder} has no vocabulary; add the file that holds it")
        if self._tokenizer.eos_token_id is None:
            raise _no_end(folder)
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


def _no_end(folder: Path) -> ValueError:
    return ValueError(
        f"a tokenizer must have a token that ends a document, {folder} names none; add "
        f'"eos_token": "..." to its tokenizer_config.json'
    )


def write_config(folder: Path, end: str) -> None:
    """Name the end token in tokenizer_config.json, if it is not named there yet."""
    default = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config = read_json(folder / "tokenizer_config.json") or default
    if not config.get("eos_token"):
        write_json(folder / "tokenizer_config.json", {**config, "eos_token": end})


def read_json(path: Path) -> dict[str, Any]:
    """Empty, if there is no such file."""
    entries = json.loads(path.read_bytes()) if path.is_file() else {}
    return entries if isinstance(entries, dict) else {}


def write_json(path: Path, entries: dict[str, Any]) -> None:
    path.write_text(json.dumps(entries, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
