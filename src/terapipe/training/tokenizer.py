"""Tokenizers: bytes, a Hugging Face folder, or one trained on the data."""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from terapipe.runtime.folders import beside, put_in_place, recover
from terapipe.training.text import cut

END = "<|endoftext|>"
MARK = "made.json"  # in a folder that ``make`` wrote: from what
ENOUGH = 50_000_000  # characters to train on
LONGEST = 100  # characters without a space, where a tokenizer is trained

# What belongs to a tokenizer in a folder that may also hold a model.
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip


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
        _write(folder / "tokenizer.json", whole)
        _write_config(folder, END)


def _characters() -> list[str]:
    """The character that byte-level tokenizers write for each byte: its own, if that is a visible one of Latin-1."""
    others = iter(range(256, 512))
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("ÿ") + 1)} - {0xAD}
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]


class FastTokenizer:
    """A tokenizer.json, by the tokenizers library. Special tokens that a text spells out are taken as such."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        kind = _library("tokenizers", "data").Tokenizer
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
            token = _read(self._folder / name).get("eos_token")
            found = self._tokenizer.token_to_id(token["content"] if isinstance(token, dict) else token or "")
            if found is not None:
                return int(found)
        number = _read(self._folder / "config.json").get("eos_token_id")
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
        _write_config(folder, self._tokenizer.id_to_token(self.end))


class SlowTokenizer:
    """Any other that transformers knows."""

    def __init__(self, folder: Path) -> None:
        auto = _library("transformers", "hf").AutoTokenizer
        try:
            self._tokenizer = auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # of many kinds
            raise ValueError(f"transformers finds no tokenizer in {folder}: {error}") from error
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
    if spec == "train" and _read(folder / MARK) == mark:
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
        _train(vocab, texts(), partial)
    else:
        load(spec, source).save(partial)
    _write(partial / MARK, mark)
    put_in_place(folder, partial)
    return load(spec, folder)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(
            f'data.tokenizer must be "bytes", "train" or a folder with a Hugging Face tokenizer, got {str(folder)!r}, '
            f"and there is no such folder in {Path.cwd()}; one from the Hub must be downloaded before: "
            f"hf download NAME --local-dir FOLDER"
        )


def _train(vocab: int, texts: Iterable[str], folder: Path) -> None:
    """A byte-level BPE: it can say any text."""
    if vocab < 257:
        raise ValueError(f"a tokenizer has at least 257 entries, one for each byte and the end, got data.vocab {vocab}")
    library: Any = _library("tokenizers", "data")
    level = {"add_prefix_space": False}
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(**level)
    tokenizer.decoder = library.decoders.ByteLevel(**level)
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_some(texts), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_config(folder, END)


def _some(texts: Iterable[str]) -> Iterator[str]:
    """As many as are enough. What has no spaces is broken: training takes as long as its longest words are."""
    taken = 0
    for text in texts:
        for part in cut(text):
            yield re.sub(rf"\S{{{LONGEST}}}", r"\g<0>\n", part)
            taken += len(part)
            if taken >= ENOUGH:
                return


def _write_config(folder: Path, end: str) -> None:
    """With the end that was found, wherever it was found."""
    plain = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    there = _read(folder / "tokenizer_config.json") or plain
    if not there.get("eos_token"):
        _write(folder / "tokenizer_config.json", {**there, "eos_token": end})


def _read(path: Path) -> dict[str, Any]:
    """Nothing, if there is no such file."""
    found = json.loads(path.read_bytes()) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, entries: dict[str, Any]) -> None:
    path.write_text(json.dumps(entries, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _library(name: str, extra: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise ValueError(
            f"this tokenizer needs {name}, which is not installed; pip install terapipe[{extra}]"
        ) from None
