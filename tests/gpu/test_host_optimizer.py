"""AdamW with its state on the host, on pretend GPUs: weights as those of AdamW on one device, in any layout."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from terapipe import GPT, Pipeline, Plan
from terapipe.runtime import HostOptimizer
from terapipe.training.config import OptimizerConfig
from terapipe.training.optimizer import MasterAdamW, make_optimizer
from tests.support.models import make_batch, variant
from tests.support.ranks import Ranks
from tests.unit.trainers import runs
from tests.unit.trainers.test_trainer import check
from tests.unit.training import test_run

SIZES = variant(layers=3, hidden=32, heads=2, vocab=150, tied=True)  # of which some are the host's, others not
STEPS, ACCUMULATE, CLIP = 4, 2, 0.05
BOUNDARIES = {1: (0, 3), 2: (0, 1, 3)}
BATCHES = [make_batch(SIZES, 2, 24, ignored=bool(number % 2), seed=number) for number in range(STEPS * ACCUMULATE)]
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-3}


def config(name: str) -> OptimizerConfig:
    return OptimizerConfig(name=name, lr=1e-2, eps=1e-4, weight_decay=0.1)  # type: ignore[arg-type]


def update(optimizer: Any, step: int) -> None:
    for group in optimizer.param_groups:  # as a schedule does
        group["lr"] = 1e-2 / (1 + step)
    optimizer.step()
    optimizer.zero_grad()


def plainly(dtype: torch.dtype, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """By AdamW as ``terapipe train`` has it, on the CPU in one process, on the whole batch."""
    model = GPT(SIZES).to(dtype)
    optimizer = make_optimizer(model.named_parameters(), config("adamw"))
    for step in range(steps):
        for ids, labels in BATCHES[step * ACCUMULATE : (step + 1) * ACCUMULATE]:
            (model.loss(model(ids), labels) / 40).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        assert norm > CLIP, "or clipping shows nothing"
        update(optimizer, step)
    return {name: p.detach() for name, p in model.named_parameters()}


def trained(
    dtype: torch.dtype, stages: int, steps: range, load: str = "", save: str = "", name: str = "adamw-offload"
) -> dict[str, torch.Tensor]:
    plan = Plan((1, 1), ((7, 12, 5),) * 2, BOUNDARIES[stages])
    pipe = Pipeline(GPT(SIZES).to(dtype), plan)
    optimizer = make_optimizer(pipe.named_parameters(), config(name))
    if load:
        pipe.load(Path(load), optimizer)
    for step in steps:
        for ids, labels in BATCHES[step * ACCUMULATE : (step + 1) * ACCUMULATE]:
            pipe.step(ids, labels, total=40)
        pipe.clip_grad_norm_(CLIP)
        update(optimizer, step)
    if name == "adamw-offload":
        _check_places(pipe, optimizer)
    if save:
        pipe.save(Path(save), optimizer)
    return {name: p.detach().cpu() for name, p in pipe.named_parameters()}


def _check_places(pipe: Pipeline, optimizer: Any) -> None:
    assert isinstance(optimizer, HostOptimizer)
    for p in pipe.parameters():
        assert p.is_cuda
        assert optimizer.state[p]["exp_avg"].device.type == ("cpu" if p.numel() >= 4096 else "cuda")


def compare(parts: list[dict[str, torch.Tensor]], wanted: dict[str, torch.Tensor], bound: float) -> None:
    wanted = {**wanted, "head.weight": wanted["embedding.weight"]}  # the last stage has a copy of it
    assert {*wanted, "head.weight"} == {"head.weight"}.union(*parts)
    for part in parts:
        for name, p in part.items():
            assert float((p - wanted[name]).abs().max()) <= bound, name


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_weights_are_those_of_adamw(ranks: Callable[[int], Ranks], dtype: torch.dtype, stages: int) -> None:
    """With gradients that are accumulated, then clipped: torchao alone would take them before."""
    compare(ranks(stages)(trained, dtype, stages, range(STEPS)), plainly(dtype), BOUND[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_going_on_in_another_layout(
    ranks: Callable[[int], Ranks], tmp_path: Path, before: int, after: int, dtype: torch.dtype
) -> None:
    """torchao's copies of weights on the host are those of the beginning when a checkpoint is loaded."""
    folder = str(tmp_path / "saved")
    ranks(before)(trained, dtype, before, range(2), "", folder)
    found = ranks(after)(trained, dtype, after, range(2, STEPS), folder)
    compare(found, plainly(dtype), BOUND[dtype])


def test_going_on_with_a_checkpoint_of_adamw_and_back(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("device", "host")]
    ranks(2)(trained, torch.float64, 2, range(1), "", folders[0], "adamw")
    ranks(1)(trained, torch.float64, 1, range(1, 3), *folders)
    found = ranks(2)(trained, torch.float64, 2, range(3, STEPS), folders[1], "", "adamw")
    compare(found, plainly(torch.float64), BOUND[torch.float64])


def test_weights_that_somebody_changes() -> None:
    """They are not overwritten by the copies on the host."""
    found = []
    for kind, device in ((torch.optim.AdamW, "cpu"), (HostOptimizer, "cuda")):
        torch.manual_seed(0)
        layer = nn.Linear(64, 64).double().to(device)
        optimizer = kind(layer.parameters(), lr=1e-2)
        for _ in range(2):
            layer(torch.ones(1, 64, device=device, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                layer.weight.mul_(0.5)
        found.append(layer.weight.detach().cpu())
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_parameters_that_are_thawed_later_are_refused() -> None:
    layer = nn.Linear(64, 64).cuda()
    layer.weight.requires_grad_(False)
    optimizer = HostOptimizer(layer.parameters(), lr=1e-2)
    layer.weight.requires_grad_(True)
    layer(torch.ones(1, 64, device="cuda")).sum().backward()
    with pytest.raises(ValueError, match="a parameter was frozen when the optimizer was made"):
        optimizer.step()
    with pytest.raises(ValueError, match="takes no more parameters later"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1, device="cuda"))]})


def test_a_run_from_a_file(ranks: Callable[[int], Ranks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped on two stages, finished on one: the curve of a plain loop."""
    monkeypatch.setattr(test_run, "SHAPE", "layers=3,hidden=32,heads=2")
    (tmp_path / "text.txt").write_text(test_run.TEXT.read_text()[:6000])
    told = test_run.config(
        tmp_path / "run", "", "optimizer.name=adamw-offload", "optimizer.steps=8", "plan.num_slices=3",
        "evaluation.every=0",
    )  # fmt: skip
    ranks(2)(test_run.train, told, 5)
    ranks(1)(test_run.train, told)
    assert test_run.losses(told.folder) == pytest.approx(test_run.plainly(replace(told), 8), rel=1e-9)


# transformers' Trainer


def model() -> Any:
    """Wide enough that some states are the host's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    sizes = AutoConfig.for_model(
        "llama", hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(sizes).double()


OPTIONS = {"learning_rate": 2e-3, "max_steps": 4, "model": model}


def by_trainer(folder: str, resume: str | None = None, **changes: Any) -> runs.Run:
    from torchao.optim import CPUOffloadOptimizer

    optimizer = {"optimizer_cls_and_kwargs": (CPUOffloadOptimizer, {"lr": 2e-3})}
    return runs.causal(
        folder, {"slices": 5}, resume, **OPTIONS, trainer=optimizer, use_cpu=False, dataloader_pin_memory=False,
        **changes,
    )  # fmt: skip


@pytest.mark.usefixtures("quiet_models")
def test_the_trainer(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """torchao's class as a user names it. A run of one process goes on in two stages."""
    wanted = runs.causal(str(tmp_path / "plain"), None, **OPTIONS)
    one = by_trainer(str(tmp_path / "one"), None, save_strategy="steps", save_steps=2)
    check(on_cpu(one), wanted)
    for found in ranks(2)(by_trainer, str(tmp_path / "two"), str(tmp_path / "one/checkpoint-2")):
        check(runs.Run([], on_cpu(found).weights), runs.Run([], wanted.weights))


@pytest.mark.usefixtures("quiet_models")
def test_a_create_optimizer_of_ones_own(tmp_path: Path) -> None:
    """It comes before that of the mixin, which then puts nothing in the place of torchao's class: gradients were taken
    before they were clipped."""
    from torchao.optim import CPUOffloadOptimizer

    from terapipe.trainers import PipelineTrainer

    class Mine(PipelineTrainer):
        def create_optimizer(self, model: Any = None) -> Any:
            parameters = self.make_pipeline().pipe.parameters()
            self.optimizer = CPUOffloadOptimizer(parameters, lr=2e-3, weight_decay=0.0)
            return self.optimizer

    clipped = OPTIONS | {"max_grad_norm": 0.5, "weight_decay": 0.0}
    wanted = runs.causal(str(tmp_path / "plain"), None, **clipped)
    found = runs.causal(
        str(tmp_path / "own"), {"slices": 5}, **clipped, kind=Mine, use_cpu=False, dataloader_pin_memory=False
    )
    check(on_cpu(found), wanted)


def test_states_of_an_optimizer_without_float32_copies() -> None:
    """The optimizer of the host loads them itself: copies begin as the weights are."""
    before, states = nn.Linear(64, 64).bfloat16(), []
    plain = torch.optim.AdamW(before.parameters(), lr=1e-2)
    gradients = {name: torch.randn_like(p) for name, p in before.named_parameters()}
    step_with(plain, before, gradients)
    for kind, device in ((MasterAdamW, "cpu"), (HostOptimizer, "cuda")):
        layer = nn.Linear(64, 64).bfloat16()
        layer.load_state_dict(before.state_dict())
        layer = layer.to(device)
        mine: Any = (MasterAdamW,) if kind is HostOptimizer else ()
        optimizer = kind([{"params": layer.weight}, {"params": [layer.bias]}], *mine, lr=1e-2)
        optimizer.load_state_dict(plain_state(plain))
        step_with(optimizer, layer, gradients)
        states.append([layer.weight.detach().cpu(), optimizer.state[layer.weight]["master"].cpu()])
    for one, other in zip(*states, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def step_with(optimizer: torch.optim.Optimizer, layer: nn.Module, gradients: dict[str, torch.Tensor]) -> None:
    for name, p in layer.named_parameters():
        p.grad = gradients[name].to(p.device)
    optimizer.step()


def plain_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Of one group of two parameters, as of two groups of one."""
    state = copy.deepcopy(optimizer.state_dict())  # loading would share it
    (group,) = state["param_groups"]
    return {"state": state["state"], "param_groups": [{**group, "params": [i]} for i in group["params"]]}


def on_cpu(run: runs.Run) -> runs.Run:
    return runs.Run(run.logs, {name: weight.cpu() for name, weight in run.weights.items()})
