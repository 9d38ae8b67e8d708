"""Plans that a model is not exact with are refused before a step, by the rule that they break."""

import pytest
import torch

import terapipe as tp
from examples import own_model
from terapipe.runtime.model_checks import ModelChecks

LAYERS = own_model.LAYERS
WHOLE, SLICED = (tp.Plan((1,), (lengths,), (0, LAYERS)) for lengths in ((8,), (5, 3)))


def test_layers_and_ranks_must_be_the_plans() -> None:
    checks = ModelChecks(own_model.Decoder())
    checks.size(WHOLE, 1)
    with pytest.raises(ValueError, match=rf"splits {LAYERS + 1} layers, the model has {LAYERS}"):
        checks.size(tp.Plan((1,), ((8,),), (0, LAYERS + 1)), 1)
    with pytest.raises(ValueError, match=r"is for 1 ranks .*, got 4 processes; start 1"):
        checks.size(WHOLE, 4)


@pytest.mark.parametrize("first", [WHOLE, SLICED], ids=["whole", "sliced"])
def test_slices_are_only_run_if_some_were_checked(first: tp.Plan) -> None:
    model = own_model.Decoder()
    checks = ModelChecks(model)
    checks.stage(model.stage(0, LAYERS, torch.device("cpu")), 0, first, own_loss=True)
    checks.plan(first)
    if first is SLICED:
        checks.plan(WHOLE)
    else:
        with pytest.raises(ValueError, match=r"slices of this model were not checked.*; make the Pipeline with a plan"):
            checks.plan(SLICED)
