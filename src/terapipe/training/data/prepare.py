"""Tokenize the texts of a run into token files, unless they are up to date.

::

    data.train, data.eval          texts: files, patterns, saved datasets
          |  find_files            sorted, so that all starts see the same order
          v
    fingerprint of the sources     names, sizes and times of the files, and the keys that tokens depend on
          |
          +-- equal to that in train/meta.json, and no file damaged?  ->  nothing to do
          v
    tokenizer/                     1. copied, or trained on the texts
    train/, eval/                  2. written beside, as train.partial; renamed when whole

One process does this, rank 0, and takes turns with other runs that share the folder (data.cache). Each of the three
folders is renamed into place when it is complete. A kill leaves a `.partial` folder, which the next start deletes, or
token files of another fingerprint, which it writes again.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from terapipe.files import recover
from terapipe.runtime.checkpoint import MANIFEST, damage
from terapipe.training.config import DataConfig, ObjectiveConfig
from terapipe.training.data.text_reader import check_readable, find_files, read_documents, read_entries
from terapipe.training.data.token_file import (
    FORMAT,
    META,
    STARTS,
    TOKENS,
    Origin,
    TokenFile,
    TokenWriter,
    open_data,
    split_names,
)
from terapipe.training.data.tokenizer import TOKENIZER_FILES, check_tokenizer_folder, make_tokenizer
from terapipe.training.lock import taking_turns

Say = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """What is read from the files of a run: documents, or entries with several fields.

    =============  ======================================  =======================================
    objective      fields of an entry                      what is written for it
    =============  ======================================  =======================================
    cross_entropy  data.field                              a document
    with weights   data.field, objective.weights           a document, and its weight
    dpo            chosen, rejected and perhaps a prompt   two documents, and the prompt's length
    =============  ======================================  =======================================

    Args:
        fields: Of each entry. With one field, any file that has documents can be read.
        is_weighted: Whether the second field is a weight, not a text.
    """

    fields: tuple[str, ...]
    is_weighted: bool = False

    @classmethod
    def of(cls, data: DataConfig, objective: ObjectiveConfig) -> "Source":
        """Tells what an objective needs.

        Args:
            data: Names the field with the text.
            objective: Names the other fields.
        """
        if objective.kind == "dpo":
            return cls((objective.chosen, objective.rejected, *([objective.prompt] if objective.prompt else [])))
        return cls((data.field, objective.weights), True) if objective.weights else cls((data.field,))

    @property
    def entry_fields(self) -> tuple[str, ...]:
        """The fields, if there are several; none for documents, which not only .jsonl files have."""
        return self.fields if len(self.fields) > 1 else ()

    def texts(self, paths: list[Path]) -> Iterator[str]:
        """Yields all texts, for training a tokenizer.

        Args:
            paths: Of the files.
        """
        if not self.entry_fields:
            yield from (part.text for part in read_documents(paths, self.fields[0]))
            return
        for _, values in read_entries(paths, self.fields):
            yield from (value for value in values if isinstance(value, str))

    def add_all(self, writer: TokenWriter, paths: list[Path]) -> None:
        """Reads all files and writes their tokens.

        Args:
            writer: Of the token file.
            paths: Of the files.
        """
        if not self.entry_fields:
            writer.add_all(paths, self.fields[0])
            return
        add = self._add_weighted if self.is_weighted else self._add_pair
        for where, values in read_entries(paths, self.fields):
            add(writer, values, where)
        if not writer.size:
            raise ValueError(f"there must be at least one entry with {', '.join(self.fields)}, got none in {paths[0]}")

    def _add_weighted(self, writer: TokenWriter, values: tuple[Any, ...], where: str) -> None:
        text, weight = values
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not weight >= 0:
            raise ValueError(f"{where}: {self.fields[1]!r} must be a number of at least 0, got {weight!r:.50}")
        (ids,) = writer.encode(_text(text, self.fields[0], where))
        writer.add(ids, float(weight))

    def _add_pair(self, writer: TokenWriter, values: tuple[Any, ...], where: str) -> None:
        """Adds the chosen text, then the rejected one, each with the tokens of its prompt before it.

        A prompt with a field of its own is tokenized by itself, so that both rows have the same tokens of it. Without
        one, the prompt is the tokens that both texts begin with.
        """
        chosen, rejected, *prompt = (_text(v, name, where) for v, name in zip(values, self.fields, strict=True))
        both = writer.encode(chosen, rejected)
        if prompt:
            (before,) = writer.encode(prompt[0])
            both, length = [before + ids for ids in both], len(before)
        else:
            length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*both, strict=False)))
        for ids in both:
            if length >= len(ids) + 1 or not ids:
                raise ValueError(f"{where}: a text must have tokens after the prompt, got none")
            writer.add(ids, length)


def _text(value: Any, field: str, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: {field!r} must hold text, got {value!r:.50}")
    return value


def prepare(
    config: DataConfig,
    folder: Path,
    say: Say = lambda message: None,
    objective: ObjectiveConfig | None = None,
) -> None:
    """Writes the token files and the tokenizer, unless they are up to date.

    One process of a run calls it before any process calls `open_data`.

    Args:
        config: Which texts and which tokenizer.
        folder: Gets the folders train, eval and tokenizer.
        say: Is called with a message about each damaged token file.
        objective: May need fields of its own; None: documents.
    """
    objective = objective or ObjectiveConfig()
    check_sources(config, objective)
    source = Source.of(config, objective)
    fingerprint = _fingerprint(config, source)
    with taking_turns(folder):  # several runs may share a cache: the first writes it, the others find it ready
        if not _is_ready(config, folder, fingerprint, say):
            _build(config, folder, fingerprint, source)
    open_data(config, folder)


def check_sources(config: DataConfig, objective: ObjectiveConfig) -> None:
    """Refuses texts and a tokenizer that are not there, or of which nothing can be read, without reading them.

    Args:
        config: Names them.
        objective: Names the fields that entries must have.
    """
    fields = Source.of(config, objective).entry_fields
    for path in [*find_files(config.train), *find_files(config.eval)]:
        check_readable(path, fields)
    if config.tokenizer not in ("bytes", "train"):
        check_tokenizer_folder(Path(config.tokenizer).expanduser())
    if config.eval_share >= 1 and not config.eval:
        raise ValueError(f"data.eval_share must leave documents to train on, got {config.eval_share}; try 0.01")


def _fingerprint(config: DataConfig, source: Source) -> str:
    """A hash of everything that the tokens depend on. Files count by name, size and time: reading a terabyte of texts
    to learn that nothing has changed would take as long as tokenizing it."""
    spec = config.tokenizer
    inputs: list[Any] = [FORMAT, source.entry_fields or config.field, spec, config.vocab if spec == "train" else 0]
    inputs.append(0.0 if config.eval else config.eval_share)
    for patterns in (config.train, config.eval):
        inputs.append([_stamp(file) for path in find_files(patterns) for file in _files(path)])
    if spec not in ("bytes", "train"):
        inputs.append([_stamp(Path(spec).expanduser() / name) for name in (*TOKENIZER_FILES, "config.json")])
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]


def _stamp(file: Path) -> tuple[str, int, int]:
    if not file.is_file():
        return str(file.resolve()), 0, 0
    stat = file.stat()
    return str(file.resolve()), stat.st_size, stat.st_mtime_ns


def _content_hash(folder: Path) -> str:
    """A hash of all bytes of a folder's files. Of a tokenizer, which is small, and whose change would be silent."""
    digest = hashlib.sha256()
    for file in _files(folder) if folder.is_dir() else ():
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _is_ready(config: DataConfig, folder: Path, fingerprint: str, say: Say) -> bool:
    """Whether all token files are whole, and of these sources and this tokenizer."""
    for name in ("tokenizer", "train", "eval"):
        recover(folder / name)
    existing = [folder / name for name in split_names(config) if _is_token_file(folder / name)]
    damaged = {path: problems for path in existing if (problems := damage(path, sums=config.verify))}
    for path, problems in damaged.items():
        say(f"the token file {path} is damaged: {'; '.join(problems)}; it is written again from the texts")
    if damaged or len(existing) < len(split_names(config)):
        return False
    try:
        origins = {TokenFile.open(path).origin for path in existing}
    except ValueError:
        return False
    tokenizer = _content_hash(folder / "tokenizer")
    if config.tokenizer == "train" and (folder / "tokenizer").exists():
        used = {origin.tokenizer for origin in origins if origin.sources == fingerprint}
        _check_tokenizer(folder / "tokenizer", used - {tokenizer})
    return origins == {Origin(fingerprint, tokenizer)}


def _check_tokenizer(folder: Path, others: set[str]) -> None:
    """Refuses a tokenizer that has changed although the texts that it was trained on have not."""
    if others:
        raise ValueError(
            f"the tokenizer in {folder} is not the one that made the tokens beside it: it is damaged or was edited; "
            "restore it, or delete the folder to train another"
        )


def _build(config: DataConfig, folder: Path, fingerprint: str, source: Source) -> None:
    """Writes tokenizer and token files. Both token files are closed at the end, one after the other: a kill between
    the two leaves different origins, which `_is_ready` notices."""
    for name in ("train", "eval"):
        _check_replaceable(folder / name)
    paths = find_files(config.train)
    tokenizer = make_tokenizer(config.tokenizer, config.vocab, lambda: source.texts(paths), folder / "tokenizer")
    origin = Origin(fingerprint, _content_hash(folder / "tokenizer"))
    train = TokenWriter(folder / "train", tokenizer, origin)
    source.add_all(train, paths)
    writers = [train]
    if config.eval:
        writers.append(TokenWriter(folder / "eval", tokenizer, origin))
        source.add_all(writers[1], find_files(config.eval))
    elif config.eval_share:
        writers.append(TokenWriter(folder / "eval", tokenizer, origin))
        train.move_end(writers[1], config.eval_share)
    else:
        shutil.rmtree(folder / "eval", ignore_errors=True)  # left by other training data
    for writer in writers:
        writer.close()


def _is_token_file(folder: Path) -> bool:
    """Also if one of its files is missing: then it is damaged, and may be replaced."""
    return sum((folder / name).exists() for name in (TOKENS, STARTS, META, MANIFEST)) > 1


def _check_replaceable(folder: Path) -> None:
    """Refuses a folder with something else in it: data.cache may be mistyped, and what is there would be deleted."""
    if folder.exists() and not _is_token_file(folder) and any(folder.iterdir()):
        raise ValueError(f"{folder} is to hold tokens, but holds something else; set another data.cache")
