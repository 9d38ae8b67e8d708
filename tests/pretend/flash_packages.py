"""Doubles of the packages that ``torch.nn.attention.activate_flash_attention_impl`` looks for: flash_attn_interface,
which is FlashAttention 3, and flash_attn.cute.interface, version 4. torch's own code between its operators and these
packages runs as it is. They refuse what the real ones refuse, and in their way: version 4 by assertions.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tests.pretend.operators import Three, check, device_capability, flash_backward, flash_forward

calls: Counter[str] = Counter()  # of each function, since the process began

_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, "
    "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
    "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0.0, bool deterministic=False, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library: list[torch.library.Library] = []


@contextmanager
def activate(version: str) -> Iterator[None]:
    """FA3 or FA4 is installed, and active."""
    names = {"FA3": ("flash_attn_interface",), "FA4": ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")}
    modules = {name: ModuleType(name) for name in names[version]}
    if version == "FA3":
        _define_version_3()
    else:
        interface: Any = modules["flash_attn.cute.interface"]
        interface._flash_attn_fwd, interface._flash_attn_bwd = _forward_4, _backward_4
    sys.modules.update(modules)
    _forget_devices()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that they are overridden
        nn.attention.activate_flash_attention_impl(version)
    try:
        yield
    finally:
        nn.attention.restore_flash_attention_impl()
        for name in modules:
            del sys.modules[name]
        _forget_devices()


def _forget_devices() -> None:
    """torch's code keeps in mind which GPU is which."""
    from torch.nn.attention import _fa3, _fa4

    for module in (_fa3, _fa4):
        module._get_device_major.cache_clear()
    _fa4._fa4_import_module.cache_clear()


def _define_version_3() -> None:
    if _library:
        return
    library = torch.library.Library("flash_attn_3", "DEF")
    for schema, function in ((_FORWARD, _forward_3), (_BACKWARD, _backward_3)):
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CUDA")
    _library.append(library)


def _lengths(q: Tensor, k: Tensor, starts_q: Tensor | None, starts_k: Tensor | None, *longest: int | None) -> Any:
    whole = (q.shape[-3], k.shape[-3])
    return starts_q, starts_k, *(a or b for a, b in zip(longest, whole, strict=True))


# Version 3


def _forward_3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *more: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments that are as their defaults at the end are not passed."""
    calls["FA3 forward"] += 1
    names = [part.split("=")[0].split()[-1] for part in _FORWARD.partition("(")[2].split(", ")][3:]
    named = dict(zip(names, more, strict=False))
    check(device_capability()[0] == 9, "FlashAttention-3 needs Hopper")
    lengths = _lengths(q, k, *(named[f"{name}_{x}"] for name in ("cu_seqlens", "max_seqlen") for x in "qk"))
    values, lse, *_ = flash_forward(
        q, k, v, *lengths, 0.0, named["is_causal"], False, scale=named["softmax_scale"],
        window_size_left=named["window_size_left"], window_size_right=named["window_size_right"],
    )  # fmt: skip
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if named["out"] is None else named["out"]
    return out.copy_(values), lse, q.new_empty(0), q.new_empty(0)


def _backward_3(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> tuple[Tensor, ...]:
    calls["FA3 backward"] += 1
    calls["FA3 deterministic"] += deterministic
    check(not deterministic or q.shape[-1] <= 192, "Deterministic backward not supported for hdim 256.")
    lengths = _lengths(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    values = flash_backward(
        dout, q, k, v, out, lse, *lengths, 0.0, is_causal, None, None, scale=softmax_scale,
        window_size_left=window_size_left, window_size_right=window_size_right,
    )  # fmt: skip
    for room, x in zip((dq, dk, dv), values, strict=True):
        check(room.stride(-1) == 1, "dq, dk and dv must have contiguous last dimension")
        room.copy_(x)
    return tuple(q.new_empty(0) for _ in range(5))


# Version 4


def _check_heads(q: Tensor, v: Tensor) -> None:
    size, major = q.shape[-1], device_capability()[0]
    able = size % 8 == 0 and (size <= (256 if major == 9 else 128) or size == 256)
    assert able, f"(head_dim, head_dim_v)=({size}, {v.shape[-1]}) is not supported on SM{major}0."


def _forward_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    window_size_left: int | None,
    window_size_right: int | None,
    return_lse: bool,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    seqused_k: Tensor | None,
    page_table: Tensor | None,
    num_splits: int,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    calls["FA4 forward"] += 1
    _check_heads(q, v)
    lengths = _lengths(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    values, lse, *_ = flash_forward(
        q, k, v, *lengths, 0.0, causal, False, scale=softmax_scale, window_size_left=window_size_left,
        window_size_right=window_size_right,
    )  # fmt: skip
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    return out.copy_(values), lse


def _backward_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    window_size_left: int | None,
    window_size_right: int | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    deterministic: bool,
) -> Three:
    calls["FA4 backward"] += 1
    calls["FA4 deterministic"] += deterministic
    _check_heads(q, v)
    rows = (q.shape[0], q.shape[2], q.shape[1]) if cu_seqlens_q is None else (q.shape[1], q.shape[0])
    assert lse.shape == rows, f"lse must have shape {rows}"
    assert lse.dtype == torch.float32, "lse must be float32"
    lengths = _lengths(q, k, cu_seqlens_q, cu_seqlens_k, None, None)
    return flash_backward(
        dout, q, k, v, out, lse, *lengths, 0.0, causal, None, None, scale=softmax_scale,
        window_size_left=window_size_left, window_size_right=window_size_right,
    )  # fmt: skip
