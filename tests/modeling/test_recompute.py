"""Feed-forward layers, or whole layers, computed again in the backward: nothing changes but what is kept."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from terapipe import GPT, GPTConfig, Layout, Pipeline, Plan
from terapipe.modeling.stage import IGNORE
from tests.models import TINY, gradients, make_batch, make_model, mesh_of, plain, variant, worst_error
from tests.ranks import Ranks

ODD, EVEN = ((9, 1, 12, 7), (20, 9)), ((10, 2, 12, 4), (20, 8))
CONFIG = variant(kv_heads=2)


def selective(config: GPTConfig, dtype: torch.dtype = torch.float64) -> GPT:
    model = GPT(config, recompute="selective").to(dtype)
    model.load_state_dict(make_model(config, dtype).state_dict())
    return model


def piped(layout: Layout, plan: Plan, shard: bool) -> tuple[float, dict[str, Tensor]]:
    pipe = Pipeline(selective(CONFIG), plan, mesh=mesh_of(layout), shard=shard, timeout=300.0)
    rows = slice(pipe.dp_rank * plan.batch_size, (pipe.dp_rank + 1) * plan.batch_size)
    ids, labels = make_batch(CONFIG, plan.batch_size * layout.dp, plan.seq_len, ignored=True)
    loss = pipe.step(ids[rows], labels[rows])
    return loss.item(), gradients(pipe)


@pytest.mark.parametrize(
    ("layout", "lengths", "order", "recompute", "shard"),
    [
        (Layout(1, 2, 1), ODD, "terapipe", False, False),
        (Layout(1, 2, 1), ODD, "terapipe", True, False),  # beside whole slices
        (Layout(1, 2, 1), ODD, "terapipe-1f1b", False, False),
        (Layout(1, 2, 1), ODD, "terapipe-deferred", False, False),
        (Layout(1, 1, 2), ODD, "terapipe-deferred", False, False),
        (Layout(1, 2, 2), EVEN, "terapipe-1f1b", False, False),  # tokens are shared out between operators
        (Layout(2, 2, 1), ODD, "terapipe-deferred", False, True),
    ],
    ids=str,
)
def test_gradients_are_the_plain_models(
    ranks: Callable[[int], Ranks],
    layout: Layout,
    lengths: tuple[tuple[int, ...], ...],
    order: str,
    recompute: bool,
    shard: bool,
) -> None:
    plan = Plan((1, 2), lengths, (0, 1, 4) if layout.pp == 2 else (0, 4), order, 1, recompute)
    ids, labels = make_batch(CONFIG, plan.batch_size * layout.dp, plan.seq_len, ignored=True)
    found = ranks(layout.devices)(piped, layout, plan, shard)
    assert worst_error(plain(CONFIG, ids, labels, torch.float64), found, CONFIG) < 1e-12


def test_the_plain_model() -> None:
    ids, labels = make_batch(TINY, 2, 29, ignored=True)
    model = selective(TINY)
    loss = model.loss(model(ids), labels) / (labels != IGNORE).sum()
    loss.backward()
    found = loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert worst_error(plain(TINY, ids, labels, torch.float64), [found], TINY) < 1e-12


def kept(stage: Any, x: Tensor) -> int:
    """Bytes that autograd holds after a forward, beside parameters and what the stage was given."""
    held: dict[int, Tensor] = {}
    mine = {p.untyped_storage().data_ptr() for p in stage.parameters()} | {x.untyped_storage().data_ptr()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in mine:
            held[storage.data_ptr()] = tensor  # held, so that no other takes its address
        return tensor

    cache = stage.make_cache(*x.shape[:2])
    cache.begin(0, x.shape[1])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = stage(x, cache)
    cache.backward(out, torch.ones_like(out))
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def test_only_the_input_of_feed_forward_layers_is_kept() -> None:
    x = torch.randn(2, 20, TINY.hidden, dtype=torch.float64, requires_grad=True)
    off, on = (kept(made(TINY).stage(1, 4, torch.device("cpu")), x) for made in (make_model, selective))
    widths = TINY.hidden + 2 * TINY.ffn_hidden  # the norm's output, and both sides of the activation
    moments = 2  # of the norm
    assert off - on == 3 * 40 * (widths + moments) * 8


def test_nothing_is_multiplied_in_vain() -> None:
    """What comes last in the feed-forward is not multiplied again: its result is known."""
    model, products = selective(TINY), []
    cache = model.make_cache(1, 16)
    cache.begin(0, 16)
    out = model.layers["0"](torch.randn(1, 16, 16, dtype=torch.float64, requires_grad=True), cache)
    plainly = nn.functional.linear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "linear", lambda x, w, b: products.append(w.shape) or plainly(x, w, b))
        cache.backward(out, torch.ones_like(out))
    assert products == [model.layers["0"].up.weight.shape]


def test_only_known_ways() -> None:
    with pytest.raises(ValueError, match="recompute is one of off, selective, got 'full'"):
        GPT(TINY, recompute="full")  # type: ignore[arg-type]


# Hugging Face


def decoder(name: str) -> Any:
    from terapipe.hf import Decoder
    from terapipe.modeling.hf.shrink import small_config

    return Decoder.from_config(small_config(name), dtype=torch.float64)


def stepped(recompute: bool, layout: Layout, shard: bool) -> dict[str, Tensor]:
    made = decoder("llama")
    if recompute:
        made.recompute_layers()
    plan = Plan((1, 1), ((9, 1, 12, 7), (20, 9)), (0, 1, 4) if layout.pp == 2 else (0, 4))
    pipe = Pipeline(made, plan, mesh=mesh_of(layout) if layout.devices > 1 else None, shard=shard, timeout=300.0)
    ids, labels = make_batch(TINY, 2 * layout.dp, 29, ignored=True)
    rows = slice(2 * pipe.dp_rank, 2 * pipe.dp_rank + 2)
    assert all(stage.model.is_gradient_checkpointing == recompute for stage in pipe.stages.values())
    pipe.step(ids[rows], labels[rows])
    return gradients(pipe)


@pytest.mark.parametrize("shard", [False, True])
def test_layers_of_a_decoder_are_computed_again(ranks: Callable[[int], Ranks], shard: bool) -> None:
    layout = Layout(2, 2, 1) if shard else Layout(1, 2, 1)
    wanted, found = (ranks(layout.devices)(stepped, recompute, layout, shard) for recompute in (False, True))
    for rank, other in zip(wanted, found, strict=True):
        assert rank.keys() == other.keys()
        for name, truth in rank.items():
            assert (other[name] - truth).abs().max() <= 1e-12 * max(truth.abs().max().item(), 1e-3)


def test_layers_of_a_decoder_keep_less() -> None:
    first, second = decoder("llama"), decoder("llama")
    second.recompute_layers()
    x = torch.randn(2, 20, 64, dtype=torch.float64, requires_grad=True)
    off, on = (kept(made.stage(1, 4, torch.device("cpu")), x) for made in (first, second))
    assert on < off / 5


def test_a_decoder_read_from_files(tmp_path: Any) -> None:
    from terapipe.hf import Decoder
    from terapipe.modeling.hf.shrink import small_config, small_model

    small_model(small_config("llama")).save_pretrained(tmp_path)
    saved = Decoder.from_pretrained(tmp_path)
    saved.recompute_layers()
    assert saved.stage(1, 4, torch.device("cpu")).model.is_gradient_checkpointing
    assert not copy.deepcopy(Decoder.from_pretrained(tmp_path)).model.is_gradient_checkpointing


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bloom", "cache backend"),
        # It asks the cache for the context, which gradient checkpointing takes away from it: wrong without a word.
        ("llama4_text", "gradients of a small copy differ"),
        ("ctrl", "does not support gradient checkpointing"),
    ],
)
def test_models_whose_layers_cannot_be_computed_again(name: str, reason: str) -> None:
    from terapipe.hf import UnsupportedModelError

    with pytest.raises(UnsupportedModelError, match=rf"layers of .* cannot be computed again: .*{reason}"):
        decoder(name).recompute_layers()


def test_what_was_asked_of_the_model_itself_is_refused_too() -> None:
    from terapipe.hf import Decoder, UnsupportedModelError

    model = decoder("llama4_text").model
    model.gradient_checkpointing_enable()
    with pytest.raises(UnsupportedModelError, match="leave gradient checkpointing off"):
        Decoder(model)
