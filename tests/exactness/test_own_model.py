"""The example of a model of one's own: exact across slices, its carried state included, and it runs as printed."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from examples.own_model import VOCAB, Decoder
from terapipe import Layout, Pipeline, Plan, SliceCache
from tests.support.models import gradients, mesh_of, variant, worst_error
from tests.support.ranks import Ranks


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(VOCAB, (2, 29), generator=generator) for _ in range(2))
    return ids, labels


def whole() -> tuple[float, dict[str, Tensor]]:
    model, (ids, labels) = Decoder().double(), batch()
    cache = SliceCache(29)  # one slice: no slicing at all
    cache.begin(0, 29)
    loss = model.loss(model(ids, cache), labels) / labels.numel()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def cut(plan: Plan, layout: Layout | None = None) -> tuple[float, dict[str, Tensor]]:
    mesh = None if layout is None else mesh_of(layout)
    pipe = Pipeline(Decoder().double(), plan, mesh=mesh, timeout=300.0)
    loss = pipe.step(*batch())
    return loss.item(), gradients(pipe)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("order", ["terapipe", "terapipe-1f1b", "terapipe-deferred", "terapipe-zb"])
def test_attention_and_recurrence_are_exact_across_slices(
    ranks: Callable[[int], Ranks], order: str, recompute: bool
) -> None:
    plan = Plan((1, 1), ((9, 1, 12, 7), (20, 9)), (0, 1, 4), order, 1, recompute)
    assert worst_error(whole(), ranks(2)(cut, plan), variant(tied=False)) < 1e-12


@pytest.mark.parametrize("lengths", [(9, 1, 12, 7), (10, 2, 12, 4, 1)])
def test_operators_split_over_devices_are_exact(ranks: Callable[[int], Ranks], lengths: tuple[int, ...]) -> None:
    plan = Plan((2,), (lengths,), (0, 4), "terapipe-deferred")
    assert worst_error(whole(), ranks(2)(cut, plan, Layout(1, 1, 2)), variant(tied=False)) < 1e-12


@pytest.mark.exhaustive
def test_it_runs_as_printed() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, "examples/own_model.py"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    losses = [float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines()]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
