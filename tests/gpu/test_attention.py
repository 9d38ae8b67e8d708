"""Attention on a GPU: one call for a slice, no copies of keys, no masks, kernels by what the device can do."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from terapipe import SliceCache, attend
from terapipe.modeling import flash_kernels, kernel_choice
from terapipe.modeling.flash_kernels import Flash
from terapipe.modeling.kernel_choice import fault_of, kernel_for
from terapipe.modeling.kernels import Cudnn, Efficient, Kernel, KernelRequest, Plain
from terapipe.runtime import MemoryCounter
from tests.pretend import flash_packages
from tests.pretend.cuda import capability
from tests.pretend.operators import calls
from tests.pretend.operators import copies as inner_copies

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _forget_trust() -> Iterator[None]:
    kernel_choice.forget()
    yield
    kernel_choice.forget()


def sliced(
    head: int = 16, heads: int = 4, kv_heads: int = 2, window: int | None = None, slices: int = 3, rows: int = 1
) -> None:
    """Forwards and backwards of some slices of 8 tokens in bfloat16."""
    cache = SliceCache(8 * slices)
    outs = []
    for i in range(slices):
        cache.begin(8 * i, 8)
        shapes = ((rows, heads, 8, head), (rows, kv_heads, 8, head), (rows, kv_heads, 8, head))
        q, k, v = (torch.randn(s, device=GPU, dtype=torch.bfloat16, requires_grad=True) for s in shapes)
        outs.append(attend(q, k, v, cache, 0, window=window))
    for i in reversed(range(slices)):
        cache.begin(8 * i, 8)
        out = outs.pop()
        assert not out.isnan().any()
        out.backward(torch.randn_like(out))


@pytest.mark.parametrize("window", [None, 5])
def test_a_slice_is_one_call(window: int | None) -> None:
    """It was two, and six more operations to merge their results."""
    sliced(window=window)  # with the self-test
    before = dict(calls)
    sliced(window=window, slices=5)
    assert calls["_flash_attention_forward"] - before["_flash_attention_forward"] == 5
    assert calls["_flash_attention_backward"] - before["_flash_attention_backward"] == 5


def test_grouped_heads_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of the whole context were repeated for every slice and layer."""
    heads: list[tuple[int, int]] = []

    def noted(operator: Callable[..., Any], at: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            heads.append((args[at].shape[-2], args[at + 1].shape[-2]))
            return operator(*args, **kwargs)

        return call

    aten = flash_kernels.aten
    doubles = SimpleNamespace(
        _flash_attention_forward=noted(aten._flash_attention_forward, 0),
        _flash_attention_backward=noted(aten._flash_attention_backward, 1),
    )
    sliced(heads=8, kv_heads=2)  # with the self-test
    monkeypatch.setattr(flash_kernels, "aten", doubles)
    sliced(heads=8, kv_heads=2)
    assert heads == [(8, 2)] * 6


class Copies(TorchDispatchMode):
    """Counts copies of tensors of some number of elements, also those that FlashAttention makes."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.number, self._numel = 0, numel

    def __enter__(self) -> "Copies":
        self._before = inner_copies["flash"]
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.number += inner_copies["flash"] - self._before

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copies = ("aten::clone", "aten::copy_", "aten::_to_copy")
        self.number += operator._schema.name in copies and args[0].numel() == self._numel
        return operator(*args, **kwargs or {})


@pytest.mark.parametrize(("fused", "most"), [(False, 0), (True, 1)])
@pytest.mark.parametrize(("device", "dtype"), [("cuda", torch.bfloat16), ("cpu", torch.float32)])
def test_queries_and_outputs_are_not_copied(device: str, dtype: torch.dtype, fused: bool, most: int) -> None:
    """Models lay them out as (batch, tokens, heads, size). They were copied five times for each layer and slice:
    queries, outputs, outputs and their gradients again in the backward, and gradients of queries. Queries that are a
    part of a fused projection are copied once, so that the rest of it is not kept."""
    rows, tokens, heads, kv_heads, size, slices = 2, 16, 4, 2, 8, 3
    weights = [
        torch.randn(outputs * size, heads * size, device=device, dtype=dtype, requires_grad=True)
        for outputs in (heads, kv_heads, kv_heads, heads)
    ]
    cache = SliceCache(tokens * slices)

    def layer(i: int) -> Tensor:
        cache.begin(i * tokens, tokens)
        x = torch.randn(rows, tokens, heads * size, device=device, dtype=dtype)
        if fused:
            parts = F.linear(x, torch.cat(weights[:3])).split([w.shape[0] for w in weights[:3]], -1)
        else:
            parts = tuple(F.linear(x, w) for w in weights[:3])
        q, k, v = (part.view(rows, tokens, -1, size).transpose(1, 2) for part in parts)
        out = attend(q if fused else q * 2, k, v, cache, 0)  # as positions change queries
        return F.linear(out.transpose(1, 2).reshape(rows, tokens, -1), weights[3])

    for _ in range(2):  # the first time with self-tests
        outs = [layer(i) for i in range(slices - 1)]
        with Copies(rows * tokens * heads * size) as copies:
            outs.append(layer(slices - 1))
        for i in reversed(range(slices)):
            cache.begin(i * tokens, tokens)
            grad = torch.randn_like(outs[i])
            with Copies(rows * tokens * heads * size) if i == 1 else nullcontext() as backward:
                cache.backward(outs[i], grad)
            copies.number += backward.number if backward else 0
    assert copies.number <= most


@pytest.mark.parametrize("kernel", [Cudnn(), Flash(), Efficient(), Plain()], ids=lambda kernel: kernel.name)
def test_outputs_lie_as_queries_do(kernel: Kernel) -> None:
    cache = SliceCache(24)
    for context in (0, 8, 16):
        cache.begin(context, 8)
        q = torch.randn(2, 8, 4, 16, device=GPU, dtype=torch.bfloat16).transpose(1, 2)
        assert attend(q, q, q, cache, 0, kernel=kernel).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("by_tokens", [False, True])
def test_slices_by_cudnn_are_exact(by_tokens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two calls, whose results are merged. Gradients of outputs come in any layout, and cuDNN reads all as the
    first."""
    monkeypatch.setattr(Cudnn, "LEAST_WORK", 0)
    cuts, shapes = (0, 11, 12, 29, 40), ((2, 4), (2, 2), (2, 2))
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(rows, heads, 40, 16, generator=generator).bfloat16() for rows, heads in (*shapes, (2, 4))]
    exact = [x.double().requires_grad_() for x in tensors[:3]]
    wanted = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    truth = [wanted.detach(), *torch.autograd.grad(wanted, exact, tensors[3].double())]
    for layout in range(3):
        leaves = [x.to(GPU).requires_grad_() for x in tensors[:3]]
        cache, outs = SliceCache(40), []
        before = calls.copy()
        for start, end in pairwise(cuts):
            cache.begin(start, end - start)
            parts = (x[:, :, start:end] for x in leaves)
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) if by_tokens else x.contiguous() for x in parts)
            outs.append(attend(q, k, v, cache, 0))
        for (start, end), out in reversed(list(zip(pairwise(cuts), outs, strict=True))):
            cache.begin(start, end - start)
            grad = tensors[3][:, :, start:end].to(GPU)
            if layout == 1:
                grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
            elif layout == 2:
                grad = torch.stack([grad, grad], -1)[..., 0]
            cache.backward(out, grad)
        number = calls - before
        assert number["_scaled_dot_product_cudnn_attention"] == (5 if layout else 10)  # with the self-test
        assert number["_scaled_dot_product_cudnn_attention_backward"] == (5 if layout else 10)
        results = [torch.cat([out.detach() for out in outs], 2), *(x.grad for x in leaves)]
        for x, y in zip(results, truth, strict=True):
            assert x is not None
            assert (x.cpu().double() - y).abs().max() <= 2e-2 * y.abs().max()


def test_a_version_that_is_activated_later_is_tested_and_used() -> None:
    sliced(window=5)
    with flash_packages.activate("FA3"):
        for expected in (4 + 3, 3):  # the first time with the self-test
            before = flash_packages.calls.copy()
            sliced(window=5)
            assert flash_packages.calls - before == {"FA3 forward": expected, "FA3 backward": expected}
    before = flash_packages.calls.copy()
    sliced(window=5)
    assert flash_packages.calls == before


@pytest.mark.parametrize("head", [8, 20, 96, 256])
def test_heads_of_any_size_up_to_256(head: int) -> None:
    """Sizes that are no multiple of 8 raised in the first slice."""
    before = calls["_flash_attention_forward"]
    sliced(head=head)
    assert calls["_flash_attention_forward"] > before


def test_larger_heads_have_another_kernel() -> None:
    before = calls["_scaled_dot_product_efficient_attention"]
    sliced(head=264)
    assert calls["_scaled_dot_product_efficient_attention"] > before


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_old_gpus_use_memory_efficient_attention(dtype: torch.dtype) -> None:
    """In half precision that kernel takes for granted how its output lies in memory: gradients were silently wrong."""
    with capability(7, 5):
        need = KernelRequest(GPU, dtype, 64)
        assert fault_of(Efficient(), need) is None
        assert isinstance(kernel_for(need), Efficient)


def peak(device: torch.device, dtype: torch.dtype, window: int | None) -> int:
    """Of a slice of 1024 tokens behind 8192, forward and backward, without keys, values and their gradients."""
    cache, context, length = SliceCache(9216), 8192, 1024
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, 1, 9216, 16, generator=generator).to(device, dtype) for _ in range(4))
    cache.begin(0, context)
    attend(*(x[:, :, :context] for x in (q, k, v)), cache, 0, window=1)
    last = [x[:, :, context:].clone().requires_grad_() for x in (q, k, v)]
    cache.begin(context, length)
    cache.store(0).zero_grad()
    counter = MemoryCounter(device)
    with counter:
        attend(*last, cache, 0, window=window).backward(grad[:, :, context:])
    return counter.peak


@pytest.mark.gpu_seldom("^(cuda-dtype2|cpu)")
@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16), ("cuda", torch.float32)]
)
def test_windows_need_no_more_memory(device: str, dtype: torch.dtype) -> None:
    """A mask, and scores of rows x keys in float32, took gigabytes for each slice of a sliding-window model."""
    assert peak(torch.device(device), dtype, 512) < 1.2 * peak(torch.device(device), dtype, None)


def test_what_no_fast_kernel_can_do_is_told_with_its_bytes() -> None:
    cache = SliceCache(8)
    cache.begin(0, 8)
    q = torch.randn(1, 2, 8, 16, device=GPU, dtype=torch.bfloat16)
    with pytest.warns(RuntimeWarning, match=r"up to 10 MiB for each head .*flash: no softcap; flash-attn: the package"):
        attend(q, q, q, cache, 0, softcap=2.0)
