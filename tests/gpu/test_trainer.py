"""A Hugging Face model through a pipeline on a pretend GPU, called by itself and by transformers' Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from terapipe.hf import pipelined
from tests.hf import runs

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
