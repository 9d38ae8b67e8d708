"""What was put into a model after it was made, which a small copy does not have: exact, or refused by name."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from terapipe import Pipeline
from terapipe.hf import Decoder, UnsupportedModelError
from terapipe.hf.verify.small_model import small_model
from tests.support.hf_models import (
    batch,
    plain_gradients,
    small,
    small_config,
    stages_here,
    step_gradients,
    worst_difference,
)

pytestmark = pytest.mark.usefixtures("quiet_models")


class Normalized(nn.Module):
    """BatchNorm over all tokens."""

    def __init__(self, track: bool = True) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64, track_running_stats=track, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        normalized: Tensor = self.norm(x.flatten(0, 1)).view_as(x)
        return normalized


class Summed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


class LowRank(nn.Module):
    """LoRA of one's own."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.drop = base, nn.Dropout(0.0)
        self.down, self.up = nn.Linear(base.in_features, 3).double(), nn.Linear(3, base.out_features).double()

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.base(x) + self.up(self.down(self.drop(x)))
        return changed


class OtherAttention(LlamaAttention):
    pass


def replace_attention(model: Any) -> None:
    model.model.layers[1].self_attn = OtherAttention(model.config, 1).double()


def spectral(model: Any) -> None:
    for layer in model.model.layers:
        parametrizations.spectral_norm(layer.mlp.up_proj)


def weight_norms(model: Any) -> None:
    for module in (model.model.embed_tokens, model.model.layers[2].mlp.down_proj, model.lm_head):
        parametrizations.weight_norm(module)


def low_rank(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj = LowRank(layer.mlp.up_proj)


def steer(model: Any) -> None:
    direction = torch.randn(64, dtype=torch.float64)
    model.model.layers[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.5, *inputs[1:]))
    model.model.layers[2].register_forward_hook(lambda module, inputs, output: output + direction)


def batch_norm(model: Any, track: bool = True) -> None:
    model.model.layers[1].post_attention_layernorm = Normalized(track)


def sum_tokens(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = Summed()


def hook_two_layers(model: Any) -> None:
    """By hooks of one name, of which the second is not exact."""
    for layer, dim in enumerate((2, 1)):
        model.model.layers[layer].mlp.register_forward_hook(
            lambda module, inputs, output, dim=dim: output - output.mean(dim, keepdim=True)
        )


def center(module: Any, inputs: Any, output: Tensor) -> Tensor:
    return output - output.mean(1, keepdim=True)


def fewer_layers(model: Any) -> None:
    model.model.layers = model.model.layers[:3]


@pytest.mark.parametrize("change", [weight_norms, low_rank, steer, lambda m: m.enable_input_require_grads()])
@pytest.mark.parametrize("training", [True, False])
def test_changes_that_work_on_each_token_alone_are_exact(change: Callable[[Any], None], training: bool) -> None:
    """Hooks before the first layer of a stage saw zeros, and what they returned was lost."""
    torch.manual_seed(0)
    model = small().train(training)
    change(model)
    wanted = plain_gradients(copy.deepcopy(model))
    pipe = Pipeline(Decoder(model, backend="attention"), stages_here(0, 1, 4))
    assert pipe.training == training
    assert worst_difference(step_gradients(pipe), wanted) < 1e-12


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            replace_attention,
            r"layers\.1\.self_attn is a OtherAttention .* a LlamaAttention, .*__init__ of a subclass",
        ),
        (sum_tokens, r"layers\.1\.mlp\.act_fn is a Summed where .* differ by"),
        (lambda m: batch_norm(m, track=False), r"post_attention_layernorm is a Normalized where .* differ by"),
        (
            lambda m: m.model.layers[0].mlp.register_forward_hook(center),
            r"layers\.0\.mlp has a forward hook \(center\)",
        ),
        (lambda m: m.register_forward_hook(center), "LlamaForCausalLM has a forward hook .* call it otherwise"),
        (lambda m: m.lm_head.register_full_backward_hook(lambda *_: None), "lm_head has a backward hook: it would see"),
        (hook_two_layers, r"layers\.1\.mlp has a forward hook"),
        (fewer_layers, r"model\.layers has 3 layers: the configuration of LlamaForCausalLM says 4"),
    ],
    ids=["attention", "sum", "batch norm", "hook", "hook of the model", "backward hook", "two hooks", "layers"],
)
def test_changes_that_slices_would_get_wrong_are_refused_by_name(change: Callable[[Any], None], reason: str) -> None:
    """Nothing was checked: gradients were wrong by 0.4 with a hook that centers tokens, and by 0.1 to 3 with others."""
    model = small()
    change(model)
    with pytest.raises(UnsupportedModelError, match=reason):
        Decoder(model, backend="attention")


@pytest.mark.parametrize(
    ("change", "buffers"),
    [
        (spectral, r"up_proj\.parametrizations\.weight\.0\._u"),
        (batch_norm, r"post_attention_layernorm\.norm\.running_mean"),
    ],
    ids=["spectral norm", "batch norm"],
)
def test_buffers_that_the_forward_updates_are_named_in_training_mode(
    change: Callable[[Any], None], buffers: str
) -> None:
    """Each slice updated them: gradients were wrong by up to 0.18 with spectral norm and 2.9 with BatchNorm."""
    model = small()
    change(model)
    before = {name: x.clone() for name, x in model.named_buffers()}
    pipe = Pipeline(Decoder(model, backend="attention"), stages_here(0, 1, 4))
    with pytest.raises(
        UnsupportedModelError, match=f"in training mode: the forward updates .*{buffers}.* for each slice"
    ):
        pipe.step(*batch())
    assert all(torch.equal(x, before[name]) for name, x in model.named_buffers())
    assert worst_difference(step_gradients(pipe.eval()), plain_gradients(model.eval())) < 1e-12


def test_a_change_made_by_a_subclass_is_in_the_small_copy() -> None:
    class Own(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for i, layer in enumerate(self.model.layers):
                layer.self_attn = OtherAttention(config, i)

    class Updating(Own):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for layer in self.model.layers:
                layer.mlp = Normalized()

    assert Decoder(small_model(small_config("llama"), kind=Own)).backend == "attention"
    with pytest.raises(UnsupportedModelError, match=r"each forward updates model\.layers\.0\.mlp\.norm\.running_mean"):
        Decoder(small_model(small_config("llama"), kind=Updating))


def test_lora_over_a_changed_layer() -> None:
    """Adapters are known; what they wrap is compared with the configuration."""
    peft = pytest.importorskip("peft")
    model = small()
    model.model.layers[1].mlp.act_fn = Summed()
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"])
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.act_fn is a Summed"):
        Decoder(peft.get_peft_model(model, adapters), backend="attention")
