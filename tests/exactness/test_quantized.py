"""Adapters on quantized bases: gradients equal those of the plain quantized model of peft.

bitsandbytes knows no float64, so the bound is that of float32: the same model without quantization, in the same slices,
is 2e-6 away from its plain gradients, relative to the largest. Scales of one layer that are 1 % larger show as 1e-4 and
more. Weights of torchao in 8 bits are multiplied in any dtype.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from terapipe import Layout, Pipeline, Plan
from terapipe.hf import Decoder
from terapipe.modeling.quantized import is_quantized
from tests.support.hf_models import (
    FLOAT32_ROUNDING,
    QUANTIZATIONS,
    TORCHAO,
    batch,
    plain_gradients,
    quantized,
    save_base,
    stages_here,
    step_gradients,
    two_stages,
    worst_difference,
)
from tests.support.models import gradients, mesh_of
from tests.support.ranks import Ranks

pytestmark = pytest.mark.usefixtures("quiet_models")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


def wanted_of(model: Any) -> dict[str, Tensor]:
    return {name.removeprefix("base_model.model."): g for name, g in plain_gradients(model).items()}


@pytest.mark.parametrize("kind", [*QUANTIZATIONS, "torchao-int8", "torchao-intx4"])
def test_gradients_are_those_of_the_plain_model(kind: str, base: Path) -> None:
    model = quantized(base, kind)
    decoder = Decoder(model)  # before the first call: an 8-bit layer then takes its scales off its parameter
    pipes = [Pipeline(decoder, stages_here(0, 4)), Pipeline(decoder, two_stages(decoder))]
    wanted = wanted_of(model)
    assert all("lora" in name for name in wanted)
    assert len(wanted) == 24
    for pipe in pipes:
        assert worst_difference(step_gradients(pipe), wanted) < FLOAT32_ROUNDING
    assert all(torch.equal(g, wanted[name]) for name, g in wanted_of(model).items()), "the model is as it was"


def in_float64(base: Path, kind: str) -> Any:
    """Weights of int8 know no cast and take the dtype of their input; those of float8 are made in it."""
    if kind == "torchao-float8":
        return quantized(base, kind, dtype=torch.float64)
    return quantized(base, kind).double()


@pytest.mark.parametrize("kind", [kind for kind in TORCHAO if kind != "torchao-intx4"])
@pytest.mark.parametrize("mode", ["none", "light", "block", "full"])
def test_in_float64_only_rounding_is_left(kind: str, mode: Any, base: Path) -> None:
    model = in_float64(base, kind)
    wanted = wanted_of(model)
    assert {g.dtype for g in wanted.values()} == {torch.float64}
    assert worst_difference(in_two_stages(model, mode), wanted) < 1e-13


def in_two_stages(model: Any, recompute: Any = "none") -> dict[str, Tensor]:
    plan = Plan((2,), ((9, 1, 12, 7),), (0, 1, 4), "terapipe", 2, recompute=recompute)
    return step_gradients(Pipeline(Decoder(model, backend="attention"), plan))


def test_a_scale_counts(base: Path) -> None:
    """What the bound is worth: scales of one layer, larger by a hundredth."""
    model = quantized(base)
    wanted = wanted_of(model)
    next(p for p in model.parameters() if is_quantized(p)).quant_state.absmax.mul_(1.01)
    assert worst_difference(in_two_stages(model), wanted) > 1e-4


@pytest.mark.parametrize("kind", ["nf4-double", "fp4"])
@pytest.mark.parametrize("mode", ["block", "full"])
def test_recomputation(kind: str, mode: Any, base: Path) -> None:
    model = quantized(base, kind)
    assert worst_difference(in_two_stages(model, mode), wanted_of(model)) < FLOAT32_ROUNDING


def test_trained_norms_and_head_beside_a_quantized_base(base: Path) -> None:
    """Without adapters: what bitsandbytes leaves as it is can be trained."""
    model = quantized(base, lora=False)
    assert worst_difference(in_two_stages(model), plain_gradients(model)) < FLOAT32_ROUNDING


ON_RANKS = ("nf4", "int8", "torchao-int8")


def on_ranks(base: str) -> list[dict[str, Tensor]]:
    """Gradients of this rank's stage, for each kind of quantization, of models that are read stage by stage and that
    are in memory."""
    results = []
    for kind in ON_RANKS:
        model = quantized(Path(base), kind)
        decoder = Decoder(model, backend="attention")
        pipe = Pipeline(decoder, Plan((1, 1), ((9, 1, 12, 7), (20, 9)), (0, 1, 4)), mesh=mesh_of(Layout(1, 2, 1)))
        pipe.step(*batch())
        results.append(gradients(pipe))
    return results


def test_on_two_ranks(base: Path, ranks: Callable[[int], Ranks]) -> None:
    found = ranks(2)(on_ranks, str(base))
    for i, kind in enumerate(ON_RANKS):
        together = {**found[0][i], **found[1][i]}
        assert len(together) == len(found[0][i]) + len(found[1][i])
        assert worst_difference(together, wanted_of(quantized(base, kind))) < FLOAT32_ROUNDING
