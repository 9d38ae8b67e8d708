"""A rank's step on fake tensors: at real size, without memory, other ranks or GPUs."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import terapipe
from examples import own_model
from terapipe import GPTConfig, Layout, Plan, SliceCache
from terapipe.cli import main
from terapipe.runtime.comm.channel import MessageFormat

learn = MessageFormat.learn


@pytest.mark.exhaustive_ids("^(1-options1|2-options2)")
@pytest.mark.parametrize(
    ("dp", "options"),
    [
        pytest.param(1, {"order": "terapipe", "chunks": 1}, marks=pytest.mark.exhaustive),
        (1, {"order": "terapipe-deferred", "chunks": 2}),
        (2, {"order": "terapipe-v"}),
        (1, {"order": "terapipe", "chunks": 1, "recompute": "light"}),
        (1, {"order": "terapipe", "chunks": 1, "recompute": "block"}),
        pytest.param(1, {"order": "terapipe", "chunks": 1, "recompute": "full"}, marks=pytest.mark.exhaustive),
    ],
)
def test_bytes_of_a_rank_of_gpt3_13b_are_the_planners(dp: int, options: dict[str, Any]) -> None:
    """Replicas needed 16 % more: copies of all gradients. A rank with two stages was taken to need 7 % more."""
    result = terapipe.plan(
        "gpt3-13b",
        f"dgx-a100:{dp}",
        batch_size=dp,
        seq_len=2048,
        pp=8,
        dp=dp,
        tp=1,
        shard=False,
        num_slices=8,
        **options,
    )
    found = terapipe.dry_run("gpt3-13b", result, rank=4)
    assert found.predicted is not None
    assert found.peak == pytest.approx(found.predicted, rel=0.05)
    assert found.weights > 5 << 29
    assert found.waits == ()


def test_bytes_of_windows_are_the_planners() -> None:
    """Gradients of keys and values had room for all tokens: a third of this rank."""
    windows = (256, 256, 256, 256, 256, 0)
    shape = GPTConfig(6, 512, 8, 8, 512, 1024, 8192, windows=windows)
    options: dict[str, Any] = {"batch_size": 1, "seq_len": 8192, "num_slices": 8, "order": "terapipe"}
    result = terapipe.plan(shape, "dgx-a100:1", pp=1, tp=1, dp=1, recompute="full", **options)
    run = terapipe.dry_run(shape, result, rank=0)
    assert run.predicted is not None
    assert run.peak == pytest.approx(run.predicted, rel=0.05)
    without = replace(shape, windows=())
    assert terapipe.dry_run(without, result, rank=0).peak > 1.3 * run.peak


@pytest.mark.parametrize("recompute", ["none", "light", pytest.param("block", marks=pytest.mark.exhaustive)])
def test_bytes_with_split_operators_are_the_planners(recompute: Any) -> None:
    """Devices shared out what products save, except their inputs: the last rank was taken to need 10 % more."""
    shape = "layers=4,hidden=1024,heads=8,vocab=16384"
    result = terapipe.plan(
        shape,
        "dgx-a100:1",
        batch_size=1,
        seq_len=8192,
        num_slices=4,
        order="terapipe",
        pp=2,
        tp=4,
        dp=1,
        recompute=recompute,
    )
    for rank in (0, 1):
        run = terapipe.dry_run(shape, result, rank=rank)
        assert run.predicted is not None
        assert run.peak - (1 << 25) < run.predicted * 1.03  # gradients are rounded 16 M at a time
        assert run.peak > run.predicted * 0.97


@pytest.mark.parametrize("recompute", ["none", "block", pytest.param("full", marks=pytest.mark.exhaustive)])
def test_bytes_with_offload_are_the_planners(recompute: Any) -> None:
    """What waits in the host's memory does not count, although a CPU stands for the device."""
    options = {"batch_size": 1, "seq_len": 8192, "num_slices": 12, "order": "terapipe", "recompute": recompute}
    peaks = []
    for share in ("none", 1.0):
        result = terapipe.plan(
            "layers=3,hidden=256,heads=4,vocab=512", "dgx-a100:1", pp=1, tp=1, dp=1, offload=share, **options
        )
        run = terapipe.dry_run("layers=3,hidden=256,heads=4,vocab=512", result)
        assert run.peak == pytest.approx(run.predicted, rel=0.05)
        peaks.append(run.peak)
    assert peaks[1] < peaks[0]


def test_messages_of_a_step() -> None:
    config = GPTConfig(layers=4, hidden=32, heads=2, vocab=64, max_seq_len=64)
    plan = Plan((1, 1), ((32, 32), (64,)), (0, 1, 3, 4))
    sent = [terapipe.dry_run(config, plan, layout=Layout(2, 3, 1), rank=rank).sent for rank in range(3)]
    shared = {"the gradient of a shared parameter": 1}  # embedding and head, on the first rank and the last
    assert sent[0] == {"SEND_F": 3, "sum of gradients": 1} | shared
    assert sent[1] == {"SEND_F": 3, "SEND_B": 3, "sum of gradients": 1}
    assert sent[2] == {"SEND_B": 3, "sum of gradients": 1} | shared


class Nosy(own_model.Decoder):
    def stage(self, first: int, last: int, device: torch.device, tp: object = None) -> "Nosy":
        return Nosy(first, last).to(device)

    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        out = super().forward(x, cache)
        return out if out.max().item() > 0 else -out  # waits for the device


def test_a_line_that_reads_a_number_is_named() -> None:
    plan = Plan((1,), ((16, 16),), (0, 2, 4))
    for kind in (own_model.Decoder, Nosy):
        with torch.device("meta"):
            model = kind()
        found = terapipe.dry_run(model, plan)
        assert len(found.waits) == (kind is Nosy)
    assert re.fullmatch(r".*test_dry_run\.py:\d+", found.waits[0])
    assert "the host would wait at" in str(found)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"rank": 3}, "the pipeline has ranks 0 to 1, got 3"),
        ({"layout": Layout(2, 2, 1, shard=True)}, "does not know sharded replicas"),
    ],
)
def test_what_it_refuses(more: dict[str, Any], said: str) -> None:
    config = GPTConfig(layers=2, hidden=32, heads=2, vocab=64, max_seq_len=64)
    with pytest.raises(ValueError, match=said):
        terapipe.dry_run(config, Plan((1,), ((64,),), (0, 1, 2)), **more)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "plan",
        "--model=layers=4,hidden=256,heads=4",
        "--cluster=dgx-a100:1",
        "--batch-size=8",
        "--seq-len=512",
        "--dry-run",
    ]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "Dry run of rank" in said
    assert "by the planner" in said
    assert "no hidden waits" in said


@pytest.mark.parametrize(("order", "autocast"), [("terapipe", True), ("terapipe-deferred", False)])
def test_bytes_are_those_of_products_that_add_in_place(order: str, autocast: bool) -> None:
    """Fake parameters are of another class: their layers were computed as torch's own, whose casts of weights live
    beside ours under autocast, and whose gradients are not deferred. Under autocast it was refused."""
    config = GPTConfig(layers=8, hidden=1024, heads=8, vocab=64, max_seq_len=512)
    options: dict[str, Any] = {"pp": 4, "dp": 1, "tp": 1, "num_slices": 4, "order": order, "autocast": autocast}
    result = terapipe.plan(config, "dgx-h100:1", batch_size=1, seq_len=512, **options)
    dry = terapipe.dry_run(config, result, rank=1)
    assert dry.predicted is not None
    assert dry.peak == pytest.approx(dry.predicted, rel=0.05)
    assert dry.waits == ()


class EndsWithProduct(own_model.Decoder):
    def stage(self, first: int, last: int, device: torch.device, tp: object = None) -> "EndsWithProduct":
        return EndsWithProduct(first, last).to(device)

    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        out = super().forward(x, cache)
        return torch.matmul(out, torch.ones(out.shape[-1], out.shape[-1], device=out.device))


@pytest.mark.parametrize("kind", [own_model.Decoder, EndsWithProduct])
def test_messages_under_autocast_have_the_dtype_of_the_stage_before(kind: Any, monkeypatch: Any) -> None:
    """A rank that receives cannot know it by itself, and fake messages have no tag."""
    learned: dict[int, torch.dtype] = {}
    monkeypatch.setattr(
        MessageFormat, "learn", lambda self, _, dtypes: (learned.update(dtypes), learn(self, _, dtypes))
    )
    with torch.device("meta"):
        model = kind()
    with torch.autocast("cpu", torch.bfloat16):
        dry = terapipe.dry_run(model, Plan((1,), ((16, 16),), (0, 1, 2, 4)), rank=1)
    assert learned == dict.fromkeys(range(2), torch.bfloat16 if kind is EndsWithProduct else torch.float32)
    assert dry.waits == ()
    assert dry.sent == {"SEND_F": 2, "SEND_B": 2}
