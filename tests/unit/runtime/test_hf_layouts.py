"""Hugging Face models with replicas, shared state and split operators."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from terapipe import Layout, Pipeline, Plan
from tests.support.models import gradients, mesh_of
from tests.support.ranks import Ranks

Found = dict[str, Tensor]

EMBEDDING = {"gpt2": "transformer.wte.weight", "bert": "bert.embeddings.word_embeddings.weight"}  # tied


def batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids, labels = (torch.randint(90, (rows, 28), generator=generator) for _ in range(2))
    return ids, labels


def model(name: str) -> object:
    from terapipe.hf.verify.small_model import small_model
    from tests.support.hf_models import small_config

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return small_model(small_config(name))


def plainly(name: str, rows: int) -> Found:
    whole, (ids, labels) = model(name), batch(rows)
    logits = whole(input_ids=ids, use_cache=False).logits  # type: ignore[operator]
    F.cross_entropy(logits.flatten(0, 1).double(), labels.flatten()).backward()
    return {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]


def laid_out(name: str, layout: Layout, shard: bool, folded: bool) -> Found:
    from terapipe.hf import Decoder

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        decoder = Decoder(model(name), backend="attention")
        cuts, order, chunks = ((0, 1, 2, 3, 4), "terapipe-v", 2) if folded else ((0, 1, 4), "terapipe", 1)
        plan = Plan((2,), ((10, 2, 12, 4),), cuts, order, chunks)
        pipe = Pipeline(decoder, plan, mesh=mesh_of(layout), shard=shard, timeout=300.0)
        ids, labels = batch(2 * layout.dp)
        mine = slice(2 * pipe.dp_rank, 2 * pipe.dp_rank + 2)
        pipe.step(ids[mine], labels[mine])
        pipe.clip_grad_norm_(1e9)
        return gradients(pipe)


MORE = pytest.mark.exhaustive


@pytest.mark.gpu_seldom("bert|llama-layout5|gpt2-layout9")
@pytest.mark.parametrize(
    ("name", "layout", "shard", "folded"),
    [
        ("bert", Layout(1, 2, 1), False, False),  # shares a bias within its head beside the embedding's weight
        pytest.param("gpt2", Layout(1, 2, 1), False, False, marks=MORE),
        pytest.param("llama", Layout(2, 2, 1), False, False, marks=MORE),
        pytest.param("llama", Layout(2, 2, 1), True, False, marks=MORE),
        ("gpt2", Layout(2, 2, 1), True, False),
        pytest.param("llama", Layout(1, 2, 2), False, False, marks=MORE),
        pytest.param("qwen3", Layout(1, 2, 2), False, False, marks=MORE),
        pytest.param("gpt_neox", Layout(1, 2, 2), False, False, marks=MORE),
        ("mixtral", Layout(1, 2, 2), False, False),
        ("gpt2", Layout(1, 2, 1), False, True),  # both ends of a tied model on one rank
        ("llama", Layout(2, 2, 1), True, True),
    ],
)
def test_gradients_are_those_of_one_piece(
    ranks: Callable[[int], Ranks], name: str, layout: Layout, shard: bool, folded: bool
) -> None:
    wanted = plainly(name, 2 * layout.dp)
    largest = max(g.abs().max().item() for g in wanted.values())
    seen = set()
    for found in ranks(layout.devices)(laid_out, name, layout, shard, folded):
        for parameter, gradient in found.items():
            truth = wanted.get(parameter, wanted.get(EMBEDDING.get(name, "")))
            assert truth is not None
            scale = max(truth.abs().max().item(), 1e-3 * largest)
            assert (gradient - truth).abs().max().item() / scale < 1e-4, parameter
            seen.add(parameter)
    assert set(wanted) <= seen
