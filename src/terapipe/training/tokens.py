"""Token files: what is trained on, encoded once, then read through memory maps."""

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terapipe.config import DataConfig
from terapipe.runtime.folders import beside, put_in_place, recover
from terapipe.training.text import Piece, find, pieces
from terapipe.training.tokenizer import FILES, Tokenizer, load, make

FORMAT = 1
BATCH = 2**21  # characters encoded at a time
TOKENS, STARTS, META = "tokens.bin", "documents.npy", "meta.json"

Progress = Callable[[int], None]


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
        try:
            meta = json.loads((folder / META).read_bytes())
            sizes = {name: (folder / name).stat().st_size for name in (TOKENS, STARTS)}
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder} holds no token file: {error}; prepare the data first") from None
        if meta.pop("format", None) != FORMAT or meta.pop("sizes", None) != sizes:
            raise ValueError(f"{folder} holds a token file that is damaged, or of another version; delete it")
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


def prepare(config: DataConfig, folder: Path, progress: Progress = lambda tokens: None) -> None:
    """Writes the token files and the tokenizer that the configuration asks for, unless they are there.

    One process does it, before any calls ``open_data``. ``progress`` is told how many tokens are written so far.
    """
    sources = _fingerprint(config)
    if not _is_ready(config, folder, sources):
        _build(config, folder, sources, progress)
    open_data(config, folder)


def open_data(config: DataConfig, folder: Path) -> Data:
    """What ``prepare`` wrote."""
    files = {name: TokenFile.open(folder / name) for name in _wanted(config)}
    for name, file in files.items():
        if config.packing != "alone" and file.num_tokens < config.tokens:
            more = "data.eval, or a larger data.eval_share," if name == "eval" else "data.train"
            raise ValueError(
                f"a sequence has {config.tokens} tokens (data.tokens), but the {name} data only {file.num_tokens} in "
                f"{file.num_documents} documents; give more as {more} or shorter sequences"
            )
    return Data(files["train"], files.get("eval"), load(config.tokenizer, folder / "tokenizer"))


def _wanted(config: DataConfig) -> list[str]:
    return ["train", "eval"] if config.eval or config.eval_share else ["train"]


def _fingerprint(config: DataConfig) -> str:
    """Of all that the tokens depend on."""
    spec = config.tokenizer
    known: list[Any] = [FORMAT, config.field, spec, config.vocab if spec == "train" else 0]
    known += [0.0 if config.eval else config.eval_share]
    known += [[_stamp(file) for path in find(names) for file in _files(path)] for names in (config.train, config.eval)]
    if spec not in ("bytes", "train"):
        names = (*FILES, "config.json")
        known.append([_stamp(Path(spec).expanduser() / name) for name in names])
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]


def _stamp(file: Path) -> tuple[str, int, int]:
    if not file.is_file():
        return str(file.resolve()), 0, 0
    stat = file.stat()
    return str(file.resolve()), stat.st_size, stat.st_mtime_ns


def _contents(folder: Path) -> str:
    """A hash of what the files in a folder hold."""
    found = hashlib.sha256()
    for file in _files(folder) if folder.is_dir() else ():
        found.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()


def _is_ready(config: DataConfig, folder: Path, sources: str) -> bool:
    for name in ("tokenizer", "train", "eval"):
        recover(folder / name)
    origin = Origin(sources, _contents(folder / "tokenizer"))
    try:
        return all(TokenFile.open(folder / name).origin == origin for name in _wanted(config))
    except ValueError:
        return False


def _build(config: DataConfig, folder: Path, sources: str, progress: Progress) -> None:
    if config.eval_share >= 1 and not config.eval:
        raise ValueError(f"data.eval_share must leave documents to train on, got {config.eval_share}; try 0.01")
    for name in ("train", "eval"):
        _check_ours(folder / name)
    train = find(config.train)
    tokenizer = make(
        config.tokenizer, config.vocab, lambda: (p.text for p in pieces(train, config.field)), folder / "tokenizer"
    )
    origin = Origin(sources, _contents(folder / "tokenizer"))
    main = _Writer(folder / "train", tokenizer, origin)
    main.add_all(train, config.field, progress)
    written = [main]
    if config.eval:
        written.append(_Writer(folder / "eval", tokenizer, origin))
        written[1].add_all(find(config.eval), config.field, lambda tokens: progress(main.size + tokens))
    elif config.eval_share:
        written.append(_Writer(folder / "eval", tokenizer, origin))
        main.move_end(written[1], config.eval_share)
    else:
        shutil.rmtree(folder / "eval", ignore_errors=True)  # it would not be that of this training data
    for writer in written:
        writer.close()


def _check_ours(folder: Path) -> None:
    if folder.exists() and not (folder / TOKENS).exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is to hold tokens, but holds something else; set another data.cache")


class _Writer:
    """A token file as it grows, beside the place where it will be."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, origin: Origin) -> None:
        self._folder, self._tokenizer, self._origin = folder, tokenizer, origin
        self._dtype = np.dtype("<u2" if tokenizer.vocab <= 2**16 else "<u4")
        self._starts = array("q")
        self._partial = beside(folder, "partial")
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        self.size = 0

    def add_all(self, paths: list[Path], field: str, progress: Progress) -> None:
        start = 0
        for batch in _batches(pieces(paths, field)):
            tokens: list[int] = []
            for ids, piece in zip(self._tokenizer.encode([p.text for p in batch]), batch, strict=True):
                tokens += ids
                if piece.ends and self.size + len(tokens) > start:  # there are texts without tokens
                    tokens.append(self._tokenizer.end)
                    self._starts.append(start)
                    start = self.size + len(tokens)
            self._append(np.asarray(tokens, self._dtype))
            progress(self.size)
        if not self._starts:
            names = ", ".join(map(str, paths[:3])) + (", ..." if len(paths) > 3 else "")
            raise ValueError(f"there must be at least one document that is not empty, got none in {names}")

    def _append(self, tokens: NDArray[Any]) -> None:
        with (self._partial / TOKENS).open("ab") as file:
            file.write(tokens.data)
        self.size += len(tokens)

    def move_end(self, other: "_Writer", share: float) -> None:
        """The last documents, about this share of the tokens, become the other file's."""
        starts = np.asarray(self._starts, np.int64)
        place = _place(starts, self.size, share)
        path = self._partial / TOKENS
        other._append(np.memmap(path, self._dtype, "r", offset=place * self._dtype.itemsize))
        other._starts = array("q", [0, *(starts[starts > place] - place).tolist()])
        os.truncate(path, place * self._dtype.itemsize)
        self.size, self._starts = place, array("q", starts[starts < place].tolist())
        if place not in starts:  # in the middle of a document
            self._append(np.asarray([self._tokenizer.end], self._dtype))

    def close(self) -> None:
        np.save(self._partial / STARTS, np.asarray(self._starts, np.int64))
        sizes = {name: (self._partial / name).stat().st_size for name in (TOKENS, STARTS)}
        made = TokenFile(
            self._folder, self._dtype.str, self._tokenizer.vocab, self.size, len(self._starts), self._origin
        )
        meta = {"format": FORMAT, "sizes": sizes, **asdict(made)}
        del meta["folder"]
        (self._partial / META).write_text(json.dumps(meta, indent=1) + "\n")
        put_in_place(self._folder, self._partial)


def _batches(found: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Some at a time: a tokenizer works on several at once, and memory stays bounded."""
    batch: list[Piece] = []
    length = 0
    for piece in found:
        batch.append(piece)
        length += len(piece.text)
        if length >= BATCH:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _place(starts: NDArray[np.int64], size: int, share: float) -> int:
    """Where the last share begins: with a document, or within one if there are too few to come near."""
    wanted = max(1, min(round(size * (1 - share)), size - 2))
    nearest = int(starts[np.abs(starts - wanted).argmin()])
    return nearest if nearest and abs(nearest - wanted) <= share * size / 2 else wanted
