"""What a checkpoint says beside its tensors, and what a run takes over from it."""

import math
from typing import Any

import pytest
import torch

from terapipe import GPT, Layout, Pipeline, Plan
from terapipe.planning.presets import gpt_config
from terapipe.runtime import rng_state, seed_rng
from terapipe.search.result import PlanResult
from terapipe.training.config import RunConfig
from terapipe.training.identity import NOTE, Identity
from terapipe.training.state import RunContext, RunState

IDENTITY: Identity = {"model": {}, "objective": {"objective.kind": "cross_entropy"}, "data": {"eval": {"tokens": 9}}}


def state(layout: Layout | None = None) -> RunState:
    plan = Plan.uniform(batch_size=1, seq_len=8, num_slices=2, boundaries=(0, 2))
    pipe = Pipeline(GPT(gpt_config("layers=2,hidden=8,heads=2,vocab=16,max_seq_len=8")), plan)
    optimizer = torch.optim.AdamW(pipe.parameters())
    return RunState(PlanResult.of_plan(plan, layout or Layout(1, 1, 1)), None, pipe, optimizer, seed_rng(0, 0))


def context(identity: Identity = IDENTITY) -> Any:
    """Of which `resume` asks for the identity and the seed."""
    return RunContext(RunConfig(), None, None, None, identity)  # type: ignore[arg-type]


def test_notes_are_taken_over() -> None:
    before, after = state(), state()
    before.step, before.position, before.skipped, before.best = 7, 28, 1, 2.5
    notes = before.take_notes(IDENTITY)
    drawn = torch.rand(3)
    after.random = before.random  # as a checkpoint loads them
    after.resume(notes, context())
    assert (after.step, after.position, after.skipped, after.best) == (7, 28, 1, 2.5)
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_notes_have_no_numbers_that_json_has_not(loss: float) -> None:
    before, after = state(), state()
    before.eval_loss = loss
    notes = before.take_notes(IDENTITY)
    assert (notes["best"], notes["eval_loss"]) == (None, None)
    after.resume(notes, context())
    assert after.best == math.inf


def test_what_does_not_apply_is_not_taken_over() -> None:
    """Rows of pairs are others than rows of documents, another evaluation has other losses, and states of random
    numbers belong to the ranks of a layout."""
    before, after = state(), state(Layout(2, 1, 1))
    before.step, before.position, before.best = 3, 12, 0.5
    pairs: Identity = {**IDENTITY, "objective": {"objective.kind": "dpo"}, "data": {"eval": None}}
    notes = before.take_notes(pairs)
    assert notes[NOTE] == pairs
    after.resume(notes, context())
    assert (after.step, after.position, after.best) == (3, 0, math.inf)
    seed_rng(RunConfig().data.seed + 3, 0)
    wanted = {name: tensor.clone() for name, tensor in rng_state(0).items()}
    after.resume(notes, context())
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in rng_state(0).items())
