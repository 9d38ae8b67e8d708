"""Attention on a GPU: one call for a slice, no copies of keys, no masks, kernels by what the device can do."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from terapipe import SliceCache, attend
from terapipe.modeling import flash_kernels, kernels
from terapipe.modeling.block_kernels import Efficient
from terapipe.modeling.kernel_check import fault_of
from terapipe.modeling.kernels import Need, kernel_for
from terapipe.runtime import MemoryCounter
from tests.pretend.cuda import capability
from tests.pretend.operators import calls

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _forget_trust() -> Iterator[None]:
    for cached in (kernels._is_trusted, kernels.kernel_for):
        cached.cache_clear()
    yield
    for cached in (kernels._is_trusted, kernels.kernel_for):
        cached.cache_clear()


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
        need = Need(GPU, dtype, 64)
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
