"""AdamW in groups, with float32 copies of parameters in half precision; and the learning rate."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from terapipe.training import optimizer as module
from terapipe.training.config import LRConfig, OptimizerConfig
from terapipe.training.optimizer import MasterAdamW, learning_rate, make_optimizer, set_lr
from tests.support.ranks import Ranks

CONFIG = OptimizerConfig(lr=1e-4, weight_decay=0.1)
UNFUSED = replace(CONFIG, fused="off")


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(1.0 + torch.rand(p.shape))  # values next to which small updates vanish in half precision
    return made.to(dtype)


def gradients(like: nn.Module, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(p.shape, generator=generator).bfloat16() for p in like.parameters())


def train(net: nn.Module, made: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for p, grad in zip(net.parameters(), gradients(net, step), strict=True):
            p.grad = grad.to(p.dtype)
        made.step()


def test_matrices_decay_and_the_others_do_not() -> None:
    net = model()
    net[2].weight.requires_grad_(False)
    made = make_optimizer(net.named_parameters(), CONFIG)
    found = {id(p): group["weight_decay"] for group in made.param_groups for p in group["params"]}
    assert found == {
        id(net[0].weight): 0.1, id(net[0].bias): 0.0, id(net[1].weight): 0.0, id(net[1].bias): 0.0,
        id(net[2].bias): 0.0,
    }  # fmt: skip
    assert type(made) is torch.optim.AdamW
    assert made.defaults["betas"] == (0.9, 0.95)


def test_nothing_to_train_is_no_error() -> None:
    made = make_optimizer([("a", nn.Parameter(torch.ones(2), requires_grad=False))], CONFIG)
    set_lr(made, 0.5)
    made.step()
    made.zero_grad()
    assert made.param_groups[0]["params"] == []
    assert not made.state


def test_state_on_the_host_of_a_cpu_is_refused() -> None:
    """tests/gpu/test_host_optimizer.py has what it computes on a GPU."""
    with pytest.raises(ValueError, match=r"got some on cpu, .*take AdamW itself \(optimizer.name = 'adamw'\)"):
        make_optimizer(model().named_parameters(), replace(CONFIG, name="adamw-offload"))


def test_the_learning_rate_is_that_of_all_groups() -> None:
    made = make_optimizer(model().named_parameters(), CONFIG)
    assert {group["lr"] for group in made.param_groups} == {1e-4}
    set_lr(made, 0.25)
    assert [group["lr"] for group in made.param_groups] == [0.25, 0.25]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fused_is_the_same_but_for_rounding(dtype: torch.dtype) -> None:
    results = []
    for fused in ("on", "auto", "off"):
        net = model(dtype)
        made = make_optimizer(net.named_parameters(), replace(CONFIG, lr=0.01, fused=fused))  # type: ignore[arg-type]
        assert all(bool(group["fused"]) is (fused != "off") for group in made.param_groups)
        train(net, made, range(3))
        results.append([made.state[p].get("master", p.detach()) for p in net.parameters()])
    for x, y, z in zip(*results, strict=True):
        torch.testing.assert_close(x, z)
        assert torch.equal(x, y)


def test_where_there_is_no_fused_kernel() -> None:
    named = [("a", nn.Parameter(torch.ones(2, 2, device="meta")))]
    assert make_optimizer(named, CONFIG).param_groups[0]["fused"] is None
    with pytest.raises(ValueError, match=r"fused = 'on' needs .* torch.float32 on meta; use 'auto' or 'off'"):
        make_optimizer(named, replace(CONFIG, fused="on"))


# Half precision


@pytest.mark.parametrize("fused", ["on", "off"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_move_as_float32_would(dtype: torch.dtype, fused: str) -> None:
    config = replace(CONFIG, fused=fused)  # type: ignore[arg-type]
    net, truth = model(dtype), model(dtype).float()
    made, reference = (make_optimizer(m.named_parameters(), config) for m in (net, truth))
    assert isinstance(made, MasterAdamW)
    lost = model(dtype)
    losing = torch.optim.AdamW(lost.parameters(), lr=CONFIG.lr, betas=(0.9, 0.95), weight_decay=0.0)
    for m, o in ((net, made), (truth, reference), (lost, losing)):
        train(m, o, range(20))
    for p, wanted, before in zip(net.parameters(), truth.parameters(), model(dtype).parameters(), strict=True):
        assert torch.equal(made.state[p]["master"], wanted)
        assert torch.equal(p, wanted.to(dtype))
        assert not torch.equal(wanted, before.float())
    if dtype == torch.bfloat16:
        assert all(torch.equal(p, q) for p, q in zip(lost.parameters(), model(dtype).parameters(), strict=True))


def test_a_mixture_of_precisions_has_masters_of_the_low_one_only() -> None:
    net, truth = model(torch.bfloat16), model(torch.bfloat16).float()
    net[1].float()
    made, reference = (make_optimizer(m.named_parameters(), UNFUSED) for m in (net, truth))
    train(net, made, range(3))
    train(truth, reference, range(3))
    for p, wanted in zip(net.parameters(), truth.parameters(), strict=True):
        assert ("master" in made.state[p]) is (p.dtype == torch.bfloat16)
        assert torch.equal(made.state[p].get("master", p), wanted)


def test_few_gradients_are_widened_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for chunk in (1 << 26, 9):
        monkeypatch.setattr(module, "CHUNK", chunk)
        net = model(torch.bfloat16)
        made = make_optimizer(net.named_parameters(), UNFUSED)
        train(net, made, range(2))
        results.append([made.state[p]["master"] for p in net.parameters()])
    assert [len(c) for c in module._chunks(net.parameters())] == [1, 2, 1, 1, 1]  # of 32, 4, 4, 4, 8, 2
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_a_closure_gives_the_loss() -> None:
    net = model(torch.bfloat16)
    made = make_optimizer(net.named_parameters(), replace(CONFIG, lr=0.5))

    def closure() -> Tensor:
        loss = net(torch.ones(1, 8, dtype=torch.bfloat16)).sum()
        loss.backward()
        return loss

    assert made.step(closure).item() != made.step(closure).item()  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["plain", "by name", "flat"])
@pytest.mark.parametrize("fused", ["on", "off"])
def test_masters_stay_float32_when_loaded(how: str, fused: str) -> None:
    config = replace(CONFIG, lr=0.01, fused=fused)  # type: ignore[arg-type]
    net, other = model(torch.bfloat16), model(torch.bfloat16)
    made, loaded = (make_optimizer(m.named_parameters(), config) for m in (net, other))
    train(net, made, range(3))
    if how == "plain":
        loaded.load_state_dict(made.state_dict())
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=how == "flat")
        state = get_optimizer_state_dict(net, made, options=options)
        before = [p.clone() for p in other.parameters()]
        get_optimizer_state_dict(other, loaded, options=options)  # makes state where there is none, by a step
        assert all(torch.equal(p, q) for p, q in zip(before, other.parameters(), strict=True))
        set_optimizer_state_dict(other, loaded, state, options=options)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), "the master, rounded"
        for key, value in made.state[p].items():
            assert loaded.state[q][key].dtype == torch.float32
            assert torch.equal(loaded.state[q][key], value)
    train(net, made, range(3, 6))
    train(other, loaded, range(3, 6))
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(made.state[p]["master"], loaded.state[q]["master"])


def test_state_without_masters_takes_them_from_the_parameters() -> None:
    net = model(torch.bfloat16)
    plainly = torch.optim.AdamW(net.parameters())
    train(net, plainly, range(2))
    made = MasterAdamW(net.parameters())
    made.load_state_dict(plainly.state_dict())
    for p in net.parameters():
        assert torch.equal(made.state[p]["master"], p.float())
        assert made.state[p]["exp_avg"].dtype == torch.float32
    train(net, made, range(2, 3))


# Tensors in parts


def in_parts(dtype: torch.dtype, fused: str) -> tuple[list[tuple[int, float, bool]], list[Tensor]]:
    """A matrix in parts, a vector on all, and one that is no DTensor: their groups, and the values after some steps."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 3), (4,), (3, 3))]
    given = [
        nn.Parameter(distribute_tensor(whole[0].clone(), mesh, [Shard(0)])),
        nn.Parameter(distribute_tensor(whole[1].clone(), mesh, [Replicate()])),
        nn.Parameter(whole[2].clone()),
    ]
    made = make_optimizer([("", p) for p in given], replace(CONFIG, lr=0.01, fused=fused))  # type: ignore[arg-type]
    for step in range(3):
        for p, like in zip(given, whole, strict=True):
            grad = torch.full_like(like, 0.5 + step)
            p.grad = distribute_tensor(grad, mesh, p.placements) if isinstance(p, DTensor) else grad
        made.step()
    values = [made.state[p].get("master", p.detach()) for p in given]
    assert all(isinstance(x, DTensor) == isinstance(p, DTensor) for x, p in zip(values, given, strict=True))
    groups = [(len(g["params"]), g["weight_decay"], bool(g["fused"])) for g in made.param_groups]
    return groups, [x.full_tensor() if isinstance(x, DTensor) else x for x in values]


@pytest.mark.parametrize("fused", ["auto", "off"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_in_parts_have_groups_of_their_own(
    ranks: Callable[[int], Ranks], dtype: torch.dtype, fused: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    truth = [nn.Parameter(torch.randn(s, generator=generator).to(dtype).float()) for s in ((5, 3), (4,), (3, 3))]
    made = make_optimizer([("", p) for p in truth], replace(UNFUSED, lr=0.01))
    for step in range(3):
        for p in truth:
            p.grad = torch.full_like(p, 0.5 + step)
        made.step()
    for groups, values in ranks(2)(in_parts, dtype, fused):
        assert groups == [(1, 0.1, fused == "auto"), (1, 0.0, fused == "auto"), (1, 0.1, fused == "auto")]
        for x, wanted in zip(values, truth, strict=True):
            torch.testing.assert_close(x, wanted.detach())


# The learning rate

PEAK = 0.5


def rates(steps: int = 20, **changes: object) -> list[float]:
    config = LRConfig(**{"warmup": 5, "min_lr_ratio": 0.1, **changes})  # type: ignore[arg-type]
    return [learning_rate(step, config, OptimizerConfig(lr=PEAK, steps=steps)) for step in range(steps)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_it_rises_to_the_peak_in_equal_steps(kind: str) -> None:
    assert rates(kind=kind)[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 5, 19])
def test_it_ends_at_the_floor_and_stays_there(kind: str, warmup: int) -> None:
    config = LRConfig(warmup=warmup, min_lr_ratio=0.1, kind=kind)  # type: ignore[arg-type]
    assert learning_rate(19, config, OptimizerConfig(lr=PEAK, steps=20)) == pytest.approx(0.05)
    assert learning_rate(100, config, OptimizerConfig(lr=PEAK, steps=20)) == pytest.approx(0.05)
    assert learning_rate(max(0, warmup - 1), config, OptimizerConfig(lr=PEAK, steps=20)) == PEAK


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_it_falls_all_the_way(kind: str) -> None:
    fall = rates(kind=kind, decay=0.75)[4:]
    assert all(a > b for a, b in pairwise(fall))


def test_a_cosine_is_half_way_in_the_middle() -> None:
    found = rates(kind="cosine", steps=25, min_lr_ratio=0.0)
    assert found[14] == pytest.approx(PEAK / 2)
    assert found[9] == pytest.approx(PEAK / 2 * (1 + math.cos(math.pi / 4)))


def test_a_line_is_straight() -> None:
    found = rates(kind="linear")
    assert [a - b for a, b in pairwise(found[4:])] == pytest.approx([0.45 / 15] * 15)


def test_stable_then_falling_in_the_last_share() -> None:
    found = rates(kind="wsd", decay=0.2)
    assert found[4:16] == [PEAK] * 12
    assert found[16:] == pytest.approx([PEAK * (1 - 0.9 * i / 4) for i in range(1, 5)])
    assert rates(kind="wsd", decay=0.0)[4:] == [PEAK] * 16
    assert rates(kind="wsd", decay=1.0)[5] < PEAK, "never before the warm-up is over"


def test_constant_has_no_floor() -> None:
    assert rates(kind="constant")[4:] == [PEAK] * 16


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_short_runs(kind: str) -> None:
    assert rates(kind=kind, steps=1, warmup=0) == [PEAK]
    assert rates(kind=kind, steps=2, warmup=100) == pytest.approx([PEAK / 100, PEAK / 50])


def test_steps_are_counted_from_zero() -> None:
    with pytest.raises(ValueError, match="counted from 0, got -1"):
        learning_rate(-1, LRConfig(), OptimizerConfig())
