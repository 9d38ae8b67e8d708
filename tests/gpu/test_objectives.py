"""Objectives on a GPU: the CPU's gradients, and the host never waits for the device within a step."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from terapipe import GPT, Pipeline, Plan, losses, next_token_labels
from terapipe.hf import Decoder
from tests.gpu.test_models import CONFIG, EXPERTS, SMALL, error
from tests.pretend.waits import counting_waits

IDS = torch.stack([(torch.arange(64) * k) % 97 for k in (1, 3, 5, 7)])
LABELS = next_token_labels(IDS)
ROWS, TOKENS = IDS.shape
PLAN = Plan((2, 2), ((24, 24, 16), (10, 1, 37, 16)), (0, 2, 4), "terapipe", 2)


def some(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


OBJECTIVES: dict[str, tuple[Any, Any]] = {
    "z-loss": (losses.cross_entropy(z_loss=1e-2, label_smoothing=0.1), LABELS),
    "distillation": (losses.distillation(), {"labels": LABELS, "teacher_logits": some(ROWS, TOKENS, 97)}),
    "dpo": (losses.dpo(), {"labels": LABELS, "reference": -100 + some(ROWS)}),
    "kto": (losses.kto(), {"labels": LABELS, "reference": -280 + some(ROWS), "desirable": torch.arange(ROWS) > 1}),
    "grpo": (losses.grpo(), {"labels": LABELS, "advantages": some(ROWS), "old": -4 + some(ROWS, TOKENS)}),
}


def piped(name: str, device: str | None, recompute: bool = False) -> Pipeline:
    plan = Plan(PLAN.sizes, PLAN.lengths, PLAN.boundaries, PLAN.order, 2, recompute)
    return Pipeline(GPT(CONFIG), plan, loss_fn=OBJECTIVES[name][0], device=device)


def gradients(pipe: Pipeline, targets: Any) -> dict[str, Tensor]:
    pipe.zero_grad()
    pipe.step(IDS, targets)
    return {name: p.grad.float().cpu() for name, p in pipe.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_are_the_cpus_and_nothing_waits(name: str) -> None:
    targets = OBJECTIVES[name][1]
    on_gpu = piped(name, None, recompute=name == "grpo")
    assert error(gradients(on_gpu, targets), gradients(piped(name, "cpu"), targets)) < 2e-5
    with counting_waits() as found:
        on_gpu.step(IDS, targets)
    assert found == []
    assert on_gpu.metrics().keys() == OBJECTIVES_METRICS[name]


OBJECTIVES_METRICS = {
    "z-loss": {"z_loss"},
    "distillation": {"distillation"},
    "dpo": {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"},
    "kto": {"kl"},
    "grpo": {"clip_ratio"},
}


def test_log_probs_are_the_cpus() -> None:
    on_gpu, on_cpu = (
        Pipeline(GPT(CONFIG), PLAN, device=device).log_probs(IDS, LABELS).cpu() for device in (None, "cpu")
    )
    assert torch.allclose(on_gpu, on_cpu, atol=1e-4)


def test_losses_of_routers_are_the_cpus() -> None:
    config = AutoConfig.for_model("mixtral", **{**SMALL, **EXPERTS}, output_router_logits=True)
    config.router_aux_loss_coef = 0.5
    made = [
        Pipeline(Decoder.from_config(config, router_loss_over="batch", router_z_loss=0.1), PLAN, device=device)
        for device in (None, "cpu")
    ]
    assert error(gradients(made[0], LABELS), gradients(made[1], LABELS)) < 2e-5
    on_gpu, on_cpu = (pipe.metrics() for pipe in made)
    assert on_gpu == pytest.approx(on_cpu, rel=1e-4)
