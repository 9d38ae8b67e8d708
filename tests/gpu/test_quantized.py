"""Bases that torchao quantized, on a GPU: stages have weights of their own there, and gradients are those of the plain
model on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from terapipe import Pipeline, Plan
from terapipe.hf import Decoder
from terapipe.hf.quantized import torchao_layers
from tests.pretend.waits import counting_waits
from tests.support.hf_models import (
    FLOAT32_ROUNDING,
    batch,
    plain_gradients,
    quantized,
    save_base,
    step_gradients,
    worst_difference,
)

pytestmark = pytest.mark.usefixtures("quiet_models")


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [("torchao-int8", "none"), ("torchao-int8-group", "light"), ("torchao-float8", "block"), ("torchao-intx4", "full")],
)
def test_adapters_on_weights_of_torchao(kind: str, recompute: Any, tmp_path: Path) -> None:
    model = quantized(save_base(tmp_path), kind)
    wanted = {name.removeprefix("base_model.model."): g for name, g in plain_gradients(model).items()}
    plan = Plan((2,), ((9, 1, 12, 7),), (0, 1, 4), "terapipe", 2, recompute=recompute)
    pipe = Pipeline(Decoder(model, backend="attention"), plan, device="cuda")
    assert {layer.weight.qdata.device.type for layer in torchao_layers(pipe)} == {"cuda"}
    assert {layer.weight.qdata.device.type for layer in torchao_layers(model)} == {"cpu"}
    assert worst_difference({name: g.cpu() for name, g in step_gradients(pipe).items()}, wanted) < FLOAT32_ROUNDING
    ids, labels = batch()
    pipe.step(ids, labels)
    torch.cuda.synchronize()
    with counting_waits() as waits:
        pipe.step(ids, labels)
    assert not waits
