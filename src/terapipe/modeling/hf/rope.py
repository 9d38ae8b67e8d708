"""Rotary embeddings whose frequencies depend on a sequence's length (dynamic NTK scaling, LongRoPE).

Transformers takes the largest position of a call for the length. The dynamic kind also remembers the longest call: one
that is longer than the original length, but not the longest so far, is rotated as the longest was.
"""

import copy
from typing import Any

from torch import nn
from transformers import PretrainedConfig

_ORIGINAL = "original_inv_freq"


def depends_on_length(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    found = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(map(_by_length, found))


def _by_length(kind: Any) -> bool:
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")


def within_reach(config: PretrainedConfig, seq_len: int) -> PretrainedConfig:
    """The same configuration; where frequencies depend on the length, they change beyond so many tokens."""
    config = copy.deepcopy(config)
    for part in (config, *(part for part in vars(config).values() if isinstance(part, PretrainedConfig))):
        rope = getattr(part, "rope_parameters", None) or {}
        for one in (rope, *(inner for inner in rope.values() if isinstance(inner, dict))):
            if _by_length(one.get("rope_type")):
                part.max_position_embeddings = seq_len if "dynamic" in one["rope_type"] else 4 * seq_len
                one["original_max_position_embeddings"] = seq_len
                if hasattr(part, "original_max_position_embeddings"):
                    part.original_max_position_embeddings = seq_len
    return config


def forgotten(module: nn.Module) -> dict[str, Any]:
    """Makes the module one that was never called. What it remembered."""
    known = {**vars(module), **module._buffers}
    fresh: dict[str, Any] = {}
    for name in known:
        if name.endswith(_ORIGINAL):  # one for each kind of layer
            kind = name.removesuffix(_ORIGINAL)
            fresh |= {f"{kind}inv_freq": known[name], f"{kind}max_seq_len_cached": module.original_max_seq_len}
    remembered = {name: known[name] for name in fresh if name in known}
    remember(module, fresh)
    return remembered


def remember(module: nn.Module, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(module, name, value)
