"""Linear layers of any module: gradients of weights in place and put off; outside of slices nothing is changed."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from terapipe import Pipeline, Plan
from terapipe.hf import Decoder
from terapipe.hf.verify.reference import Batch, Result, errors, reference
from terapipe.hf.verify.small_model import small_model
from terapipe.modeling.linear import fuse_weight_grads
from terapipe.modeling.slice_cache import SliceCache
from terapipe.modeling.weight_grads import DeferredGrad, main_grad
from tests.support.hf_models import TORCHAO, small_config

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
    cache.current.fuses = True
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
    cache.current.fuses = True
    with cache:
        out = linear(x)
    out.sum().backward()
    assert torch.allclose(out.as_subclass(Tensor), 0.5 * x @ weight.t())
    assert torch.allclose(linear.weight.grad, 0.5 * x.sum((0, 1)).expand(3, 4))  # type: ignore[arg-type]


# Weights of torchao


def quantized_linear(kind: str, dtype: torch.dtype) -> nn.Linear:
    torchao = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    linear = nn.Linear(64, 32, dtype=dtype)
    linear.requires_grad_(False)
    torchao.quantize_(linear, TORCHAO[kind](torchao))
    return linear


def product(linear: nn.Linear, *, fused: bool, autocast: bool) -> list[Tensor]:
    """Output, gradient of the input, and what autograd saved that is as large as the weight. The output is changed in
    place, as some models do."""
    torch.manual_seed(1)
    dtype = linear.weight.dtype
    x, grad = torch.randn(2, 5, 64, dtype=dtype, requires_grad=True), torch.randn(2, 5, 32)
    saved: list[Tensor] = []
    cache = SliceCache(5)
    cache.begin(0, 5)
    cache.current.fuses = fused
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with cache, hooks, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = linear(x)
        out *= 2
    cache.begin(0, 5)
    out.backward(grad.to(out.dtype))
    assert x.grad is not None
    return [out.detach(), x.grad, *(t for t in saved if t.numel() >= linear.weight.numel())]


@pytest.mark.parametrize("kind", TORCHAO)
@pytest.mark.parametrize("mode", ["float32", "bfloat16", "autocast"])
def test_products_of_torchao_keep_no_weight(kind: str, mode: str) -> None:
    """The same bits as autograd's, which keeps the weight that a product made."""
    linear = quantized_linear(kind, torch.bfloat16 if mode == "bfloat16" else torch.float32)
    wanted = product(linear, fused=False, autocast=mode == "autocast")
    assert len(wanted) > 2
    fuse_weight_grads(linear)
    found = product(linear, fused=True, autocast=mode == "autocast")
    assert len(found) == 2
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    assert type(copy.deepcopy(linear)) is nn.Linear


def test_a_weight_of_torchao_must_not_change_before_the_backward() -> None:
    linear, cache = quantized_linear("torchao-int8", torch.float32), SliceCache(5)
    fuse_weight_grads(linear)
    cache.begin(0, 5)
    cache.current.fuses = True
    with cache:
        out = linear(torch.randn(2, 5, 64, requires_grad=True))
    linear.weight.scale.mul_(2)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=r"part of a quantized weight of shape .* modified by an inplace"):
        out.sum().backward()


# Embeddings


class Scaled(nn.Embedding):
    """As models have them that scale embeddings: the module's own forward, and something after it."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.0


EMBEDDINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"padding_idx": 2},
    "frequencies": {"scale_grad_by_freq": True},
    "norms": {"max_norm": 0.5},
    "sparse": {"sparse": True},
}


def embedding(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    make = Scaled if kind == "scaled" else nn.Embedding
    return make(5, 3, dtype=dtype, **EMBEDDINGS.get(kind, {}))


def in_slices(module: nn.Module, ids: Tensor, lengths: tuple[int, ...], *, main_grads: bool = False) -> None:
    """Forwards and backwards, as a pipeline runs them."""
    fuse_weight_grads(module)
    cache = SliceCache(ids.shape[1])
    cache.current.fuses, cache.current.main_grads = True, main_grads
    start, outs = 0, []
    with cache:
        for length in lengths:
            outs.append(module(ids[:, start : start + length]))
            start += length
        for out in reversed(outs):
            cache.backward(out, torch.cos(out.detach()))


@pytest.mark.parametrize("kind", [*EMBEDDINGS, "scaled"])
def test_embeddings_have_the_gradients_of_autograd(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are added in place where that is all there is to do. Frequencies are those of a slice, as ever."""
    ids = torch.tensor([[0, 2, 1, 2, 2], [4, 0, 0, 2, 1]])
    added: list[int] = []
    from terapipe.modeling import linear as place

    add = place._add
    monkeypatch.setattr(place, "_add", lambda *a, **named: added.append(1) or add(*a, **named))  # type: ignore[func-returns-value]
    lengths = (5,) if kind in ("frequencies", "norms") else (2, 3)
    wanted, module = (embedding(kind, torch.float64) for _ in range(2))
    out = wanted(ids)
    out.backward(torch.cos(out.detach()))
    in_slices(module, ids, lengths)
    truth, gradient = (p.grad.to_dense() for p in (wanted.weight, module.weight))  # type: ignore[union-attr, operator]
    assert torch.allclose(gradient, truth, rtol=1e-14, atol=1e-15)
    assert len(added) == (len(lengths) if kind in ("plain", "padding", "scaled") else 0)


def test_embeddings_with_hooks_frozen_or_differentiated_twice() -> None:
    ids = torch.tensor([[0, 2, 1, 2, 2]])
    module: Any = embedding("plain", torch.float64)
    parts: list[Tensor] = []
    handle = module.weight.register_hook(parts.append)
    in_slices(module, ids, (2, 3))
    handle.remove()
    assert len(parts) == 2
    assert torch.allclose(sum(parts), module.weight.grad)  # type: ignore[arg-type]
    module.zero_grad()
    cache = SliceCache(5)
    cache.current.fuses = True
    with cache:
        out = module(ids)
        (first,) = torch.autograd.grad(out.square().sum(), module.weight, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), module.weight)
    plain = nn.functional.embedding(ids, module.weight)
    (wanted,) = torch.autograd.grad(plain.square().sum(), module.weight, create_graph=True)
    assert torch.equal(first, wanted)
    assert torch.equal(second, torch.autograd.grad(wanted.square().sum(), module.weight)[0])
    assert module.weight.grad is None
    module.weight.requires_grad_(False)
    assert not module(ids).requires_grad


def test_half_precision_embeddings_are_summed_in_float32() -> None:
    """A token that occurs in every slice: bfloat16 would stay at 256."""
    module: Any = embedding("plain", torch.bfloat16)
    in_slices(module, torch.zeros(1, 600, dtype=torch.int64), (1,) * 600, main_grads=True)
    total, part = main_grad(module.weight), torch.cos(module.weight[0].detach())
    assert total is not None
    assert torch.allclose(total[0], 600 * part.float(), rtol=1e-5)
    assert not total[1:].any()


def many_adapters(**options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, init_lora_weights=False, **options)
    return get_peft_model(small_model(small_config("llama")), config)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ],
    ids=["adapted", "saved"],
)
def test_adapters_of_embedding_and_head(options: dict[str, Any]) -> None:
    model: Any = many_adapters(**options)
    whole = model.base_model.model
    batch = Batch.of(small_model(small_config("llama")))
    wanted = reference(whole, batch)
    assert max(errors(wanted, stepped(pipe_of(model), batch)).values()) < 1e-12


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_of_a_model(kind: str, tied: bool) -> None:
    """On one stage and on two, with a row that padding has: its gradient comes from the head alone, if at all."""
    config: Any = small_config(kind)
    config.tie_word_embeddings, config.pad_token_id = tied, 5
    model = small_model(config)
    batch = Batch.of(model)
    batch.ids[0, 3:8] = 5
    wanted = reference(model, batch)
    for cuts in ((0, 4), (0, 1, 4)):
        pipe = Pipeline(Decoder(model, backend="attention"), Plan((2,), LENGTHS, cuts, "terapipe", len(cuts) - 1))
        loss, gradients = stepped(pipe, batch)
        if tied:
            gradients.pop("lm_head.weight", None)
        bound = 1e-6 if kind == "gemma2" else 1e-12  # it computes norms in float32
        assert max(errors(wanted, (loss, gradients)).values()) < bound


def test_a_wrong_gradient_of_an_embedding_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """This suite can fail."""
    from terapipe.modeling import linear as place

    add = place._add
    monkeypatch.setattr(place, "_add", lambda w, ids, rows, *a, **named: add(w, ids, rows * 1.01, *a, **named))
    model = small_model(small_config("llama"))
    batch = Batch.of(model)
    assert max(errors(reference(model, batch), stepped(pipe_of(model), batch)).values()) > 1e-3
