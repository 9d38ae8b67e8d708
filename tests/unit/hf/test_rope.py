"""Rotary embeddings whose frequencies depend on the length of a sequence."""

import copy
from itertools import pairwise

import pytest
import torch
from transformers import PretrainedConfig

from terapipe.hf import Decoder, UnsupportedModelError
from terapipe.hf.verify.small_model import small_model
from terapipe.runtime.pipeline import Pipeline
from tests.support.hf_models import batch, plain_gradients, small_config, two_stages, worst_difference
from tests.support.models import gradients

pytestmark = pytest.mark.usefixtures("quiet_models")


def rope_by_length(kind: str) -> PretrainedConfig:
    """Frequencies change beyond 16 tokens."""
    config = small_config("llama")
    config.rope_parameters = {
        "rope_type": kind,
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    config.max_position_embeddings = 16
    if kind == "longrope":
        half = config.head_dim // 2
        config.rope_parameters |= {"short_factor": [1.0] * half, "long_factor": [3.0] * half}
    return config


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_by_length_follows_transformers_packing(kind: str) -> None:
    """The length is that of the longest document of the whole batch, not of the row, nor of a microbatch."""
    model, (ids, labels) = small_model(rope_by_length(kind)), batch()
    decoder = Decoder(copy.deepcopy(model))
    for documents in (((0, 12, 20), (0, 7, 14, 21)), ((0, 15), (0, 4)), ((0, 9), (0, 10, 20))):
        rows = [torch.cat([torch.arange(b - a) for a, b in pairwise([*row, 29])]) for row in documents]
        pipe = Pipeline(decoder, two_stages(decoder, ((9, 1, 12, 7), (20, 9))))
        pipe.zero_grad()
        pipe.step(ids, labels, documents)
        assert (
            worst_difference(gradients(pipe), plain_gradients(copy.deepcopy(model), ids, labels, torch.stack(rows)))
            < 1e-12
        )


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_by_length_forgets_the_lengths_before(kind: str) -> None:
    """After a longer batch, an evaluation or generated text, stages rotated by different frequencies."""
    model = small_model(rope_by_length(kind))
    mine = copy.deepcopy(model)
    decoder = Decoder(mine)
    pipe = Pipeline(decoder, two_stages(decoder), vary="replan")
    for tokens in (29, 40, 20, 12, 29):
        ids, labels = batch(tokens)
        pipe.zero_grad()
        pipe.step(ids, labels)
        assert worst_difference(gradients(pipe), plain_gradients(copy.deepcopy(model), ids, labels)) < 1e-12
        pipe.evaluate(*batch(60 - tokens))
        with torch.no_grad():
            wanted = copy.deepcopy(model)(input_ids=ids[:, :18]).logits[:, -1]
        assert (pipe.next_token_logits(ids[:, :18]) - wanted).abs().max() < 1e-12
    rope = mine.model.rotary_emb
    assert rope.max_seq_len_cached == 16  # the caller's own model is as it was
    assert torch.equal(rope.inv_freq, model.model.rotary_emb.inv_freq)


def test_rope_by_length_refuses_filled_batches() -> None:
    """Ranks in the middle do not know how long a batch was before it was filled."""
    decoder = Decoder(small_model(rope_by_length("dynamic")))
    pipe = Pipeline(decoder, two_stages(decoder), vary="pad")
    with pytest.raises(
        UnsupportedModelError, match="depend on the length, which vary='pad' changes; take vary='replan'"
    ):
        pipe.step(*batch(20))
