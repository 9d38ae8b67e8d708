"""The private kernels: chosen by one table, trusted after a test, replaced by the plain one when torch changes them."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from terapipe.modeling import kernels
from terapipe.modeling.kernels import (
    PLAIN,
    CpuFlashKernel,
    CudaEfficientKernel,
    CudaFlashKernel,
    How,
    Kernel,
    kernel_for,
)


@pytest.fixture(autouse=True)
def _forget_trust() -> None:
    kernels._trusted.cache_clear()


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cpu", torch.float32, CpuFlashKernel),
        ("cpu", torch.float64, CpuFlashKernel),
        ("cpu", torch.bfloat16, CpuFlashKernel),
        ("cuda", torch.bfloat16, CudaFlashKernel),
        ("cuda", torch.float16, CudaFlashKernel),
        ("cuda", torch.float32, CudaEfficientKernel),
        ("cuda", torch.float64, kernels.PlainKernel),
        ("meta", torch.float32, kernels.PlainKernel),
    ],
)
def test_the_table(device: str, dtype: torch.dtype, expected: type[Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_wrong_result", lambda *_: None)  # there may be no such device here
    assert type(kernel_for(torch.device(device), dtype)) is expected


@pytest.mark.parametrize("kernel", [CpuFlashKernel(), CudaFlashKernel(), CudaEfficientKernel()])
def test_this_torch_has_the_signatures_we_count_on(kernel: Kernel) -> None:
    assert kernels._wrong_signature(kernel) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_cpu_kernel_passes_its_self_test(dtype: torch.dtype) -> None:
    assert kernels._wrong_result(CpuFlashKernel(), torch.device("cpu"), dtype) is None


def test_a_changed_signature_falls_back_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    schemas = (("_scaled_dot_product_flash_attention_for_cpu", "query key value something_else"),)
    monkeypatch.setattr(CpuFlashKernel, "schemas", schemas)
    with pytest.warns(RuntimeWarning, match=r"changed a private attention kernel: aten::_scaled.*expected \(query key"):
        assert kernel_for(torch.device("cpu"), torch.float32) is PLAIN


def test_a_missing_kernel_falls_back_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "aten", SimpleNamespace())
    with pytest.warns(RuntimeWarning, match="is gone"):
        assert kernel_for(torch.device("cpu"), torch.float32) is PLAIN


def test_a_kernel_that_computes_something_else_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How) -> object:
        out, lse = PLAIN.forward(q, k, v, how)
        return out, lse / 0.6931  # as if it were base 2

    monkeypatch.setattr(CpuFlashKernel, "forward", wrong)
    with pytest.warns(RuntimeWarning, match="another result"):
        assert kernel_for(torch.device("cpu"), torch.float32) is PLAIN


@pytest.mark.parametrize(
    ("kernel", "dtype"), [(CudaFlashKernel(), torch.bfloat16), (CudaEfficientKernel(), torch.float32)]
)
def test_cuda_kernels_take_our_arguments(kernel: Kernel, dtype: torch.dtype) -> None:
    """There is no GPU here; fake tensors at least check the calls and the shapes they give."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        q = torch.empty(2, 4, 9, 16, device="cuda", dtype=dtype)
        k = torch.empty(2, 2, 9, 16, device="cuda", dtype=dtype)
        out, lse = kernel.forward(q, k, k, How(0.25, True))
        assert out.shape == q.shape
        assert lse.shape == (2, 4, 9)
        dq, dk, dv = kernel.backward(q, q, k, k, out, lse, How(0.25, True))
        assert dq.shape == q.shape
        assert dk.shape == dv.shape == k.shape
