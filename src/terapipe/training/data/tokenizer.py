"""Tokenizers: bytes, a Hugging Face folder, or a byte-level BPE trained on the data.

::

    data.tokenizer     class           needs         files in the run's tokenizer/
    "bytes"            ByteTokenizer   nothing       tokenizer.json, written by us
    "train"            FastTokenizer   tokenizers    tokenizer.json, trained on the texts
    a folder           FastTokenizer   tokenizers    copied, if there is a tokenizer.json
    a folder           SlowTokenizer   transformers  saved by transformers, if there is none

Whatever it was, the run's folder has a copy that `transformers.AutoTokenizer` opens, and the exported model gets that
copy. FastTokenizer does not use AutoTokenizer: every rank opens the tokenizer, and transformers takes half a second to
import on each; and AutoTokenizer does not find an end token that only the model's config.json names, by its number.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from terapipe.extras import import_extra
from terapipe.files import check_kinds, recover, replace_folder, sibling, with_path
from terapipe.training.data.text_reader import split_text

END = "<|endoftext|>"

# The files of a tokenizer in a folder that may also hold a model.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip


class _LibraryTokenizer:
    """What is the same by tokenizers and by transformers, which call it alike."""

    _tokenizer: Any

    @cached_property
    def vocab(self) -> int:
        """One more than the largest id, not the count of tokens: ids may have gaps, and the embedding has rows for
        them."""
        return 1 + int(max(self._tokenizer.get_vocab().values()))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


class FastTokenizer(_LibraryTokenizer):
    """A tokenizer.json, by the tokenizers library. Special tokens that are spelled out in a text are recognized.

    Args:
        folder: That holds it; the files beside it name the end token.
    """

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

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def save(self, folder: Path) -> None:
        """Copies the files. The end token is named in the copy, even where only the model's config.json did."""
        folder.mkdir(parents=True, exist_ok=True)
        if folder.resolve() != self._folder.resolve():
            for name in TOKENIZER_FILES:
                if (self._folder / name).is_file():
                    shutil.copyfile(self._folder / name, folder / name)
        write_config(folder, self._tokenizer.id_to_token(self.end))


class SlowTokenizer(_LibraryTokenizer):
    """Any other tokenizer that transformers can open, such as a sentencepiece model.

    Args:
        folder: That holds it. No code in it is run, and nothing is downloaded.
    """

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

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer(list(texts), add_special_tokens=False, truncation=False, verbose=False)
        return [list(ids) for ids in encoded["input_ids"]]

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)


def _no_end(folder: Path) -> ValueError:
    """Documents follow each other in a token file: without an end token a model could not learn where one stops."""
    return ValueError(
        f"a tokenizer must have a token that ends a document, {folder} names none; add "
        f'"eos_token": "..." to its tokenizer_config.json'
    )


def write_config(folder: Path, end: str) -> None:
    """Names the end token in tokenizer_config.json, if it is not named there yet.

    Args:
        folder: Of the tokenizer.
        end: The token, as text.
    """
    default = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config = read_json(folder / "tokenizer_config.json") or default
    if not config.get("eos_token"):
        write_json(folder / "tokenizer_config.json", {**config, "eos_token": end})


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; empty if there is no such file, or it holds something else.

    Args:
        path: Of the file.
    """
    entries = json.loads(path.read_bytes()) if path.is_file() else {}
    return entries if isinstance(entries, dict) else {}


def write_json(path: Path, entries: dict[str, Any]) -> None:
    """Writes a JSON object.

    Args:
        path: Of the file. It is not replaced atomically: its folder is.
        entries: Of the object.
    """
    with with_path(path):
        path.write_text(json.dumps(entries, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


MARK = "made.json"  # in a folder that ``make_tokenizer`` wrote: the keys it was made from
SAMPLE = 50_000_000  # characters to train a tokenizer on
LONGEST_WORD = 100  # characters, while training a tokenizer
# Every tokenizer folder has a file with one of these names; some kinds have no vocabulary file.
FILE_PATTERNS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "merges.txt", "special_tokens_map.json")


class Tokenizer(Protocol):
    """Converts texts to token ids and back. The three classes here do, and nothing else of them is used."""

    @property
    def vocab(self) -> int:
        """All token ids are below it."""

    @property
    def end(self) -> int:
        """The token that ends a document."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text, without special tokens added.

        Args:
            texts: Several at a time: some tokenizers encode them in parallel.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text, without special tokens.

        Args:
            ids: Of tokens. A character may span several, so parts of a text are not decoded one by one.
        """

    def save(self, folder: Path) -> None:
        """Writes files that `transformers.AutoTokenizer` opens. Other files in the folder stay.

        Args:
            folder: Is made if it is not there.
        """


class ByteTokenizer:
    """The bytes of UTF-8, and an end token: for small experiments, without any file or library."""

    vocab, end = 257, 256

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Writes an equivalent byte-level BPE without merges, so that an exported model can be used like any other."""
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        end = {"id": self.end, "content": END, "single_word": False, "lstrip": False, "rstrip": False}
        tokenizer = {
            "version": "1.0",
            "added_tokens": [{**end, "normalized": False, "special": True}],
            "pre_tokenizer": level,
            "decoder": level,
            "model": {"type": "BPE", "vocab": {c: byte for byte, c in enumerate(_characters())}, "merges": []},
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "tokenizer.json", tokenizer)
        write_config(folder, END)


def _characters() -> list[str]:
    """The character that byte-level tokenizers write for each byte: the byte itself if Latin-1 prints it, else one from
    256 on."""
    others = iter(range(256, 512))
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("ÿ") + 1)} - {0xAD}
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def load_tokenizer(spec: str, folder: Path) -> Tokenizer:
    """Opens a tokenizer that `make_tokenizer` saved.

    Args:
        spec: The value of data.tokenizer.
        folder: With the files.
    """
    if spec == "bytes":
        return ByteTokenizer()
    return FastTokenizer(folder) if (folder / "tokenizer.json").is_file() else SlowTokenizer(folder)


def make_tokenizer(spec: str, vocab: int, texts: Callable[[], Iterator[str]], folder: Path) -> Tokenizer:
    """Makes the tokenizer that data.tokenizer asks for and saves it to the folder.

    A tokenizer that was trained there before is used again, even if the texts have changed, so that the training of its
    model can continue. To train a new one, delete the folder.

    Args:
        spec: The value of data.tokenizer.
        vocab: Entries of one that is trained.
        texts: Yields the texts to train on; only called if needed.
        folder: Is replaced as a whole, and only if it is one that this function wrote.
    """
    mark = {"tokenizer": spec, "vocab": vocab} if spec == "train" else {"tokenizer": spec}
    recover(folder)
    if spec == "train" and read_json(folder / MARK) == mark:
        return load_tokenizer(spec, folder)
    source = Path(spec).expanduser()
    if spec not in ("bytes", "train"):
        check_tokenizer_folder(source)
        if folder.exists() and source.samefile(folder):
            return load_tokenizer(spec, folder)
    if folder.exists() and not (folder / MARK).exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is to hold a tokenizer, but holds something else; set another data.cache")
    partial = sibling(folder, "partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with with_path(partial):
        if spec == "train":
            _train(vocab, texts(), partial)
        else:
            load_tokenizer(spec, source).save(partial)
    write_json(partial / MARK, mark)
    replace_folder(folder, partial)
    return load_tokenizer(spec, folder)


def check_tokenizer_folder(folder: Path) -> None:
    """Refuses a folder without a tokenizer, without opening one.

    Args:
        folder: That data.tokenizer names.
    """
    if not folder.is_dir():
        raise ValueError(
            f'data.tokenizer must be "bytes", "train" or a folder with a Hugging Face tokenizer (by default that of '
            f"the model), got {str(folder)!r}, and there is no such folder in {Path.cwd()}; one from the Hub must be "
            f"downloaded before: hf download NAME --local-dir FOLDER"
        )
    check_kinds(folder)
    if not any(True for pattern in FILE_PATTERNS for _ in folder.glob(pattern)):
        raise ValueError(
            f"{folder} holds no tokenizer (there is no tokenizer.json, vocab.json, tokenizer.model or the like), and a "
            "model knows only the tokens that it was trained with; save its tokenizer there, or set data.tokenizer to "
            'its folder; "bytes" and "train" are for models that begin with random weights'
        )


def _train(vocab: int, texts: Iterable[str], folder: Path) -> None:
    """Trains a byte-level BPE, which can encode any text, on a sample of the texts."""
    if vocab < 257:
        raise ValueError(f"a tokenizer has at least 257 entries, one for each byte and the end, got data.vocab {vocab}")
    tools: Any = import_extra("tokenizers", "data", "a tokenizer that is trained")
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
    tokenizer.train_from_iterator(_sample(texts), trainer)
    with with_path(folder / "tokenizer.json"):
        (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    write_config(folder, END)


def _sample(texts: Iterable[str]) -> Iterator[str]:
    """The first texts, up to SAMPLE characters. Long words are broken, because training time grows with the longest
    word."""
    taken = 0
    for text in texts:
        for part in split_text(text):
            yield re.sub(rf"\S{{{LONGEST_WORD}}}", r"\g<0>\n", part)
            taken += len(part)
            if taken >= SAMPLE:
                return
