"""Token files as they are written: texts are encoded some at a time, and memory stays bounded."""

import io
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terapipe.files import beside, flush_files, naming, put_in_place
from terapipe.runtime.checkpoint.manifest import Sum, write_manifest
from terapipe.training.data.pieces import Piece
from terapipe.training.data.readers import pieces
from terapipe.training.data.token_file import FORMAT, META, STARTS, TOKENS, Origin, TokenFile
from terapipe.training.data.tokenizer import Tokenizer

BATCH = 2**21  # characters encoded at a time

Progress = Callable[[int], None]


class Writer:
    """A token file as it grows, beside the place where it will be."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, origin: Origin) -> None:
        self._folder, self._tokenizer, self._origin = folder, tokenizer, origin
        self._dtype = np.dtype("<u2" if tokenizer.vocab <= 2**16 else "<u4")
        self._starts = array("q")
        self._partial = beside(folder, "partial")
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        self.size = 0
        self._sums = [Sum()]  # of the tokens after each append: some of them may be moved away again

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
        path = self._partial / TOKENS
        with naming(path), path.open("ab") as file:
            file.write(tokens.data)
        self.size += len(tokens)
        self._sums.append(self._sums[-1].add(tokens.data))

    def move_end(self, other: "Writer", share: float) -> None:
        """The last documents, about this share of the tokens, become the other file's."""
        starts = np.asarray(self._starts, np.int64)
        place = _place(starts, self.size, share)
        path = self._partial / TOKENS
        other._append(np.memmap(path, self._dtype, "r", offset=place * self._dtype.itemsize))
        other._starts = array("q", [0, *(starts[starts > place] - place).tolist()])
        self._sums = [_up_to(place * self._dtype.itemsize, self._sums, path)]
        os.truncate(path, place * self._dtype.itemsize)
        self.size, self._starts = place, array("q", starts[starts < place].tolist())
        if place not in starts:  # in the middle of a document
            self._append(np.asarray([self._tokenizer.end], self._dtype))

    def close(self) -> None:
        starts = io.BytesIO()
        np.save(starts, np.asarray(self._starts, np.int64))
        made = TokenFile(
            self._folder, self._dtype.str, self._tokenizer.vocab, self.size, len(self._starts), self._origin
        )
        meta = {"format": FORMAT, **asdict(made)}
        del meta["folder"]
        texts = {STARTS: starts.getvalue(), META: (json.dumps(meta, indent=1) + "\n").encode()}
        for name, text in texts.items():
            with naming(self._partial / name):
                (self._partial / name).write_bytes(text)
        sums = {TOKENS: self._sums[-1], **{name: Sum().add(text) for name, text in texts.items()}}
        with naming(self._partial):
            write_manifest(self._partial, sums)
            flush_files(self._partial)
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


def _up_to(size: int, sums: list[Sum], path: Path) -> Sum:
    """The checksum of the file's beginning, from the nearest that was taken while it was written."""
    nearest = max(found for found in sums if found.size <= size)
    with path.open("rb") as file:
        file.seek(nearest.size)
        return nearest.add(file.read(size - nearest.size))


def _place(starts: NDArray[np.int64], size: int, share: float) -> int:
    """Where the last share begins: with a document, or within one if there are too few to come near."""
    wanted = max(1, min(round(size * (1 - share)), size - 2))
    nearest = int(starts[np.abs(starts - wanted).argmin()])
    return nearest if nearest and abs(nearest - wanted) <= share * size / 2 else wanted
