"""In half precision, sums over slices are in float32: more slices do not make gradients worse."""

import pytest
import torch
from torch import Tensor

from terapipe import GPT, GPTConfig, Pipeline, Plan, next_token_labels
from terapipe.modeling.weight_grads import add_to_main_grad, main_grad
from tests.support.models import gradients

CONFIG = GPTConfig(layers=2, hidden=32, heads=2, vocab=61, max_seq_len=256)
IDS = (torch.arange(256) * 7 % 61)[None]


def stepped(dtype: torch.dtype, slices: int, order: str = "terapipe") -> tuple[dict[str, Tensor], Pipeline]:
    model = GPT(CONFIG, seed=1).bfloat16().to(dtype)  # the same weights, whatever they are kept in
    pipe = Pipeline(model, Plan((1,), ((256 // slices,) * slices,), (0, 2), order), device="cpu")
    pipe.step(IDS, next_token_labels(IDS))
    return gradients(pipe), pipe


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Of all gradients together."""
    off = sum((found[name].double() - g.double()).square().sum().item() for name, g in wanted.items())
    return (off / sum(g.double().square().sum().item() for g in wanted.values())) ** 0.5


@pytest.mark.parametrize("order", ["terapipe", "terapipe-deferred"])
def test_the_error_does_not_grow_with_the_number_of_slices(order: str) -> None:
    """It was twice as large with 128 slices: weights, and what later slices owe to keys, were summed in bfloat16."""
    wanted, _ = stepped(torch.float64, 1)
    whole = error(stepped(torch.bfloat16, 1)[0], wanted)
    assert 0.002 < whole < 0.02
    assert error(stepped(torch.bfloat16, 128, order)[0], wanted) < 1.1 * whole


def test_optimizers_see_gradients_of_the_parameters_dtype() -> None:
    found, pipe = stepped(torch.bfloat16, 4)
    assert found.keys() == dict(pipe.named_parameters()).keys()
    assert all(g.dtype == torch.bfloat16 for g in found.values())
    assert all(main_grad(p) is None for p in pipe.parameters()), "nothing is left of the sums"


def test_gradients_of_several_steps_are_added() -> None:
    once, pipe = stepped(torch.bfloat16, 4)
    pipe.step(IDS, next_token_labels(IDS))
    for name, twice in gradients(pipe).items():
        assert torch.equal(twice, 2 * once[name])


def test_a_step_that_fails_leaves_no_sums() -> None:
    before, pipe = stepped(torch.bfloat16, 4)
    calls = iter(range(100))

    def fail(gradient: Tensor) -> None:
        if next(calls) == 2:
            raise ArithmeticError("in the third backward")

    handle = pipe.stages[0].register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
    with pytest.raises(ArithmeticError):
        pipe.step(IDS, next_token_labels(IDS))
    handle.remove()
    assert all(main_grad(p) is None for p in pipe.parameters())
    assert all(torch.equal(g, before[name]) for name, g in gradients(pipe).items())


def test_parts_are_added_in_float32() -> None:
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    add_to_main_grad(p, torch.ones(1, dtype=torch.bfloat16))
    for _ in range(100):
        add_to_main_grad(p, torch.full((1,), 2**-10, dtype=torch.bfloat16))
    total = main_grad(p)
    assert total is not None
    assert total.item() == 1 + 100 * 2**-10
