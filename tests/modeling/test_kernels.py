"""Attention kernels: chosen by one table, trusted after a test, replaced by the next one when torch changes them."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from terapipe import SliceCache
from terapipe.modeling import flash_kernels, kernels
from terapipe.modeling.block_kernels import CpuFlash, Efficient, Plain
from terapipe.modeling.flash_kernels import Flash, FlashAttnPackage, Flex
from terapipe.modeling.kernel_check import CASES, Case, error_of, fault_of, tolerance
from terapipe.modeling.kernels import Kernel, Need, Scores, changed_signature, kernel_for

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _forget_trust() -> None:
    kernels._is_trusted.cache_clear()
    kernels.kernel_for.cache_clear()


def need(device: str = "cpu", dtype: torch.dtype = torch.float32, size: int = 16, **more: bool) -> Need:
    return Need(torch.device(device), dtype, size, **more)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (need(), CpuFlash),
        (need(dtype=torch.float64), CpuFlash),
        (need(dtype=torch.bfloat16), CpuFlash),
        (need(dtype=torch.float16), Plain),
        (need(softcap=True), Plain),
        (need("meta"), Plain),
        (need("cuda", torch.bfloat16), Flash),
        (need("cuda", torch.float16, 256, sinks=True), Flash),
        (need("cuda", torch.bfloat16, 264), Flex),
        (need("cuda", torch.bfloat16, softcap=True), Flex),
        (need("cuda", torch.bfloat16, 264, sinks=True), Efficient),
        (need("cuda", torch.float32), Flex),
        (need("cuda", torch.float32, sinks=True), Efficient),
    ],
)
def test_the_table(asked: Need, expected: type[Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_is_trusted", lambda *_: True)  # there may be no such device here
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash_kernels, "_has_triton", lambda: True)
    assert type(kernel_for(asked)) is expected


def test_old_gpus_have_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention needs compute capability 8.0: half precision fell to matrix products, which are quadratic."""
    monkeypatch.setattr(kernels, "_is_trusted", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(flash_kernels, "_has_triton", lambda: False)
    assert type(kernel_for(need("cuda", torch.float16))) is Efficient
    with pytest.warns(RuntimeWarning, match=r"up to 10 MiB for each head.*flash: needs compute capability 8.0"):
        assert type(kernel_for(need("cuda", torch.bfloat16))) is Plain


@pytest.mark.parametrize("kernel", [CpuFlash(), Flash(), Efficient()])
def test_this_torch_has_the_signatures_we_count_on(kernel: Kernel) -> None:
    assert changed_signature(kernel) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [CpuFlash(), Plain()])
def test_kernels_of_the_cpu_are_right(kernel: Kernel, dtype: torch.dtype) -> None:
    assert fault_of(kernel, need(dtype=dtype)) is None
    assert fault_of(kernel, need(dtype=dtype, size=20)) is None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_plain_attention_in_small_blocks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are limited, so that it needs no more memory for longer slices."""
    monkeypatch.setattr(Plain, "largest", (4, 3))
    assert error_of(Plain(), CPU, torch.float64, 8, case) < 1e-12


@pytest.mark.parametrize("case", [c for c in CASES if not c.sinks], ids=lambda case: case.name)
@pytest.mark.parametrize("block", [16, 128])
def test_flex_attention_by_its_own_definition(case: Case, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not compiled, which needs a GPU. torch has the eager backward on CPUs, but forbids it."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(Flex, "BLOCK", block)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        assert error_of(Flex(compiled=False), CPU, torch.float32, 16, case) < 1e-5


def test_flex_attention_skips_what_nobody_sees() -> None:
    cache = SliceCache(1024)
    cache.begin(512, 512)
    mask = flash_kernels._block_mask(cache.visibility(window=256), 1, slice(257, 1024), CPU, 128)
    # Rows 512 to 639 see keys 257 to 639: blocks 0 to 2 of 6. Only keys that all of them see make a whole block.
    assert mask.kv_num_blocks[0, 0].tolist() == [2, 2, 2, 2]
    assert mask.full_kv_num_blocks[0, 0].tolist() == [1, 1, 1, 1]


def test_a_changed_signature_falls_back_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = (("_scaled_dot_product_flash_attention_for_cpu", "query key value something_else"),)
    monkeypatch.setattr(CpuFlash, "operators", operators)
    with pytest.warns(RuntimeWarning, match=r"flash for CPUs is not used.*expected \(query key value something_else\)"):
        assert type(kernel_for(need())) is Plain


def test_a_missing_operator_falls_back_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "aten", SimpleNamespace())
    with pytest.warns(RuntimeWarning, match="has no aten::_scaled"):
        assert type(kernel_for(need())) is Plain


def test_the_self_test_does_not_depend_on_the_devices_precision() -> None:
    """Its truth was computed on the device: with TF32 that was coarser than what it judged."""
    assert error_of(CpuFlash(), CPU, torch.float32, 64, CASES[0]) < 5e-6
    assert tolerance(torch.device("cuda"), torch.float32) > 1e-3


# Kernels that are wrong in some way


class Unmerged(CpuFlash):
    """Backwards that go by the block's own output and log-sum-exp, whatever they are given."""

    def block_backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        return super().block_backward(grad, q, k, v, *self.block(q, k, v, *rest[2:]), *rest[2:])


class Base2(CpuFlash):
    def block(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scores: Scores) -> tuple[Tensor, Tensor]:
        out, lse = super().block(q, k, v, causal, scores)
        return out, lse / 0.6931


class Shifted(CpuFlash):
    """Reads keys as if they lay one after the other in memory."""

    def block(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scores: Scores) -> tuple[Tensor, Tensor]:
        dense = torch.as_strided(k, k.shape, torch.empty(k.shape, device="meta").stride(), k.storage_offset())
        return super().block(q, dense, v, causal, scores)


class WholeDocuments(CpuFlash):
    """Forgets that documents begin inside a slice."""

    def forward(self, q: Tensor, store: Any, seen: Any, scores: Scores) -> tuple[Tensor, Tensor]:
        cache = SliceCache(99)
        cache.begin(seen.context, seen.length)
        return super().forward(q, store, cache.visibility(seen.window), scores)


class NoSinks(CpuFlash):
    """Goes by its own log-sum-exp where sinks have changed it."""

    def backward(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, store: Any, seen: Any, scores: Scores) -> Any:
        return super().backward(grad, q, *self.forward(q, store, seen, scores), store, seen, scores)


class NotANumber(CpuFlash):
    """Right outputs and gradients of keys, no number in those of queries."""

    def backward(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, store: Any, seen: Any, scores: Scores) -> Any:
        for part in super().backward(grad, q, out, lse, store, seen, scores):
            yield part._replace(dq=part.dq * torch.nan)


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        (NotANumber, "causal"),
        (Unmerged, "causal"),
        (Base2, "causal"),
        (Shifted, "causal"),
        (WholeDocuments, "chunks"),
        (NoSinks, "sinks"),
    ],
)
def test_a_kernel_must_show_all_that_slices_need(kind: type[Kernel], case: str) -> None:
    """The self-test tried one square of its own: a kernel wrong in any of these ways was trusted."""
    assert f"({case}) was off by" in str(fault_of(kind(), need()))
    with pytest.warns(RuntimeWarning, match="was off by"):
        assert not kernels._is_trusted(kind(), need())


# The package flash-attn, which is not here


class FakePackage:
    """The private functions of flash-attn 2.6, by plain attention; notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def _flash_attn_forward(
        self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
        window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
        return_softmax: bool,
    ) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
        self.asked.append({"window": window_size_left, "softcap": softcap, "causal": causal})
        out, lse = dense(q, k, v, softmax_scale, window_size_left, softcap)
        return out.detach(), lse.detach(), None, None

    def _flash_attn_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
        dv: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
        window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
        rng_state: Tensor | None = None,
    ) -> None:  # fmt: skip
        given = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            again, _ = dense(given[0], given[1], given[2], softmax_scale, window_size_left, softcap)
        for room, found in zip((dq, dk, dv), torch.autograd.grad(again, given, dout), strict=True):
            room.copy_(found)

    def _flash_attn_varlen_forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
        window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
        return_softmax: bool = False,
    ) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
        parts = [
            self._flash_attn_forward(q[None, a:b], k[None, c:d], v[None, c:d], dropout_p, softmax_scale, causal,
                                     window_size_left, window_size_right, softcap, None, False)
            for a, b, c, d in segments(cu_seqlens_q, cu_seqlens_k)
        ]  # fmt: skip
        return torch.cat([p[0][0] for p in parts]), torch.cat([p[1][0] for p in parts], -1), None, None

    def _flash_attn_varlen_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
        dv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
        dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
        softcap: float, alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
    ) -> None:  # fmt: skip
        for a, b, c, d in segments(cu_seqlens_q, cu_seqlens_k):
            self._flash_attn_backward(
                dout[None, a:b], q[None, a:b], k[None, c:d], v[None, c:d], out, softmax_lse, dq[None, a:b],
                dk[None, c:d], dv[None, c:d], dropout_p, softmax_scale, causal, window_size_left, window_size_right,
                softcap, None, False,
            )  # fmt: skip


def segments(queries: Tensor, keys: Tensor) -> list[tuple[int, int, int, int]]:
    assert queries.dtype == keys.dtype == torch.int32
    a, b = queries.tolist(), keys.tolist()
    return list(zip(a, a[1:], b, b[1:], strict=False))


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, softcap: float) -> tuple[Tensor, Tensor]:
    """(batch, tokens, heads, size); causal at the lower right."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    scores = scores if not softcap else softcap * torch.tanh(scores / softcap)
    rows = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    keys = torch.arange(k.shape[2])[None]
    seen = (keys <= rows) & ((keys >= rows - left) | (left < 0))
    scores = scores.masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


@pytest.mark.parametrize("case", [c for c in CASES if not c.sinks], ids=lambda case: case.name)
def test_the_package_flash_attn_by_its_interface(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    package = FakePackage()
    monkeypatch.setattr(flash_kernels, "_package", lambda: package)
    assert error_of(FlashAttnPackage(), CPU, torch.float32, 16, case) < 1e-5
    asked = {(a["window"], a["softcap"], a["causal"]) for a in package.asked}
    assert asked == {(-1 if case.window is None else case.window - 1, case.softcap or 0.0, True)}


def test_the_package_is_optional_and_must_have_softcaps(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_kernels._package_fault.cache_clear()
    assert flash_kernels._package_fault() == "the package flash-attn is not installed"
    flash_kernels._package_fault.cache_clear()
    monkeypatch.setattr(flash_kernels, "_package", FakePackage)
    assert flash_kernels._package_fault() is None
    flash_kernels._package_fault.cache_clear()
    monkeypatch.setattr(FakePackage, "_flash_attn_forward", lambda self, q, k, v: None)
    assert "version 2.6 or newer" in str(flash_kernels._package_fault())
    flash_kernels._package_fault.cache_clear()


def test_the_self_test_does_not_depend_on_where_it_is_called() -> None:
    """It is called by the first attention of a process, which may be recomputed, offloaded or autocast."""

    def refuse(x: Tensor) -> Tensor:
        raise AssertionError("a hook of the caller was called")

    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
        assert fault_of(CpuFlash(), need()) is None
