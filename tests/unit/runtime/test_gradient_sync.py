"""A weight that two stages share, when it is frozen."""

from collections.abc import Callable

import pytest
import torch

from terapipe import Pipeline, Plan
from terapipe.hf import Decoder
from tests.support.hf_models import LENGTHS, batch, small_config, stages_here
from tests.support.ranks import Ranks

pytestmark = pytest.mark.usefixtures("quiet_models")


def frozen_shared_weight() -> tuple[bool, float]:
    """Whether it has a gradient, and how far weight decay moves it."""
    decoder = Decoder.from_config(small_config("gpt2"), dtype=torch.float64, backend="attention")
    pipe = Pipeline(decoder, Plan((1, 1), LENGTHS, (0, 1, 4)), timeout=300.0)
    shared = next(p for name, p in pipe.named_parameters() if name in decoder.tied)
    shared.requires_grad_(False)
    before = shared.detach().clone()
    pipe.step(*batch())
    torch.optim.AdamW(pipe.parameters(), lr=0.1, weight_decay=0.5).step()
    return shared.grad is not None, (shared.detach() - before).abs().max().item()


def test_a_frozen_shared_weight_has_no_gradient(ranks: Callable[[int], Ranks]) -> None:
    """It was given one of zero, and an optimizer with weight decay moved it."""
    assert ranks(2)(frozen_shared_weight) == [(False, 0.0)] * 2


def test_a_shared_weight_that_is_frozen_under_one_name_only_is_refused() -> None:
    decoder = Decoder.from_config(small_config("gpt2"), dtype=torch.float64, backend="attention")
    pipe = Pipeline(decoder, stages_here(0, 1, 4))
    next(p for name, p in pipe.named_parameters() if name == "lm_head.weight").requires_grad_(False)
    with pytest.raises(ValueError, match=r"wte\.weight and lm_head\.weight are one parameter, which must be frozen"):
        pipe.step(*batch())
