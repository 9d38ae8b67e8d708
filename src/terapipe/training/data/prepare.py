"""Tokenize the texts of a run into token files, unless they are up to date."""

import hashlib
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from terapipe.files import recover
from terapipe.runtime.checkpoint import MANIFEST, damage
from terapipe.training.config import DataConfig, ObjectiveConfig
from terapipe.training.data.entries import Entries, entries_of
from terapipe.training.data.text_reader import check_readable, find_files, read_documents
from terapipe.training.data.token_file import (
    FORMAT,
    META,
    STARTS,
    TOKENS,
    Origin,
    Progress,
    TokenFile,
    TokenWriter,
    open_data,
    split_names,
)
from terapipe.training.data.tokenizer import TOKENIZER_FILES, check_tokenizer_folder, make_tokenizer
from terapipe.training.lock import taking_turns

Say = Callable[[str], None]


def prepare(
    config: DataConfig,
    folder: Path,
    progress: Progress = lambda tokens: None,
    say: Say = lambda message: None,
    objective: ObjectiveConfig | None = None,
) -> None:
    """Write the token files and the tokenizer, unless they are up to date.

    One process of a run calls it before any process calls ``open_data``. ``progress`` gets the number of tokens written
    so far, ``say`` a message about each damaged file. The objective may have fields of its own.
    """
    objective = objective or ObjectiveConfig()
    check_sources(config, objective)
    entries = entries_of(config, objective)
    sources = _fingerprint(config, entries)
    with taking_turns(folder):  # several runs may share a cache: the first writes it, the others find it ready
        if not _is_ready(config, folder, sources, say):
            _build(config, folder, sources, progress, entries)
    open_data(config, folder)


def check_sources(config: DataConfig, objective: ObjectiveConfig) -> None:
    """Refuse texts and a tokenizer that are not there, or of which nothing can be read, without reading them."""
    names = entries_of(config, objective).names
    for path in [*find_files(config.train), *find_files(config.eval)]:
        check_readable(path, names)
    if config.tokenizer not in ("bytes", "train"):
        check_tokenizer_folder(Path(config.tokenizer).expanduser())
    if config.eval_share >= 1 and not config.eval:
        raise ValueError(f"data.eval_share must leave documents to train on, got {config.eval_share}; try 0.01")


def _fingerprint(config: DataConfig, entries: Entries) -> str:
    """A hash of everything that the tokens depend on."""
    spec = config.tokenizer
    inputs: list[Any] = [
        FORMAT,
        *([entries.names] if entries.names else [config.field]),
        spec,
        config.vocab if spec == "train" else 0,
    ]
    inputs += [0.0 if config.eval else config.eval_share]
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
    digest = hashlib.sha256()
    for file in _files(folder) if folder.is_dir() else ():
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _is_ready(config: DataConfig, folder: Path, sources: str, say: Say) -> bool:
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
        used = {origin.tokenizer for origin in origins if origin.sources == sources}
        _check_tokenizer(folder / "tokenizer", used - {tokenizer})
    return origins == {Origin(sources, tokenizer)}


def _check_tokenizer(folder: Path, others: set[str]) -> None:
    """The texts have not changed, but the tokenizer trained on them has: it must not be used."""
    if others:
        raise ValueError(
            f"the tokenizer in {folder} is not the one that made the tokens beside it: it is damaged or was edited; "
            "restore it, or delete the folder to train another"
        )


def _build(config: DataConfig, folder: Path, sources: str, progress: Progress, entries: Entries) -> None:
    for name in ("train", "eval"):
        _check_replaceable(folder / name)
    paths = find_files(config.train)
    tokenizer = make_tokenizer(
        config.tokenizer,
        config.vocab,
        lambda: entries.texts(paths) if entries.names else (p.text for p in read_documents(paths, config.field)),
        folder / "tokenizer",
    )
    origin = Origin(sources, _content_hash(folder / "tokenizer"))
    train = TokenWriter(folder / "train", tokenizer, origin)
    add = entries.add_all if entries.names else partial(TokenWriter.add_all, field=config.field)
    add(train, paths, progress=progress)
    writers = [train]
    if config.eval:
        writers.append(TokenWriter(folder / "eval", tokenizer, origin))
        add(writers[1], find_files(config.eval), progress=lambda tokens: progress(train.size + tokens))
    elif config.eval_share:
        writers.append(TokenWriter(folder / "eval", tokenizer, origin))
        train.move_end(writers[1], config.eval_share)
    else:
        shutil.rmtree(folder / "eval", ignore_errors=True)  # left by other training data
    for writer in writers:
        writer.close()


def _is_token_file(folder: Path) -> bool:
    """Also if one of its files is missing."""
    return sum((folder / name).exists() for name in (TOKENS, STARTS, META, MANIFEST)) > 1


def _check_replaceable(folder: Path) -> None:
    if folder.exists() and not _is_token_file(folder) and any(folder.iterdir()):
        raise ValueError(f"{folder} is to hold tokens, but holds something else; set another data.cache")
