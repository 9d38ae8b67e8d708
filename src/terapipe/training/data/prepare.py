"""Texts become token files: once, and again only if something that they depend on has changed."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from terapipe.config import DataConfig
from terapipe.files import recover
from terapipe.runtime.checkpoint.manifest import MANIFEST, damage
from terapipe.training.data.readers import find, pieces
from terapipe.training.data.token_file import FORMAT, META, STARTS, TOKENS, Origin, TokenFile, open_data, wanted
from terapipe.training.data.token_writer import Progress, Writer
from terapipe.training.data.tokenizer import make
from terapipe.training.data.tokenizer_files import FILES

Say = Callable[[str], None]


def prepare(
    config: DataConfig, folder: Path, progress: Progress = lambda tokens: None, say: Say = lambda message: None
) -> None:
    """Writes the token files and the tokenizer that the configuration asks for, unless they are there.

    One process does it, before any calls ``open_data``. ``progress`` is told how many tokens are written so far,
    ``say`` which files were damaged.
    """
    sources = _fingerprint(config)
    if not _is_ready(config, folder, sources, say):
        _build(config, folder, sources, progress)
    open_data(config, folder)


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


def _is_ready(config: DataConfig, folder: Path, sources: str, say: Say) -> bool:
    for name in ("tokenizer", "train", "eval"):
        recover(folder / name)
    there = [folder / name for name in wanted(config) if _is_ours(folder / name)]
    damaged = {path: wrong for path in there if (wrong := damage(path, sums=config.verify))}
    for path, wrong in damaged.items():
        say(f"the token file {path} is damaged: {'; '.join(wrong)}; it is made again from the texts")
    if damaged or len(there) < len(wanted(config)):
        return False
    try:
        origins = {TokenFile.open(path).origin for path in there}
    except ValueError:
        return False
    tokenizer = _contents(folder / "tokenizer")
    if config.tokenizer == "train" and (folder / "tokenizer").exists():
        known = {origin.tokenizer for origin in origins if origin.sources == sources}
        _check_tokenizer(folder / "tokenizer", known - {tokenizer})
    return origins == {Origin(sources, tokenizer)}


def _check_tokenizer(folder: Path, others: set[str]) -> None:
    """The same texts, but not the tokenizer that was trained on them: it would be used as it is."""
    if others:
        raise ValueError(
            f"the tokenizer in {folder} is not the one that made the tokens beside it: it is damaged or was edited; "
            "restore it, or delete the folder to train another"
        )


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
    main = Writer(folder / "train", tokenizer, origin)
    main.add_all(train, config.field, progress)
    written = [main]
    if config.eval:
        written.append(Writer(folder / "eval", tokenizer, origin))
        written[1].add_all(find(config.eval), config.field, lambda tokens: progress(main.size + tokens))
    elif config.eval_share:
        written.append(Writer(folder / "eval", tokenizer, origin))
        main.move_end(written[1], config.eval_share)
    else:
        shutil.rmtree(folder / "eval", ignore_errors=True)  # it would not be that of this training data
    for writer in written:
        writer.close()


def _is_ours(folder: Path) -> bool:
    """A token file, even if one of its files is lost."""
    return sum((folder / name).exists() for name in (TOKENS, STARTS, META, MANIFEST)) > 1


def _check_ours(folder: Path) -> None:
    if folder.exists() and not _is_ours(folder) and any(folder.iterdir()):
        raise ValueError(f"{folder} is to hold tokens, but holds something else; set another data.cache")
