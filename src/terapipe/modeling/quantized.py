"""Quantized parameters: numbers of few bits, and beside them the scales that make weights of them.

bitsandbytes keeps the weight of a linear layer as a parameter of whole numbers, and hangs its scales on it. That of
torchao is a tensor class: it has shape and dtype of the weights that it stands for, and no memory of its own::

    bitsandbytes
      4 bits   (outputs * inputs / 2, 1) of uint8   .quant_state   a scale for each block of weights, a table of 16
                                                                   values; double quantization has the scales in 8
                                                                   bits, with scales, a table and an offset of their own
      8 bits   (outputs, inputs) of int8            .SCB           a scale for each output
    torchao
      weight   (outputs, inputs), no memory         .qdata         int8 or float8, (outputs, inputs)
                                                    .scale, ...    for each output, group of inputs, or for all

They are known by these attributes, so nothing of either is imported here. Whoever compares, saves or sends such a
parameter must do so with its scales: the same whole numbers with other scales are another weight.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor


def scales_of(parameter: Tensor | None) -> dict[str, Tensor]:
    """The tensors that a quantized parameter's weights are computed with, beside itself, by name; empty for any other
    parameter.

    Args:
        parameter: Of any kind, or none. One of torchao is computed with all that it is made of.
    """
    if parameter is not None and is_composed(parameter):
        names, _ = parameter.__tensor_flatten__()  # type: ignore[attr-defined]
        return {name: getattr(parameter, name) for name in names}
    state: Any = getattr(parameter, "quant_state", None)
    if state is not None:
        scales = {"absmax": state.absmax, "quant_map": state.code}
        if state.nested:
            nested = {"nested_absmax": state.state2.absmax, "nested_quant_map": state.state2.code}
            scales |= nested | {"offset": state.offset}
        return scales
    rows = getattr(parameter, "SCB", None)
    return {} if rows is None else {"SCB": rows}


def is_composed(parameter: Tensor) -> bool:
    """Whether a parameter is one of torchao: made of other tensors, without memory of its own.

    Args:
        parameter: Of any kind.
    """
    return getattr(parameter, "qdata", None) is not None


def parts_of(parameter: Tensor) -> tuple[Tensor, ...]:
    """The tensors that have a parameter's bits: itself and its scales, or what it is made of.

    Args:
        parameter: Of any kind; one that is not quantized has itself alone.
    """
    scales = tuple(scales_of(parameter).values())
    return scales if is_composed(parameter) else (parameter, *scales)


def bytes_of(parameter: Tensor) -> int:
    """The memory that a parameter takes, with its scales.

    Args:
        parameter: Of any kind.
    """
    return sum(part.nbytes for part in parts_of(parameter))


def empty_as(parameter: Any, device: torch.device) -> Tensor:
    """A tensor of a parameter's shape and dtype, without its numbers; one of torchao is made of such tensors.

    Args:
        parameter: Of any kind.
        device: Where to put it.
    """
    if not is_composed(parameter):
        return torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    parts = {name: empty_as(part, device) for name, part in scales_of(parameter).items()}
    _, attributes = parameter.__tensor_flatten__()
    empty: Tensor = type(parameter).__tensor_unflatten__(parts, attributes, parameter.shape, parameter.stride())
    return empty


def is_quantized(parameter: Tensor) -> bool:
    """Whether a parameter has scales beside its numbers.

    Args:
        parameter: Of any kind.
    """
    of_bitsandbytes = any(getattr(parameter, name, None) is not None for name in ("quant_state", "SCB"))
    return of_bitsandbytes or is_composed(parameter)


def count_weights(parameter: Tensor) -> int:
    """The number of weights that a parameter stands for: a byte of a 4-bit one has two.

    Args:
        parameter: Of any kind.
    """
    state: Any = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else prod(state.shape)


def multiply_back(grad: Tensor, weight: Any, dtype: torch.dtype) -> Tensor:
    """The gradient of x, where F.linear(x, weight) was computed with a weight of torchao.

    With the operations that autograd would reverse: in half precision others would round otherwise. ::

        a scale for each output, or one   F.linear = (x qdata^T) * scale    here (grad * scale) qdata
        a scale for each group            F.linear = x weights^T            here grad weights

    Args:
        grad: Of the output, (..., outputs).
        weight: (outputs, inputs).
        dtype: That the product was computed in.
    """
    if type(weight).__name__ == "Int8Tensor" and weight.block_size[-1] == weight.shape[-1]:
        numbers: Tensor = weight.qdata.to(dtype)
        scaled: Tensor = grad.to(dtype) * weight.scale.to(dtype).flatten()
        return scaled @ numbers
    matrix: Tensor = weight.dequantize().to(dtype)
    return grad.to(dtype) @ matrix
