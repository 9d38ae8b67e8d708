"""Attention kernels: chosen by one table, trusted after a test, replaced by the next one when torch changes them."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from terapipe import SliceCache
from terapipe.modeling import flash_kernels, kernel_choice, kernels
from terapipe.modeling.flash_kernels import Flash, Flex
from terapipe.modeling.kernel_choice import (
    CASES,
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


def test_the_self_test_does_not_depend_on_where_it_is_called() -> None:
    """It is called by the first attention of a process, which may be recomputed, offloaded or autocast."""

    def refuse(x: Tensor) -> Tensor:
        raise AssertionError("a hook of the caller was called")

    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
        assert fault_of(CpuFlash(), need()) is None
