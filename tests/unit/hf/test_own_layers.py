"""Some layers in the place of all of a model's: names stay, loops and configurations see only these."""

import pytest
import torch

from terapipe.hf.own_layers import LastLayerError, LayerSwap, OwnLayers
from terapipe.hf.verify.small_model import small_model
from tests.support.hf_models import small_config


def test_layers_keep_their_numbers_and_are_counted_from_zero() -> None:
    layers = OwnLayers({2: torch.nn.Linear(1, 1), 5: torch.nn.ReLU()})
    assert layers.numbers == [2, 5]
    assert [name for name, _ in layers.named_parameters()] == ["2.weight", "2.bias"]
    assert isinstance(layers[1], torch.nn.ReLU)
    assert layers[: len(layers)] is layers


def test_a_loop_over_all_of_them_can_leave_the_forward() -> None:
    def leave() -> None:
        raise LastLayerError

    layers = iter(OwnLayers({0: torch.nn.ReLU()}, leave))
    assert isinstance(next(layers), torch.nn.ReLU)
    with pytest.raises(LastLayerError):
        next(layers)


def test_a_model_is_as_it_was_after_a_swap() -> None:
    model = small_model(small_config("llama"))
    before, config = model.model.layers, model.model.config
    depth = len(before)
    swap = LayerSwap(model, "model.layers", OwnLayers({1: before[1]}), depth)
    with swap.applied():
        assert list(model.model.layers) == [before[1]]
        assert model.model.config.num_hidden_layers == 1
        assert config.num_hidden_layers == depth  # the caller's own is left alone
    assert model.model.layers is before
    assert model.model.config is config
