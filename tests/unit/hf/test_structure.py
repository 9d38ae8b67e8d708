"""Which modules of a decoder are its layers, and what comes before and after."""

import pytest
from torch import nn

from terapipe.hf.backends import UnsupportedModelError
from terapipe.hf.structure import AFTER, BEFORE, LAYERS, find_structure, identity_of, with_layers
from terapipe.hf.verify.small_model import small_model
from tests.support.hf_models import small_config


@pytest.mark.parametrize(
    ("name", "layers", "first", "last"),
    [
        ("llama", "model.layers", "model.embed_tokens", "lm_head"),
        ("gpt2", "transformer.h", "transformer.wte", "lm_head"),
        ("gpt_neox", "gpt_neox.layers", "gpt_neox.embed_in", "gpt_neox.final_layer_norm"),
    ],
)
def test_modules_are_where_they_are_called(name: str, layers: str, first: str, last: str) -> None:
    structure = find_structure(small_model(small_config(name)))
    assert structure.layers == layers
    assert structure.place(first) == BEFORE
    assert structure.place(f"{layers}.0.anything") == LAYERS
    assert structure.place(last) == AFTER
    assert structure.place(f"{last}.lora_A.default") == AFTER  # what an adapter adds has its module's place


def test_parameters_that_no_configuration_describes_are_refused() -> None:
    model = small_model(small_config("llama"))
    structure = find_structure(model)
    assert structure.of(model).layers == structure.layers
    model.model.extra = nn.Linear(2, 2)
    with pytest.raises(UnsupportedModelError, match=r"does not describe.*: model\.extra; remove them"):
        structure.of(model)


def test_layers_are_replaced_in_a_copy() -> None:
    model = small_model(small_config("llama"))
    bare = with_layers(model, "model.layers", lambda k, layer: nn.Identity())
    assert all(isinstance(layer, nn.Identity) for layer in bare.model.layers)
    assert not any(isinstance(layer, nn.Identity) for layer in model.model.layers)
    assert bare.lm_head.weight is model.lm_head.weight


def test_what_does_not_change_a_model_is_not_compared() -> None:
    config = {"layers": 2, "use_cache": True, "_name": "x", "text": {"heads": 4, "dtype": "float32"}}
    assert identity_of(config) == {"layers": 2, "text": {"heads": 4}}
