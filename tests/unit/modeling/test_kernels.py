"""Kernels that compute a slice block by block: they are right, and lay out what they return as models want it."""

import pytest
import torch

from terapipe import SliceCache, attend
from terapipe.modeling import kernel_choice
from terapipe.modeling.attention import _sink_gradient
from terapipe.modeling.kernel_choice import (
    CASES,
    Case,
    error_of,
    fault_of,
)
from terapipe.modeling.kernels import CpuFlash, Kernel, KernelRequest, Plain

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _forget_trust() -> None:
    kernel_choice.forget()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [CpuFlash(), Plain()])
def test_kernels_of_the_cpu_are_right(kernel: Kernel, dtype: torch.dtype) -> None:
    assert fault_of(kernel, KernelRequest(CPU, dtype, 16)) is None
    assert fault_of(kernel, KernelRequest(CPU, dtype, 20)) is None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_plain_attention_in_small_blocks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are limited, so that it needs no more memory for longer slices."""
    monkeypatch.setattr(Plain, "largest", (4, 3))
    assert error_of(Plain(), CPU, torch.float64, 8, case) < 1e-12


@pytest.mark.parametrize("kernel", [CpuFlash(), Plain()], ids=lambda kernel: kernel.name)
def test_outputs_lie_as_queries_do(kernel: Kernel) -> None:
    """A model whose queries lie by tokens makes a copy of outputs that do not, and both were kept for the backward."""
    cache = SliceCache(24)
    for context in (0, 8, 16):
        cache.begin(context, 8)
        q = torch.randn(2, 8, 4, 16).transpose(1, 2)
        assert attend(q, q, q, cache, 0, kernel=kernel).transpose(1, 2).is_contiguous()
        assert attend(q.contiguous(), q, q, cache, 1, kernel=kernel).is_contiguous()


def test_gradients_of_sinks_are_summed_in_float32() -> None:
    """Products and sums over heads were rounded to half precision."""
    grad, out = (torch.randn(1, 4, 64, 128, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(2))
    lse, sinks = torch.zeros(1, 4, 64), torch.zeros(4)
    gradient = _sink_gradient(grad, out, lse, sinks)
    wanted = -(grad.double() * out.double()).sum((0, 2, 3))
    assert gradient is not None
    assert (gradient.double() - wanted).abs().max() < 1e-6 * wanted.abs().max()
