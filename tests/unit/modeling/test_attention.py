import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from terapipe import SliceCache, attend
from terapipe.modeling.kernels import Kernel, Plain
from terapipe.modeling.key_values import KeyValueStore
from tests.support.plans import slicings

Parts = tuple[Tensor, Tensor, Tensor]


def inputs(tokens: int, heads: int = 4, kv_heads: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(2, heads, tokens, 8), (2, kv_heads, tokens, 8), (2, kv_heads, tokens, 8), (2, heads, tokens, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def whole(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, scale: float | None = None) -> list[Tensor]:
    """Output and gradients by explicit masks in float64."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    repeat = q.shape[1] // k.shape[1]
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    out = F.scaled_dot_product_attention(
        q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1), attn_mask=mask, scale=scale
    )
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.double())]


def sliced(
    lengths: tuple[int, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    *,
    kernel: Kernel | None = None,
    scale: float | None = None,
    cache: SliceCache | None = None,
    recompute: bool = False,
) -> list[Tensor]:
    """The same, slice by slice: each slice's backward is an ordinary one, last slice first."""
    cache = cache or SliceCache(sum(lengths))
    parts: list[tuple[Parts, Tensor]] = []
    start = 0
    for length in lengths:
        cut = slice(start, start + length)
        part = tuple(x[:, :, cut].detach().requires_grad_() for x in (q, k, v))
        cache.begin(start, length)
        call = (attend, *part, cache, 0)
        options = {"scale": scale, "kernel": kernel}
        out = checkpoint(*call, use_reentrant=False, **options) if recompute else attend(*part, cache, 0, **options)
        parts.append((part, out))
        start += length
    for (_, out), length in zip(reversed(parts), reversed(lengths), strict=True):
        start -= length
        cache.begin(start, length)
        out.backward(grad[:, :, start : start + length])
    outputs = torch.cat([out for _, out in parts], 2).detach()
    return [outputs, *(torch.cat([part[i].grad for part, _ in parts], 2) for i in range(3))]


def error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference, relative to the largest number of all: a single token's queries have no gradient."""
    scale = max(b.abs().max().item() for b in wanted)
    return max((a.double() - b).abs().max().item() for a, b in zip(found, wanted, strict=True)) / scale


@settings(max_examples=60)
@given(st.data(), st.integers(1, 40), st.sampled_from([1, 2, 4]))
def test_slices_are_exact(data: st.DataObject, tokens: int, kv_heads: int) -> None:
    lengths = data.draw(slicings(tokens, 8))
    given_ = inputs(tokens, kv_heads=kv_heads)
    for kernel in (None, Plain()):
        assert error(sliced(lengths, *given_, kernel=kernel), whole(*given_)) < 1e-12


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("kernel", [None, Plain()])
def test_other_precisions(dtype: torch.dtype, bound: float, kernel: Kernel | None) -> None:
    given_ = inputs(29, kv_heads=2, dtype=dtype)
    assert error(sliced((9, 1, 12, 7), *given_, kernel=kernel), whole(*given_)) < bound


def test_a_scale_of_ones_own() -> None:
    given_ = inputs(12)
    assert error(sliced((5, 7), *given_, scale=0.9), whole(*given_, scale=0.9)) < 1e-12


def test_a_cache_can_be_used_again() -> None:
    cache = SliceCache(29)
    for lengths in ((9, 1, 12, 7), (29,), (4, 25), (9, 1, 12, 7)):
        given_ = inputs(29)
        assert error(sliced(lengths, *given_, cache=cache), whole(*given_)) < 1e-12


def test_recomputation_writes_the_same_keys_again() -> None:
    given_ = inputs(20)
    assert error(sliced((6, 10, 4), *given_, recompute=True), whole(*given_)) < 1e-12


def test_dropping_what_later_slices_owe_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation that leaves the loss untouched: without it, this file could not fail."""
    nothing = torch.zeros(())
    monkeypatch.setattr(KeyValueStore, "grad", lambda self, start, end: (nothing, nothing))
    given_ = inputs(29)
    found, wanted = sliced((9, 1, 12, 7), *given_), whole(*given_)
    assert error(found[:1], wanted[:1]) < 1e-12
    assert error(found[2:], wanted[2:]) > 0.1


def test_nothing_is_kept_per_slice_but_queries_output_and_lse() -> None:
    """Saved memory must not grow with the number of slices."""

    def saved(lengths: tuple[int, ...]) -> int:
        total = 0

        def pack(x: Tensor) -> Tensor:
            nonlocal total
            total += x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            sliced(lengths, *inputs(32))
        return total

    assert saved((32,)) == saved((4,) * 8)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 4, 3, 8), (1, 4, 4, 8), (1, 4, 4, 8)), "must have the 4 tokens of the current slice, got 3, 4 and 4"),
        (((1, 4, 4, 8), (1, 3, 4, 8), (1, 3, 4, 8)), "the same number of heads, which divides"),
        (((1, 4, 4, 8), (1, 4, 4, 6), (1, 4, 4, 6)), "head size"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    cache = SliceCache(8)
    cache.begin(0, 4)
    with pytest.raises(ValueError, match=message):
        attend(*(torch.zeros(shape) for shape in shapes), cache, 0)


def test_a_slice_outside_its_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="cache of 8 tokens, got 6 to 10"):
        SliceCache(8).begin(6, 4)


def test_rows_attend_to_themselves_and_before_only() -> None:
    q, k, v, grad = inputs(10)
    first = sliced((4, 6), q, k, v, grad)[0]
    v[:, :, 7:] = 1e6
    assert torch.equal(sliced((4, 6), q, k, v, grad)[0][:, :, :7], first[:, :, :7])
