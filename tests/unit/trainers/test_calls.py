"""What a model is called with: padding on the left, and what counts as packed documents."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from terapipe.hf import UnsupportedModelError
from terapipe.hf.verify.small_model import default_config, small_model
from terapipe.hf.verify.verification import relative_length
from terapipe.hf.weights import meta_model
from terapipe.trainers import pipelined
from tests.support.hf_models import small_config

pytestmark = pytest.mark.usefixtures("quiet_models")
ROWS, TOKENS = 2, 29


def gradients(model: Any, call: dict[str, Any]) -> dict[str, Tensor]:
    model.zero_grad()
    model(**call).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def error(model: Any, call: dict[str, Any]) -> float:
    """Of gradients through a pipeline. Transformers' loss is in float32."""
    wanted = gradients(copy.deepcopy(model), call)
    pipelined(model, 4, batch_size=ROWS, seq_len=TOKENS)
    largest = max(float(g.abs().max()) for g in wanted.values())
    return max(float((g - wanted[name]).abs().max()) / largest for name, g in gradients(model, call).items())


def small(kind: str, **changes: Any) -> Any:
    config = small_config(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    return small_model(config)


def token_ids() -> Tensor:
    return torch.randint(3, 90, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))


# Padding on the left


def padded(*padding: int, with_positions: bool = False) -> dict[str, Any]:
    """``padding``: places before each row's first token."""
    places = torch.arange(TOKENS).expand(ROWS, -1) - torch.tensor(padding)[:, None]
    mask = (places >= 0).long()
    labels = token_ids().masked_fill(places <= 0, -100)
    positions = {"position_ids": places.clamp(min=0)} if with_positions else {}
    return {"input_ids": token_ids(), "attention_mask": mask, "labels": labels, "use_cache": False, **positions}


@pytest.mark.parametrize("kind", ["ministral3", "hunyuan_v1_dense", "beam"])
def test_left_padding_is_refused_where_attention_depends_on_positions(kind: str) -> None:
    """Rows were moved to position 0 without a word: queries of Ministral 3 (0.1) and Beam (2e-4) are scaled by their
    positions, and Hunyuan has a norm after the rotation (0.1)."""
    model = small(kind)
    assert error(model, padded(0, 11, with_positions=True)) < 1e-6
    with pytest.raises(UnsupportedModelError, match=r"not only on distances.*padding_side to 'right', or give"):
        model(**padded(0, 11))


def test_left_padding_is_exact_up_to_the_length_from_which_queries_are_scaled() -> None:
    model = small("ministral3")
    model.config.rope_parameters["original_max_position_embeddings"] = TOKENS
    assert relative_length(model) == TOKENS
    assert error(model, padded(0, 11)) < 2e-6
    longer = {name: torch.cat([x, x[:, :1]], 1) for name, x in padded(0, 11).items() if isinstance(x, Tensor)}
    with pytest.raises(UnsupportedModelError, match=f"beyond {TOKENS} tokens, got {TOKENS + 1}"):
        model(**longer)


@pytest.mark.parametrize(
    ("kind", "length"), [("llama", float("inf")), ("ministral3", 16384), ("hunyuan_v1_dense", 0), ("gpt2", 0)]
)
def test_up_to_which_length_a_model_sees_distances_only(kind: str, length: float) -> None:
    assert relative_length(meta_model(default_config(kind))) == length


def test_rope_by_length_takes_the_length_of_positions() -> None:
    """With positions from the first token on, no row as long as the batch and a length that changes frequencies,
    gradients were wrong by 0.7."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = small("llama", rope_parameters=rope, max_position_embeddings=16)
    assert error(model, padded(6, 11)) < 2e-6
    with pytest.raises(UnsupportedModelError, match="depend on the length, which is 23 by position_ids and 29"):
        model(**padded(6, 11, with_positions=True))


# Packed documents


@pytest.mark.parametrize(
    ("beside", "reason"),
    [
        ({"use_cache": False}, ""),
        ({"use_cache": False, "attention_mask": torch.ones(ROWS, TOKENS)}, "an attention_mask beside them"),
        ({}, "it uses a cache; set use_cache=False"),
    ],
    ids=["alone", "a mask of ones", "a cache"],
)
def test_positions_that_begin_again_are_documents_with_a_warning_where_transformers_has_none(
    beside: dict[str, Any], reason: str
) -> None:
    """Beside a mask of ones or with a cache, transformers lets documents see each other; nobody was told."""
    positions = torch.cat([torch.arange(11), torch.arange(1), torch.arange(17)]).expand(ROWS, -1)
    call = {"input_ids": token_ids(), "position_ids": positions, "labels": token_ids(), **beside}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        different = error(small("llama"), call) > 1e-6
    told_of_packing = [str(one.message) for one in told if "packed documents" in str(one.message)]
    assert different == bool(told_of_packing) == bool(reason)
    assert all(reason in message for message in told_of_packing)
