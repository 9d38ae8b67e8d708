"""Faults that were found in use: each with its story, and a test that failed before it was mended."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from terapipe import Layout, Pipeline, Plan, next_token_labels
from terapipe.hf import Decoder
from terapipe.hf.verify.small_model import small_config, small_model
from terapipe.modeling.gpt import GPT
from terapipe.modeling.slice_cache import SliceCache
from terapipe.modeling.sliced_stage import SlicedStage
from terapipe.modeling.stage import IGNORE, Stage
from tests.support.models import TINY, gradients, make_batch, make_model, mesh_of
from tests.support.ranks import Ranks

PLAN = Plan((1, 1), ((9, 1, 12, 7), (20, 9)), (0, 1, 4))


# Random numbers


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
    assert pipe._executors is not None
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


# What a step is given


def refused(function: Callable[[], object]) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""


def test_labels_that_were_not_shifted_are_refused() -> None:
    """Hugging Face takes ``labels=input_ids`` and shifts them; here that trained a model to copy."""
    pipe = Pipeline(make_model(TINY), Plan((2,), ((9, 20),), (0, 4)))
    ids, _ = make_batch(TINY, 2, 29, ignored=False)
    masked = ids.clone()
    masked[0, :20] = -100
    for labels in (ids, ids.clone(), masked):
        assert "next_token_labels" in refused(lambda labels=labels: pipe.step(ids, labels))
    pipe.step(ids, next_token_labels(ids))
    alike = torch.full_like(ids, 5)
    pipe.step(alike, alike.clone())  # every token is the one after it, too


def from_its_end(ids: Tensor) -> list[str]:
    """Token ids on the first rank only and labels on the last only."""
    pipe = Pipeline(make_model(TINY), PLAN, timeout=300.0)
    good = next_token_labels(ids)
    said = [refused(lambda: pipe.step(ids if pipe.is_first else None, ids if pipe.is_last else None))]
    said.append(refused(lambda: pipe.step(ids if pipe.is_first else None, good if pipe.is_last else None)))
    return said


def test_unshifted_labels_on_another_rank_are_noticed(ranks: Callable[[int], Ranks]) -> None:
    for wrong, right in ranks(2)(from_its_end, make_batch(TINY, 2, 29, ignored=False)[0]):
        assert "got the input_ids themselves" in wrong
        assert right == ""


def misused() -> list[tuple[str, bool]]:
    """What each misuse says on this rank, and whether gradients were left alone; then a good step."""
    pipe = Pipeline(make_model(TINY), PLAN, vary="replan", timeout=300.0)
    ids, labels = make_batch(TINY, 2, 29, ignored=True)
    pipe.step(ids, labels)
    before = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
    mine = pipe.rank == 1
    high, low = ids.clone(), labels.clone()
    high[1, 3], low[0, 2] = 19, -7
    other = Plan((2,), ((20, 9),), PLAN.boundaries)
    said = []
    for misuse in (
        lambda: pipe.step(high, labels),
        lambda: pipe.step(ids, low),
        lambda: pipe.evaluate(ids.to(torch.int32), labels),
        lambda: pipe.step(ids, labels, ((0, 5), (0,)) if mine else None),
        lambda: pipe.step(ids, labels, plan=other if mine else None),
        lambda: pipe.step(ids[:1], labels[:1]) if mine else pipe.step(ids, labels),
        lambda: pipe.evaluate(ids, labels) if mine else pipe.step(ids, labels),
        lambda: pipe.step(ids, labels, 5 if mine else None),  # type: ignore[arg-type]
        lambda: pipe.step(ids, torch.full_like(labels, -100)),
        lambda: pipe.next_token_logits(ids if mine else ids[:1]),
        lambda: pipe.next_token_logits(high),
        *(lambda total=total: pipe.step(ids, labels, total=total) for total in (0, -1, float("nan"), float("inf"))),
    ):
        text = refused(misuse)
        alone = all(torch.equal(p.grad, before[name]) for name, p in pipe.named_parameters() if p.grad is not None)
        said.append((text, alone))
    pipe.zero_grad()
    pipe.step(ids, labels)
    said.append(("", all(torch.equal(p.grad, before[name]) for name, p in pipe.named_parameters())))
    return said


def test_a_refused_batch_leaves_everything_as_it_was(ranks: Callable[[int], Ranks]) -> None:
    """One rank's refusal used to end the pipeline, with the earlier gradients gone; and documents, plans or shapes that
    differ between ranks gave wrong losses or crashed a process."""
    words = [
        "input_ids must be tokens of the model's vocabulary, 0 to 18, got 19 at row 1, place 3",
        "labels must be tokens of the model's vocabulary, 0 to 18, or -100 to leave a place out, got -7 at row 0",
        "torch.int64",
        *["must call the same method with the same plan, documents and shape of batch: rank 0 has"] * 4,
        "documents must be, for each of the 2 sequences, the rising places",
        "at least one label of a batch must count",
        "must call the same method",
        "input_ids must be tokens of the model's vocabulary",
        *["total must be a positive finite number"] * 4,
        "",
    ]
    for account in ranks(2)(misused):
        assert len(account) == len(words)
        for (text, alone), expected in zip(account, words, strict=True):
            assert expected in text
            assert bool(text) == bool(expected)
            assert alone, f"gradients changed: {text}"


# Memory


def test_a_sequence_in_one_piece_makes_no_gradients_of_earlier_keys() -> None:
    """Two buffers as large as the keys and values of all layers were made and zeroed, and never read."""
    pipe = Pipeline(make_model(TINY), Plan((1,), ((29,),), (0, 4)))
    pipe.step(*make_batch(TINY, 1, 29, ignored=False))
    assert pipe._executors is not None
    (cache,) = pipe._executors.spare
    assert all(store._pair is not None and store._gradients is None for store in cache._stores.values())


def test_batches_of_many_shapes_keep_the_buffers_of_two() -> None:
    """Each of eight kept its keys, values and gradients for good."""
    pipe = Pipeline(make_model(TINY), Plan((2,), ((9, 20),), (0, 4)), vary="replan")
    for tokens in (29, 20, 21, 22, 23):
        pipe.step(*make_batch(TINY, 2, tokens, ignored=False))
    assert pipe._executors is not None
    assert pipe._executors.spare.shapes == {(2, 29), (2, 23)}


# Hugging Face models and random numbers


def hugging_face(kind: str) -> Any:
    config = small_config({"lora": "llama", "jitter": "mixtral"}.get(kind, kind))
    if kind == "gpt2":
        config.resid_pdrop = config.embd_pdrop = 0.3
    if kind == "jitter":
        config.router_jitter_noise = 0.3
    model: Any = small_model(config)
    if kind == "lora":
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
