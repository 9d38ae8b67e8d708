"""What a model was trained as: part of every checkpoint, and compared when a run goes on from one."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from terapipe.config import RunConfig
from terapipe.runtime.checkpoint.manifest import read_manifest
from terapipe.training.data.token_file import STARTS, TOKENS, Data, TokenFile
from terapipe.training.data.tokenizer_files import FILES
from terapipe.training.model import Made

NOTE = "trained_as"  # among a checkpoint's notes
MODEL, TOKENIZER, OBJECTIVE, DATA, KEYS = "model", "tokenizer", "objective", "data", "keys"
_OBJECTIVE = ("data.packing", "data.seq_len")
_KEYS = ("model.dtype", "model.seed", "model.factory", "data.seed", "data.shuffle", "data.batch_size")
_SECTIONS = ("optimizer", "schedule")
_SPEED_ONLY = ("optimizer.fused",)
# Of a model's configuration, what the function that it computes does not depend on.
_TRAINING_ONLY = re.compile("dropout|pdrop|layerdrop|jitter|initializer_range|aux_loss_coef")

Identity = dict[str, dict[str, Any]]


def identity(config: RunConfig, data: Data, made: Made) -> Identity:
    """As JSON gives it back."""
    flat = {f"{part}.{key}": value for part, keys in asdict(config).items() for key, value in keys.items()}
    keys = {key: value for key, value in flat.items() if key in _KEYS or key.split(".")[0] in _SECTIONS}
    found = {
        MODEL: made.identity,
        TOKENIZER: {
            "vocab": data.tokenizer.vocab,
            "end": data.tokenizer.end,
            "files": _contents(data.train.folder.parent),
        },
        OBJECTIVE: {key: flat[key] for key in _OBJECTIVE},
        DATA: {"train": _fingerprint(data.train), "eval": data.eval and _fingerprint(data.eval)},
        KEYS: {key: value for key, value in keys.items() if key not in _SPEED_ONLY},
    }
    same: Identity = json.loads(json.dumps(found))
    return same


def _contents(folder: Path) -> str:
    """A hash of the tokenizer's files that say how a text becomes tokens."""
    whole = folder / "tokenizer" / "tokenizer.json"
    files = [whole] if whole.is_file() else [folder / "tokenizer" / name for name in FILES]
    found = hashlib.sha256()
    for file in files:
        found.update(file.read_bytes() if file.is_file() else b"\0")
    return found.hexdigest()


def _fingerprint(file: TokenFile) -> dict[str, Any]:
    sums = read_manifest(file.folder)
    contents = [sums[name].crc32 for name in (TOKENS, STARTS)]
    return {"tokens": file.num_tokens, "documents": file.num_documents, "contents": contents}


def compare(before: Mapping[str, Any], now: Identity, place: Path, *, own: bool) -> list[str]:
    """What is announced; what makes another model is refused. ``before`` are the notes of the checkpoint in ``place``,
    ``own`` says that it is this run's: one that begins with another run's may have another objective."""
    was = before.get(NOTE)
    if not isinstance(was, dict) or not all(isinstance(was.get(part), dict) for part in now):
        return ["it does not say what it was trained as, so nothing was compared"]
    found = {part: list(_changes(was[part], now[part], part)) for part in now}
    model = [change for change in found[MODEL] if not _TRAINING_ONLY.search(change)]
    refused = [*model, *found[TOKENIZER], *(found[OBJECTIVE] if own else ())]
    if refused:
        remedy = (
            "set what it was" if not found[TOKENIZER] else "set what it was (data.tokenizer: the folder of its own)"
        )
        elsewhere = ", or begin another run in another logging.folder" if own else ", or begin without it"
        raise ValueError(
            f"a run goes on with the model, tokenizer and objective of its checkpoint, {place} has others: "
            f"{'; '.join(refused)}; {remedy}{elsewhere}"
        )
    return [*found[MODEL], *found[OBJECTIVE], *found[DATA], *found[KEYS]]


def same_evaluation(before: Mapping[str, Any], now: Identity) -> bool:
    """Whether losses of then and now are of the same data, as far as is known."""
    was = before.get(NOTE)
    return not isinstance(was, dict) or was.get(DATA, {}).get("eval") == now[DATA]["eval"]


def _changes(was: Mapping[str, Any], now: Mapping[str, Any], part: str) -> Iterator[str]:
    """Of a model only what both know: another version of a library may have other keys."""
    keys = was.keys() & now.keys() if part == MODEL else {*was, *now}
    for key in sorted(keys):
        old, new = was.get(key), now.get(key)
        named = key if part in (OBJECTIVE, KEYS) else f"{part}.{key}"
        if old == new:
            continue
        if part == MODEL and isinstance(old, dict) and isinstance(new, dict):
            yield from (f"{part}.{key}{change.removeprefix(part)}" for change in _changes(old, new, part))
        elif part == DATA:
            yield f"{named}: {_counted(old)} -> {_counted(new)}{_same_size(old, new)}"
        elif key == "files":
            yield "the tokenizer's files are others"
        else:
            yield f"{named}: {old} -> {new}"


def _counted(file: Mapping[str, Any] | None) -> str:
    return f"{file['tokens']} tokens in {file['documents']} documents" if file else "none"


def _same_size(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> str:
    alike = old and new and (old["tokens"], old["documents"]) == (new["tokens"], new["documents"])
    return ", others than before" if alike else ""
