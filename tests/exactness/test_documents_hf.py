"""Packed documents in Hugging Face models equal each document by itself."""

import copy

import pytest
import torch

from terapipe.hf import Decoder, UnsupportedModelError
from terapipe.hf import stage as decoder_stage
from terapipe.hf.verify.small_model import small_model
from terapipe.runtime.pipeline import Pipeline
from tests.support.hf_models import (
    batch,
    gradients_of_documents,
    plain_gradients,
    small_config,
    two_stages,
    worst_difference,
)
from tests.support.models import gradients

pytestmark = pytest.mark.usefixtures("quiet_models")


@pytest.mark.exhaustive_ids("mistral|gemma2")
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "llama4_text"])
def test_windows_and_chunks_begin_anew_with_documents(name: str) -> None:
    """Documents that began exactly where a slice does passed for one, and their windows reached into the one before."""
    config = small_config(name)
    config.attn_temperature_tuning = False  # of Llama 4: by places in the row, so refused with documents
    model, (ids, labels) = small_model(config), batch()
    decoder = Decoder(copy.deepcopy(model))
    for documents in (((0, 9), (0, 9)), ((0, 9, 22), (0, 10)), ((0, 3, 4, 20), (0,))):
        pipe = Pipeline(decoder, two_stages(decoder))
        pipe.zero_grad()
        pipe.step(ids, labels, documents)
        assert (
            worst_difference(gradients(pipe), gradients_of_documents(model, ids, labels, documents)) < 1e-6
        )  # gemma2 has float32 in it


def test_older_keys_are_not_touched_within_a_document() -> None:
    """A slice's block begins where the window of its first token does, or the document."""
    cache = decoder_stage.SliceCache(40)
    cache.set_documents(((0, 12),))
    cache.begin(25, 5)
    keys = [block.keys for block in cache.visibility(window=4).blocks()]
    assert min(block.start for block in keys) == 22
    assert max(block.stop for block in keys) == 30
    cache.begin(13, 5)
    assert min(block.keys.start for block in cache.visibility(window=4).blocks()) == 12


def test_a_model_that_swallows_positions_refuses_documents_alone() -> None:
    """Bart takes ``position_ids`` and does nothing with them: packed documents were off by one to three."""
    model, (ids, labels) = small_model(small_config("bart")), batch()
    decoder = Decoder(copy.deepcopy(model))
    pipe = Pipeline(decoder, two_stages(decoder))
    pipe.step(ids, labels)
    before = {name: g.clone() for name, g in gradients(pipe).items()}
    for call in (pipe.step, pipe.evaluate):
        with pytest.raises(
            UnsupportedModelError, match="packed documents are not exact in BartForCausalLM: gradients differ by"
        ):
            call(ids, labels, ((0, 5), (0,)))
    assert all(torch.equal(g, before[name]) for name, g in gradients(pipe).items())
    pipe.zero_grad()
    pipe.step(ids, labels, ((0,), (0,)))  # one document each is none
    assert worst_difference(gradients(pipe), plain_gradients(copy.deepcopy(model), ids, labels)) < 1e-12
    chosen = Decoder(small_model(small_config("bart")), backend="attention")  # nothing is checked yet
    with pytest.raises(UnsupportedModelError, match="packed documents are not exact"):
        chosen.check_step(documents=True, training=True, padded=False)
