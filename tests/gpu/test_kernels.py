"""Attention kernels for CUDA, over doubles of the operators that they call."""

import warnings
from collections.abc import Iterator

import pytest
import torch

from terapipe.modeling import kernels
from terapipe.modeling.block_kernels import Efficient, Plain
from terapipe.modeling.flash_kernels import Flash
from terapipe.modeling.kernel_check import CASES, Case, error_of, fault_of, tolerance
from terapipe.modeling.kernels import Kernel, Need, kernel_for
from tests.pretend import cuda, operators

CUDA = torch.device("cuda", 0)
SIZES = (8, 16, 20, 64, 128, 192, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """What one test found out about kernels, no other should know."""
    yield
    kernels.kernel_for.cache_clear()
    kernels._is_trusted.cache_clear()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", [Flash(), Efficient()], ids=lambda kernel: kernel.name)
def test_kernels_pass_their_own_test(kernel: Kernel, dtype: torch.dtype, size: int) -> None:
    need = Need(CUDA, dtype, size)
    if kernel.refusal(need) is not None:
        pytest.skip(f"{kernel.name}: {kernel.refusal(need)}")
    assert fault_of(kernel, need) is None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("kernel", [Flash(), Efficient(), Plain()], ids=lambda kernel: kernel.name)
def test_every_case(kernel: Kernel, case: Case) -> None:
    need = Need(CUDA, torch.bfloat16, 64, case.softcap is not None, case.sinks)
    if kernel.refusal(need) is not None:
        pytest.skip(f"{kernel.name}: {kernel.refusal(need)}")
    assert error_of(kernel, CUDA, torch.bfloat16, 64, case) <= tolerance(CUDA, torch.bfloat16)


def chosen(dtype: torch.dtype, size: int, **more: bool) -> str:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "attention in .* uses plain matrix products")
        return kernel_for(Need(CUDA, dtype, size, **more)).name


@pytest.mark.parametrize(
    ("capability", "dtype", "size", "name"),
    [
        ((9, 0), torch.bfloat16, 64, "flash"),
        ((9, 0), torch.float16, 20, "flash"),
        ((9, 0), torch.float32, 64, "memory-efficient"),
        ((9, 0), torch.bfloat16, 264, "memory-efficient"),
        ((9, 0), torch.float64, 64, "plain"),
        ((7, 0), torch.float16, 64, "memory-efficient"),
        ((7, 5), torch.bfloat16, 64, "plain"),
    ],
)
def test_the_best_kernel_that_can(capability: tuple[int, int], dtype: torch.dtype, size: int, name: str) -> None:
    with cuda.capability(*capability):
        assert chosen(dtype, size) == name


def test_softcaps_have_no_fast_kernel_without_triton() -> None:
    assert chosen(torch.bfloat16, 64, softcap=True) == "plain"
    with pytest.warns(RuntimeWarning, match="flash: no softcap.*flex: needs triton.*memory-efficient: no softcap"):
        kernel_for(Need(CUDA, torch.float16, 64, softcap=True))


def test_one_call_for_a_slice() -> None:
    """Not one for what is before it and one for itself."""
    before = operators.calls.copy()
    error_of(Flash(), CUDA, torch.bfloat16, 64, CASES[0])
    made = operators.calls - before
    assert made == {"_flash_attention_forward": 4, "_flash_attention_backward": 4}


class ViewOfLogSumExps(Flash):
    """Gives the operator log-sum-exps that are not contiguous, which it does not notice."""

    def _run_backward(self, grad, q, k, v, out, lse, ragged, window, scores):  # type: ignore[no-untyped-def]
        view = lse.new_empty(*lse.shape[:-1], 2 * lse.shape[-1])[..., ::2].copy_(lse)
        return super()._run_backward(grad, q, k, v, out, view, ragged, window, scores)


class WrongLayout(Efficient):
    """Outputs as (batch, heads, tokens, size), which the operator does not check."""

    def block_backward(self, grad, q, k, v, out, lse, causal, scores):  # type: ignore[no-untyped-def]
        from terapipe.modeling import block_kernels

        kept, block_kernels._as_rows = block_kernels._as_rows, torch.Tensor.contiguous
        try:
            return super().block_backward(grad, q, k, v, out, lse, causal, scores)
        finally:
            block_kernels._as_rows = kept


@pytest.mark.parametrize("kind", [ViewOfLogSumExps, WrongLayout])
def test_the_check_sees_what_no_operator_refuses(kind: type[Kernel]) -> None:
    assert "was off by" in str(fault_of(kind(), Need(CUDA, torch.bfloat16, 16)))
