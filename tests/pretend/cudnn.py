"""A double of cuDNN's attention as torch calls it (aten/src/ATen/native/cudnn/MHA.cpp), and of torch's rules for when
to take it. Tensors are (batch, heads, tokens, head size).

It reads log-sum-exps as if they were contiguous, and outputs and their gradients as they lay in the first call with
such queries, keys and values.
"""

import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.pretend.operators import (
    HALF,
    Seen,
    Three,
    attention,
    check,
    contiguous_strides,
    delta_of,
    device_capability,
    gradients,
    on_device,
    on_host,
    read,
    scale_of,
    with_count,
)

_library: list[torch.library.Library] = []  # what it registers is gone with it


def install() -> None:
    library = torch.library.Library("aten", "IMPL", "CUDA")
    doubles = {
        "_scaled_dot_product_cudnn_attention": _sdpa_cudnn,
        "_scaled_dot_product_cudnn_attention_backward": _sdpa_cudnn_backward,
    }
    for name, function in doubles.items():
        library.impl(name, with_count(name, function), "CUDA")
    _library.append(library)
    torch._C._can_use_cudnn_attention = _can_use_cudnn


class _Plans(threading.local):
    """What cuDNN has compiled, in each thread for itself: how outputs and their gradients lay when a plan was made. A
    plan is looked up by shapes and layouts of queries, keys and values alone."""

    def __init__(self) -> None:
        self.forward: set[Any] = set()
        self.backward: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]] = {}


plans = _Plans()


def _plan_key(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
    return q.device, q.dtype, causal, *((tuple(x.shape), x.stride()) for x in (q, k, v))


def cudnn_faults(q: Tensor, k: Tensor, v: Tensor) -> Iterator[str]:
    """What keeps ``scaled_dot_product_attention`` from taking it, in torch's words."""
    if not torch._C._get_cudnn_sdp_enabled():
        yield "cuDNN attention has been runtime disabled."
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        yield "cuDNN SDPA is not deterministic."
    if q.dtype not in HALF:
        yield "Expected query, key and value to all be of dtype: {Half, BFloat16}."
    if device_capability() < (8, 0):
        yield "cuDNN MHA only supports gpu architectures in the range [sm80, sm121]."
    limit = 256 if device_capability() == (9, 0) else 128
    if max(q.shape[3], v.shape[3]) > limit:
        yield f"head_dim should be no more than {limit}"
    if q.shape[3] % 8 or v.shape[3] % 8:
        yield "head_dim should be a multiple of 8"
    if k.shape[2] == 1:
        yield "cudnn SDPA does not support key/value sequence length 1."


def _can_use_cudnn(params: Any, debug: bool) -> bool:
    faults = list(cudnn_faults(params.query, params.key, params.value))
    if debug:
        for fault in faults:
            warnings.warn(fault, UserWarning, stacklevel=2)
    return not faults


def _cudnn_checks(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> None:
    """The operator itself checks little; the rest is what cuDNN cannot make a plan for."""
    shapes = (fault for fault in cudnn_faults(q, k, v) if "disabled" not in fault and "deterministic" not in fault)
    for fault in shapes:
        raise RuntimeError(f"cuDNN Frontend error: No valid execution plans built: {fault}")
    check(q.dim() == k.dim() == v.dim() == 4, "Q tensor has unexpected number of dims, please report a bug to PyTorch.")
    check(q.dtype == k.dtype == v.dtype, "query, key and value must have the same dtype")
    check(q.shape[0] == k.shape[0] and k.shape[:3] == v.shape[:3], "cuDNN Frontend error: invalid dims")
    check(q.shape[1] % k.shape[1] == 0, "cuDNN Frontend error: num_heads of key must divide those of query")
    for x in (q, k, v, *more):
        check(x.is_cuda and x.stride(3) == 1, "cuDNN Frontend error: the stride of the last dimension must be 1")


def _sdpa_cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Causal masks begin at the first key, whatever the numbers of rows and keys."""
    check(attn_bias is None and dropout_p == 0.0, "this double has neither bias nor dropout")
    _cudnn_checks(query, key, value)
    plans.forward.add(_plan_key(query, key, value, is_causal))
    out = torch.empty_like(query)
    q, k, v, o = on_host(query, key, value, out)
    values, lse = attention(q, k, v, scale_of(q, scale), Seen(right=0 if is_causal else -1))
    o.copy_(values)
    sums = on_device(lse[..., None], query) if compute_log_sumexp else None
    state = torch.empty((), dtype=torch.int64, device=query.device)
    return out, sums, None, None, q.shape[2], k.shape[2], state, state.clone(), None


def _sdpa_cudnn_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> Three:
    check(attn_bias is None and dropout_p == 0.0, "this double has neither bias nor dropout")
    check(cum_seq_q is None and cum_seq_k is None, "this double has no ragged batches")
    check(
        device_capability() != (10, 0) or philox_seed is not None,
        "tensor does not have a device",
    )
    if grad_out.stride(3) != 1:
        grad_out = torch.empty_like(out).copy_(grad_out)
    _cudnn_checks(query, key, value, out, grad_out)
    check(out.shape == grad_out.shape == query.shape, "cuDNN Frontend error: invalid dims")
    check((max_q, max_k) == (query.shape[2], key.shape[2]), "cuDNN Frontend error: invalid dims")
    check(logsumexp.shape == (*query.shape[:3], 1), "cuDNN Frontend error: Stats must be (b, h, s_q, 1)")
    plan = _plan_key(query, key, value, is_causal)
    layouts = plans.backward.setdefault(plan, (out.stride(), grad_out.stride()))
    results = tuple(torch.empty_like(x) for x in (query, key, value))
    q, k, v, o, grad, sums = on_host(query, key, value, out, grad_out, logsumexp)
    o, grad = (read(x, tuple(q.shape), layout) for x, layout in zip((o, grad), layouts, strict=True))
    lse = read(sums, tuple(q.shape[:3]), contiguous_strides(tuple(q.shape[:3])))
    seen = Seen(right=0 if is_causal else -1)
    values = gradients(grad, q, k, v, delta_of(grad, o), lse, scale_of(q, scale), seen)
    for room, x in zip(on_host(*results), values, strict=True):
        room.copy_(x)
    return results  # type: ignore[return-value]
