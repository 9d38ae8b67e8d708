"""Recomputation of layers, without attention or even products. Nothing changes but what is kept."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from terapipe import Layout, Pipeline, Plan
from terapipe.modeling import attention
from terapipe.modeling.recall import Recall
from terapipe.modeling.stage import SlicedStage
from terapipe.planning.recompute import Recompute, RecomputeModes
from tests.support.models import TINY, gradients, make_batch, make_model, mesh_of, plain, variant, worst_error
from tests.support.ranks import Ranks

ODD, EVEN = ((9, 1, 12, 7), (20, 9)), ((10, 2, 12, 4), (20, 8))
CONFIG = variant(kv_heads=2)
# Of two stages and six slices.
MIXED: RecomputeModes = (("block", "none", "full", "light", "full", "none"), "block")


def piped(layout: Layout, plan: Plan, shard: bool) -> tuple[float, dict[str, Tensor]]:
    model = make_model(CONFIG, torch.float64)
    pipe = Pipeline(model, plan, mesh=mesh_of(layout), shard=shard, timeout=300.0)
    rows = slice(pipe.dp_rank * plan.batch_size, (pipe.dp_rank + 1) * plan.batch_size)
    ids, labels = make_batch(CONFIG, plan.batch_size * layout.dp, plan.seq_len, ignored=True)
    loss = pipe.step(ids[rows], labels[rows])
    return loss.item(), gradients(pipe)


@pytest.mark.parametrize(
    ("layout", "lengths", "order", "recompute", "shard"),
    [
        (Layout(1, 2, 1), ODD, "terapipe", "block", False),
        (Layout(1, 2, 1), ODD, "terapipe", "light", False),
        (Layout(1, 2, 1), ODD, "terapipe", MIXED, False),
        (Layout(1, 2, 1), ODD, "terapipe-1f1b", MIXED, False),
        (Layout(1, 2, 1), ODD, "terapipe-deferred", MIXED, False),
        (Layout(1, 1, 2), ODD, "terapipe-deferred", "block", False),
        (Layout(1, 1, 2), ODD, "terapipe-deferred", "light", False),
        (Layout(1, 2, 2), EVEN, "terapipe-zb", "light", False),
        (Layout(2, 2, 1), ODD, "terapipe-1f1b", "light", True),
        (Layout(1, 2, 2), EVEN, "terapipe-1f1b", MIXED, False),  # tokens are shared out between operators
        (Layout(2, 2, 1), ODD, "terapipe-deferred", MIXED, True),
    ],
    ids=str,
)
def test_gradients_are_the_plain_models(
    ranks: Callable[[int], Ranks],
    layout: Layout,
    lengths: tuple[tuple[int, ...], ...],
    order: str,
    recompute: RecomputeModes,
    shard: bool,
) -> None:
    plan = Plan((1, 2), lengths, (0, 1, 4) if layout.pp == 2 else (0, 4), order, 1, recompute)
    ids, labels = make_batch(CONFIG, plan.batch_size * layout.dp, plan.seq_len, ignored=True)
    found = ranks(layout.devices)(piped, layout, plan, shard)
    assert worst_error(plain(CONFIG, ids, labels, torch.float64), found, CONFIG) < 1e-12


# What is kept, and what is computed


def slice_of(stage: Any, x: Tensor, mode: Recompute) -> tuple[int, Callable[[], None]]:
    """Bytes that autograd and the cache hold after a forward, beside parameters, keys and values and what the stage was
    given; and the backward."""
    held: dict[int, Tensor] = {}
    ignored = {p.untyped_storage().data_ptr() for p in stage.parameters()} | {x.untyped_storage().data_ptr()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ignored:
            held[storage.data_ptr()] = tensor  # held, so that no other takes its address
        return tensor

    recalls: list[Recall] = []

    def recall(*arguments: Any) -> Recall:
        recalls.append(Recall(*arguments))
        return recalls[-1]

    cache, sliced = stage.make_cache(*x.shape[:2]), SlicedStage(stage)
    cache.begin(0, x.shape[1])
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, mock.patch("terapipe.modeling.checkpointing.Recall", recall):
        out = sliced.forward(x, cache, recompute=mode)
    entries = [t for entry in cache._attention.values() for t in entry[:3]]
    entries += [out.tensor for each in recalls for out in each._outputs.values()]
    kept = {t.untyped_storage().data_ptr(): t for t in entries if t is not None}
    total = sum(tensor.untyped_storage().nbytes() for tensor in (held | kept).values())
    return total, lambda: sliced.backward(cache, out, torch.ones_like(out))


def test_layers_keep_their_input_and_the_output_of_attention() -> None:
    x = torch.randn(2, 20, TINY.hidden, dtype=torch.float64, requires_grad=True)
    stage = make_model(TINY).stage(1, 4, torch.device("cpu"))
    kept, _ = slice_of(stage, x, "block")
    per_token = 3 * (TINY.hidden + TINY.heads) + 2 * TINY.hidden  # attention of three layers, inputs of two
    assert kept == 40 * per_token * 8


def test_layers_keep_the_outputs_of_products_that_something_is_computed_from() -> None:
    """Of the projection to queries, keys and values nothing is: attention has the queries."""
    x = torch.randn(2, 20, TINY.hidden, dtype=torch.float64, requires_grad=True)
    stage = make_model(TINY).stage(1, 4, torch.device("cpu"))
    per_layer = 3 * TINY.hidden + TINY.heads + TINY.ffn_hidden  # queries, attention, its projection; the MLP's first
    kept, _ = slice_of(stage, x, "light")
    assert kept == 40 * (3 * per_layer + 2 * TINY.hidden) * 8
    assert kept < 0.6 * slice_of(stage, x, "none")[0]


@pytest.mark.parametrize("mode", ["light", "block"])
def test_attention_and_the_last_product_are_not_computed_again(
    monkeypatch: pytest.MonkeyPatch, mode: Recompute
) -> None:
    model, products, attended = make_model(TINY), [], []
    block: Any = model.layers["0"]
    x = torch.randn(1, 16, TINY.hidden, dtype=torch.float64, requires_grad=True)
    _, backward = slice_of(model.stage(0, 1, torch.device("cpu")), torch.zeros(1, 16, dtype=torch.int64), mode)
    del x
    addmm, computed = torch.addmm, attention._compute

    def noted(bias: Tensor, x: Tensor, weight: Tensor, **more: Tensor) -> Tensor:
        products.append(tuple(weight.t().shape))
        return addmm(bias, x, weight, **more)

    monkeypatch.setattr(torch, "addmm", noted)
    monkeypatch.setattr(attention, "_compute", lambda *a: attended.append(a) or computed(*a))
    backward()
    wanted = () if mode == "light" else (block.attention.qkv, block.attention.out, block.up)
    assert products == [tuple(module.weight.shape) for module in wanted]
    assert not attended


# Hugging Face


def decoder(name: str) -> Any:
    from terapipe.hf import Decoder
    from tests.support.hf_models import small_config

    return Decoder.from_config(small_config(name), dtype=torch.float64)


PLAN = Plan((1, 1), ODD, (0, 1, 4))


def stepped(recompute: RecomputeModes, layout: Layout, shard: bool) -> dict[str, Tensor]:
    plan = replace(PLAN, recompute=recompute)
    pipe = Pipeline(decoder("llama"), plan, mesh=mesh_of(layout), shard=shard, timeout=300.0)
    ids, labels = make_batch(TINY, 2 * layout.dp, 29, ignored=True)
    rows = slice(2 * pipe.dp_rank, 2 * pipe.dp_rank + 2)
    pipe.step(ids[rows], labels[rows])
    return gradients(pipe)


@pytest.mark.parametrize("shard", [False, True])
def test_layers_of_a_decoder_are_computed_again(ranks: Callable[[int], Ranks], shard: bool) -> None:
    layout = Layout(2, 2, 1) if shard else Layout(1, 2, 1)
    modes: tuple[RecomputeModes, ...] = ("none", MIXED)
    wanted, found = (ranks(layout.devices)(stepped, recompute, layout, shard) for recompute in modes)
    for rank, other in zip(wanted, found, strict=True):
        assert rank.keys() == other.keys()
        for name, truth in rank.items():
            assert (other[name] - truth).abs().max() <= 1e-12 * max(truth.abs().max().item(), 1e-3)


def test_layers_of_a_decoder_keep_less() -> None:
    x = torch.randn(2, 20, 64, dtype=torch.float64, requires_grad=True)
    stage = decoder("llama").stage(1, 4, torch.device("cpu"))
    modes: tuple[Recompute, ...] = ("none", "light", "block")
    off, light, on = (slice_of(stage, x, mode)[0] for mode in modes)
    assert on < off / 4
    assert light < 0.6 * off


@pytest.mark.parametrize(
    ("name", "mode", "reason"),
    [("bloom", "block", "slices of .* cannot be computed again"), ("bloom", "full", "slices of .* cannot")],
)
def test_models_that_cannot_be_computed_again(name: str, mode: Recompute, reason: str) -> None:
    from terapipe.hf import UnsupportedModelError

    made = decoder(name)
    assert made.recompute_modes == ("none",)
    with pytest.raises(UnsupportedModelError, match=reason):
        made.check_plan(Plan((1,), ((8,),), (0, made.num_layers), recompute=mode))


def test_a_block_recomputation_that_is_not_exact_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from terapipe.hf import UnsupportedModelError
    from terapipe.modeling.slice_cache import SliceCache

    made, kept = decoder("llama"), SliceCache.recall_attention

    def wrong(self: SliceCache, layer: Any) -> Any:
        found = kept(self, layer)
        return found and (found[0] * 1.01, *found[1:])

    monkeypatch.setattr(SliceCache, "recall_attention", wrong)
    with pytest.raises(UnsupportedModelError, match=r"gradients differ by .*; take recompute full"):
        Pipeline(made, Plan((1, 1), ODD, (0, 4), recompute="block"))


def test_gradient_checkpointing_of_the_model_itself() -> None:
    """llama4_text asks the cache for the context, which transformers' gradient checkpointing takes away from it."""
    from terapipe.hf import Decoder, UnsupportedModelError

    model = decoder("llama4_text").model
    model.gradient_checkpointing_enable()
    with pytest.raises(UnsupportedModelError, match="leave gradient checkpointing off"):
        Decoder(model)
