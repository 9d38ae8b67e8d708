"""Token files: documents as tokens, written once, then read through memory maps.

::

    train/
      tokens.bin       all tokens, 2 bytes each (4 if the vocabulary is above 65536), each document with its end token
      documents.npy    int64: where each document begins in tokens.bin
      numbers.npy      float64, only with some objectives: a number for each document
      meta.json        dtype, vocabulary, counts, and the hashes of what it was made from
      manifest.json    sizes and checksums of the files above

    tokens.bin     T h e . c a t . A n d . ...        "." stands for the end token
    documents.npy  0       4       8       ...

A batch is a few ranges of tokens.bin, which the kernel reads when they are touched and shares between the ranks of a
host. The cache of `datasets` does not replace that. Batches read any range of tokens, for which Arrow's record batches
are no contiguous array; `datasets` would be imported by every rank (over a second and 100 MB each); and its cache has
no checksums.
"""

import io
import json
import os
import shutil
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terapipe.files import flush_files, replace_folder, sibling, with_path
from terapipe.runtime.checkpoint import Sum, damage, read_manifest, write_manifest
from terapipe.training.config import DataConfig
from terapipe.training.data.text_reader import DocumentPart, read_documents
from terapipe.training.data.tokenizer import Tokenizer, load_tokenizer

BATCH = 2**21  # characters encoded at a time


@dataclass(frozen=True)
class Origin:
    """Hashes of what a token file was made from. If one of them changes, the file is written again.

    Args:
        sources: Of names, sizes and times of the texts, and of the keys that the tokens depend on.
        tokenizer: Of the contents of the tokenizer's files.
    """

    sources: str
    tokenizer: str


class TokenWriter:
    """Writes a token file to a temporary folder beside its place; `close` renames it.

    Tokens go to the disk as they come, so memory does not grow with the data, except for 8 bytes a document.

    Args:
        folder: Where the token file will be.
        tokenizer: Encodes the texts.
        origin: Is written to meta.json.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, origin: Origin) -> None:
        self._folder, self._tokenizer, self._origin = folder, tokenizer, origin
        self._dtype = np.dtype("<u2" if tokenizer.vocab <= 2**16 else "<u4")
        self._starts = array("q")
        self._partial = sibling(folder, "partial")
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        self.size = 0
        self._numbers: array[float] | None = None
        self._sums = [Sum()]  # checksums of the file after each append, for ``move_end``

    def add_all(self, paths: list[Path], field: str) -> None:
        """Writes all documents of some files.

        Long documents come in parts, so a document ends where a part says that it is the last one, not where a part
        ends.

        Args:
            paths: The files, in this order.
            field: Which field or column has the text.
        """
        start = 0
        for parts in _batches(read_documents(paths, field)):
            tokens: list[int] = []
            for ids, part in zip(self._tokenizer.encode([p.text for p in parts]), parts, strict=True):
                tokens += ids
                if part.is_last and self.size + len(tokens) > start:  # a text may have no tokens
                    tokens.append(self._tokenizer.end)
                    self._starts.append(start)
                    start = self.size + len(tokens)
            self._append(np.asarray(tokens, self._dtype))
        if not self._starts:
            names = ", ".join(map(str, paths[:3])) + (", ..." if len(paths) > 3 else "")
            raise ValueError(f"there must be at least one document that is not empty, got none in {names}")

    def encode(self, *texts: str) -> list[list[int]]:
        """Returns the token ids of some texts, for a caller that puts documents together itself.

        Args:
            *texts: Each is encoded by itself.
        """
        return self._tokenizer.encode(list(texts))

    def add(self, tokens: list[int], number: float) -> None:
        """Writes one document and a number that belongs to it.

        Args:
            tokens: Of the document, without the end token.
            number: Of a pair, the tokens of its prompt; otherwise the document's weight.
        """
        self._numbers = self._numbers if self._numbers is not None else array("d")
        self._numbers.append(number)
        self._starts.append(self.size)
        self._append(np.asarray([*tokens, self._tokenizer.end], self._dtype))

    def _append(self, tokens: NDArray[Any]) -> None:
        """Writes tokens at the end, and continues the checksum: the file is not read again to compute it."""
        path = self._partial / TOKENS
        with with_path(path), path.open("ab") as file:
            file.write(tokens.data)
        self.size += len(tokens)
        self._sums.append(self._sums[-1].add(tokens.data))

    def move_end(self, other: "TokenWriter", share: float) -> None:
        """Moves the last documents to another file: how data.eval_share gets its data.

        The texts are read once, and only then is it known where the last share begins. So all tokens are written to one
        file, and its end is moved.

        Args:
            other: The empty writer of the evaluation data.
            share: Of all tokens, about; documents stay whole where possible.
        """
        starts = np.asarray(self._starts, np.int64)
        border = _border(starts, self.size, share)
        path = self._partial / TOKENS
        other._append(np.memmap(path, self._dtype, "r", offset=border * self._dtype.itemsize))
        other._starts = array("q", [0, *(starts[starts > border] - border).tolist()])
        self._sums = [_sum_of_first(border * self._dtype.itemsize, self._sums, path)]
        os.truncate(path, border * self._dtype.itemsize)
        self.size, self._starts = border, array("q", starts[starts < border].tolist())
        if border not in starts:  # inside a document
            self._append(np.asarray([self._tokenizer.end], self._dtype))

    def close(self) -> None:
        """Writes the other files, flushes all of them to the disk, and renames the folder into place. The manifest is
        written last of all, so a folder that has one is whole."""
        starts = io.BytesIO()
        np.save(starts, np.asarray(self._starts, np.int64))
        file = TokenFile(
            self._folder, self._dtype.str, self._tokenizer.vocab, self.size, len(self._starts), self._origin
        )
        meta = {"format": FORMAT, **asdict(file)}
        del meta["folder"]
        contents = {STARTS: starts.getvalue(), META: (json.dumps(meta, indent=1) + "\n").encode()}
        if self._numbers is not None:
            numbers = io.BytesIO()
            np.save(numbers, np.asarray(self._numbers, np.float64))
            contents[NUMBERS] = numbers.getvalue()
        for name, content in contents.items():
            with with_path(self._partial / name):
                (self._partial / name).write_bytes(content)
        sums = {TOKENS: self._sums[-1], **{name: Sum().add(content) for name, content in contents.items()}}
        with with_path(self._partial):
            write_manifest(self._partial, sums)
            flush_files(self._partial)
        replace_folder(self._folder, self._partial)


def _batches(parts: Iterable[DocumentPart]) -> Iterator[list[DocumentPart]]:
    """Several parts at a time, about BATCH characters: tokenizers encode them in parallel, in threads of their own."""
    batch: list[DocumentPart] = []
    length = 0
    for part in parts:
        batch.append(part)
        length += len(part.text)
        if length >= BATCH:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _sum_of_first(size: int, sums: list[Sum], path: Path) -> Sum:
    """The checksum of the first bytes of a file, continued from the nearest one that was noted while writing."""
    nearest = max(sum_ for sum_ in sums if sum_.size <= size)
    with path.open("rb") as file:
        file.seek(nearest.size)
        return nearest.add(file.read(size - nearest.size))


def _border(starts: NDArray[np.int64], size: int, share: float) -> int:
    """Where the last share begins: at the nearest document, or inside one if no document begins near it."""
    target = max(1, min(round(size * (1 - share)), size - 2))
    nearest = int(starts[np.abs(starts - target).argmin()])
    return nearest if nearest and abs(nearest - target) <= share * size / 2 else target


FORMAT = 2
TOKENS, STARTS, META = "tokens.bin", "documents.npy", "meta.json"
NUMBERS = "numbers.npy"  # one for each document: of a pair the tokens of its prompt, or the document's weight


@dataclass(frozen=True)
class TokenFile:
    """A folder with the tokens of all documents, each followed by the tokenizer's end token.

    Nothing is read before it is used: `tokens` and `starts` are memory maps, opened at first use and kept.

    Args:
        folder: Which one.
        dtype: Of the tokens, as numpy writes it: "<u2" or "<u4".
        vocab: All tokens are below it.
        num_tokens: In all.
        num_documents: In all.
        origin: What it was made from.
    """

    folder: Path
    dtype: str
    vocab: int
    num_tokens: int
    num_documents: int
    origin: Origin

    @staticmethod
    def open(folder: Path) -> "TokenFile":
        """Opens what a `TokenWriter` wrote. Checks sizes only, so that ranks without the first or last stage read no
        tokens; `prepare` has compared the checksums once, on rank 0.

        Args:
            folder: Which one.
        """
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
        """All tokens, one after the other."""
        return np.memmap(self.folder / TOKENS, self.dtype, "r")

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Where each document begins."""
        starts: NDArray[np.int64] = np.load(self.folder / STARTS, mmap_mode="r")
        return starts

    @cached_property
    def numbers(self) -> NDArray[np.float64]:
        """What belongs to each document: the tokens of its prompt, or its weight. Only if the objective needs them."""
        numbers: NDArray[np.float64] = np.load(self.folder / NUMBERS)
        return numbers

    def document(self, index: int) -> tuple[int, int]:
        """Returns where a document begins and ends; its end token is the last one.

        Args:
            index: Of the document.
        """
        end = self.starts[index + 1] if index + 1 < self.num_documents else self.num_tokens
        return int(self.starts[index]), int(end)


@dataclass(frozen=True)
class Data:
    """What a run reads while it trains.

    Args:
        train: To train on.
        eval: To evaluate on; None if there is nothing.
        tokenizer: That made both.
    """

    train: TokenFile
    eval: TokenFile | None
    tokenizer: Tokenizer


def open_data(config: DataConfig, folder: Path) -> Data:
    """Opens what `prepare` wrote, and refuses what makes no sequence. All ranks call it.

    Args:
        config: Says whether there is evaluation data.
        folder: That of `prepare`.
    """
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
    """The token files that a configuration asks for."""
    return ["train", "eval"] if config.eval or config.eval_share else ["train"]
