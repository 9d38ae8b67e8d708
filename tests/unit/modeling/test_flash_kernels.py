"""Kernels that take a whole slice in one call: FlexAttention and the package flash-attn, tried on the CPU."""

import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from terapipe import SliceCache, attend
from terapipe.modeling import flash_kernels, kernel_choice
from terapipe.modeling.flash_kernels import FlashAttnPackage, Flex
from terapipe.modeling.kernel_choice import (
    CASES,
    Case,
    error_of,
    fault_of,
)
from terapipe.modeling.kernels import Kernel, KernelRequest

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _forget_trust() -> None:
    kernel_choice.forget()


@pytest.mark.exhaustive_ids("^(16-softcap|16-window|128-causal|128-softcap)")
@pytest.mark.parametrize("case", [c for c in CASES if not c.sinks], ids=lambda case: case.name)
@pytest.mark.parametrize("block", [16, 128])
def test_flex_attention_by_its_own_definition(case: Case, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not compiled, which needs a GPU. torch has the eager backward on CPUs, but forbids it."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(Flex, "BLOCK", block)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        assert error_of(Flex(backend=None), CPU, torch.float32, 16, case) < 1e-5


def train(kernel: Kernel, cuts: tuple[int, ...], softcap: float | None, window: int | None) -> None:
    """Forwards of slices and their backwards. Queries lie as models lay them out."""
    cache, outs = SliceCache(cuts[-1]), []
    for start, end in pairwise(cuts):
        cache.begin(start, end - start)
        drawn = (torch.randn(1, end - start, heads, 16, requires_grad=True) for heads in (4, 2, 2))
        q, k, v = (x.transpose(1, 2) for x in drawn)
        outs.append(attend(q, k, v, cache, 0, softcap=softcap, window=window, kernel=kernel))
    for start, end in reversed(list(pairwise(cuts))):
        cache.begin(start, end - start)
        out = outs.pop()
        cache.backward(out, torch.randn_like(out))


@pytest.mark.parametrize("softcap", [None, 50.0])
def test_flex_attention_is_compiled_in_few_graphs(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its self-test alone took more graphs than torch allows, and a softcap, which was a variable of the graph, broke
    it: no GPU would ever have used it. Dynamo does the same for any device; here nothing is compiled behind it."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    kernel = Flex(backend)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*unfused")
        assert fault_of(kernel, KernelRequest(CPU, torch.float32, 16, softcap=softcap is not None)) is None
        assert len(graphs) <= 6
        for cuts in ((0, 256, 512, 768), (0, 300, 436, 640)):
            train(kernel, cuts, softcap, None)
        train(kernel, (0, 256, 640), softcap, 200)
    assert len(graphs) <= 10


def test_flex_attention_skips_what_nobody_sees() -> None:
    cache = SliceCache(1024)
    cache.begin(512, 512)
    mask = flash_kernels._block_mask(cache.visibility(window=256), 1, slice(257, 1024), CPU, 128)
    # Rows 512 to 639 see keys 257 to 639: blocks 0 to 2 of 6. Only keys that all of them see make a whole block.
    assert mask.kv_num_blocks[0, 0].tolist() == [2, 2, 2, 2]
    assert mask.full_kv_num_blocks[0, 0].tolist() == [1, 1, 1, 1]


class FakePackage:
    """The private functions of flash-attn 2.7, by plain attention; notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.deterministic: bool | None = None

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
        self.deterministic = deterministic
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
                softcap, None, deterministic,
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


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=lambda case: case.name)
@pytest.mark.parametrize("mode", ["default", "warn", "error"])
def test_the_package_repeats_to_the_bit_if_asked(case: Case, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told not to, whatever torch was told."""
    package = FakePackage()
    monkeypatch.setattr(flash_kernels, "_package", lambda: package)
    torch.set_deterministic_debug_mode(mode)
    try:
        error_of(FlashAttnPackage(), CPU, torch.float32, 16, case)
    finally:
        torch.set_deterministic_debug_mode("default")
    assert package.deterministic is (mode == "error")


def test_the_package_is_optional_and_must_have_softcaps(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_kernels.package_fault.cache_clear()
    assert flash_kernels.package_fault() == "the package flash-attn is not installed"
    flash_kernels.package_fault.cache_clear()
    monkeypatch.setattr(flash_kernels, "_package", FakePackage)
    assert flash_kernels.package_fault() is None
    flash_kernels.package_fault.cache_clear()
    monkeypatch.setattr(FakePackage, "_flash_attn_forward", lambda self, q, k, v: None)
    assert "version 2.7 or newer" in str(flash_kernels.package_fault())
    flash_kernels.package_fault.cache_clear()
