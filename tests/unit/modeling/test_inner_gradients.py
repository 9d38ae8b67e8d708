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
from terapipe.hf.verify.reference import Batch, errors, reference
from terapipe.hf.verify.small_model import small_model
from terapipe.modeling.linear import fuse_weight_grads, plain_class
from terapipe.modeling.slice_cache import SliceCache
from terapipe.modeling.stage import IGNORE
from tests.support.hf_models import small_config
from tests.support.models import TINY, make_batch, make_model, mesh_of, variant, whole
from tests.support.ranks import Ranks

IDS, LABELS = make_batch(TINY, 2, 29, ignored=True)
ORDERS = ["terapipe", "terapipe-deferred"]
MODES = ["none", "light", "block", "full"]
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
        self.linear, self.own = nn.Linear(TINY.hidden, TINY.hidden), nn.Linear(TINY.hidden, TINY.hidden)
        with torch.no_grad():
            for p in (*self.linear.parameters(), *self.own.parameters()):
                p.copy_(torch.sin(torch.arange(p.numel())).view_as(p))

    def forward(self, x: Tensor, cache: SliceCache | None = None) -> Tensor:
        return self.change(self, self.layer(x, cache), cache)

    def energy(self, x: Tensor, cache: SliceCache | None) -> Tensor:
        return (torch.tanh(self.linear(x)).square() + torch.tanh(self.own(x)).square()).sum()


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


CHANGES = [(change, mode) for change in (slope, slope_twice, slope_apart) for mode in MODES]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("change", "recompute"), [*CHANGES, (slope_by_torch_func, "none"), (slope_by_torch_func, "full")]
)
def test_gradients_inside_a_layer_are_autograds(change: Any, recompute: str, order: str) -> None:
    if recompute == "full" and change in (slope, slope_twice):
        with pytest.raises(ValueError, match=r"a layer must not differentiate .* recompute 'block' or 'none'"):
            pipe_of(model_with(change), order, recompute).step(IDS, LABELS)
        return
    wanted = plain(model_with(change))
    for fused in (True, False)[: 1 if recompute == "light" else 2]:  # which recalls fused products alone
        assert error(wanted, stepped(pipe_of(model_with(change), order, recompute, fused=fused))) < 1e-12


def test_gradients_inside_a_layer_do_not_go_through_attention() -> None:
    """Later slices, which would add to them, are not computed yet."""

    def forward(layer: Any, x: Tensor, cache: SliceCache | None = None) -> Tensor:
        out: Tensor = type(layer).forward(layer, x, cache)
        (gradient,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        return out + 0.3 * gradient

    model = make_model(TINY)
    layer: Any = model.layers["2"]
    layer.forward = lambda x, cache=None: forward(layer, x, cache)
    for recompute in ("none", "light", "block"):
        with pytest.raises(ValueError, match=r"must not go through attention: .* tokens 0 to 9 of 29; "):
            pipe_of(model, recompute=recompute).step(IDS, LABELS)
    wanted = plain(model)
    model.zero_grad()
    assert error(wanted, stepped(Pipeline(model, Plan((2,), ((29,),), (0, 1, 4), "terapipe", 2)))) < 1e-12


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", ["nn.Linear", "Conv1D"])
def test_gradients_of_weights_inside_a_slice(kind: str, dtype: torch.dtype | None) -> None:
    """To the second order, and ``.grad`` is left alone."""
    module: Any = {"nn.Linear": nn.Linear, "Conv1D": Conv1D}[kind](4, 4)
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
    fuse_weight_grads(module)
    cache.current.fuses = True
    with cache:
        gradients = of(module)
    for truth, gradient in zip(wanted, gradients, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=0.05 if dtype else 1e-5, atol=0.01 if dtype else 1e-6)
    assert all(p.grad is None for p in module.parameters())


# Hooks of parameters


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("recompute", MODES)
def test_tensor_hooks_see_the_whole_gradient_once(order: str, recompute: str) -> None:
    """``register_hook`` saw the part of each slice, or for weights whose gradients are added in place nothing."""
    names = ["embedding.weight", "layers.0.norm1.weight", "layers.1.up.weight", "layers.3.down.bias", "norm.bias"]
    wanted = watched(model := make_model(TINY), partial(plain, model), names)
    for fused in (True, False)[: 1 if recompute == "light" else 2]:  # which recalls fused products alone
        pipe = pipe_of(model := make_model(TINY), order, recompute, fused=fused)
        assert error(wanted, watched(model, partial(stepped, pipe), names)) < 1e-12


def watched(model: GPT, run: Callable[[], Gradients], names: list[str]) -> Gradients:
    """The gradients of three steps, and what hooks saw that also change, remove themselves, or are for several."""
    parameters = [model.get_parameter(name) for name in names]
    seen: list[list[Tensor]] = [[] for _ in names]
    together: list[Any] = []
    for p, mine in zip(parameters, seen, strict=True):
        p.register_hook(lambda g, mine=mine: mine.append(g.clone()))  # type: ignore[no-untyped-call, misc]
        p.register_hook(lambda g: g.sign() * g.abs().sqrt())  # type: ignore[no-untyped-call]
    register_multi_grad_hook(parameters, together.append)
    once = [p.register_hook(lambda _, i=i: once[i].remove()) for i, p in enumerate(parameters)]  # type: ignore
    for _ in range(2):
        run()
    gradients = run()
    assert [len(x) for x in seen] == [3] * len(names)
    assert len(together) == 3
    assert [len(p._backward_hooks or ()) for p in parameters] == [3] * len(names)
    return {**gradients, **{f"{name}, seen": torch.stack(x) for name, x in zip(names, seen, strict=True)}}


def hooked(layout: Layout, shard: bool) -> Gradients:
    """Gradients in full, of a hook that masks and squares."""
    pipe = Pipeline(make_model(variant(tied=True)), hook_plan(layout), mesh=mesh_of(layout), shard=shard)
    calls: list[str] = []

    def hook(name: str) -> Callable[[Tensor], Tensor]:
        return lambda gradient: calls.append(name) or gradient * gradient.abs()  # type: ignore[func-returns-value]

    for name, p in pipe.named_parameters():
        p.register_hook(hook(name))  # type: ignore[no-untyped-call]
    ids, labels = make_batch(TINY, layout.dp, 28, ignored=True)
    for _ in range(2):
        pipe.step(*(x[pipe.dp_rank : pipe.dp_rank + 1] for x in (ids, labels)))
    assert sorted(calls) == sorted(2 * [name for name, _ in pipe.named_parameters()])
    return {name: whole(p.grad) for name, p in pipe.named_parameters() if p.grad is not None}


def hook_plan(layout: Layout) -> Plan:
    return Plan((1,), ((12, 16),), (0, 1, 4) if layout.pp == 2 else (0, 4), "terapipe-deferred")


@pytest.mark.parametrize(
    ("layout", "shard"),
    [(Layout(1, 2, 1), False), (Layout(2, 1, 1), False), (Layout(2, 1, 1), True), (Layout(1, 1, 2), False)],
    ids=str,
)
def test_tensor_hooks_see_sums_over_ranks(ranks: Callable[[int], Ranks], layout: Layout, shard: bool) -> None:
    """As in one process: over replicas and tied copies, too."""
    model = make_model(variant(tied=True))
    ids, labels = make_batch(TINY, layout.dp, 28, ignored=True)
    (model.loss(model(ids), labels) / (labels != IGNORE).sum()).backward()  # type: ignore[no-untyped-call]
    wanted = {name: 2 * p.grad * p.grad.abs() for name, p in model.named_parameters() if p.grad is not None}
    for part in ranks(2)(hooked, layout, shard):
        for name, gradient in part.items():
            truth = wanted["embedding.weight" if name == "head.weight" else name]
            torch.testing.assert_close(gradient, truth, rtol=1e-10, atol=1e-14)


def test_a_hook_that_fails_leaves_gradients_as_before() -> None:
    pipe = pipe_of(make_model(TINY))
    earlier = {name: gradient.clone() for name, gradient in stepped(pipe).items()}
    weight = pipe.get_parameter("layers.1.up.weight")
    handle = weight.register_hook(lambda gradient: gradient[:1])  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="has changed the size of value"):
        pipe.step(IDS, LABELS)
    assert weight.grad is not None
    assert torch.equal(weight.grad, earlier["layers.1.up.weight"])
    handle.remove()
    assert not weight._backward_hooks


# Weights that change on the way


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("name", ["layers.2.linear.weight", "layers.2.own.weight", "layers.2.layer.up.weight"])
def test_weights_changed_by_a_later_slice_are_refused(name: str, recompute: str) -> None:
    """Their gradients are those of other weights than the forward's: autograd refuses that, and so do we."""

    def grow(module: Around, x: Tensor, cache: SliceCache | None) -> Tensor:
        out: Tensor = module.linear(x) + module.own(x)
        if module is model.layers["2"] and cache is not None and cache.end == 29:
            with torch.no_grad():
                model.get_parameter(name).add_(0.01)
        return out

    model = model_with(grow)
    for fused in (True, False)[: 1 if recompute == "light" else 2]:  # which recalls fused products alone
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            pipe_of(model, "terapipe-deferred", recompute, fused=fused).step(IDS, LABELS)


@pytest.mark.parametrize("recompute", MODES)
def test_weights_changed_before_the_backward_are_refused(recompute: str) -> None:
    model = make_model(TINY)
    pipe = pipe_of(model, recompute=recompute)
    values = pipe.token_outputs(IDS, LABELS.clamp(min=0))
    with torch.no_grad():
        model.get_parameter("layers.3.up.weight").add_(0.01)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        values.sum().backward()
    pipe.zero_grad()
    assert error(plain(make_model(TINY)), stepped(pipe_of(make_model(TINY), recompute=recompute))) < 1e-12


def test_weights_frozen_before_the_backward_get_no_gradient() -> None:
    model = make_model(TINY)
    pipe = pipe_of(model)
    values = pipe.token_outputs(IDS, LABELS.clamp(min=0))
    model.get_parameter("layers.1.up.weight").requires_grad_(False)
    values.sum().backward()
    assert model.get_parameter("layers.1.up.weight").grad is None
    assert model.get_parameter("layers.1.down.weight").grad is not None
    model.zero_grad()
    wanted = plain(model)
    model.zero_grad()
    assert error(wanted, stepped(pipe)) < 1e-12
    model.requires_grad_(True)
    model.zero_grad()
    wanted = plain(model)
    model.zero_grad()
    assert error(wanted, stepped(pipe)) < 1e-12


# Modules that change on the way


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * torch.tanh(weight)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("recompute", MODES)
def test_a_parametrization_after_the_first_step(order: str, recompute: str) -> None:
    """The module got its first class back, whose weight was gone."""

    def mixed(module: Around, x: Tensor, cache: SliceCache | None) -> Tensor:
        return torch.tanh(module.linear(x)) + module.own(x)

    model = model_with(mixed)
    pipe = pipe_of(model, order, recompute)
    pipe.step(IDS, LABELS)
    for module in (model.layers["1"].linear, model.layers["2"].own):
        register_parametrization(module, "weight", Doubled())  # type: ignore[arg-type]
    kinds = [type(module) for module in model.modules()]
    model.zero_grad()
    wanted = plain(model)
    model.zero_grad()
    pipe.step(IDS, LABELS)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert error(wanted, gradients) < 1e-12
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("recompute", MODES)
def test_what_is_copied_during_a_step_is_plain(recompute: str) -> None:
    """Copies of linear layers had the class that these have while a slice is computed."""
    model = small_model(small_config("gpt2"))
    batch = Batch.of(model)
    wanted = reference(model, batch)
    plan = Plan((2,), ((9, 1, 12, 7),), (0, 1, 4), "terapipe-deferred", 2, recompute)
    pipe = Pipeline(Decoder(model, backend="attention"), plan)
    block: Any = pipe.stages[0].blocks[0]  # type: ignore[operator, union-attr]
    copies: list[nn.Module] = []

    def duplicate(module: nn.Module, *_: Any) -> None:
        copies.extend((copy.deepcopy(module), pickle.loads(pickle.dumps(module.c_fc))))

    handle = block.mlp.register_forward_hook(duplicate)
    pipe.step(batch.ids, batch.labels)
    handle.remove()
    for mine in copies:
        assert {type(module) for module in mine.modules()} <= {plain_class(module) for module in block.mlp.modules()}
    gradients = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    assert max(errors(wanted, (wanted[0], gradients)).values()) < 1e-12


@pytest.mark.parametrize("recompute", MODES)
def test_a_layer_that_is_copied_during_a_step_is_plain(recompute: str) -> None:
    """With block recomputation its copy kept the checkpointed forward, over a copy of the cache."""
    copies: list[Any] = []

    def duplicate(module: Around, x: Tensor, cache: SliceCache | None) -> Tensor:
        if cache is not None and torch.is_grad_enabled() and not copies:
            copies.append(copy.deepcopy(module))
        return torch.tanh(module.linear(x)) + module.own(x)

    model = model_with(duplicate)
    pipe_of(model, recompute=recompute).step(IDS, LABELS)
    x = torch.randn(1, 5, TINY.hidden, dtype=torch.float64)
    (layer,) = (layer for layer in model.layers.values() if torch.equal(layer(x), copies[0](x)))
    assert [type(module) for module in copies[0].modules()] == [plain_class(module) for module in layer.modules()]
    assert getattr(copies[0].forward, "__self__", None) is copies[0]
