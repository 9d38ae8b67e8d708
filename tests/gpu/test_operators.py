"""Doubles of the private attention operators: they compute attention, and refuse what the C++ refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.pretend import cuda, operators

aten: Any = torch.ops.aten
CUDA = torch.device("cuda")
BF16 = torch.bfloat16


def made(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(CUDA)


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int = -1) -> tuple[Tensor, Tensor]:
    """(batch, tokens, heads, size); causal, aligned at the lower right; in float64 on the CPU, with gradients."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    rows = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    keys = torch.arange(k.shape[2])
    seen = (keys <= rows) & ((keys >= rows - left) | (left < 0))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


def close(found: Tensor, wanted: Tensor, limit: float = 1e-2) -> bool:
    return (found.double().cpu() - wanted).abs().max().item() <= limit * wanted.abs().max().item()


Q, K, V, GRAD = made(2, 5, 4, 16), made(2, 9, 2, 16, seed=1), made(2, 9, 2, 16, seed=2), made(2, 5, 4, 16, seed=3)


def flash(q: Tensor = Q, k: Tensor = K, v: Tensor = V, left: int = -1) -> tuple[Tensor, Tensor]:
    lengths = (None, None, q.shape[1], k.shape[1])
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, *lengths, 0.0, True, False, scale=0.3, window_size_left=left, window_size_right=0
    )
    return out, lse


def flash_backward(
    out: Tensor, lse: Tensor, *, q: Tensor = Q, starts: Tensor | None = None, left: int = -1
) -> tuple[Tensor, ...]:
    state = torch.empty(2, dtype=torch.uint64, device=CUDA)
    lengths = (starts, starts, q.shape[1], K.shape[1])
    found: tuple[Tensor, ...] = aten._flash_attention_backward(
        GRAD, q, K, V, out, lse, *lengths, 0.0, True, state, state[0], scale=0.3, window_size_left=left,
        window_size_right=0,
    )  # fmt: skip
    return found


@pytest.mark.parametrize("left", [-1, 3])
def test_flash_is_causal_at_the_lower_right(left: int) -> None:
    given = [x.cpu().double().requires_grad_() for x in (Q, K, V)]
    wanted, sums = reference(*given, 0.3, left)
    out, lse = flash(left=left)
    assert close(out, wanted)
    assert close(lse, sums, 1e-5)
    for found, truth in zip(
        flash_backward(out, lse, left=left), torch.autograd.grad(wanted, given, GRAD.cpu().double()), strict=True
    ):
        assert close(found, truth, 2e-2)


def test_flash_over_ragged_segments() -> None:
    q, k, v, grad = (made(n, h, 16, seed=i) for i, (n, h) in enumerate(((7, 4), (12, 2), (12, 2), (7, 4))))
    queries, keys = ([0, 2, 7], [0, 5, 12])
    starts = [torch.tensor(x, dtype=torch.int32, device=CUDA) for x in (queries, keys)]
    out, lse, state, unused, _ = aten._flash_attention_forward(
        q, k, v, *starts, 5, 7, 0.0, True, False, scale=0.3, window_size_left=2, window_size_right=0
    )
    found = aten._flash_attention_backward(
        grad, q, k, v, out, lse, *starts, 5, 7, 0.0, True, state, unused, scale=0.3, window_size_left=2,
        window_size_right=0,
    )  # fmt: skip
    assert lse.shape == (4, 7)
    for a, b, c, d in ((0, 2, 0, 5), (2, 7, 5, 12)):
        given = [x[None].cpu().double().requires_grad_() for x in (q[a:b], k[c:d], v[c:d])]
        wanted, sums = reference(*given, 0.3, 2)
        assert close(out[None, a:b], wanted)
        assert close(lse[None, :, a:b], sums, 1e-5)
        truth = torch.autograd.grad(wanted, given, grad[None, a:b].cpu().double())
        for x, part, y in zip(found, (slice(a, b), slice(c, d), slice(c, d)), truth, strict=True):
            assert close(x[None, part], y, 2e-2)


def test_flash_reads_log_sum_exps_as_if_they_were_contiguous() -> None:
    out, lse = flash()
    wide = torch.empty(2, 4, 10, device=CUDA)
    wide[:, :, :5] = lse
    right, wrong = flash_backward(out, lse), flash_backward(out, wide[:, :, :5])
    assert not close(wrong[0], right[0].double().cpu())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: flash(made(1, 3, 4, 20), made(1, 3, 4, 20), made(1, 3, 4, 20)), "must be a multiple of 8"),
        (lambda: flash(made(1, 3, 1, 264), made(1, 3, 1, 264), made(1, 3, 1, 264)), "at most 256"),
        (lambda: flash(Q.float(), K.float(), V.float()), "only support fp16 and bf16"),
        (lambda: flash(Q, K.half(), V), "query and key must have the same dtype"),
        (lambda: flash(Q, made(2, 9, 3, 16), made(2, 9, 3, 16)), "must divide number of heads"),
        (lambda: flash(Q, K.transpose(1, 3).contiguous().transpose(1, 3), V), "contiguous last dimension"),
        (lambda: flash(Q[:1], K, V), "batch size must be positive"),
        (lambda: flash_backward(*flash(), starts=torch.empty(0, device=CUDA)), "cu_seqlens_q must have dtype int32"),
        (
            lambda: flash_backward(*flash(), starts=torch.empty(0, dtype=torch.int32, device=CUDA)),
            "batch size must be positive",
        ),
    ],
)
def test_what_flash_refuses(call: Callable[[], object], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        call()


def test_flash_needs_ampere() -> None:
    with cuda.capability(7, 5), pytest.raises(RuntimeError, match="only supports Ampere GPUs or newer"):
        flash()


# Memory-efficient attention


def efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """(batch, heads, tokens, size)"""
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=0.3)
    return out, lse


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool = False
) -> tuple[Tensor, ...]:
    none = torch.empty((), dtype=torch.int64, device=CUDA)
    found: tuple[Tensor, ...] = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, lse, none, none, 0.0, [True, True, True, False], causal, scale=0.3
    )
    return found[:3]


def inputs(dtype: torch.dtype, heads: int = 3, size: int = 16) -> list[Tensor]:
    return [made(2, heads, 7, size, dtype=dtype, seed=i) for i in range(4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_memory_efficient_attention(dtype: torch.dtype, causal: bool) -> None:
    q, k, v, grad = inputs(dtype)
    out, lse = efficient(q, k, v, causal)
    assert lse.shape == (2, 3, 32)  # in blocks of rows
    assert lse[..., 7:].isinf().all()
    given = [x.cpu().double().requires_grad_() for x in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*given, is_causal=causal, scale=0.3)
    assert close(out, wanted)
    truth = torch.autograd.grad(wanted, given, grad.cpu().double())
    for x, y in zip(efficient_backward(grad, q, k, v, out, lse, causal), truth, strict=True):
        assert close(x, y, 2e-2)


def test_half_precision_takes_the_layout_of_outputs_for_granted() -> None:
    """The C++ does not check it: numbers are wrong, and nobody says so. Single precision computes delta elsewhere."""
    for dtype, is_wrong in ((torch.float32, False), (BF16, True)):
        q, k, v, grad = inputs(dtype)
        out, lse = efficient(q, k, v)
        right = efficient_backward(grad, q, k, v, out, lse)
        wrong = efficient_backward(grad, q, k, v, out.contiguous(), lse)
        assert close(wrong[0], right[0].double().cpu()) != is_wrong
        assert close(wrong[2], right[2].double().cpu())  # for values, delta does not matter


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda q, k, v, g: efficient(q, k[:, :1], v[:, :1]), r"query.size\(2\) == key.size\(2\)"),
        (lambda q, k, v, g: efficient(q.double(), k.double(), v.double()), "has no torch.float64"),
        (lambda q, k, v, g: efficient(q[..., 1:14], k[..., 1:14], v[..., 1:14]), "query is not correctly aligned"),
        (lambda q, k, v, g: efficient(*(made(2, 3, 7, 10) for _ in range(3))), r"not correctly aligned \(stride"),
        (
            lambda q, k, v, g: efficient_backward(g, q, k, v, q, efficient(q, k, v)[1][..., :7].contiguous()),
            "LSE is not correctly aligned",
        ),
        (
            lambda q, k, v, g: efficient_backward(g, q, k, v, q, efficient(q, k, v)[1][..., :8].contiguous()),
            "LSE has 8 rows, and the kernel reads 32",
        ),
    ],
)
def test_what_memory_efficient_attention_refuses(call: Callable[..., object], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        call(*inputs(BF16))


def test_bfloat16_needs_ampere() -> None:
    with cuda.capability(7, 5):
        efficient(*inputs(torch.float16)[:3])
        with pytest.raises(RuntimeError, match="no kernel found"):
            efficient(*inputs(BF16)[:3])


def test_keys_may_be_repeated_by_a_stride() -> None:
    q, k, v, _ = inputs(BF16)
    one = k[:, :1].expand(-1, 3, -1, -1), v[:, :1].expand(-1, 3, -1, -1)
    found = efficient(q, *one)[0]
    assert torch.equal(found.cpu(), efficient(q, *(x.contiguous() for x in one))[0].cpu())


@pytest.mark.parametrize("ragged", [False, True])
def test_lower_right_masks_and_windows(ragged: bool) -> None:
    q, k, v, grad = (made(1, n, 3, 16, dtype=torch.float32, seed=n) for n in (5, 9, 9, 5))
    starts = [None, None]
    if ragged:
        starts = [torch.tensor(x, dtype=torch.int32, device=CUDA) for x in ([0, 5], [0, 9])]
    out, lse, seed, offset, *longest = aten._efficient_attention_forward(
        q, k, v, None, *starts, 5, 9, 0.0, 2, True, scale=0.3, window_size=4
    )
    found = aten._efficient_attention_backward(
        grad, q, k, v, None, out, *starts, *longest, lse, 0.0, seed, offset, 2, False, scale=0.3, window_size=4
    )
    given = [x.cpu().double().requires_grad_() for x in (q, k, v)]
    wanted, _ = reference(*given, 0.3, 3)
    assert close(out, wanted, 1e-5)
    for x, y in zip(found[:3], torch.autograd.grad(wanted, given, grad.cpu().double()), strict=True):
        assert close(x, y, 1e-5)


# cuDNN


def by_tokens(x: Tensor) -> Tensor:
    """The same numbers, lying as (batch, tokens, heads, size)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=0.3)
    return out, lse


def cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool = False
) -> tuple[Tensor, ...]:
    none = torch.empty((), dtype=torch.int64, device=CUDA)
    grads: tuple[Tensor, ...] = aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, none, none, None, None, None, q.shape[2], k.shape[2], 0.0, causal, scale=0.3
    )
    return grads


@pytest.mark.parametrize("layout", [by_tokens, Tensor.contiguous])
@pytest.mark.parametrize("causal", [False, True])
def test_cudnn_is_causal_at_the_upper_left(causal: bool, layout: Callable[[Tensor], Tensor]) -> None:
    """Also for five rows and nine keys: the last row does not see the last key."""
    q, k, v, grad = (layout(made(2, h, n, 16, seed=h + n)) for h, n in ((4, 5), (2, 9), (2, 9), (4, 5)))
    out, lse = cudnn(q, k, v, causal)
    assert out.stride() == q.stride()
    assert lse.shape == (2, 4, 5, 1)
    inputs_64 = [x.cpu().double().requires_grad_() for x in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*inputs_64, is_causal=causal, scale=0.3, enable_gqa=True)
    assert close(out, wanted)
    truth = torch.autograd.grad(wanted, inputs_64, grad.cpu().double())
    for x, y in zip(cudnn_backward(grad, q, k, v, out, lse, causal), truth, strict=True):
        assert close(x, y, 2e-2)


@pytest.mark.parametrize("which", ["out", "grad", "sums"])
def test_cudnn_reads_by_the_plan_of_the_first_call(which: str) -> None:
    """torch looks plans up by queries, keys and values: the same numbers in another layout are read wrongly."""
    q, k, v, grad = (by_tokens(made(2, 4, 7, 16, seed=i)) for i in range(4))
    out, lse = cudnn(q, k, v)
    right = cudnn_backward(grad, q, k, v, out, lse)
    assert torch.equal(cudnn_backward(grad, q, k, v, out, lse)[0].cpu(), right[0].cpu())
    tensors = {"out": out, "grad": grad, "sums": lse}
    tensors[which] = by_tokens(lse) if which == "sums" else tensors[which].contiguous()
    wrong = cudnn_backward(tensors["grad"], q, k, v, tensors["out"], tensors["sums"])
    assert not close(wrong[0], right[0].double().cpu())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda q, k, v: cudnn(q.float(), k.float(), v.float()), "to all be of dtype"),
        (lambda q, k, v: cudnn(*(made(1, 2, 7, 20) for _ in range(3))), "multiple of 8"),
        (lambda q, k, v: cudnn(*(made(1, 2, 7, 264) for _ in range(3))), "no more than 256"),
        (lambda q, k, v: cudnn(q, k[:, :, :1], v[:, :, :1]), "does not support key/value sequence length 1"),
        (lambda q, k, v: cudnn(q, made(2, 2, 7, 16), made(2, 2, 7, 16)), "must divide"),
        (lambda q, k, v: cudnn(q.transpose(2, 3).contiguous().transpose(2, 3), k, v), "last dimension must be 1"),
    ],
)
def test_what_cudnn_refuses(call: Callable[..., object], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        call(*inputs(BF16)[:3])


# Products with sums in float32


@pytest.mark.parametrize("size", [(3, 5, 7), (257, 129, 301)])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
def test_addmm_sums_in_float32(size: tuple[int, int, int], left: bool, right: bool) -> None:
    rows, inner, columns = size
    a = made(inner, rows).t() if left else made(rows, inner)
    b = made(columns, inner, seed=1).t() if right else made(inner, columns, seed=1)
    total = made(rows, columns, dtype=torch.float32, seed=2)
    wanted = total.cpu().double() + a.cpu().double() @ b.cpu().double()
    address = total.data_ptr()
    out = torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    assert out.data_ptr() == address
    assert close(total, wanted, 1e-6)
    new = torch.addmm(a[:1, :1], a, b, out_dtype=torch.float32, beta=0)
    assert close(new, a.cpu().double() @ b.cpu().double(), 1e-6)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda a, s: torch.addmm(s, a, a.half(), out_dtype=torch.float32), "mat1 and mat2 must have the same dtype"),
        (
            lambda a, s: torch.addmm(s, a, a, out_dtype=torch.float16),
            "out_dtype must be the same as input dtype or fp32",
        ),
        (lambda a, s: torch.addmm(s.double(), a, a, out_dtype=torch.float32), "self dtype must match either"),
        (lambda a, s: torch.addmm(s, a, a[:3], out_dtype=torch.float32), "cannot be multiplied"),
        (lambda a, s: torch.addmm(s, a, a, out_dtype=torch.float32, out=a.clone()), "the provided out tensor"),
    ],
)
def test_what_addmm_refuses(call: Callable[[Tensor, Tensor], object], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        call(made(4, 4), made(4, 4, dtype=torch.float32))


def test_older_versions_of_addmm_want_a_sum_of_the_matrices_dtype() -> None:
    with operators.old_addmm(), pytest.raises(RuntimeError, match="self and mat2 must have the same dtype"):
        torch.addmm(made(4, 4, dtype=torch.float32), made(4, 4), made(4, 4), out_dtype=torch.float32)


# torch's own attention takes them


@pytest.mark.parametrize(
    ("dtype", "capability", "operator"),
    [
        (BF16, (9, 0), "_scaled_dot_product_cudnn_attention"),
        (BF16, (8, 0), "_scaled_dot_product_flash_attention"),
        (torch.float32, (9, 0), "_scaled_dot_product_efficient_attention"),
        (torch.float64, (9, 0), None),
    ],
)
def test_scaled_dot_product_attention(dtype: torch.dtype, capability: tuple[int, int], operator: str | None) -> None:
    before = operators.calls.copy()
    given = [x.requires_grad_() for x in inputs(dtype)[:3]]
    with cuda.capability(*capability):
        out = F.scaled_dot_product_attention(*given, is_causal=True)
        out.sum().backward()
    host = [x.detach().cpu().double().requires_grad_() for x in given]
    wanted = F.scaled_dot_product_attention(*host, is_causal=True)
    wanted.sum().backward()
    assert close(out.detach(), wanted.detach())
    for x, y in zip(given, host, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert close(x.grad, y.grad, 2e-2)
    made_calls = operators.calls - before
    assert made_calls == ({} if operator is None else {operator: 1, f"{operator}_backward": 1})
