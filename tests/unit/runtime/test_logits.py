"""Scores of the next token through a pipeline: those of the plain model, on every rank."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from examples import own_model
from terapipe import Layout, Pipeline, Plan, Stage
from tests.support.models import TINY, make_batch, make_model, mesh_of, variant
from tests.support.ranks import Ranks

LENGTHS = (1, 7, 29)  # of prompts
ODD, EVEN = ((9, 1, 12, 7),), ((10, 2, 12, 4),)  # of slices in training
CONFIG = variant(kv_heads=2)


def prompt(rows: int, tokens: int) -> Tensor:
    return make_batch(CONFIG, rows, tokens, ignored=False, seed=tokens)[0]


def plainly(ids: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    model = make_model(CONFIG, dtype)
    with torch.no_grad():
        return model.logits(model(ids))[:, -1]


def piped(layout: Layout, plan: Plan, shard: bool = False) -> list[Tensor]:
    """The logits of each prompt, of which this replica has two or three sequences."""
    mesh = mesh_of(layout) if layout.devices > 1 else None
    pipe = Pipeline(make_model(CONFIG), plan, mesh=mesh, shard=shard, timeout=300.0)
    rows = slice(0, 2) if pipe.dp_rank == 0 else slice(2, 5)
    ids, labels = make_batch(CONFIG, 1, plan.seq_len, ignored=False)
    before = pipe.step(ids, labels).item()
    events = len(pipe.timeline().events)
    found = [pipe.next_token_logits(prompt(5, tokens)[rows]) for tokens in LENGTHS]
    # Nothing else has changed: what was kept for training is still there, and trains.
    assert len(pipe.timeline().events) == events
    assert [executor.plan for executor in pipe._executors.recent] == [plan]
    assert pipe.step(ids, labels).item() == before
    return found


@pytest.mark.exhaustive_ids("dp 1 x pp 1 x tp 2")
@pytest.mark.parametrize(
    ("layout", "plan", "shard"),
    [
        (Layout(1, 3, 1), Plan((1,), ODD, (0, 1, 2, 4), "terapipe-1f1b"), False),
        (Layout(1, 2, 1), Plan((1,), ODD, (0, 1, 2, 3, 4), "interleaved", 2), False),
        (Layout(1, 2, 1), Plan((1,), ODD, (0, 1, 2, 3, 4), "terapipe-v", 2), False),
        (Layout(1, 1, 2), Plan((1,), ODD, (0, 4)), False),
        (Layout(1, 2, 2), Plan((1,), EVEN, (0, 1, 4)), False),  # tokens are shared out, prompts filled up
        (Layout(2, 2, 1), Plan((1,), ODD, (0, 1, 4), "terapipe-deferred"), True),
    ],
    ids=str,
)
def test_logits_are_the_plain_models_on_every_rank(
    ranks: Callable[[int], Ranks], layout: Layout, plan: Plan, shard: bool
) -> None:
    found = ranks(layout.devices)(piped, layout, plan, shard)
    for rank, logits in enumerate(found):
        rows = slice(0, 2) if rank < layout.devices // layout.dp else slice(2, 5)
        for tokens, scores in zip(LENGTHS, logits, strict=True):
            wanted = plainly(prompt(5, tokens)[rows])
            assert scores.shape == wanted.shape
            assert (scores - wanted).abs().max() < 1e-12 * wanted.abs().max()


def test_one_process_without_a_group() -> None:
    for tokens, scores in zip(LENGTHS, piped(Layout(), Plan((1,), ODD, (0, 4))), strict=True):
        torch.testing.assert_close(scores, plainly(prompt(5, tokens)[:2]), rtol=1e-12, atol=1e-12)


def test_half_precision_gives_single() -> None:
    pipe = Pipeline(make_model(CONFIG, torch.bfloat16), Plan((1,), ODD, (0, 4)))
    assert pipe.next_token_logits(prompt(2, 7)).dtype == torch.float32


def hugging_face(name: str) -> tuple[Tensor, Tensor]:
    """Through a pipeline, and by the model itself."""
    from terapipe.hf import Decoder
    from terapipe.hf.verify.small_model import small_model
    from tests.support.hf_models import small_config

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = small_model(small_config(name)).eval()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            wanted = model(input_ids=prompt(2, 13), use_cache=False).logits[:, -1]
        pipe = Pipeline(Decoder(model), Plan((1,), ((8, 5),), (0, 1, 4)), timeout=300.0)
        return pipe.next_token_logits(prompt(2, 13)), wanted


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom"])  # gemma2 has a softcap, bloom the cache backend
def test_hugging_face_models_keep_what_they_do_to_logits(ranks: Callable[[int], Ranks], name: str) -> None:
    for found, wanted in ranks(2)(hugging_face, name):
        assert (found - wanted).abs().max() < (1e-12 if name == "llama" else 1e-5) * wanted.abs().max()


class LossOnly(own_model.Decoder):
    logits = Stage.logits

    def stage(self, first: int, last: int, device: torch.device, tp: Any = None) -> "LossOnly":
        return LossOnly(first, last)

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")


def test_a_stage_without_logits_is_named_and_goes_on_training() -> None:
    pipe = Pipeline(LossOnly(), Plan((1,), ODD, (0, 4)))
    with pytest.raises(ValueError, match=r"need a last stage with a method logits\(hidden\).*LossOnly has none"):
        pipe.next_token_logits(prompt(1, 5))
    pipe.step(prompt(1, 29), prompt(1, 29).roll(-1, 1))


@pytest.mark.parametrize("given", [None, torch.zeros(5, dtype=torch.int64), torch.zeros(1, 0, dtype=torch.int64)])
def test_what_is_no_prompt(given: Tensor | None) -> None:
    pipe = Pipeline(make_model(TINY), Plan((1,), ODD, (0, 4)))
    with pytest.raises(ValueError, match=r"must be \(rows, tokens\) of torch.int64"):
        pipe.next_token_logits(given)
