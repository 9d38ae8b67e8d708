"""Linear layers of any module: gradients of weights in place and put off; outside of slices nothing is changed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from terapipe import Pipeline, Plan
from terapipe.hf import Decoder
from terapipe.modeling.cache import SliceCache
from terapipe.modeling.fused_layers import fuse_weight_grads
from terapipe.modeling.hf.comparison import Batch, Result, errors, reference
from terapipe.modeling.hf.shrink import small_config, small_model
from terapipe.modeling.linear import DeferredGrad

LENGTHS = ((9, 1, 12, 7),)


def pipe_of(model: Any, order: str = "terapipe-deferred", *, fused: bool = True) -> Pipeline:
    plan = Plan((2,), LENGTHS, (0, 1, 4), order, 2)
    return Pipeline(Decoder(model, backend="attention"), plan, fused_weight_grads=fused)


def stepped(pipe: Pipeline, batch: Batch) -> Result:
    pipe.zero_grad()
    loss = pipe.step(batch.ids, batch.labels)
    return loss.item(), {name: p.grad.cpu().clone() for name, p in pipe.named_parameters() if p.grad is not None}


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The ops in which gradients of weights were added in place."""
    from terapipe.runtime.executor import Executor

    added: list[str] = []
    add = DeferredGrad.add
    now: list[Executor] = []
    run = Executor._perform_all

    def performing(self: Executor, runs: Any) -> None:
        now.append(self)
        run(self, runs)

    def noted(self: DeferredGrad) -> None:
        assert now[-1].at is not None
        added.append(str(now[-1].at.op))
        add(self)

    with monkeypatch.context() as patch:
        patch.setattr(Executor, "_perform_all", performing)
        patch.setattr(DeferredGrad, "add", noted)
        yield added


def adapted(dropout: float = 0.0) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_dropout=dropout, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model: Any = small_model(small_config("llama"))
    return get_peft_model(model, config)


@pytest.mark.parametrize(
    ("kind", "products"),
    # Linear layers of four layers, for each of four slices: q, k, v, o, gate, up, down; qkv, out, up, down; two by two.
    [("llama", 4 * 4 * 7), ("gpt2", 4 * 4 * 4), ("lora", 4 * 4 * 4)],
)
def test_weights_of_any_model_are_put_off(kind: str, products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = adapted() if kind == "lora" else small_model(small_config(kind))
    whole = model.base_model.model if kind == "lora" else model
    batch = Batch.of(whole)
    wanted = reference(whole, batch)
    for order, op in (("terapipe-deferred", "W"), ("terapipe", "B")):
        pipe = pipe_of(model, order)
        with counted(monkeypatch) as added:
            found = stepped(pipe, batch)
        heads = 0 if kind == "lora" else 4  # of each slice, with the loss; frozen under adapters
        assert added == ["F"] * heads + [op] * products
        assert max(errors(wanted, found).values()) < 1e-12
    with counted(monkeypatch) as added:
        found = stepped(pipe_of(model, fused=False), batch)
    assert not added
    assert max(errors(wanted, found).values()) < 1e-12


def test_the_model_is_as_before_and_after() -> None:
    model = small_model(small_config("gpt2"))
    kinds = {name: type(module) for name, module in model.named_modules()}
    pipe = pipe_of(model)
    inside = [type(module) for stage in pipe.stages.values() for module in stage.modules()]
    stepped(pipe, Batch.of(model))
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert [type(module) for stage in pipe.stages.values() for module in stage.modules()] == inside
    assert set(pipe.state_dict()) <= set(model.state_dict())


def test_it_is_as_before_after_a_failure() -> None:
    model = small_model(small_config("llama"))
    batch = Batch.of(model)
    wanted = reference(model, batch)
    pipe = pipe_of(model)
    stage = pipe.stages[0]
    layer: Any = stage.blocks[0]  # type: ignore[operator, union-attr]
    inside = [type(module) for module in stage.modules()]
    handle = layer.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pipe.step(batch.ids, batch.labels)
    handle.remove()
    assert [type(module) for module in stage.modules()] == inside
    assert max(errors(wanted, stepped(pipe_of(model), batch)).values()) < 1e-12


def test_hooks_of_parameters_fire() -> None:
    """Once, with the gradient of the step."""
    model = small_model(small_config("llama"))
    batch = Batch.of(model)
    wanted = reference(model, batch)
    pipe = pipe_of(model)
    name = "model.layers.0.mlp.up_proj.weight"
    seen: list[Tensor] = []
    parameter = dict(pipe.named_parameters())[name]
    parameter.register_hook(seen.append)  # type: ignore[no-untyped-call]
    complete: list[Tensor] = []
    other = dict(pipe.named_parameters())["model.layers.0.mlp.down_proj.weight"]
    other.register_post_accumulate_grad_hook(lambda p: complete.append(p.grad.clone()))  # type: ignore[no-untyped-call]
    found = stepped(pipe, batch)
    assert max(errors(wanted, found).values()) < 1e-12
    assert len(seen) == 1
    assert torch.allclose(seen[0].cpu(), wanted[1][name], rtol=0, atol=1e-14)
    assert len(complete) == 1
    assert torch.equal(complete[0].cpu(), found[1]["model.layers.0.mlp.down_proj.weight"])


def test_outputs_may_be_changed_in_place() -> None:
    """roc_bert does."""
    linear, cache = nn.Sequential(nn.Linear(4, 3)), SliceCache(5)
    x = torch.randn(2, 5, 4, requires_grad=True)
    cache.begin(0, 5)
    fuse_weight_grads(linear)
    cache.fuses = True
    with cache:
        out = linear(x).mul_(2.0)
    out.sum().backward()
    plainly = nn.functional.linear(x, linear[0].weight, linear[0].bias) * 2  # type: ignore[arg-type]
    assert torch.allclose(out, plainly)
    assert torch.allclose(linear[0].weight.grad, 2 * x.detach().sum((0, 1)).expand(3, 4))  # type: ignore[arg-type]


def test_a_wrong_product_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small copy of a model is verified with what a pipeline uses."""
    from terapipe.hf import UnsupportedModelError

    monkeypatch.setattr(DeferredGrad, "product", lambda self: self.left.t() @ self.right * 1.01)
    with pytest.raises(UnsupportedModelError, match="gradients differ"):
        Decoder(small_model(small_config("llama")))


class Halved(Tensor):
    """A tensor class with products of its own, as low precision training has them."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(function, types, args, kwargs or {})
        return 0.5 * found if function is nn.functional.linear else found


def test_weights_with_products_of_their_own_are_left_alone() -> None:
    linear, cache = nn.Linear(4, 3, bias=False), SliceCache(5)
    weight = linear.weight.detach()
    linear.weight = nn.Parameter(weight.as_subclass(Halved))
    x = torch.randn(2, 5, 4)
    cache.begin(0, 5)
    fuse_weight_grads(linear)
    cache.fuses = True
    with cache:
        out = linear(x)
    out.sum().backward()
    assert torch.allclose(out.as_subclass(Tensor), 0.5 * x @ weight.t())
    assert torch.allclose(linear.weight.grad, 0.5 * x.sum((0, 1)).expand(3, 4))  # type: ignore[arg-type]
