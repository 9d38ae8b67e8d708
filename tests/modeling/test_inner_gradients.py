"""Gradients of weights stay inside their step: what layers differentiate, hook, change or copy on the way."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.utils.parametrize import register_parametrization
from transformers.pytorch_utils import Conv1D

from terapipe import GPT, Layout, Pipeline, Plan
from terapipe.hf import Decoder
from terapipe.modeling.cache import SliceCache
from terapipe.modeling.fused_linear import FusedLinears
from terapipe.modeling.hf.comparison import Batch, errors, reference
from terapipe.modeling.hf.shrink import small_config, small_model
from terapipe.modeling.linear import Linear
from terapipe.modeling.stage import IGNORE
from tests.models import TINY, make_batch, make_model, mesh_of, variant, whole
from tests.ranks import Ranks

IDS, LABELS = make_batch(TINY, 2, 29, ignored=True)
ORDERS = ["terapipe", "terapipe-deferred"]
MODES = ["none", "selective", "full"]
Gradients = dict[str, Tensor]


def pipe_of(model: GPT, order: str = "terapipe", recompute: str = "none", *, fused: bool = True) -> Pipeline:
    plan = Plan((1, 1), ((9, 1, 12, 7), (20, 9)), (0, 1, 4), order, 2, recompute)
    return Pipeline(model, plan, fused_weight_grads=fused)


def plain(model: GPT) -> Gradients:
    (model.loss(model(IDS), LABELS) / (LABELS != IGNORE).sum()).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def stepped(pipe: Pipeline) -> Gradients:
    pipe.step(IDS, LABELS)
    return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


def error(wanted: Gradients, gradients: Gradients) -> float:
    assert set(wanted) == set(gradients)
    scale = max(truth.abs().max().item() for truth in wanted.values())
    return max((gradients[name] - truth).abs().max().item() for name, truth in wanted.items()) / scale


class Around(nn.Module):
    """A layer of the model and what a test adds to it: ``change`` gets the module, its output and the cache."""

    def __init__(self, layer: nn.Module, change: Callable[["Around", Tensor, SliceCache | None], Tensor]) -> None:
        super().__init__()
        self.layer, self.change = layer, change
        self.linear, self.own = nn.Linear(TINY.hidden, TINY.hidden), Linear(TINY.hidden, TINY.hidden)
        with torch.no_grad():
            for p in (*self.linear.parameters(), *self.own.parameters()):
                p.copy_(torch.sin(torch.arange(p.numel())).view_as(p))

    def forward(self, x: Tensor, cache: SliceCache | None = None) -> Tensor:
        return self.change(self, self.layer(x, cache), cache)

    def energy(self, x: Tensor, cache: SliceCache | None) -> Tensor:
        return (torch.tanh(self.linear(x)).square() + torch.tanh(self.own(x, cache)).square()).sum()


def model_with(change: Callable[[Around, Tensor, SliceCache | None], Tensor]) -> GPT:
    model = make_model(TINY)
    model.layers = nn.ModuleDict({name: Around(layer, change).double() for name, layer in model.layers.items()})
    return model


# torch.autograd.grad inside a layer


def slope(module: Around, x: Tensor, cache: SliceCache | None) -> Tensor:
    (gradient,) = torch.autograd.grad(module.energy(x, cache), x)
    return x + 0.3 * gradient


def slope_twice(module: Around, x: Tensor, cache: SliceCache | None) -> Tensor:
    (gradient,) = torch.autograd.grad(module.energy(x, cache), x, create_graph=True)
    return x + 0.3 * gradient


def slope_apart(module: Around, x: Tensor, cache: SliceCache | None) -> Tensor:
    with torch.enable_grad():
        apart = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(module.energy(apart, cache), apart, create_graph=True)
    return x + 0.3 * gradient


def slope_by_torch_func(module: Around, x: Tensor, cache: SliceCache | None) -> Tensor:
    return x + 0.3 * torch.func.grad(lambda x: module.energy(x, cache))(x)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("change", [slope, slope_twice, slope_apart, slope_by_torch_func])
def test_gradients_inside_a_layer_are_autograds(change: Any, recompute: str, order: str) -> None:
    if recompute == "selective" and change is slope_by_torch_func:
        pytest.skip("torch.func does not work inside of torch.utils.checkpoint")
    if recompute == "full" and change in (slope, slope_twice):
        with pytest.raises(ValueError, match=r"a layer must not differentiate .* recompute 'selective' or 'none'"):
            pipe_of(model_with(change), order, recompute).step(IDS, LABELS)
        return
    wanted = plain(model_with(change))
    for fused in (True, False):
        assert error(wanted, stepped(pipe_of(model_with(change), order, recompute, fused=fused))) < 1e-13


def test_gradients_inside_a_layer_do_not_go_through_attention() -> None:
    """Later slices, which would add to them, are not computed yet."""

    def forward(layer: Any, x: Tensor, cache: SliceCache | None = None) -> Tensor:
        out: Tensor = type(layer).forward(layer, x, cache)
        (gradient,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        return out + 0.3 * gradient

    model = make_model(TINY)
    layer: Any = model.layers["2"]
    layer.forward = lambda x, cache=None: forward(layer, x, cache)
    for recompute in ("none", "selective"):
        with pytest.raises(ValueError, match=r"must not go through attention: .* tokens 0 to 9 of 29; "):
            pipe_of(model, recompute=recompute).step(IDS, LABELS)
    wanted = plain(model)
    model.zero_grad()
    assert error(wanted, stepped(Pipeline(model, Plan((2,), ((29,),), (0, 1, 4), "terapipe", 2)))) < 1e-13


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", ["nn.Linear", "Linear", "Conv1D"])
def test_gradients_of_weights_inside_a_slice(kind: str, dtype: torch.dtype | None) -> None:
    """To the second order, and ``.grad`` is left alone."""
    module: Any = {"nn.Linear": nn.Linear, "Linear": Linear, "Conv1D": Conv1D}[kind](4, 4)
    module = nn.Sequential(module)
    x = torch.randn(2, 5, 4, requires_grad=True)

    def of(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        with torch.autocast("cpu", enabled=dtype is not None):
            out = torch.tanh(call(x)).square().sum()
        inputs = (x, *module.parameters())
        first = torch.autograd.grad(out, inputs, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), inputs)]  # type: ignore[union-attr]

    wanted, cache = of(module), SliceCache(5)
    cache.begin(0, 5)
    with FusedLinears(module, ()).over(cache):
        gradients = of((lambda x: module[0](x, cache)) if kind == "Linear" else module)
    for truth, gradient in zip(wanted, gradients, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=0.05 if dtype else 1e-5, atol=0.01 if dtype else 1e-6)
    assert all(p.grad is None for p in module.parameters())


# Hooks of parameters


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("recompute", MODES)
def test_tensor_hooks_see_the_whole_gradient_once(order: str, recompute: str) -> None:
    """``register_hook`` saw the part of each slice, or for the weights of ``Linear`` nothing."""
    names = ["embedding.weight", "layers.0.norm1.weight", "layers.1.up.weight", "layers.3.down.bias", "norm.bias"]
    results = []
    for fused in (None, True, False):
        model = make_model(TINY)
        run = partial(plain, model) if fused is None else partial(stepped, pipe_of(model, order, recompute, fused=fused))
        seen: list[list[Tensor]] = [[] for _ in names]
        together: list[Any] = []
        parameters = [model.get_parameter(name) for name in names]
        for p, mine in zip(parameters, seen, strict=True):
            p.register_hook(lambda g, mine=mine: mine.append(g.clone()))  # type: ignore[no-untyped-call]
            p.register_hook(lambda g: g.sign() * g.abs().sqrt())  # type: ignore[no-untyped-call]
        register_multi_grad_hook(parameters, together.append)
        once = [p.register_hook(lambda g, i=i: once[i].remove()) for i, p in enumerate(parameters)]  # type: ignore
        run()
        run()  # adds
        results.append({**run(), **{f"{name} seen": sum(x) for name, x in zip(names, seen, strict=True)}})
        assert [len(x) for x in seen] == [3] * len(names)
        assert len(together) == 3
        assert [len(p._backward_hooks or ()) for p in parameters] == [3] * len(names)
    wanted, *others = results
    for gradients in others:
        assert error(wanted, gradients) < 1e-13
