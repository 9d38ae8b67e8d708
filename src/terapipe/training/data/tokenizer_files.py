"""The files of a tokenizer, as Hugging Face names them."""

import json
from pathlib import Path
from typing import Any

END = "<|endoftext|>"

# What belongs to a tokenizer in a folder that may also hold a model.
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip


def write_config(folder: Path, end: str) -> None:
    """With the end that was found, wherever it was found."""
    plain = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    there = read(folder / "tokenizer_config.json") or plain
    if not there.get("eos_token"):
        write(folder / "tokenizer_config.json", {**there, "eos_token": end})


def read(path: Path) -> dict[str, Any]:
    """Nothing, if there is no such file."""
    found = json.loads(path.read_bytes()) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def write(path: Path, entries: dict[str, Any]) -> None:
    path.write_text(json.dumps(entries, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
