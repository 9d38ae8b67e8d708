"""Attention kernels for CUDA, over doubles of the operators that they call."""

import warnings
from collections.abc import Iterator

import pytest
import torch

from terapipe.modeling import kernel_choice
from terapipe.modeling.flash_kernels import Flash
from terapipe.modeling.kernel_choice import CASES, Case, error_of, fault_of, kernel_for, kernel_report, tolerance
from terapipe.modeling.kernels import Cudnn, Efficient, Kernel, KernelRequest, Plain
from tests.pretend import cuda, flash_packages, operators

CUDA = torch.device("cuda", 0)
SIZES = (8, 16, 20, 64, 128, 192, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """What one test found out about kernels, no other should know."""
    yield
    kernel_choice.forget()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", [Cudnn(), Flash(), Efficient()], ids=lambda kernel: kernel.name)
def test_kernels_pass_their_own_test(kernel: Kernel, dtype: torch.dtype, size: int) -> None:
    for sinks in (False, True):
        for need in (
            KernelRequest(CUDA, dtype, size, False, sinks),
            KernelRequest(CUDA, dtype, size, False, sinks, True, True),
        ):
            if kernel.refusal(need) is None:
                assert fault_of(kernel, need) is None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("kernel", [Cudnn(), Flash(), Efficient(), Plain()], ids=lambda kernel: kernel.name)
def test_every_case(kernel: Kernel, case: Case) -> None:
    need = case.need(CUDA, torch.bfloat16, 64)
    if kernel.refusal(need) is not None:
        pytest.skip(f"{kernel.name}: {kernel.refusal(need)}")
    assert error_of(kernel, CUDA, torch.bfloat16, 64, case) <= tolerance(CUDA, torch.bfloat16)


def chosen(dtype: torch.dtype, size: int, **more: bool) -> str:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "attention in .* uses plain matrix products")
        return kernel_for(KernelRequest(CUDA, dtype, size, **more)).name


@pytest.mark.parametrize(
    ("capability", "dtype", "size", "name"),
    [
        ((9, 0), torch.bfloat16, 64, "cudnn"),
        ((9, 0), torch.float16, 256, "cudnn"),
        ((9, 0), torch.float16, 20, "flash"),
        ((10, 0), torch.bfloat16, 128, "cudnn"),
        ((10, 0), torch.bfloat16, 256, "flash"),
        ((8, 0), torch.bfloat16, 64, "flash"),
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
    with pytest.warns(RuntimeWarning, match="flash: no softcap.*memory-efficient: no softcap.*flex: needs triton"):
        kernel_for(KernelRequest(CUDA, torch.float16, 64, softcap=True))


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
        from terapipe.modeling import kernels

        kept, kernels._as_rows = kernels._as_rows, torch.Tensor.contiguous
        try:
            return super().block_backward(grad, q, k, v, out, lse, causal, scores)
        finally:
            kernels._as_rows = kept


@pytest.mark.parametrize("kind", [ViewOfLogSumExps, WrongLayout])
def test_the_check_sees_what_no_operator_refuses(kind: type[Kernel]) -> None:
    assert "was off by" in str(fault_of(kind(), KernelRequest(CUDA, torch.bfloat16, 16)))


# What torch is told decides, also after the first step


def test_cudnn_is_refused_as_torch_refuses_it() -> None:
    """Its backward does not repeat to the bit, and torch has no deterministic one."""
    asked = (CUDA, torch.bfloat16, 64)
    assert kernel_report(*asked).used == (
        ("cudnn", "long slices without windows and documents"),
        ("flash", "all others"),
    )
    torch.use_deterministic_algorithms(True)
    try:
        report = kernel_report(*asked)
    finally:
        torch.use_deterministic_algorithms(False)
    assert report.used == (("flash", ""),)
    assert report.refused == (("cudnn", "torch does not take it: cuDNN SDPA is not deterministic."),)
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert "flash; cudnn is not used: torch does not take it: cuDNN attention has been" in str(
            kernel_report(*asked)
        )
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    assert kernel_report(*asked).used[0][0] == "cudnn"
    with cuda.capability(8, 6):
        kernel_choice.forget()
        assert dict(kernel_report(*asked).refused)["cudnn"] == "torch prefers another on this GPU"


@pytest.mark.parametrize("version", ["FA3", "FA4"])
def test_later_versions_of_flash(version: str) -> None:
    """By torch's own code, over doubles of the packages. What was found out about version 2 was taken for theirs."""
    need = KernelRequest(CUDA, torch.bfloat16, 128)
    before = kernel_for(need)
    assert before.title == "cudnn"
    with flash_packages.activate(version):
        calls = flash_packages.calls.copy()
        assert kernel_for(need).title == f"flash ({version})"
        tested = flash_packages.calls - calls
        assert tested == {f"{version} forward": 4, f"{version} backward": 4}
        for case in CASES:
            asked = case.need(CUDA, torch.bfloat16, 128)
            if Flash().refusal(asked) is None:
                assert fault_of(Flash(), asked) is None
    assert kernel_for(need) is before


def test_a_later_version_that_refuses_leaves_the_others() -> None:
    """Version 4 has no backward for heads of 192 on Blackwell, and says so by an assertion, which ended the step."""
    with cuda.capability(10, 0), flash_packages.activate("FA4"):
        with pytest.warns(RuntimeWarning, match=r"flash \(FA4\) is not used.*AssertionError.*=\(192, 192\) is not"):
            assert kernel_for(KernelRequest(CUDA, torch.bfloat16, 192)).name == "memory-efficient"
        assert kernel_for(KernelRequest(CUDA, torch.bfloat16, 64)).title == "flash (FA4)"


@pytest.mark.parametrize("version", ["FA3", "FA4"])
def test_later_versions_are_told_to_repeat(version: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with flash_packages.activate(version):
            calls = flash_packages.calls.copy()
            assert kernel_for(KernelRequest(CUDA, torch.bfloat16, 64)).title == f"flash ({version})"
            assert (flash_packages.calls - calls)[f"{version} deterministic"] == 4
            if version == "FA3":
                with pytest.warns(RuntimeWarning, match="Deterministic backward not supported for hdim 256"):
                    assert kernel_for(KernelRequest(CUDA, torch.bfloat16, 256)).name == "memory-efficient"
    finally:
        torch.use_deterministic_algorithms(False)
