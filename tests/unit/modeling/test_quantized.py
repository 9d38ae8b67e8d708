"""Parameters of whole numbers with scales beside them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from terapipe.modeling.quantized import bytes_of, count_weights, empty_as, is_quantized, parts_of, scales_of


def parameter(**attributes: Any) -> nn.Parameter:
    p = nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    for name, value in attributes.items():
        setattr(p, name, value)
    return p


def test_a_plain_parameter_has_no_scales() -> None:
    assert scales_of(parameter()) == scales_of(None) == {}
    assert not is_quantized(parameter())
    assert count_weights(parameter()) == 8


def test_scales_of_4_bits_and_of_8() -> None:
    inner = SimpleNamespace(absmax=torch.ones(1), code=torch.ones(256))
    state = SimpleNamespace(
        absmax=torch.ones(2), code=torch.ones(16), nested=True, state2=inner, offset=torch.ones(()), shape=(4, 4)
    )
    double = parameter(quant_state=state)
    assert set(scales_of(double)) == {"absmax", "quant_map", "nested_absmax", "nested_quant_map", "offset"}
    assert count_weights(double) == 16
    state.nested = False
    assert set(scales_of(double)) == {"absmax", "quant_map"}
    assert set(scales_of(parameter(SCB=torch.ones(8)))) == {"SCB"}
    assert is_quantized(double)
    assert is_quantized(parameter(SCB=torch.ones(8)))


def test_a_weight_of_torchao_is_what_it_is_made_of() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    layer = nn.Linear(64, 32, bias=False)
    torchao.quantize_(layer, torchao.Float8WeightOnlyConfig())
    weight = layer.weight
    assert is_quantized(weight)
    assert set(scales_of(weight)) == {"qdata", "scale"}
    assert [part.shape for part in parts_of(weight)] == [(32, 64), (32, 1)]
    assert bytes_of(weight) == 32 * 64 + 32 * 4
    assert count_weights(weight) == 32 * 64
    empty = empty_as(weight, torch.device("meta"))
    assert (type(empty), bytes_of(empty), empty.is_meta) == (type(weight), bytes_of(weight), True)
    assert bytes_of(parameter()) == 8
