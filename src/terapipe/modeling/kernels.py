"""Attention kernels that also give the log-sum-exp of each row, and backward kernels that take it from outside.

With those two, attention over several blocks of keys is exact: merge the outputs by their log-sum-exps, and run each
block's backward with the merged output and log-sum-exp. torch has such kernels for CPU and CUDA, but their names are
private; everything that knows them is in this file.

All tensors are (batch, heads, tokens, head size); keys and values may have fewer heads than queries. ``causal`` means a
square block whose row ``t`` sees columns up to ``t``.
"""

import math
import warnings
from abc import ABC, abstractmethod
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

aten: Final[Any] = torch.ops.aten


Three = tuple[Tensor, Tensor, Tensor]


class How(NamedTuple):
    """What a block's queries see of its keys: all, each those up to itself, or what a mask (rows, keys) says."""

    scale: float
    causal: bool = False
    mask: Tensor | None = None


class Kernel(ABC):
    """One block of attention, forward and backward."""

    takes_masks = False
    schemas: tuple[tuple[str, str], ...] = ()  # the private operators it calls, with the arguments it counts on

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """Output, and natural logarithm of the sum of exponentials of each row, shaped (batch, heads, tokens)."""

    @abstractmethod
    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: How) -> Three:
        """Gradients of q, k, v. ``out`` and ``lse`` may be those of a longer row that this block is part of."""


class PlainKernel(Kernel):
    """Written out with matrix products: any device and dtype, slower, needs memory for the scores."""

    takes_masks = True

    def __init__(self, softcap: float | None = None) -> None:
        self.softcap = softcap

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k, how)[0]
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp()
        return (weights @ _spread(v, q).to(scores.dtype)).to(q.dtype), lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: How) -> Three:
        scores, slope = self._scores(q, k, how)
        weights = (scores - lse.unsqueeze(-1)).exp()
        wide = weights.dtype
        dout = grad.to(wide)
        dweights = dout @ _spread(v, q).to(wide).transpose(-1, -2)
        dscores = weights * (dweights - (dout * out.to(wide)).sum(-1, keepdim=True)) * slope
        dq = dscores @ _spread(k, q).to(wide)
        dk = _gather(dscores.transpose(-1, -2) @ q.to(wide), k)
        dv = _gather(weights.transpose(-1, -2) @ dout, v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _scores(self, q: Tensor, k: Tensor, how: How) -> tuple[Tensor, Tensor | float]:
        """And how they change with the products of queries and keys."""
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = (q.to(wide) @ _spread(k, q).to(wide).transpose(-1, -2)) * how.scale
        slope: Tensor | float = how.scale
        if self.softcap is not None:
            bent = torch.tanh(scores / self.softcap)
            scores, slope = bent * self.softcap, how.scale * (1 - bent**2)
        if how.causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        if how.mask is not None:
            scores = scores.masked_fill(~how.mask, -math.inf)
        return scores, slope


def _spread(x: Tensor, q: Tensor) -> Tensor:
    """Repeats the heads of keys or values so that there are as many as of queries."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _gather(grad: Tensor, x: Tensor) -> Tensor:
    """The reverse for gradients: sums those of the repeated heads."""
    return grad if grad.shape[1] == x.shape[1] else grad.unflatten(1, (x.shape[1], -1)).sum(2)  # type: ignore[no-untyped-call]


def _added(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """What a kernel adds to scores so that only these places are seen."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -math.inf)


class CpuFlashKernel(Kernel):
    takes_masks = True
    schemas = (
        ("_scaled_dot_product_flash_attention_for_cpu", "query key value dropout_p is_causal attn_mask scale"),
        (
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale",
        ),
    )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, how.causal, attn_mask=_added(how.mask, q), scale=how.scale
        )
        return out, lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: How) -> Three:
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, how.causal, attn_mask=_added(how.mask, q), scale=how.scale
        )
        return dq, dk, dv


class CudaFlashKernel(Kernel):
    """FlashAttention: half precisions only, and no masks."""

    schemas = (
        ("_scaled_dot_product_flash_attention", "query key value dropout_p is_causal return_debug_mask scale"),
        (
            "_scaled_dot_product_flash_attention_backward",
            "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal "
            "philox_seed philox_offset scale",
        ),
    )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            q, _spread(k, q), _spread(v, q), 0.0, how.causal, False, scale=how.scale
        )
        return out, lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: How) -> Three:
        none = torch.empty(0, dtype=torch.int64, device=q.device)  # no variable lengths, no dropout
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            grad,
            q,
            _spread(k, q),
            _spread(v, q),
            out,
            lse,
            none,
            none,
            q.shape[2],
            k.shape[2],
            0.0,
            how.causal,
            none,
            none,
            scale=how.scale,
        )
        return dq, _gather(dk, k), _gather(dv, v)


class CudaEfficientKernel(Kernel):
    """Memory-efficient attention: float32 too. It could take masks, of aligned shapes; the plain kernel takes any."""

    schemas = (
        (
            "_scaled_dot_product_efficient_attention",
            "query key value attn_bias compute_log_sumexp dropout_p is_causal scale",
        ),
        (
            "_scaled_dot_product_efficient_attention_backward",
            "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p grad_input_mask "
            "is_causal scale",
        ),
    )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, _spread(k, q), _spread(v, q), None, True, 0.0, how.causal, scale=how.scale
        )
        return out, lse.narrow(-1, 0, q.shape[2])  # the kernel pads its rows

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: How) -> Three:
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32))
        none = torch.empty((), dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad,
            q,
            _spread(k, q),
            _spread(v, q),
            None,
            out,
            padded,
            none,
            none,
            0.0,
            [True, True, True, False],
            how.causal,
            scale=how.scale,
        )
        return dq, _gather(dk, k), _gather(dv, v)


PLAIN: Final = PlainKernel()

# The fastest kernel for a device type and dtype; whatever is not listed takes the plain one.
_FAST: dict[tuple[str, torch.dtype], Kernel] = {
    **{("cpu", dtype): CpuFlashKernel() for dtype in (torch.float64, torch.float32, torch.bfloat16)},
    **{("cuda", dtype): CudaFlashKernel() for dtype in (torch.float16, torch.bfloat16)},
    ("cuda", torch.float32): CudaEfficientKernel(),
}


def kernel_for(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel to use, after it has shown once that it still does what this file counts on."""
    kernel = _FAST.get((device.type, dtype), PLAIN)
    return kernel if not kernel.schemas or _trusted(kernel, device, dtype) else PLAIN


@cache
def _trusted(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> bool:
    fault = _wrong_signature(kernel) or _wrong_result(kernel, device, dtype)
    if fault:
        warnings.warn(
            f"torch {torch.__version__} changed a private attention kernel: {fault}. Falling back to plain attention, "
            "which is exact but slower and needs more memory; use a torch version that this release was tested with.",
            RuntimeWarning,
            stacklevel=3,
        )
    return not fault


def _wrong_signature(kernel: Kernel) -> str | None:
    for name, expected in kernel.schemas:
        operator = getattr(aten, name, None)
        if operator is None:
            return f"aten::{name} is gone"
        found = " ".join(argument.name for argument in operator.default._schema.arguments)
        if found != expected:
            return f"aten::{name} takes ({found}), expected ({expected})"
    return None


def _wrong_result(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> str | None:
    """Compares blocks of one slice with the plain kernel, as attention.py uses them: keys and values cut out of longer
    buffers, with fewer heads; rectangles; and backwards with the output and log-sum-exp of all blocks together."""
    generator = torch.Generator().manual_seed(0)
    q, grad = (torch.randn(2, 4, 8, 16, generator=generator).to(device, dtype) for _ in range(2))
    keys, values = (torch.randn(2, 2, 24, 16, generator=generator).to(device, dtype) for _ in range(2))
    blocks = [(slice(11, 19), How(0.3, causal=True)), (slice(0, 11), How(0.3))]
    if kernel.takes_masks:
        seen = torch.rand(8, 11, generator=generator) < 0.5
        seen[:, 3] = True  # no row may see nothing
        blocks[1] = (slice(0, 11), How(0.3, mask=seen.to(device)))
    parts = [(keys[:, :, at], values[:, :, at], how) for at, how in blocks]
    wanted = [PLAIN.forward(q, *part) for part in parts]
    lse = torch.logaddexp(wanted[0][1], wanted[1][1])
    shares = [(each - lse).exp().unsqueeze(-1) for _, each in wanted]
    out = torch.stack([x * share for (x, _), share in zip(wanted, shares, strict=True)]).sum(0).to(dtype)
    tolerance = 0.05 if dtype.itemsize < 4 else 1e-4
    for (k, v, how), (block_out, block_lse) in zip(parts, wanted, strict=True):
        truth = [block_out, block_lse, *PLAIN.backward(grad, q, k, v, out, lse, how)]
        try:
            found = [*kernel.forward(q, k, v, how), *kernel.backward(grad, q, k, v, out, lse, how)]
        except (RuntimeError, TypeError, ValueError) as error:
            return f"{type(kernel).__name__} failed its self-test with {error}"
        for a, b in zip(found, truth, strict=True):
            if a.shape != b.shape or not torch.allclose(a.double(), b.double(), atol=tolerance, rtol=tolerance):
                return f"{type(kernel).__name__} gave another result than plain attention in its self-test"
    return None
