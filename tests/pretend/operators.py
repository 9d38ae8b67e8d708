"""Doubles of torch's private attention operators for CUDA, and of others that the CPU lacks: first what their C++
checks, then plain mathematics. That of cuDNN is in cudnn.py.

They follow aten/src/ATen/native/transformers/cuda: attention.cu, attention_backward.cu, flash_attn/flash_api.cpp and
mem_eff_attention; and aten/src/ATen/native/cuda/Blas.cpp. What the C++ takes for granted without a check is taken for
granted here too, so that a wrong call gives wrong numbers, as on a GPU: FlashAttention reads log-sum-exps as if they
were contiguous, and memory-efficient attention in half precision reads outputs as if they lay as (batch, tokens, heads,
head size).
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

calls: Counter[str] = Counter()  # of each operator, since the process began
copies: Counter[str] = Counter()  # that operators made of their arguments

HALF = (torch.float16, torch.bfloat16)
_pretend: Any = torch.ops.pretend
_library: list[torch.library.Library] = []  # what it registers is gone with it

Three = tuple[Tensor, Tensor, Tensor]


def install() -> None:
    library = torch.library.Library("aten", "IMPL", "CUDA")
    for name, function in _DOUBLES.items():
        library.impl(name, with_count(name, function), "CUDA")
    _library.append(library)
    # Over kernels that are compiled, others may be registered in python: FlashAttention 3 and 4 are.
    torch.library._impls -= library._op_impls


def with_count(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    return counted


def check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def device_capability() -> tuple[int, int]:
    major, minor = _pretend.capability()
    return major, minor


# Plain attention in float32, on the CPU's view of the same memory. Tensors are (batch, heads, tokens, head size).


class Seen(NamedTuple):
    """Which keys a row sees: those within so many places of its own, negative for all of them."""

    left: int = -1
    right: int = -1
    offset: int = 0  # the place of the first row among the keys

    def hidden(self, rows: int, keys: int) -> Tensor:
        place, key = torch.arange(rows)[:, None] + self.offset, torch.arange(keys)
        hidden = torch.zeros(rows, keys, dtype=torch.bool)
        if self.right >= 0:
            hidden |= key > place + self.right
        if self.left >= 0:
            hidden |= key < place - self.left
        return hidden


def _scores(q: Tensor, k: Tensor, scale: float, seen: Seen) -> Tensor:
    scores = q.float() @ _repeated(k, q).transpose(-1, -2) * scale
    return scores.masked_fill(seen.hidden(*scores.shape[-2:]), -math.inf)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], 1)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Seen) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exps. Rows that see nothing have an output of zero."""
    scores = _scores(q, k, scale, seen)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return weights @ _repeated(v, q), lse.masked_fill(lse == -math.inf, math.inf)


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, delta: Tensor, lse: Tensor, scale: float, seen: Seen
) -> Three:
    """``delta`` is, for each row, the product of its output and its gradient."""
    weights = (_scores(q, k, scale, seen) - lse[..., None]).exp()
    dscores = weights * (grad.float() @ _repeated(v, q).transpose(-1, -2) - delta[..., None]) * scale
    dk, dv = dscores.transpose(-1, -2) @ q.float(), weights.transpose(-1, -2) @ grad.float()
    return dscores @ _repeated(k, q), _summed(dk, k), _summed(dv, v)


def _summed(x: Tensor, like: Tensor) -> Tensor:
    return x.unflatten(1, (like.shape[1], -1)).sum(2)


def delta_of(grad: Tensor, out: Tensor) -> Tensor:
    return (grad.float() * out.float()).sum(-1)


def scale_of(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def read(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """What a kernel reads that was given a pointer and believes in these strides; NaN behind the end of the memory."""
    flat = torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size() - x.storage_offset(),), (1,))
    needed = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if flat.numel() < needed:
        flat = torch.cat([flat, flat.new_full((needed - flat.numel(),), math.nan)])
    return torch.as_strided(flat, shape, strides, flat.storage_offset())


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def on_host(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(_pretend.as_cpu(x) for x in tensors)


def on_device(x: Tensor, like: Tensor) -> Tensor:
    """Where ``like`` is. Not by a copy from the host: the counter of waits would take it for the caller's."""
    made = torch.empty(x.shape, dtype=x.dtype, device=like.device)
    _pretend.as_cpu(made).copy_(x)
    return made


# FlashAttention: (batch, tokens, heads, head size), or ragged: (tokens, heads, head size)


def _flash_checks(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> None:
    check(device_capability() >= (8, 0), "FlashAttention only supports Ampere GPUs or newer.")
    check(q.dtype in HALF, "FlashAttention only support fp16 and bf16 data type")
    for name, x in zip(("key", "value", "out", "dout"), (k, v, *more), strict=False):
        check(x.dtype == q.dtype, f"query and {name} must have the same dtype")
    for x in (q, k, v, *more):
        check(x.is_cuda, "Input tensor must be on CUDA")
        check(x.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    heads, size = q.shape[-2:]
    check(size % 8 == 0, "head_size must be a multiple of 8, this is ensured by padding!")
    check(size <= 256, "FlashAttention only supports head dimension at most 256")
    check(heads % k.shape[-2] == 0, "Number of heads in key/value must divide number of heads in query")
    check(k.shape == v.shape and k.shape[-1] == size, "key and value must have shape (…, num_heads_k, head_size)")
    for x in more:
        check(x.shape == q.shape, "out and dout must have the shape of query")


def _dense_checks(q: Tensor, k: Tensor) -> None:
    check(q.dim() == k.dim() == 4, "query and key must be (batch, tokens, heads, head size)")
    check(q.shape[0] == k.shape[0] > 0, "batch size must be positive")


def _ragged_checks(q: Tensor, k: Tensor, starts_q: Tensor, starts_k: Tensor | None) -> None:
    check(starts_k is not None, "cum_seq_q and cum_seq_k must be both set or both not set")
    assert starts_k is not None
    for name, starts in (("cu_seqlens_q", starts_q), ("cu_seqlens_k", starts_k)):
        check(starts.dtype == torch.int32, f"{name} must have dtype int32")
        check(starts.is_cuda, f"{name} must be on CUDA")
        check(starts.is_contiguous(), f"{name} must be contiguous")
    check(starts_q.numel() > 1, "batch size must be positive")
    check(starts_k.shape == starts_q.shape, "cu_seqlens_k must have shape (batch_size + 1)")
    check(q.dim() == k.dim() == 3, "ragged query and key must be (tokens, heads, head size)")


class _Piece(NamedTuple):
    """Queries and keys that belong together: a batch of sequences, or one ragged segment."""

    queries: slice
    keys: slice
    seen: Seen


def _limits(causal: bool, left: int | None, right: int | None, longest: int) -> tuple[int, int]:
    left = -1 if left is None or left >= longest else left
    right = 0 if causal else -1 if right is None or right >= longest else right
    return left, right


def _segments(
    starts_q: Tensor, starts_k: Tensor, limits: tuple[int, int], longest_q: int, longest_k: int
) -> Iterator[_Piece]:
    edges = zip(pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True)
    for (a, b), (c, d) in edges:
        # The kernel's grid covers so many rows and no more.
        check(b - a <= longest_q and d - c <= longest_k, "a segment is longer than max_seqlen_q or max_seqlen_k")
        yield _Piece(slice(a, b), slice(c, d), Seen(*limits, offset=(d - c) - (b - a)))


def _bhmk(x: Tensor) -> Tensor:
    """From (batch, tokens, heads, size) or (tokens, heads, size)."""
    return x.transpose(-2, -3) if x.dim() == 4 else x.transpose(0, 1)[None]


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    check(dropout_p == 0.0 and not any(more.values()), "this double has neither dropout, nor ALiBi, nor pages")
    _flash_checks(query, key, value)
    out = torch.empty_like(query)
    q, k, v, o = on_host(query, key, value, out)
    if cum_seq_q is None:
        _dense_checks(query, key)
        limits = _limits(is_causal, window_size_left, window_size_right, k.shape[1])
        seen = Seen(*limits, offset=k.shape[1] - q.shape[1])
        found, lse = attention(_bhmk(q), _bhmk(k), _bhmk(v), scale_of(q, scale), seen)
        _bhmk(o).copy_(found)
    else:
        _ragged_checks(query, key, cum_seq_q, cum_seq_k)
        assert cum_seq_k is not None
        lse = torch.full((q.shape[1], q.shape[0]), math.nan)
        limits = _limits(is_causal, window_size_left, window_size_right, max_k)
        for piece in _segments(*on_host(cum_seq_q, cum_seq_k), limits, max_q, max_k):
            parts = q[piece.queries], k[piece.keys], v[piece.keys]
            found, sums = attention(*map(_bhmk, parts), scale_of(q, scale), piece.seen)
            _bhmk(o[piece.queries]).copy_(found)
            lse[:, piece.queries] = sums[0]
    state = torch.empty(2, dtype=torch.uint64, device=query.device)
    return out, on_device(lse, query), state, state[0].clone(), query.new_empty(0)


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor | None,
    unused: Tensor | None,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Three:
    """``cum_seq_q`` alone decides between dense and ragged: an empty tensor is one, too."""
    check(dropout_p == 0.0, "this double has no dropout")
    copies["flash"] += (not grad_out.is_contiguous()) + (not out.is_contiguous())
    grad_out, out = grad_out.contiguous(), out.contiguous()
    _flash_checks(query, key, value, out, grad_out)
    check(logsumexp.is_cuda, "softmax_lse must be on CUDA")
    results = tuple(torch.empty_like(x) for x in (query, key, value))
    scratch = _flash_scratch(query, key)
    grad, q, k, v, o, sums = on_host(grad_out, query, key, value, out, logsumexp)
    rooms = on_host(*results)
    # Nobody checks dtype and strides of the log-sum-exps.
    shape = (q.shape[0], q.shape[2], q.shape[1]) if cum_seq_q is None else (1, q.shape[1], q.shape[0])
    lse = read(sums.view(torch.float32) if sums.dtype != torch.float32 else sums, shape, contiguous_strides(shape))
    if cum_seq_q is None:
        _dense_checks(query, key)
        limits = _limits(is_causal, window_size_left, window_size_right, k.shape[1])
        pieces = iter([_Piece(slice(None), slice(None), Seen(*limits, offset=k.shape[1] - q.shape[1]))])
    else:
        _ragged_checks(query, key, cum_seq_q, cum_seq_k)
        assert cum_seq_k is not None
        limits = _limits(is_causal, window_size_left, window_size_right, max_k)
        pieces = _segments(*on_host(cum_seq_q, cum_seq_k), limits, max_q, max_k)
    for rows, keys, seen in pieces:
        g, part, y = (_bhmk(x[rows]) for x in (grad, q, o))
        at = lse if cum_seq_q is None else lse[..., rows]
        found = gradients(g, part, _bhmk(k[keys]), _bhmk(v[keys]), delta_of(g, y), at, scale_of(q, scale), seen)
        for room, where, x in zip(rooms, (rows, keys, keys), found, strict=True):
            _bhmk(room[where]).copy_(x)
    del scratch
    return results  # type: ignore[return-value]


def _flash_scratch(query: Tensor, key: Tensor) -> list[Tensor]:
    """What the backward allocates for itself: the queries' gradient in float32, padded, and where heads share keys, the
    gradients of keys and values for every head of the queries."""
    *rows, heads, size = query.shape
    padded = [*rows[:-1], -(-rows[-1] // 128) * 128, heads, -(-size // 32) * 32]
    rooms = [torch.empty(padded, dtype=torch.float32, device=query.device)]
    if heads != key.shape[-2]:
        rooms += [key.new_empty(*key.shape[:-2], heads, size) for _ in range(2)]
    return rooms


def _sdpa_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse, state, unused, debug = flash_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, is_causal, return_debug_mask, scale=scale
    )
    return out.transpose(1, 2), lse, None, None, q.shape[1], k.shape[1], state, unused, debug


def _sdpa_flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    *,
    scale: float | None = None,
) -> Three:
    grad, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    found = flash_backward(
        grad, q, k, v, o, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed,
        philox_offset, scale=scale,
    )  # fmt: skip
    dq, dk, dv = (x.transpose(1, 2) for x in found)
    return dq, dk, dv


# Memory-efficient attention: (batch, tokens, heads, head size)

_ROWS = 32  # of log-sum-exps that the backward reads at once
_NOT_CAUSAL, _UPPER_LEFT, _LOWER_RIGHT = range(3)


def _efficient_checks(q: Tensor, k: Tensor, v: Tensor, window: int | None, mask_type: int) -> None:
    check(q.dim() == k.dim() == v.dim() == 4, "query.dim() == 4")
    check(q.shape[0] == k.shape[0] == v.shape[0], "query.size(0) == key.size(0)")
    check(k.shape[1] == v.shape[1], "key.size(1) == value.size(1)")
    check(q.shape[2] == k.shape[2] == v.shape[2], "query.size(2) == key.size(2)")
    check(q.shape[3] == k.shape[3], "query.size(3) == key.size(3)")
    check(q.dtype in (torch.float32, *HALF), f"memory-efficient attention has no {q.dtype}")
    check(q.dtype == k.dtype == v.dtype, "query, key and value must have the same dtype")
    check(q.dtype != torch.bfloat16 or device_capability() >= (8, 0), "cutlassF: no kernel found to launch!")
    check(not window or mask_type != _NOT_CAUSAL, "custom_mask_type not supported")
    for name, x in (("query", q), ("key", k), ("value", v)):
        check(x.is_cuda and x.stride(-1) == 1, f"{name}: last dimension must be contiguous")
        _check_alignment(name, x)


def _check_alignment(name: str, x: Tensor) -> None:
    capability = device_capability()
    if x.dtype == torch.float32:
        multiple = 4 if capability >= (8, 0) else 1
    else:
        multiple = 4 if capability >= (7, 5) else 2 if capability >= (7, 0) else 1
    for dimension, axis in (("B", 0), ("M", 1), ("H", 2)):
        aligned = x.stride(axis) % multiple == 0 or (x.shape[axis] <= 1 and dimension != "M")
        check(aligned, f"{name} is not correctly aligned (stride{dimension})")
    check(x.data_ptr() % (multiple * x.element_size()) == 0, f"{name} is not correctly aligned")


def _efficient_seen(mask_type: int, window: int | None, rows: int, keys: int) -> Seen:
    offset = keys - rows if mask_type == _LOWER_RIGHT else 0
    right = -1 if mask_type == _NOT_CAUSAL else 0
    return Seen(window - 1 if window else -1, right, offset)


class _Batch(NamedTuple):
    """Queries and keys of one call, as the kernel cuts them: sequences of the batch, or ragged segments of one."""

    number: int  # of the sequence or segment
    queries: tuple[int | slice, ...]
    keys: tuple[int | slice, ...]
    rows: int
    seen: Seen


def _batches(
    q: Tensor, k: Tensor, starts_q: Tensor | None, starts_k: Tensor | None, mask_type: int, window: int | None
) -> Iterator[_Batch]:
    if starts_q is None or starts_k is None:
        for i in range(q.shape[0]):
            at = (slice(i, i + 1),)
            yield _Batch(i, at, at, q.shape[1], _efficient_seen(mask_type, window, q.shape[1], k.shape[1]))
        return
    check(q.shape[0] == 1, "cu_seqlen only supports batch_size=1")
    for starts in (starts_q, starts_k):
        check(starts.dtype == torch.int32 and starts.dim() == 1, "cu_seqlens must be of int32, and one-dimensional")
    pairs = zip(pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True)
    for i, ((a, b), (c, d)) in enumerate(pairs):
        rows, keys = (slice(None), slice(a, b)), (slice(None), slice(c, d))
        yield _Batch(i, rows, keys, b - a, _efficient_seen(mask_type, window, b - a, d - c))


def _efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float,
    custom_mask_type: int,
    compute_log_sumexp: bool = False,
    *,
    scale: float | None = None,
    seqlen_k: Tensor | None = None,
    window_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    check(bias is None and seqlen_k is None and dropout_p == 0.0, "this double has neither bias nor dropout")
    check((cu_seqlens_q is None) == (cu_seqlens_k is None), "cu_seqlens_q.has_value() == cu_seqlens_k.has_value()")
    _efficient_checks(query, key, value, window_size, custom_mask_type)
    longest_q = query.shape[1] if cu_seqlens_q is None or max_seqlen_q is None else max_seqlen_q
    longest_k = key.shape[1] if cu_seqlens_k is None or max_seqlen_k is None else max_seqlen_k
    out = torch.empty(*query.shape[:3], value.shape[3], dtype=query.dtype, device=query.device)
    q, k, v, o = on_host(query, key, value, out)
    rows = -(-longest_q // _ROWS) * _ROWS if compute_log_sumexp else 0
    count = query.shape[0] if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
    lse = torch.full((count, query.shape[2], rows), math.inf)
    starts = [None if x is None else _pretend.as_cpu(x) for x in (cu_seqlens_q, cu_seqlens_k)]
    for batch in _batches(q, k, *starts, custom_mask_type, window_size):
        parts = q[batch.queries], k[batch.keys], v[batch.keys]
        found, sums = attention(*map(_bhmk, parts), scale_of(q, scale), batch.seen)
        _bhmk(o[batch.queries]).copy_(found)
        if compute_log_sumexp:
            lse[batch.number, :, : batch.rows] = sums[0]
    state = torch.empty((), dtype=torch.int64, device=query.device)
    return out, on_device(lse, query), state, state.clone(), longest_q, longest_k


def _efficient_attention_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    logsumexp: Tensor,
    dropout_p: float,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    custom_mask_type: int,
    bias_requires_grad: bool,
    *,
    scale: float | None = None,
    num_splits_key: int | None = None,
    window_size: int | None = None,
    shared_storage_dqdkdv: bool = False,
) -> tuple[Tensor, Tensor, Tensor, None]:
    check(bias is None and dropout_p == 0.0, "this double has neither bias nor dropout")
    _efficient_checks(query, key, value, window_size, custom_mask_type)
    _check_log_sum_exps(logsumexp, query.shape[1] if cu_seqlens_q is None else max_seqlen_q)
    results = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
    grad, q, k, v, sums = on_host(grad_out_.contiguous(), query, key, value, logsumexp)
    rooms = on_host(*results)
    delta = delta_of(grad, _output_as_read(_pretend.as_cpu(out)))
    starts = [None if x is None else _pretend.as_cpu(x) for x in (cu_seqlens_q, cu_seqlens_k)]
    for batch in _batches(q, k, *starts, custom_mask_type, window_size):
        g, part = (_bhmk(x[batch.queries]) for x in (grad, q))
        keys, values = (_bhmk(x[batch.keys]) for x in (k, v))
        lse = sums[batch.number : batch.number + 1, :, : batch.rows]
        rows = delta[batch.queries].transpose(1, 2)
        found = gradients(g, part, keys, values, rows, lse, scale_of(q, scale), batch.seen)
        for room, at, x in zip(rooms, (batch.queries, batch.keys, batch.keys), found, strict=True):
            _bhmk(room[at]).copy_(x)
    return *results, None  # type: ignore[return-value]


def _check_log_sum_exps(lse: Tensor, rows: int) -> None:
    batch, heads = lse.shape[:2]
    check(lse.dtype == torch.float32 and lse.stride(-1) == 1, "LSE must be rows of float32")
    check(heads <= 1 or lse.stride(1) % 8 == 0, "LSE is not correctly aligned (strideH)")
    check(batch <= 1 or lse.stride(0) % 8 == 0, "LSE is not correctly aligned (strideB)")
    needed = -(-rows // _ROWS) * _ROWS
    check(lse.shape[2] >= needed, f"LSE has {lse.shape[2]} rows, and the kernel reads {needed}, in blocks of {_ROWS}")


def _output_as_read(out: Tensor) -> Tensor:
    """In half precision the kernel itself computes delta, and takes rows to be heads * head size apart."""
    if out.dtype == torch.float32:
        return out
    heads, size = out.shape[2:]
    return read(out, tuple(out.shape), (out.stride(0), heads * size, out.stride(2), 1))


def _sdpa_efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse, seed, offset, _, _ = _efficient_attention_forward(
        q, k, v, attn_bias, None, None, None, None, dropout_p, _UPPER_LEFT if is_causal else _NOT_CAUSAL,
        compute_log_sumexp, scale=scale,
    )  # fmt: skip
    return out.transpose(1, 2), lse, seed, offset


def _sdpa_efficient_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, None]:
    grad, q, k, v, o = (x.transpose(1, 2) for x in (grad_out_, query, key, value, out))
    dq, dk, dv, _ = _efficient_attention_backward(
        grad, q, k, v, attn_bias, o, None, None, q.shape[1], k.shape[1], logsumexp, dropout_p, philox_seed,
        philox_offset, _UPPER_LEFT if is_causal else _NOT_CAUSAL, grad_input_mask[3], scale=scale,
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), None


# Products of matrices in half precision with sums in single precision

_is_old = [False]  # whether addmm is that of older versions of torch


@contextmanager
def old_addmm() -> Iterator[None]:
    """Older versions of torch refuse a sum in another dtype than the matrices'."""
    _is_old[0] = True
    try:
        yield
    finally:
        _is_old[0] = False


def _addmm(
    self: Tensor, mat1: Tensor, mat2: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    out = torch.empty(mat1.shape[0], mat2.shape[1], dtype=out_dtype, device=mat1.device)
    return _addmm_out(self, mat1, mat2, out_dtype, beta=beta, alpha=alpha, out=out)


def _addmm_out(
    self: Tensor, mat1: Tensor, mat2: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Tensor
) -> Tensor:
    for name, matrix in (("mat1", mat1), ("mat2", mat2)):
        check(matrix.dim() == 2, f"{name} must be a matrix, got {matrix.dim()}-D tensor")
    check(mat1.shape[1] == mat2.shape[0], f"mat1 and mat2 shapes cannot be multiplied ({mat1.shape} and {mat2.shape})")
    check(mat1.dtype == mat2.dtype, f"mat1 and mat2 must have the same dtype, but got {mat1.dtype} and {mat2.dtype}")
    if _is_old[0]:
        check(
            self.dtype == mat2.dtype, f"self and mat2 must have the same dtype, but got {self.dtype} and {mat2.dtype}"
        )
    check(
        out_dtype == mat1.dtype or (out_dtype == torch.float32 and mat1.dtype in HALF),
        "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs",
    )
    check(out_dtype == out.dtype, "out_dtype must be the same as the dtype of the provided out tensor")
    check(self.dtype in (out_dtype, mat1.dtype), "self dtype must match either out_dtype or mat1 dtype")
    check(len({x.device for x in (self, mat1, mat2, out)}) == 1, "Expected all tensors to be on the same device")
    total, left, right, room = on_host(self, mat1, mat2, out)
    product = left.float() @ right.float() * alpha
    room.copy_(product if beta == 0 else product + total.float() * beta)
    return out


# Operators that the CPU has for fewer dtypes


def _histc(self: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:  # noqa: A002
    """Also of whole numbers, as mixtures of experts count tokens."""
    places = ((self.float() - min) * (bins / (max - min))).floor().clamp(0, bins - 1).long().flatten()
    inside = ((self >= min) & (self <= max)).flatten().to(self.dtype)
    return torch.zeros(bins, dtype=self.dtype, device=self.device).scatter_add_(0, places, inside)


_DOUBLES: dict[str, Callable[..., Any]] = {
    "histc": _histc,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_flash_attention": _sdpa_flash,
    "_scaled_dot_product_flash_attention_backward": _sdpa_flash_backward,
    "_efficient_attention_forward": _efficient_attention_forward,
    "_efficient_attention_backward": _efficient_attention_backward,
    "_scaled_dot_product_efficient_attention": _sdpa_efficient,
    "_scaled_dot_product_efficient_attention_backward": _sdpa_efficient_backward,
    "addmm.dtype": _addmm,
    "addmm.dtype_out": _addmm_out,
}
