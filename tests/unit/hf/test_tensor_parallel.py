"""Tensor parallel of Hugging Face models by their own plans: exact, or refused on all devices."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from terapipe import Layout, Pipeline
from terapipe.hf import Decoder, UnsupportedModelError
from terapipe.modeling.stage import TensorParallel
from tests.support.hf_models import CPU, batch, plain_gradients, small, stages_here, worst_difference
from tests.support.models import gradients, mesh_of
from tests.support.ranks import Ranks

pytestmark = pytest.mark.usefixtures("quiet_models")


def tensor_parallel() -> tuple[dict[str, Tensor], float]:
    """Gradients, and how far a step of the pipeline's optimizer moves the caller's model."""
    model = small(tie_word_embeddings=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    pipe = Pipeline(
        Decoder(model, backend="attention"), stages_here(0, 4), mesh=mesh_of(Layout(1, 1, 2)), timeout=300.0
    )
    pipe.step(*batch())
    found = gradients(pipe)
    torch.optim.SGD(pipe.parameters(), lr=1.0).step()
    return found, max((p - before[name]).abs().max().item() for name, p in model.named_parameters())


def test_tensor_parallel_of_a_model_that_ties_its_weights(ranks: Callable[[int], Ranks]) -> None:
    """Each device untied them, so that the embedding had the gradient of one of its two uses; and what was trained were
    views into the caller's model."""
    wanted = plain_gradients(small(tie_word_embeddings=True))
    for found, moved in ranks(2)(tensor_parallel):
        assert worst_difference(found, wanted) < 1e-12
        assert moved == 0.0


def refused_plan(kind: str) -> str:
    try:
        Decoder(small(kind), backend="attention").stage(0, 4, CPU, TensorParallel(mesh_of(Layout(1, 1, 2))["tp"]))
    except UnsupportedModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        # The plan forgets its activation's parameters: each device had a part of their gradient.
        ("apertus", "tp_plan of ApertusForCausalLM is not exact: tp 2: gradients of model.layers.*.mlp.act_fn"),
        # It crashed in the first step.
        ("llama4_text", "tp_plan of Llama4ForCausalLM is not exact: tp 2: Output 0 of _ToTorchTensor is a view"),
    ],
    ids=["apertus", "llama4_text"],
)
def test_a_tp_plan_that_is_not_exact_is_refused_on_all_devices_alike(
    ranks: Callable[[int], Ranks], kind: str, reason: str
) -> None:
    first, second = ranks(2)(refused_plan, kind)
    assert first == second
    assert reason in first
