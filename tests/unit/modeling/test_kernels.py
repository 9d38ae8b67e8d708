"""Attention kernels: chosen by one table, trusted after a test, replaced by the next one when torch changes them."""

import warnings
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from terapipe import SliceCache, attend
from terapipe.modeling import flash_kernels, kernel_choice, kernels
from terapipe.modeling.attention import _sink_gradient
from terapipe.modeling.flash_kernels import Flash, FlashAttnPackage, Flex
from terapipe.modeling.kernel_choice import (
    CASES,
    Case,
    changed_signature,
    error_of,
    fault_of,
    kernel_for,
    kernel_of,
    kernel_report,
    tolerance,
)
from terapipe.modeling.kernels import CpuFlash, Cudnn, Efficient, Kernel, KernelRequest, Plain, Scores, Settings

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _forget_trust() -> None:
    kernel_choice.forget()


def need(device: str = "cpu", dtype: torch.dtype = torch.float32, size: int = 16, **more: bool) -> KernelRequest:
    return KernelRequest(torch.device(device), dtype, size, **more)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (need(), CpuFlash),
        (need(dtype=torch.float64), CpuFlash),
        (need(dtype=torch.bfloat16), CpuFlash),
        (need(dtype=torch.float16), Plain),
        (need(softcap=True), Plain),
        (need("meta"), Plain),
        (need("cuda", torch.bfloat16), Cudnn),
        (need("cuda", torch.bfloat16, window=True), Flash),
        (need("cuda", torch.bfloat16, segments=True), Flash),
        (need("cuda", torch.bfloat16, 24), Flash),
        (need("cuda", torch.float16, 256, sinks=True), Cudnn),
        (need("cuda", torch.bfloat16, 264), Efficient),
        (need("cuda", torch.bfloat16, softcap=True), Flex),
        (need("cuda", torch.bfloat16, 264, sinks=True), Efficient),
        (need("cuda", torch.float32), Efficient),
        (need("cuda", torch.float32, softcap=True), Flex),
        (need("cuda", torch.float32, sinks=True), Efficient),
    ],
)
def test_the_table(asked: KernelRequest, expected: type[Kernel], gpu: None) -> None:
    """Flex, which is compiled for minutes, came before memory-efficient attention in float32."""
    assert type(kernel_for(asked)) is expected


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper, where all kernels are right."""
    monkeypatch.setattr(kernel_choice, "_fault_once", cache(lambda *_: None))
    monkeypatch.setattr(kernels, "cudnn_refusal", cache(lambda asked, _: None if asked[2] <= 256 else "no"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash_kernels, "_has_triton", lambda: True)


def test_cudnn_takes_long_slices_and_flash_the_others(gpu: None) -> None:
    """Two calls and a merge pay for long contexts; cuDNN takes no single key, and makes a plan for every shape."""

    def chosen(context: int, length: int, heads: int = 32) -> type[Kernel]:
        cache = SliceCache(context + length)
        cache.begin(context, length)
        q = torch.empty(1, heads, length, 128, dtype=torch.bfloat16, device="meta")
        return type(kernel_of(q, cache.visibility(), need("cuda", torch.bfloat16, 128)))

    assert chosen(8192, 1024) is Cudnn
    assert chosen(0, 4096, heads=64) is Cudnn
    assert chosen(1024, 1024) is Flash
    assert chosen(10**8, 1) is Flash
    assert chosen(1, 10**5) is Flash
    many = {context: chosen(context, 1024) for context in range(16384, 16384 + 200 * 64, 64)}
    assert list(many.values()).count(Cudnn) == Cudnn.MOST_SHAPES - 2
    assert chosen(8192, 1024) is Cudnn


def test_later_versions_of_flash_come_before_cudnn(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was chosen before they were activated was kept for ever."""
    asked = need("cuda:0", torch.bfloat16)
    assert type(kernel_for(asked)) is Cudnn
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    assert type(kernel_for(asked)) is Flash
    assert kernel_report(*asked[:3]).used == (("flash (FA3)", ""),)
    monkeypatch.undo()


def test_what_is_used_and_why_not_others(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    report = kernel_report(GPU, torch.bfloat16, 128)
    assert report.used == (("cudnn", "long slices without windows and documents"), ("flash", "all others"))
    assert report.refused == ()
    report = kernel_report(GPU, torch.bfloat16, 128, softcap=True)
    assert report.used == (("flex", ""),)
    assert dict(report.refused)["flash-attn"] == "the package flash-attn is not installed"
    assert str(report).startswith("flex; cudnn is not used: no softcaps, windows")
    monkeypatch.setattr(
        kernel_choice, "_fault_once", cache(lambda kernel, *_: "it is wrong" if isinstance(kernel, Flash) else None)
    )
    kernel_choice.forget()
    report = kernel_report(GPU, torch.float16, 64, window=True)
    assert report.used == (("memory-efficient", ""),)
    assert ("flash", "it is wrong") in report.refused


def test_old_gpus_have_kernels_of_their_own(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention needs compute capability 8.0: half precision fell to matrix products, which are quadratic."""
    monkeypatch.setattr(kernels, "cudnn_refusal", cache(lambda *_: "too old"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(flash_kernels, "_has_triton", lambda: False)
    assert type(kernel_for(need("cuda", torch.float16))) is Efficient
    with pytest.warns(RuntimeWarning, match=r"up to 10 MiB for each head.*flash: needs compute capability 8.0"):
        assert type(kernel_for(need("cuda", torch.bfloat16))) is Plain


@pytest.mark.parametrize("kernel", [CpuFlash(), Flash(), Efficient(), Cudnn()])
def test_this_torch_has_the_signatures_we_count_on(kernel: Kernel) -> None:
    assert changed_signature(kernel) is None


# As torch 2.9 has it, as 2.13, and as a later one may.
FLASH = "Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k"
FLASH_FORWARD = (
    f"{FLASH}, float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, "
    "SymInt? window_size_left=None, SymInt? window_size_right=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None"
)
FLASH_BACKWARD = (
    f"Tensor grad_out, {FLASH.replace('value,', 'value, Tensor out, Tensor logsumexp,')}, float dropout_p, "
    "bool is_causal, Tensor rng_state, Tensor unused, *, float? scale=None, SymInt? window_size_left=None, "
    "SymInt? window_size_right=None"
)


@pytest.mark.parametrize(
    ("version", "more", "is_right"),
    [
        ("2.9", "", True),
        ("2.13", ", Tensor? block_table=None, int? num_splits=None", True),
        ("later", ", Tensor? block_table=None, int? num_splits=None, bool quick=False", True),
        ("wrong", ", bool quick", False),
    ],
)
def test_other_versions_of_torch(version: str, more: str, is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to torch 2.11 FlashAttention has two arguments less: it was refused, and attention was half as fast."""
    name = f"terapipe_{version.replace('.', '_')}"
    library = torch.library.Library(name, "DEF")
    library.define(f"_flash_attention_forward({FLASH_FORWARD}{more}) -> (Tensor, Tensor)")
    library.define(f"_flash_attention_backward({FLASH_BACKWARD}) -> (Tensor, Tensor, Tensor)")
    called: list[dict[str, Any]] = []

    def forward(q: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        called.append(kwargs)
        return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)

    library.impl("_flash_attention_forward", forward, "CPU")
    operators = getattr(torch.ops, name)
    monkeypatch.setattr(kernel_choice, "aten", operators)
    monkeypatch.setattr(flash_kernels, "aten", operators)
    fault = changed_signature(Flash())
    assert (fault is None) == is_right
    if is_right:
        q = torch.empty(1, 4, 2, 8, dtype=torch.bfloat16)
        Flash()._run(q, q, q, None, 3, Scores(0.5))
        assert called == [{"scale": 0.5, "window_size_left": 2, "window_size_right": 0}]
    else:
        assert "window_size_right seqused_k alibi_slopes quick), expected (" in str(fault)


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
        assert fault_of(kernel, need(softcap=softcap is not None)) is None
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


def test_a_changed_signature_falls_back_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = (("_scaled_dot_product_flash_attention_for_cpu", "query key value something_else"),)
    monkeypatch.setattr(CpuFlash, "operators", operators)
    with pytest.warns(RuntimeWarning, match=r"flash for CPUs is not used.*expected \(query key value something_else\)"):
        assert type(kernel_for(need())) is Plain


@pytest.mark.parametrize("failure", [AssertionError, KeyError("tile"), type("DSLRuntimeError", (Exception,), {})("no")])
def test_whatever_a_self_test_raises_refuses_that_kernel(failure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 4 refuses by assertions, which ended the first step."""

    def refuse(*_: Any) -> Any:
        raise failure

    monkeypatch.setattr(CpuFlash, "block", refuse)
    with pytest.warns(RuntimeWarning, match=r"flash for CPUs is not used.*failed with (Assertion|Key|DSLRuntime)Error"):
        assert type(kernel_for(need())) is Plain


def test_only_what_is_needed_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that had a fault in documents was refused to all."""
    assert fault_of(WholeDocuments(), need()) is None
    assert fault_of(WholeDocuments(), need(window=True)) is None
    assert "was off by" in str(fault_of(WholeDocuments(), need(segments=True)))


def test_a_missing_operator_falls_back_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "aten", SimpleNamespace())
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
    asked = next(each for each in CASES if each.name == case).need(CPU, torch.float32, 16)
    assert f"({case}) was off by" in str(fault_of(kind(), asked))
    with pytest.warns(RuntimeWarning, match="was off by"):
        assert kernel_choice._fault_once(kind(), asked, Settings())


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


# The package flash-attn, which is not here


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
    flash_kernels._package_fault.cache_clear()
    assert flash_kernels._package_fault() == "the package flash-attn is not installed"
    flash_kernels._package_fault.cache_clear()
    monkeypatch.setattr(flash_kernels, "_package", FakePackage)
    assert flash_kernels._package_fault() is None
    flash_kernels._package_fault.cache_clear()
    monkeypatch.setattr(FakePackage, "_flash_attn_forward", lambda self, q, k, v: None)
    assert "version 2.7 or newer" in str(flash_kernels._package_fault())
    flash_kernels._package_fault.cache_clear()


def test_the_self_test_does_not_depend_on_where_it_is_called() -> None:
    """It is called by the first attention of a process, which may be recomputed, offloaded or autocast."""

    def refuse(x: Tensor) -> Tensor:
        raise AssertionError("a hook of the caller was called")

    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
        assert fault_of(CpuFlash(), need()) is None
