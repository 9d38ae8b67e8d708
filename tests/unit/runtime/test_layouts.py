"""What a user calls, in every layout: clipping, evaluation, accumulation, an optimizer, checkpoints, uneven batches."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from terapipe import GPT, Layout, Pipeline, Plan, device_mesh, fill_batch
from terapipe.modeling.stage import IGNORE
from tests.support.models import TINY, gradients, make_batch, make_model, mesh_of, variant, whole, worst_error
from tests.support.ranks import Ranks

CONFIG = variant(tied=True, kv_heads=2)
ROWS = 4
LAYOUTS = [
    (Layout(1, 1, 1), False), (Layout(1, 3, 1), False), (Layout(2, 1, 1), True), (Layout(2, 2, 1), False),
    (Layout(2, 2, 1), True), (Layout(1, 2, 2), False), (Layout(2, 2, 2), False), (Layout(2, 2, 2), True),
]  # fmt: skip


def name(value: object) -> str:
    return str(value) if isinstance(value, Layout) else ("sharded" if value else "whole")


def plan_of(layout: Layout) -> Plan:
    """With two replicas of two stages, folded."""
    boundaries = {1: (0, 4), 2: (0, 3, 4), 3: (0, 1, 2, 4)}[layout.pp]
    each = ROWS // layout.dp
    # Even lengths where there is one replica: its devices then share out the tokens, too.
    odd, even = ((9, 1, 12, 6), (20, 8), (27, 1), (15, 13)), ((10, 2, 12, 4), (20, 8), (26, 2), (14, 14))
    plan = Plan((1,) * each, (odd if layout.dp > 1 else even)[:each], boundaries, "terapipe-1f1b")
    folded = (layout.dp, layout.pp) == (2, 2)
    return replace(plan, boundaries=(0, 1, 2, 3, 4), order="terapipe-v", chunks=2) if folded else plan


def pipeline(layout: Layout, shard: bool) -> Pipeline:
    mesh = mesh_of(layout) if layout.devices > 1 else None
    return Pipeline(make_model(CONFIG), plan_of(layout), mesh=mesh, shard=shard, timeout=300.0)


def rows(pipe: Pipeline, seed: int) -> tuple[Tensor, Tensor]:
    """This replica's part of a batch."""
    ids, labels = make_batch(CONFIG, ROWS, 28, ignored=True, seed=seed)
    mine = slice(pipe.dp_rank * pipe.plan.batch_size, (pipe.dp_rank + 1) * pipe.plan.batch_size)
    return ids[mine], labels[mine]


def adam(parameters: object) -> torch.optim.Optimizer:
    # A large eps: some gradients are zero but for rounding, and must not be blown up to the size of the others.
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-2)  # type: ignore[arg-type]


def one_step(pipe: Pipeline, optimizer: torch.optim.Optimizer, seed: int) -> tuple[float, float, float]:
    """Two batches accumulated, clipped, applied. Losses before and the norm."""
    held = list(pipe.parameters())
    evaluated = pipe.evaluate(*rows(pipe, seed)).item()
    assert all(p is q for p, q in zip(held, pipe.parameters(), strict=True)), "what was gathered must be let go"
    pipe.step(*rows(pipe, seed))
    pipe.step(*rows(pipe, seed + 100))
    norm = pipe.clip_grad_norm_(0.5).item()
    optimizer.step()
    pipe.zero_grad()
    return evaluated, norm, pipe.grad_norm().item()


def plainly(steps: int) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """The same without any pipeline: losses and norms, and the parameters at the end."""
    model = make_model(CONFIG)
    optimizer = adam(model.parameters())
    seen = []
    for seed in range(steps):
        losses = [_loss(model, *make_batch(CONFIG, ROWS, 28, ignored=True, seed=s)) for s in (seed, seed + 100)]
        sum(losses[1:], losses[0]).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((losses[0].item(), norm.item()))
    return seen, {name: p.detach() for name, p in model.named_parameters()}


def _loss(model: GPT, ids: Tensor, labels: Tensor) -> Tensor:
    return model.loss(model(ids), labels) / (labels != IGNORE).sum()


def train_and_save(layout: Layout, shard: bool, folder: str) -> tuple[list[tuple[float, ...]], dict[str, Tensor]]:
    pipe = pipeline(layout, shard)
    optimizer = adam(pipe.parameters())
    seen = [one_step(pipe, optimizer, 0)]
    pipe.save(folder, optimizer)
    pipe.save(folder, optimizer)  # over the first
    seen.append(one_step(pipe, optimizer, 1))
    return seen, {name: whole(p.detach()) for name, p in pipe.named_parameters()}


def load_and_train(layout: Layout, shard: bool, folder: str) -> dict[str, Tensor]:
    pipe = pipeline(layout, shard)
    optimizer = adam(pipe.parameters())
    pipe.load(folder, optimizer)
    one_step(pipe, optimizer, 1)
    return {name: whole(p.detach()) for name, p in pipe.named_parameters()}


def worst(found: list[dict[str, Tensor]], truth: dict[str, Tensor]) -> float:
    return worst_error((1.0, truth), [(1.0, part) for part in found], CONFIG)


@pytest.fixture(scope="module")
def truth() -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    return plainly(2)


@pytest.mark.gpu_seldom("pp 2 x tp 2|pp 3|dp 2 x pp 2 x tp 1-sharded")
@pytest.mark.exhaustive_ids("dp 2 x pp 2 x tp 1-sharded")
@pytest.mark.parametrize(
    ("layout", "shard"),
    [pytest.param(*case, marks=[] if i == 4 else [pytest.mark.exhaustive]) for i, case in enumerate(LAYOUTS)],
    ids=name,
)
def test_training_is_the_same_and_goes_on_in_other_layouts(
    ranks: Callable[[int], Ranks],
    tmp_path: Path,
    layout: Layout,
    shard: bool,
    truth: tuple[list[tuple[float, float]], dict[str, Tensor]],
) -> None:
    folder = str(tmp_path / "checkpoint")
    results = ranks(layout.devices)(train_and_save, layout, shard, folder)
    for seen, _ in results:
        assert [row[:2] for row in seen] == [pytest.approx(row, rel=1e-9) for row in truth[0]]
        assert all(norm == 0 for _, _, norm in seen)
    assert worst([parameters for _, parameters in results], truth[1]) < 1e-9
    at = LAYOUTS.index((layout, shard))
    for other, sharded in (LAYOUTS[at - 1], LAYOUTS[at - 4]):
        assert worst(ranks(other.devices)(load_and_train, other, sharded, folder), truth[1]) < 1e-9
    assert [f.name for f in tmp_path.iterdir()] == ["checkpoint"]


def state_bytes(layout: Layout, shard: bool) -> tuple[int, int]:
    """Of this rank's optimizer: what its moments take, and what they would take whole."""
    pipe = pipeline(layout, shard)
    optimizer = adam(pipe.parameters())
    pipe.step(*rows(pipe, 0))
    optimizer.step()
    moments = [x for state in optimizer.state.values() for key, x in state.items() if key != "step"]
    held = sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in moments)
    return held, sum(x.nbytes for x in moments)


@pytest.mark.gpu_seldom
def test_shared_state_is_smaller_by_the_number_of_replicas(ranks: Callable[[int], Ranks]) -> None:
    answers = ranks(4)(state_bytes, Layout(2, 2, 1), True)
    for (held, all_of_it), (rest, _) in zip(answers[:2], answers[2:], strict=True):
        assert held + rest == all_of_it
        assert held == pytest.approx(rest, rel=0.05)  # a vocabulary of 19 has no half
    for held, all_of_it in ranks(4)(state_bytes, Layout(2, 2, 1), False):
        assert held == all_of_it


def uneven(layout: Layout, shares: tuple[int, ...], shard: bool) -> tuple[float, dict[str, Tensor]]:
    pipe = pipeline(layout, shard)
    ids, labels = make_batch(CONFIG, sum(shares), 28, ignored=True)
    first = sum(shares[: pipe.dp_rank])
    mine = slice(first, first + shares[pipe.dp_rank])
    loss = pipe.step(*fill_batch(ids[mine], labels[mine], pipe.plan.batch_size))
    return loss.item(), gradients(pipe)


@pytest.mark.gpu_seldom
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("shares", [(2, 1), (1, 0), (0, 2)])
def test_replicas_may_have_different_numbers_of_sequences(
    ranks: Callable[[int], Ranks], shares: tuple[int, ...], shard: bool
) -> None:
    ids, labels = make_batch(CONFIG, sum(shares), 28, ignored=True)
    model = make_model(CONFIG)
    loss = _loss(model, ids, labels)
    loss.backward()
    wanted = loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert worst_error(wanted, ranks(4)(uneven, Layout(2, 2, 1), shares, shard), CONFIG) < 1e-12


def refused(layout: Layout, **changes: int) -> str:
    with pytest.raises(ValueError, match="tp must divide") as caught:
        Pipeline(make_model(variant(**changes)), plan_of(layout), mesh=device_mesh(layout), timeout=300.0)
    return str(caught.value)


def test_heads_that_cannot_be_shared_are_refused_by_name(fresh_ranks: Callable[[int], Ranks]) -> None:
    # A pipeline that fails takes the groups of its mesh down, and one that spans all ranks is the default group.
    for message in fresh_ranks(2)(refused_heads):
        assert message.startswith("tp must divide the model's kv_heads, got tp 2 and kv_heads 1;")


def refused_heads() -> str:
    return refused(Layout(1, 1, 2), kv_heads=1)


def wrong_size() -> str:
    with pytest.raises(ValueError, match="processes") as caught:
        device_mesh(Layout(2, 2, 1))
    return str(caught.value)


def test_a_layout_of_another_size_is_refused(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2)(wrong_size)[0].startswith("dp 2 x pp 2 x tp 1 needs 4 processes, got 2;")


def test_a_batch_is_filled_up_with_rows_that_do_not_count() -> None:
    ids, labels = make_batch(TINY, 2, 5, ignored=False)
    filled, targets = fill_batch(ids, labels, 3)
    assert filled.shape == targets.shape == (3, 5)
    assert torch.equal(targets[:2], labels)
    assert (targets[2] == IGNORE).all()
    with pytest.raises(ValueError, match="filled up to 1 rows"):
        fill_batch(ids, labels, 1)


def test_nothing_is_loaded_from_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no checkpoint in"):
        pipeline(Layout(1, 1, 1), False).load(tmp_path / "nowhere")


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    pipe = pipeline(Layout(1, 1, 1), False)
    pipe.save(tmp_path / "one")
    other = Pipeline(make_model(variant(ffn=48)), plan_of(Layout(1, 1, 1)))
    with pytest.raises(ValueError, match="of another model or optimizer"):
        other.load(tmp_path / "one")
