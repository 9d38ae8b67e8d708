"""Random numbers: what is recomputed, and what devices share, draws the same ones."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from terapipe import Layout, Pipeline, Plan
from terapipe.hf import Decoder
from terapipe.hf.verify.small_model import small_model
from terapipe.modeling.gpt import GPT
from terapipe.modeling.slice_cache import SliceCache
from terapipe.modeling.stage import IGNORE, SlicedStage, Stage
from tests.support.hf_models import small_config
from tests.support.models import TINY, gradients, make_batch, make_model, mesh_of
from tests.support.ranks import Ranks

PLAN = Plan((1, 1), ((9, 1, 12, 7), (20, 9)), (0, 1, 4))


class Dropping(nn.Module):
    """A layer followed by dropout, as most models have it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, cache: SliceCache | None = None) -> Tensor:
        return nn.functional.dropout(self.layer(x, cache), 0.3, self.training)


def with_dropout() -> GPT:
    model = make_model(TINY)
    model.layers = nn.ModuleDict({name: Dropping(layer) for name, layer in model.layers.items()})
    return model


def dropped(plan: Plan, layout: Layout | None = None, seed: int = 7) -> dict[str, Tensor]:
    mesh = None if layout is None else mesh_of(layout)
    pipe = Pipeline(with_dropout(), plan, mesh=mesh, timeout=300.0)
    torch.manual_seed(seed + pipe.rank)
    pipe.step(*make_batch(TINY, plan.batch_size, plan.seq_len, ignored=True))
    return gradients(pipe)


@pytest.mark.parametrize(
    "order", ["gpipe", "terapipe", "terapipe-1f1b", "terapipe-deferred", "terapipe-v", "terapipe-zb"]
)
def test_what_is_recomputed_draws_the_same_dropout(ranks: Callable[[int], Ranks], order: str) -> None:
    """With ``recompute`` the second forward drew masks of its own: the loss was right, gradients were not."""
    lengths = ((29,), (29,)) if order == "gpipe" else PLAN.lengths
    boundaries = (0, 1, 2, 3, 4) if order == "terapipe-v" else PLAN.boundaries
    plans = [Plan((1, 1), lengths, boundaries, order, len(boundaries) // 2, again) for again in (False, True)]
    kept, recomputed = (ranks(2)(dropped, plan) for plan in plans)
    for a, b in zip(kept, recomputed, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_one_slice_draws_what_the_plain_model_draws() -> None:
    """So dropout is the plain model's own, gradients to the last digits, recomputed or not."""
    ids, labels = make_batch(TINY, 1, 29, ignored=True)
    plain = with_dropout()
    torch.manual_seed(7)
    (plain.loss(plain(ids), labels) / (labels != IGNORE).sum()).backward()
    for recompute in (False, True):
        found = dropped(Plan((1,), ((29,),), (0, 4), recompute=recompute))
        for name, p in plain.named_parameters():
            assert p.grad is not None
            assert torch.allclose(found[name], p.grad, rtol=1e-9, atol=1e-12)


class Spoken(Stage):
    """A stage that tells which numbers it draws."""

    def __init__(self, stage: GPT) -> None:
        super().__init__()
        self.stage, self.hidden_size, self.drawn = stage, stage.hidden_size, list[float]()

    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        self.drawn.append(torch.rand(()).item())
        out: Tensor = self.stage(x, cache)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return self.stage.logits(hidden)


def drawn_in_parts(plan: Plan) -> list[float]:
    torch.manual_seed(torch.distributed.get_rank())  # as every trainer does it
    pipe = Pipeline(make_model(TINY), plan, mesh=mesh_of(Layout(1, 1, 2)), timeout=300.0)
    spoken = Spoken(pipe.stages[0])
    pipe._executors.current._sliced = {0: SlicedStage(spoken)}
    pipe.step(*make_batch(TINY, plan.batch_size, plan.seq_len, ignored=False))
    return spoken.drawn


def test_devices_that_share_operators_draw_the_same_numbers(ranks: Callable[[int], Ranks]) -> None:
    """Each had its own seed, and so its own dropout of activations that must be the same on all of them."""
    plan = Plan((1,), ((9, 1, 12, 7),), (0, 4), recompute=True)
    first, second = ranks(2)(drawn_in_parts, plan)
    assert first == second
    assert first[:4] == first[:3:-1], "backwards draw again what forwards drew"
    assert len(set(first)) == 4


def hugging_face(kind: str) -> Any:
    config = small_config({"lora": "llama", "jitter": "mixtral"}.get(kind, kind))
    if kind == "gpt2":
        config.resid_pdrop = config.embd_pdrop = 0.3
    if kind == "jitter":
        config.router_jitter_noise = 0.3
    model: Any = small_model(config)
    if kind == "lora":
        torch.manual_seed(0)  # peft draws its weights from the global generator
        adapter = peft.LoraConfig(
            r=4, lora_dropout=0.3, target_modules=["q_proj", "down_proj"], init_lora_weights=False
        )
        model = peft.get_peft_model(model, adapter)
    return model.double().train()


@pytest.mark.parametrize("kind", ["gpt2", "lora", "jitter"])
def test_models_that_draw_random_numbers_can_be_recomputed(kind: str) -> None:
    """Relative errors of gradients were 2.8 for dropout of GPT-2's residuals, 1.1 for LoRA's, 1.2 for Mixtral's
    router; and ``recompute="auto"`` let the planner switch it on."""
    found = []
    for recompute in (False, True):
        model = hugging_face(kind)
        pipe = Pipeline(Decoder(model, backend="attention"), Plan((2,), ((9, 1, 12, 7),), (0, 4), recompute=recompute))
        torch.manual_seed(3)
        pipe.step(*make_batch(TINY, 2, 29, ignored=True))
        after = torch.rand(())
        found.append((gradients(pipe), after))
        torch.manual_seed(3)
        assert torch.rand(()) != after, "nothing was drawn"
    (kept, after), (recomputed, then) = found
    assert after == then
    assert kept.keys() == recomputed.keys()
    assert all(torch.equal(kept[name], recomputed[name]) for name in kept)
