"""Stages without layers: the embedding alone, the head alone. Gradients are those of the plain model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from terapipe import GPT, Layout, Pipeline, Plan
from terapipe.hf import Decoder
from tests.support.hf_models import adapted, plain_gradients, small, stages_here, step_gradients, worst_difference
from tests.support.models import laid_out, make_batch, plain, variant, worst_error
from tests.support.ranks import Ranks

ODD, EVEN = ((9, 1, 12, 7), (20, 9)), ((10, 2, 12, 4), (20, 8))
BOTH = (0, 0, 4, 4)


@pytest.mark.parametrize(
    ("layout", "shard", "lengths", "recompute", "tied"),
    [
        (Layout(2, 2, 1), True, ODD, "none", True),
        (Layout(1, 2, 2), False, EVEN, "block", True),
        (Layout(1, 3, 2), False, ODD, "full", False),
        (Layout(2, 3, 1), False, ODD, "block", True),
    ],
    ids=str,
)
def test_with_replicas_and_split_operators(
    ranks: Callable[[int], Ranks], layout: Layout, shard: bool, lengths: Any, recompute: Any, tied: bool
) -> None:
    boundaries = BOTH if layout.pp == 3 else (0, 4, 4)
    plan = Plan((1, 2), lengths, boundaries, "terapipe-1f1b", 1, recompute)
    config = variant(layers=4, tied=tied, kv_heads=2)
    ids, labels = make_batch(config, plan.batch_size * layout.dp, plan.seq_len, ignored=True)
    results = ranks(layout.devices)(laid_out, config, layout, plan, ids, labels, torch.float64, shard)
    assert worst_error(plain(config, ids, labels, torch.float64), results, config) < 1e-12


@pytest.mark.parametrize("boundaries", [(0, 0, 4), (0, 4, 4), (0, 0, 1, 4, 4)], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "qwen3_moe"])
def test_hugging_face_models(kind: str, boundaries: tuple[int, ...]) -> None:
    """GPT-2 adds positions to its embedding; Gemma scales it, and computes norms in float32."""
    model = small(kind).double()
    depth = boundaries[-1]
    wanted = plain_gradients(model)
    decoder = Decoder(model, backend="attention")
    assert decoder.num_layers == depth
    pipe = Pipeline(decoder, stages_here(*boundaries), timeout=60)
    assert worst_difference(step_gradients(pipe), wanted) < (1e-6 if kind == "gemma2" else 1e-12)


def test_adapters_leave_an_end_without_anything_to_train() -> None:
    model = adapted()
    wanted = {name.removeprefix("base_model.model."): g for name, g in plain_gradients(model).items()}
    pipe = Pipeline(Decoder(model, backend="attention"), stages_here(*BOTH), timeout=60)
    assert worst_difference(step_gradients(pipe), wanted) < 1e-12


def test_a_checkpoint_moves_to_stages_with_layers(tmp_path: Path) -> None:
    config = variant(layers=4)
    ids, labels = make_batch(config, 2, 29, ignored=False)
    bare, even = (Pipeline(GPT(config, seed=seed), stages_here(*cuts)) for seed, cuts in ((0, BOTH), (1, (0, 2, 4))))
    optimizers = [torch.optim.AdamW(pipe.parameters(), lr=0.1) for pipe in (bare, even)]
    bare.step(ids, labels)
    optimizers[0].step()
    bare.save(tmp_path / "saved", optimizers[0])
    even.load(tmp_path / "saved", optimizers[1])
    other = dict(even.named_parameters())
    for name, p in bare.named_parameters():
        assert torch.equal(p, other[name]), name


def test_a_model_of_ones_own_must_offer_them() -> None:
    class Own(GPT):
        has_bare_ends = False

    with pytest.raises(ValueError, match=r"without layers, boundaries .*, which Own does not offer; give every"):
        Pipeline(Own(variant(layers=4)), stages_here(*BOTH))
    with pytest.raises(ValueError, match="which Decoder does not offer"):
        Pipeline(Decoder(small("mamba"), backend="cache"), stages_here(*BOTH))
