"""Stages of a Hugging Face model leave the caller's model alone, and have each parameter once."""

import copy
from typing import Any

import pytest
from transformers import PreTrainedModel

from terapipe import Pipeline
from terapipe.hf import Decoder
from tests.support.hf_models import CPU, adapted, plain_gradients, small, stages_here, step_gradients, worst_difference

pytestmark = pytest.mark.usefixtures("quiet_models")


def looks(model: PreTrainedModel) -> list[Any]:
    """All that may not change in a model that pipelines are made of."""
    modules = [
        (name, type(m), m.training, getattr(m, "gradient_checkpointing", None), sorted(m.__dict__), sorted(m._buffers))
        for name, m in model.named_modules()
    ]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    tensors = [(name, id(t)) for name, t in [*model.named_parameters(), *model.named_buffers()]]
    return [modules, hooks, tensors, model.config.to_dict(), model.config._attn_implementation]


def test_two_pipelines_of_one_model_and_the_model_itself_afterwards() -> None:
    """The hooks of the first pipeline were still in the layers that the second cut elsewhere, and the model's attention
    was the pipeline's: it could not be called by itself any more."""
    model = small()
    wanted, before = plain_gradients(model), looks(model)
    first = Decoder(model, backend="attention")
    for decoder, boundaries in ((first, (0, 1, 4)), (Decoder(model, backend="attention"), (0, 2, 3, 4))):
        pipe = Pipeline(decoder, stages_here(*boundaries))
        pipe.eval().train()
        assert worst_difference(step_gradients(pipe), wanted) < 1e-12
    assert looks(model) == before
    assert worst_difference(plain_gradients(model), wanted) == 0.0


@pytest.mark.parametrize(
    ("tied", "options"),
    [
        (False, {"modules_to_save": ["embed_tokens", "norm", "lm_head"]}),
        (True, {"modules_to_save": ["lm_head"]}),
        (False, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
        (True, {"target_modules": ["q_proj", "embed_tokens"]}),
        (False, {"trainable_token_indices": [1, 2, 50]}),
    ],
    ids=["saved", "saved head of a tied model", "LoRA of the ends", "LoRA of a tied embedding", "tokens"],
)
def test_wrapped_embeddings_norms_and_heads_belong_to_one_stage(tied: bool, options: dict[str, Any]) -> None:
    """Every stage held a copy of what peft wraps, trained by one of them, and a checkpoint kept any of the copies."""
    model = adapted(tied=tied, **options)
    wanted = {name.removeprefix("base_model.model."): g for name, g in plain_gradients(copy.deepcopy(model)).items()}
    decoder = Decoder(model, backend="attention")
    first, second = (set(dict(decoder.stage(*layers, CPU).named_parameters())) for layers in ((0, 1), (1, 4)))
    assert not first & second
    assert worst_difference(step_gradients(Pipeline(decoder, stages_here(0, 1, 4))), wanted) < 1e-12


@pytest.mark.parametrize("kind", ["marian", "bart"])
@pytest.mark.parametrize(("encoder", "decoder"), [(2, 4), (4, 3)])
def test_a_decoder_may_have_more_or_fewer_layers_than_the_encoder(kind: str, encoder: int, decoder: int) -> None:
    """The cache had as many layers as the encoder: ``Decoder`` took the model, and its first step failed with an
    IndexError."""
    model = small(kind, encoder_layers=encoder, decoder_layers=decoder)
    made = Decoder(model)
    assert made.num_layers == decoder
    assert worst_difference(step_gradients(Pipeline(made, stages_here(0, 1, decoder))), plain_gradients(model)) < 1e-12
