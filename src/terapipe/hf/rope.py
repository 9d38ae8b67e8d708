"""Rotary embeddings whose frequencies depend on the sequence length (dynamic NTK scaling, LongRoPE).

Transformers takes the largest position of a call as the length. The dynamic kind also keeps state: after a long call,
shorter calls (but longer than the original length) use the frequencies of the long one. Slices need neither: the length
is that of the whole batch, and no call may depend on earlier ones. ``FixedLength`` does that.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

_ORIGINAL = "original_inv_freq"
ORIGINAL_KEY = "original_max_position_embeddings"  # of rope_parameters: the length before any scaling


def depends_on_length(module: nn.Module) -> bool:
    """Whether the module is a rotary embedding whose frequencies, for all layers or for some, depend on the length.

    Args:
        module: Any module; transformers' rotary embeddings have a ``rope_type``, or one for each kind of layer.
    """
    kinds = getattr(module, "rope_type", None)
    return any(map(_kind_depends_on_length, kinds.values() if isinstance(kinds, dict) else [kinds]))


def _kind_depends_on_length(kind: Any) -> bool:
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")


def ropes_of(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The dicts that describe rotary embeddings in a configuration: ``rope_parameters``, and those inside of it.

    Models with one kind of attention have ``{"rope_type": ..., "rope_theta": ...}``; those with several kinds have one
    such dict for each kind of layer: ``{"full_attention": {...}, "sliding_attention": {...}}``. The dicts are the
    configuration's own, so a caller who has a copy of the configuration may change them.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(inner for inner in rope.values() if isinstance(inner, dict))]


def with_original_length(config: PretrainedConfig, seq_len: int) -> PretrainedConfig:
    """A copy of the configuration in which such frequencies change beyond ``seq_len`` tokens, for short tests.

    Args:
        config: In which they change beyond thousands of tokens.
        seq_len: The length up to which frequencies are the original ones.
    """
    config = copy.deepcopy(config)
    for part in (config, *(part for part in vars(config).values() if isinstance(part, PretrainedConfig))):
        for one in ropes_of(part):
            if _kind_depends_on_length(one.get("rope_type")):
                part.max_position_embeddings = seq_len if "dynamic" in one["rope_type"] else 4 * seq_len
                one[ORIGINAL_KEY] = seq_len
                if hasattr(part, ORIGINAL_KEY):
                    setattr(part, ORIGINAL_KEY, seq_len)
    return config


class FixedLength:
    """Hooks that make a rotary embedding compute for a length that is not that of the call.

        before a call   positions 4 5 6 of a slice, length 10  ->  4 5 6 9    the largest position says the length
        after it        tables for 4 5 6 9                     ->  4 5 6

    Before the call, the module's state is reset and one position, ``length - 1``, is appended to the positions: the
    largest position is then that of the whole sequence. After the call, the extra row is removed and the state
    restored.

    Args:
        module: The rotary embedding.
        length: Returns the length; None leaves the call alone.
    """

    def __init__(self, module: nn.Module, length: Callable[[], int | None]) -> None:
        self._length = length
        self._state: dict[str, Any] = {}  # of the module, kept from the hook before a call to the one after
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        length = self._length()
        if length is None:
            return arguments, named
        self._state = _reset(module)
        positions = named["position_ids"] if "position_ids" in named else arguments[1]
        positions = torch.cat([positions, torch.full_like(positions[..., :1], length - 1)], -1)
        if "position_ids" in named:
            return arguments, {**named, "position_ids": positions}
        return (arguments[0], positions, *arguments[2:]), named

    def _after(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        if self._length() is None:
            return None
        _set(module, self._state)
        if isinstance(output, tuple):
            return tuple(table[..., :-1, :] for table in output)
        return output[..., :-1, :]


def _reset(module: nn.Module) -> dict[str, Any]:
    """Gives the module the state of one that was never called, and returns its previous state."""
    attributes = {**vars(module), **module._buffers}
    fresh: dict[str, Any] = {}
    for name in attributes:
        if name.endswith(_ORIGINAL):  # one per kind of layer
            kind = name.removesuffix(_ORIGINAL)
            fresh |= {f"{kind}inv_freq": attributes[name], f"{kind}max_seq_len_cached": module.original_max_seq_len}
    previous = {name: attributes[name] for name in fresh if name in attributes}
    _set(module, fresh)
    return previous


def _set(module: nn.Module, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(module, name, value)
