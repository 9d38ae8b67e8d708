"""What a checkpoint was trained with: model, tokenizer, data and settings. Compared when a run resumes from it.

::

    part        what it says                           if it has changed
    ----------  -------------------------------------  -------------------------------------------
    model       the configuration of the model         refused, but for dropout and the like
    tokenizer   vocabulary, end token, hash of files   refused: token ids mean something else
    objective   the [objective] section, packing       refused in the run's own folder, else told
    data        counts and checksums of token files    told: a run may go on with more data
    keys        optimizer, learning rate, seeds        told

Tensors of two models may have the same names and shapes, four heads of 16 or two of 32: loading alone does not notice.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from terapipe.runtime.checkpoint import read_manifest
from terapipe.training.config import ObjectiveConfig, RunConfig
from terapipe.training.data.token_file import NUMBERS, STARTS, TOKENS, Data, TokenFile
from terapipe.training.data.tokenizer import TOKENIZER_FILES
from terapipe.training.model import RunModel

NOTE = "trained_as"  # key in the notes of a checkpoint
MODEL, TOKENIZER, OBJECTIVE, DATA, KEYS = "model", "tokenizer", "objective", "data", "keys"
_OBJECTIVE = ("data.packing", "data.seq_len")
_KEYS = ("model.dtype", "model.seed", "model.factory", "data.seed", "data.shuffle", "data.batch_size")
_SECTIONS = ("optimizer", "lr")
_SPEED_ONLY = ("optimizer.fused",)
# Keys of a model's configuration that do not change the function that it computes.
_TRAINING_ONLY = re.compile("dropout|pdrop|layerdrop|jitter|initializer_range|aux_loss_coef")

_DEFAULTS = {f"objective.{key}": value for key, value in asdict(ObjectiveConfig()).items()}

Identity = dict[str, dict[str, Any]]


def identity(config: RunConfig, data: Data, model: RunModel) -> Identity:
    """Describes what is trained, as it is after a round trip through JSON, so that it can be compared with the notes.

    Args:
        config: Of the run.
        data: Its token files.
        model: Its model.
    """
    flat = flatten(config)
    keys = {key: value for key, value in flat.items() if key in _KEYS or key.split(".")[0] in _SECTIONS}
    parts = {
        MODEL: model.identity,
        TOKENIZER: {
            "vocab": data.tokenizer.vocab,
            "end": data.tokenizer.end,
            "files": _tokenizer_hash(data.train.folder.parent),
        },
        OBJECTIVE: {key: value for key, value in flat.items() if key in _OBJECTIVE or key.startswith("objective.")},
        DATA: {"train": _fingerprint(data.train), "eval": data.eval and _fingerprint(data.eval)},
        KEYS: {key: value for key, value in keys.items() if key not in _SPEED_ONLY},
    }
    result: Identity = json.loads(json.dumps(parts))
    return result


def flatten(config: RunConfig) -> dict[str, Any]:
    """Returns all settings by the names that messages and trackers call them, such as ``optimizer.lr``.

    Args:
        config: Of the run.
    """
    return {f"{part}.{key}": value for part, keys in asdict(config).items() for key, value in keys.items()}


def _tokenizer_hash(folder: Path) -> str:
    """A hash of the tokenizer's files that determine how text is tokenized; tokenizer.json alone does, if it is
    there."""
    whole = folder / "tokenizer" / "tokenizer.json"
    files = [whole] if whole.is_file() else [folder / "tokenizer" / name for name in TOKENIZER_FILES]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes() if file.is_file() else b"\0")
    return digest.hexdigest()


def _fingerprint(file: TokenFile) -> dict[str, Any]:
    """What tells token files apart, from their manifest: no token is read."""
    sums = read_manifest(file.folder)
    contents = [sums[name].crc32 for name in (TOKENS, STARTS, NUMBERS) if name in sums]
    return {"tokens": file.num_tokens, "documents": file.num_documents, "contents": contents}


def compare(before: Mapping[str, Any], now: Identity, place: Path, *, own: bool) -> list[str]:
    """Compares a checkpoint with the run that is to go on from it.

    Args:
        before: The notes of the checkpoint.
        now: The run.
        place: The checkpoint's folder, for messages.
        own: Whether it belongs to this run. From another run's checkpoint one may begin with another objective: that is
            fine-tuning.

    Returns:
        The changes to announce.

    Raises:
        ValueError: Another model or tokenizer, or in the run's own folder another objective.
    """
    was = before.get(NOTE)
    if not isinstance(was, dict) or not all(isinstance(was.get(part), dict) for part in now):
        return ["it does not say what it was trained as, so nothing was compared"]
    was = {**was, OBJECTIVE: {**_DEFAULTS, **was[OBJECTIVE]}}  # older checkpoints do not say all of it
    changes = {part: list(_changes(was[part], now[part], part)) for part in now}
    model = [change for change in changes[MODEL] if not _TRAINING_ONLY.search(change)]
    refused = [*model, *changes[TOKENIZER], *(changes[OBJECTIVE] if own else ())]
    if refused:
        remedy = (
            "set what it was" if not changes[TOKENIZER] else "set what it was (data.tokenizer: the folder of its own)"
        )
        elsewhere = ", or begin another run in another logging.folder" if own else ", or begin without it"
        raise ValueError(
            f"a run goes on with the model, tokenizer and objective of its checkpoint, {place} has others: "
            f"{'; '.join(refused)}; {remedy}{elsewhere}"
        )
    return [*changes[MODEL], *changes[OBJECTIVE], *changes[DATA], *changes[KEYS]]


def same_rows(before: Mapping[str, Any], now: Identity) -> bool:
    """Tells whether the position in the data means the same: rows of pairs are others than rows of documents.

    Args:
        before: The notes of the checkpoint.
        now: The run.
    """
    was = before.get(NOTE)
    if not isinstance(was, dict):
        return True
    before_dpo, now_dpo = ({**_DEFAULTS, **p.get(OBJECTIVE, {})}["objective.kind"] == "dpo" for p in (was, now))
    return bool(before_dpo == now_dpo)


def same_evaluation(before: Mapping[str, Any], now: Identity) -> bool:
    """Tells whether evaluation losses before and now are of the same data, as far as the notes say.

    Args:
        before: The notes of the checkpoint.
        now: The run.
    """
    was = before.get(NOTE)
    return not isinstance(was, dict) or was.get(DATA, {}).get("eval") == now[DATA]["eval"]


def _changes(was: Mapping[str, Any], now: Mapping[str, Any], part: str) -> Iterator[str]:
    """Yields what differs. For a model only keys that both have: another version of transformers may have other
    keys."""
    keys = was.keys() & now.keys() if part == MODEL else {*was, *now}
    for key in sorted(keys):
        old, new = was.get(key), now.get(key)
        named = key if part in (OBJECTIVE, KEYS) else f"{part}.{key}"
        if old == new:
            continue
        if part == MODEL and isinstance(old, dict) and isinstance(new, dict):
            yield from (f"{part}.{key}{change.removeprefix(part)}" for change in _changes(old, new, part))
        elif part == DATA:
            yield f"{named}: {_size_of(old)} -> {_size_of(new)}{_same_size(old, new)}"
        elif key == "files":
            yield "the tokenizer's files are others"
        else:
            yield f"{named}: {old} -> {new}"


def _size_of(file: Mapping[str, Any] | None) -> str:
    return f"{file['tokens']} tokens in {file['documents']} documents" if file else "none"


def _same_size(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> str:
    """Files of equal size with other contents: without this the message would say that nothing has changed."""
    alike = old and new and (old["tokens"], old["documents"]) == (new["tokens"], new["documents"])
    return ", others than before" if alike else ""
