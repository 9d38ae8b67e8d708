"""A model that is changed after ``pipelined``: followed, with the gradients of the plain model, or refused by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from terapipe import PipelineError
from terapipe.hf import UnsupportedModelError
from terapipe.trainers import pipelined
from tests.support.ranks import Ranks
from tests.unit.trainers import runs
from tests.unit.trainers.test_states import adapted, compare, gradients, ids, lora

pytestmark = pytest.mark.usefixtures("quiet_models")


def add_lora(model: Any) -> Any:
    from peft import get_peft_model

    torch.manual_seed(8)
    return get_peft_model(model, lora())


def load_by_assignment(model: Any) -> None:
    state = {name: x.detach() * 1.1 for name, x in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def resize_embeddings(model: Any) -> None:
    torch.manual_seed(8)
    model.resize_token_embeddings(136, mean_resizing=False)


def replace_module(model: Any) -> None:
    torch.manual_seed(8)
    model.model.layers[1].mlp.up_proj = nn.Linear(32, 48, dtype=torch.float64)


def replace_parameter(model: Any) -> None:
    layer = model.model.layers[3].mlp.down_proj
    layer.weight = nn.Parameter(2 * layer.weight.detach())


def double(module: Any, arguments: Any, output: Tensor) -> Tensor:
    return 2 * output


def add_hook(model: Any) -> None:
    model.model.layers[3].mlp.register_forward_hook(double)


def add_hook_to_the_base(model: Any) -> None:
    model.model.norm.register_forward_pre_hook(lambda module, arguments: (3 * arguments[0] + 1,))


def tie(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def replace_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5


def change_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq *= 0.5


def change_epsilon(model: Any) -> None:
    model.model.layers[2].input_layernorm.variance_epsilon = 0.3
    model.model.norm.variance_epsilon = 0.2


def replace_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def parametrize(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)


def drop_layer_weights(model: Any) -> None:
    model.model.layers[1].mlp.gate_proj.weight.requires_grad_(False)


CHANGES = (
    add_lora, load_by_assignment, resize_embeddings, replace_module, replace_parameter, add_hook, add_hook_to_the_base,
    tie, replace_buffer, change_buffer, change_epsilon, replace_activation, parametrize, drop_layer_weights,
)  # fmt: skip
PASSED_ON = (replace_buffer, change_buffer, change_epsilon, drop_layer_weights)  # whatever the number of devices


def plain_gradients(change: Callable[[Any], Any]) -> dict[str, Tensor]:
    model = runs.model()
    model = change(model) or model
    model(input_ids=ids(), labels=ids()).loss.backward()
    return gradients(model)


OFTEN = (add_lora, load_by_assignment, add_hook, tie, *PASSED_ON)
SELDOM = [pytest.param(change, marks=pytest.mark.exhaustive) for change in CHANGES if change not in OFTEN]


@pytest.mark.parametrize("change", [*OFTEN, *SELDOM], ids=lambda change: change.__name__)
def test_changes_are_followed(change: Callable[[Any], Any]) -> None:
    model = runs.model()
    pipelined(model, 5)
    model(input_ids=ids(), labels=ids()).loss.backward()
    model.zero_grad()
    model = change(model) or model
    for _ in range(2):
        model.zero_grad()
        model(input_ids=ids(), labels=ids()).loss.backward()
    compare(gradients(model), plain_gradients(change), change.__name__)


def change_all(model: Any) -> None:
    for change in PASSED_ON:
        change(model)


def on_two_stages() -> tuple[dict[str, Tensor], list[str]]:
    """Gradients after changes that are passed on, and why others are refused."""
    found, refusals = {}, []
    with runs.as_under_torchrun():
        for change in (add_hook, add_lora):
            model = runs.model()
            pipelined(model, 5)
            if not found:
                model(input_ids=ids(), labels=ids()).loss.backward()
                model.zero_grad()
                change_all(model)
                model(input_ids=ids(), labels=ids()).loss.backward()
                found = gradients(model)
            outer = change(model) or model
            with pytest.raises((ValueError, PipelineError), match="changed after") as refused:
                outer(input_ids=ids(), labels=ids())
            refusals.append(str(refused.value))
    return found, refusals


def test_changes_with_two_stages(ranks: Callable[[int], Ranks]) -> None:
    (first, refusals), (second, others) = ranks(2)(on_two_stages)
    compare(first | second, plain_gradients(change_all))
    for hook, lora_added in (refusals, others):
        assert "pipelined(): hooks of model.layers.3.mlp (forward_hooks); stages on 2 devices" in hook
        assert "pipelined(): other modules in model.layers.0.self_attn: q_proj; " in lora_added


def test_a_second_adapter_is_followed() -> None:
    def run(slices: int | None) -> dict[str, Tensor]:
        model = adapted()
        if slices:
            pipelined(model, slices)
        torch.manual_seed(9)
        model.add_adapter("third", lora())
        model.set_adapter("third")
        model(input_ids=ids(), labels=ids()).loss.backward()
        return gradients(model)

    found = run(5)
    assert len(found) == 16
    compare(found, run(None))


def test_a_change_between_forward_and_backward_comes_after_the_forward() -> None:
    def run(slices: int | None) -> dict[str, Tensor]:
        model = runs.model()
        if slices:
            pipelined(model, slices, recompute="full")
        loss = model(input_ids=ids(), labels=ids()).loss
        add_hook(model)
        with torch.no_grad():
            model(input_ids=ids())
        loss.backward()
        return gradients(model)

    compare(run(5), run(None))


def with_dropout(**changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    config = AutoConfig.for_model(
        "gpt2", n_layer=2, n_embd=16, n_head=2, vocab_size=128, attn_pdrop=0.0, resid_pdrop=0.5, embd_pdrop=0.5
    )
    return AutoModelForCausalLM.from_config(config).double()


@pytest.mark.parametrize("before", [True, False])
def test_dropout_in_evaluation_mode_stays_off(before: bool) -> None:
    def run(slices: int | None) -> dict[str, Tensor]:
        model = with_dropout().train()
        piped = partial(pipelined, model, slices) if slices else (lambda: None)
        if not before:
            piped()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.eval()
        if before:
            piped()
        model(input_ids=ids(), labels=ids()).loss.backward()
        return gradients(model)

    compare(run(5), run(None))


def test_what_is_asked_of_outputs() -> None:
    model = runs.model()
    pipelined(model, 5)
    with torch.no_grad():
        loss, logits = model(input_ids=ids(), labels=ids(), return_dict=False)
        assert logits.shape == (*ids().shape, 128)
        assert loss == model(input_ids=ids(), labels=ids()).loss
    model.config.return_dict = False
    (loss,) = model(input_ids=ids(), labels=ids())
    loss.backward()
    model.config.output_hidden_states = True
    with pytest.raises(ValueError, match="output_hidden_states=True was asked for"):
        model(input_ids=ids())
    assert model(input_ids=ids(), output_hidden_states=False)[0] is not None
    model.config.output_hidden_states = False
    model.config.rms_norm_eps = 0.1  # looked up when modules are made only, but who knows
    model(input_ids=ids())


def test_another_loss_is_refused() -> None:
    model = runs.model()
    pipelined(model, 5)
    model(input_ids=ids(), labels=ids())
    model.loss_function = lambda logits, labels, **_: logits.sum()
    with pytest.raises(UnsupportedModelError, match="loss of its own"):
        model(input_ids=ids(), labels=ids())


def test_modes_are_those_of_the_model() -> None:
    """Whatever somebody told the pipeline."""
    model = with_dropout().train()
    made = pipelined(model, 5)
    made.pipe.eval()
    torch.manual_seed(1)
    first = model(input_ids=ids(), labels=ids()).loss
    torch.manual_seed(1)
    assert model(input_ids=ids(), labels=ids()).loss == first
    model.eval()
    assert model(input_ids=ids(), labels=ids()).loss != first
