"""What a model does after its layers, called by itself."""

import pytest
import torch

from terapipe.hf.head import Head
from terapipe.hf.structure import find_structure
from terapipe.hf.verify.small_model import small_model
from tests.support.hf_models import small_config


@pytest.mark.parametrize("shortened", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_hidden_states_become_the_models_logits(name: str, shortened: bool) -> None:
    model = small_model(small_config(name)).eval()
    structure = find_structure(model)
    layers = model.get_submodule(structure.layers)
    hidden: list[torch.Tensor] = []

    def take(module: torch.nn.Module, arguments: object, out: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        hidden.append(out if isinstance(out, torch.Tensor) else out[0])

    handle = layers[-1].register_forward_hook(take)
    with torch.no_grad():
        wanted = model(input_ids=torch.arange(6)[None] + 2, use_cache=False).logits
        handle.remove()
        head = Head(model, structure, dict(enumerate(layers)), len(layers))
        empty = {"inputs_embeds": torch.zeros_like(hidden[0])}
        if shortened:
            head.shorten(hidden[0], **empty)
        assert torch.equal(head(hidden[0], **empty), wanted)
        before = head.before(hidden[0], model.lm_head, **empty)
        assert torch.equal(model.lm_head(before), wanted)
    assert model.get_submodule(structure.layers) is layers  # as it was
