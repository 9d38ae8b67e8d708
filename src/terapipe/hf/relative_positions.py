"""Up to which length a model sees distances between tokens only, not where they are: padding on the left shifts them.

Rotary embeddings make attention depend on distances. But some models also scale queries by their positions (Ministral 3
beyond its original length, Beam), or put a norm with weights of its own after the rotation (Hunyuan). So it is tried on
a small copy, which gets the same tokens at other positions.
"""

import math
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from terapipe.hf.rope import with_original_length
from terapipe.hf.structure import text_config, token_logits
from terapipe.hf.verify.reference import Batch
from terapipe.hf.verify.small_model import shrink_config, small_model
from terapipe.hf.verify.verification import quietly

SHIFT = 64
BOUND = 3e-5  # relative; angles of rotations are computed in float32
FAR = 2**20  # more tokens than a check has
ORIGINAL = "original_max_position_embeddings"


_LENGTHS: dict[tuple[type, str], float] = {}  # by class and configuration: a check takes part of a second


def relative_length(model: PreTrainedModel) -> float:
    """How many positions, from 0 on, may be shifted without an effect: 0, infinity, or an original length."""
    key = type(model), model.config.to_json_string(use_diff=False)
    if key not in _LENGTHS:
        _LENGTHS[key] = _try_lengths(model.config, type(model))
    return _LENGTHS[key]


def _try_lengths(config: PretrainedConfig, kind: type[PreTrainedModel]) -> float:
    small = with_original_length(
        shrink_config(config), FAR
    )  # frequencies by length are those of the batch, padded or not
    if _sees_distances_only(small, kind):
        return math.inf
    originals = [one[ORIGINAL] for one in _ropes(config) if one.get(ORIGINAL)]
    for one in _ropes(small):
        if one.get(ORIGINAL):
            one[ORIGINAL] = FAR
    return float(min(originals)) if originals and _sees_distances_only(small, kind) else 0.0


def _ropes(config: PretrainedConfig) -> list[dict[str, Any]]:
    rope = getattr(text_config(config), "rope_parameters", None) or {}
    return [rope, *(inner for inner in rope.values() if isinstance(inner, dict))]


def _sees_distances_only(config: PretrainedConfig, kind: type[PreTrainedModel]) -> bool:
    with quietly(), torch.no_grad():
        try:
            model = small_model(config, kind=kind).train(False)
            batch = Batch.of(model)
            places = torch.arange(batch.tokens).expand_as(batch.ids)
            here, there = (
                token_logits(model, input_ids=batch.ids, position_ids=places + shift, use_cache=False)
                for shift in (0, SHIFT)
            )
        except Exception:  # whatever the model's own code raises, for example without rows for such positions
            return False
    return bool((here - there).abs().max() <= BOUND * here.abs().max())
