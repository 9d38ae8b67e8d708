"""Gradients of weights in half precision: one operation multiplies and adds to a sum in float32."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from terapipe import GPT, GPTConfig, Pipeline, Plan, next_token_labels
from terapipe.modeling import weight_grads
from terapipe.modeling.weight_grads import add_product, can_add_in_float32, main_grad
from tests.pretend.operators import calls, old_addmm
from tests.support.models import gradients

GPU = torch.device("cuda", 0)
HALF = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    can_add_in_float32.cache_clear()
    yield
    can_add_in_float32.cache_clear()


def draw(tokens: int, width: int, seed: int, dtype: torch.dtype, transposed: bool = False) -> Tensor:
    shape = (width, tokens) if transposed else (tokens, width)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(GPU)
    return x.t() if transposed else x


def error(actual: Tensor, wanted: Tensor) -> float:
    return ((actual.cpu().double() - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
def test_products_are_added_in_float32(dtype: torch.dtype, left: bool, right: bool) -> None:
    """No test ever executed it: there is no such operator for CPUs. The first product was rounded to half precision."""
    weight = nn.Parameter(torch.zeros(384, 640, dtype=dtype, device=GPU))
    wanted = torch.zeros(384, 640, dtype=torch.float64)
    for i in range(6):
        a, b = draw(256, 384, i, dtype, left), draw(256, 640, 10 + i, dtype, right)
        wanted += a.cpu().double().t() @ b.cpu().double()
        add_product(weight, a, b)
    total = main_grad(weight)
    assert total is not None
    assert total.dtype == torch.float32
    assert error(total, wanted) < 1e-6
    assert weight.grad is None


def test_older_versions_of_torch_take_two_operations() -> None:
    weight = nn.Parameter(torch.zeros(16, 24, dtype=torch.bfloat16, device=GPU))
    wanted = torch.zeros(16, 24, dtype=torch.float64)
    with old_addmm():
        for i in range(3):
            a, b = draw(64, 16, i, torch.bfloat16), draw(64, 24, 10 + i, torch.bfloat16)
            wanted += a.cpu().double().t() @ b.cpu().double()
            add_product(weight, a, b)
    total = main_grad(weight)
    assert total is not None
    assert 1e-4 < error(total, wanted) < 1e-2


def test_an_operator_that_rounds_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = weight_grads._add_product_to

    def rounded(total: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
        exact(total, left, right, is_first=is_first)
        total.copy_(total.bfloat16())

    assert can_add_in_float32(torch.bfloat16)
    can_add_in_float32.cache_clear()
    monkeypatch.setattr(weight_grads, "_add_product_to", rounded)
    assert not can_add_in_float32(torch.bfloat16)


def test_a_step_uses_it() -> None:
    """For each slice once in linear layers and head, and the gradients are as good as the CPU's."""
    config = GPTConfig(layers=2, hidden=32, heads=2, vocab=61, max_seq_len=64)
    ids = (torch.arange(64) * 7 % 61)[None]
    steps = {}
    for device, dtype in (("cpu", torch.float64), ("cpu", torch.bfloat16), ("cuda", torch.bfloat16)):
        before = calls["addmm.dtype_out"]
        pipe = Pipeline(GPT(config, seed=1).bfloat16().to(dtype), Plan((1,), ((16,) * 4,), (0, 2)), device=device)
        pipe.step(ids, next_token_labels(ids))
        steps[device, dtype] = {name: g.cpu() for name, g in gradients(pipe).items()}
        number = calls["addmm.dtype_out"] - before
    assert number == 2 + (2 * 4 + 1) * 4  # to find out that it can, then linear layers and head, for each slice
    wanted = steps["cpu", torch.float64]

    def off(grads: dict[str, Tensor]) -> float:
        return sum((grads[name].double() - g).square().sum().item() for name, g in wanted.items()) ** 0.5

    assert off(steps["cuda", torch.bfloat16]) < 1.1 * off(steps["cpu", torch.bfloat16])
