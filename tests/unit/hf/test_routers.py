"""Losses of routers from sums of slices: the numbers that transformers computes of all tokens at once."""

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from terapipe.hf.backends import UnsupportedModelError
from terapipe.hf.routers import BALANCE, RouterLosses, Z, router_losses
from terapipe.hf.verify.small_model import small_model
from terapipe.modeling.slice_cache import SliceCache
from tests.support.hf_models import small_config


def test_slices_add_up_to_the_loss_of_transformers() -> None:
    losses = RouterLosses(experts=4, chosen=2, balance=0.5, z=0.25)
    layers = [torch.randn(10, 4, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for k in range(3)]
    cache, sums = SliceCache(10), dict[str, torch.Tensor]()
    for start, length in ((0, 7), (7, 3)):
        context = cache.begin(start, length)
        losses.add([x[None, start : start + length] for x in layers], cache)
        for name, part in context.pop_sums().items():
            sums[name] = sums.get(name, torch.zeros(())) + part
    computed = {name: loss.value(sums[name]) for name, loss in losses.auxiliary_losses.items()}
    theirs = 0.5 * load_balancing_loss_func(tuple(layers), 4, 2)  # which counts in float32
    torch.testing.assert_close(computed[BALANCE], theirs, check_dtype=False, rtol=1e-6, atol=0.0)
    every = torch.cat(layers)
    torch.testing.assert_close(computed[Z], 0.25 * every.logsumexp(-1).square().mean())


def test_other_numbers_of_experts_are_refused() -> None:
    cache = SliceCache(4)
    cache.begin(0, 4)
    with pytest.raises(
        UnsupportedModelError, match=r"routers of 4 experts were expected, got logits of shape \(4, 8\)"
    ):
        RouterLosses(4, 2, balance=1.0).add([torch.zeros(4, 8)], cache)


def test_a_model_without_routers_has_no_such_loss() -> None:
    model = small_model(small_config("llama"))
    assert router_losses(model) is None
    with pytest.raises(UnsupportedModelError, match=r"has no routers that a z-loss could be added for"):
        router_losses(model, z=0.1)
