"""Quantized parameters: whole numbers, and beside them the scales that make weights of them.

bitsandbytes keeps the weight of a linear layer as a parameter of whole numbers, and hangs its scales on it::

    4 bits   (outputs * inputs / 2, 1) of uint8   .quant_state   a scale for each block of weights, a table of 16
                                                                 values; double quantization has the scales in 8
                                                                 bits, with scales, a table and an offset of their own
    8 bits   (outputs, inputs) of int8            .SCB           a scale for each output

They are known by these attributes, so nothing of bitsandbytes is imported here. Whoever compares, saves or sends such a
parameter must do so with its scales: the same whole numbers with other scales are another weight.
"""

from math import prod
from typing import Any

from torch import Tensor


def scales_of(parameter: Tensor | None) -> dict[str, Tensor]:
    """The tensors that a quantized parameter's weights are computed with, by name; empty for any other parameter.

    Args:
        parameter: Of any kind, or none.
    """
    state: Any = getattr(parameter, "quant_state", None)
    if state is not None:
        scales = {"absmax": state.absmax, "quant_map": state.code}
        if state.nested:
            nested = {"nested_absmax": state.state2.absmax, "nested_quant_map": state.state2.code}
            scales |= nested | {"offset": state.offset}
        return scales
    rows = getattr(parameter, "SCB", None)
    return {} if rows is None else {"SCB": rows}


def is_quantized(parameter: Tensor) -> bool:
    """Whether a parameter has scales beside its numbers.

    Args:
        parameter: Of any kind.
    """
    return getattr(parameter, "quant_state", None) is not None or getattr(parameter, "SCB", None) is not None


def count_weights(parameter: Tensor) -> int:
    """The number of weights that a parameter stands for: a byte of a 4-bit one has two.

    Args:
        parameter: Of any kind.
    """
    state: Any = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else prod(state.shape)
