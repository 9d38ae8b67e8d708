"""A Hugging Face model through a pipeline on pretend GPUs, called by itself and by transformers' Trainer."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from terapipe.trainers import pipelined
from tests.support.ranks import Ranks
from tests.unit.trainers import runs

pytestmark = pytest.mark.usefixtures("quiet_models")


def test_a_loss_of_the_models_outputs() -> None:
    ids = torch.randint(3, 128, (2, 29), generator=torch.Generator().manual_seed(1))
    wanted = runs.model()
    wanted(input_ids=ids, labels=ids).loss.backward()
    model = runs.model()
    pipelined(model, 5, device="cuda")
    loss = model(input_ids=ids.cuda(), labels=ids.cuda()).loss
    loss.backward()
    assert loss.is_cuda
    largest = max(float(p.grad.abs().max()) for p in wanted.parameters() if p.grad is not None)
    for (name, p), truth in zip(model.named_parameters(), wanted.parameters(), strict=True):
        assert p.grad is not None
        assert truth.grad is not None
        assert float((p.grad.cpu() - truth.grad).abs().max()) / largest < 1e-6, name


def test_the_trainer(tmp_path: Path) -> None:
    """The curve of the plain trainer on the CPU."""
    wanted: Any = runs.causal(str(tmp_path / "plain"), None, max_steps=3)
    found: Any = runs.causal(
        str(tmp_path / "own"), {"slices": 5}, max_steps=3, use_cpu=False, dataloader_pin_memory=False
    )
    assert found.column("loss") == pytest.approx(wanted.column("loss"), rel=1e-5)
    assert found.column("eval_loss") == pytest.approx(wanted.column("eval_loss"), rel=1e-5)


BF16 = {"model": partial(runs.model, torch.float32), "max_steps": 3, "bf16": True}


@pytest.mark.gpu_seldom("^4-own2")
@pytest.mark.parametrize(
    ("size", "own"), [(2, {"slices": 5}), (4, {"slices": 3, "order": "terapipe-1f1b"}), (4, {"slices": 5, "dp": 2})]
)
def test_the_trainer_with_bf16_on_several_gpus(
    tmp_path: Path, ranks: Callable[[int], Ranks], size: int, own: dict[str, Any]
) -> None:
    """``bf16=True`` is autocast. It died in the first step, in the warm-up of every rank that receives something."""
    replicas = own.get("dp", 1)
    wanted: Any = runs.causal(str(tmp_path / "plain"), None, **BF16, per_device_train_batch_size=2 * replicas)
    run = partial(runs.causal, use_cpu=False, dataloader_pin_memory=False, **BF16)
    for found in ranks(size)(run, str(tmp_path / "own"), own):
        assert found.column("loss") == pytest.approx(wanted.column("loss"), rel=1e-2)
        assert found.column("grad_norm") == pytest.approx(wanted.column("grad_norm"), rel=5e-2)
        if replicas == 1:  # else its mean is taken over other batches
            assert found.column("eval_loss") == pytest.approx(wanted.column("eval_loss"), rel=1e-2)
        assert all(weight.dtype == torch.float32 for weight in found.weights.values())
