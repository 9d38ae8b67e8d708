"""Attention kernels: what each must do, and those that compute a slice block by block.

A kernel computes the attention of one slice and the log-sum-exp of every row, and a backward that takes output and
log-sum-exp from outside. Keys and values of earlier slices are read where they lie, in a ``KeyValueStore``. Which
kernel is used, and how it is tested first, is in kernel_choice.py. Kernels that take a whole slice in one call are in
flash_kernels.py.

The kernels of this file know rectangles and causal squares only. ``Visibility.blocks`` cuts what a slice sees into such
blocks. The forward of each block gives an output and a log-sum-exp; the outputs are merged by their shares of the whole
sum. The backward of each block takes the merged output and log-sum-exp: then its gradients are a part of the whole
ones, and nothing needs to be merged. With two blocks of keys, A and B::

    forward     q, A -> out_A, lse_A     q, B -> out_B, lse_B
    merge       lse = log(exp lse_A + exp lse_B)     out = out_A exp(lse_A - lse) + out_B exp(lse_B - lse)
    backward    (grad, q, A, out, lse) -> part of dq, dA     (grad, q, B, out, lse) -> the rest of dq, dB
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, ClassVar, Final, NamedTuple

import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams
from torch.nn.attention import SDPBackend

from terapipe.modeling.key_values import KeyValueStore
from terapipe.modeling.visibility import EVERY, Block, Visibility

aten: Final[Any] = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
Operators = tuple[tuple[str, str], ...]  # names, each with its first arguments, which are relied on
Three = tuple[Tensor, Tensor, Tensor]


class Scores(NamedTuple):
    """How scores are made from the products of queries and keys.

    Attributes:
        scale: What products are multiplied by.
        softcap: Limits the size of scores, to ``softcap * tanh(score / softcap)``, as Gemma 2 does.
    """

    scale: float
    softcap: float | None = None


class KernelRequest(NamedTuple):
    """What the calls of attention by one layer ask of a kernel. Kernels answer with a refusal or None, and self-tests
    run the case that is asked for.

    Attributes:
        device: Where the tensors are.
        dtype: Of queries, keys and values, after autocast.
        head_size: Of queries, before padding.
        softcap: Whether scores are limited.
        sinks: Whether the backward gets another log-sum-exp than the forward gave.
        window: Whether a token sees only some of the tokens before it.
        segments: Whether documents or chunks begin inside of sequences.
    """

    device: torch.device
    dtype: torch.dtype
    head_size: int
    softcap: bool = False
    sinks: bool = False
    window: bool = False
    segments: bool = False


class Settings(NamedTuple):
    """Settings of torch that change what its operators do: what a self-test has shown holds for them alone.

    Attributes:
        flash: The version of FlashAttention that the user has activated.
        deterministic: Whether results must repeat to the bit.
        cudnn: Whether torch may take cuDNN's attention.
    """

    flash: str | None = None
    deterministic: bool = False
    cudnn: bool = False

    @classmethod
    def now(cls, device: torch.device) -> "Settings":
        """Reads the settings as they are now. On devices other than GPUs no kernel depends on them."""
        if device.type != "cuda":
            return cls()
        return cls(active_flash(), is_deterministic(), torch._C._get_cudnn_sdp_enabled())


def active_flash() -> str | None:
    """The version of FlashAttention that the user has activated in torch; None is torch's own, version 2."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)  # not in torch 2.9
    return None if current is None else current()


def is_deterministic() -> bool:
    """Whether results must repeat to the bit. With ``warn_only`` torch's kernels go on as they are."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


class Gradients(NamedTuple):
    """A part of a slice's gradients: those of some rows, and of the keys and values that they see. Parts may overlap;
    attention adds them up.

    Attributes:
        rows: Queries of the slice, counted from its first token.
        dq: Their gradients, (sequences, heads, rows, head size).
        keys: Tokens of the sequence, counted from its first.
        dk: Gradients of their keys, (sequences, heads of keys, keys, head size).
        dv: Gradients of their values.
        sequences: Those of the microbatch that the part is about.
    """

    rows: slice
    dq: Tensor
    keys: slice
    dk: Tensor
    dv: Tensor
    sequences: slice = EVERY


class Kernel(ABC):
    """One way to compute attention over slices.

    Queries are (batch, heads, tokens, head size), in any order in memory but for the last dimension, whose numbers lie
    side by side; keys and values may have fewer heads. Rows' log-sum-exps are (batch, heads, tokens), natural
    logarithms, in float32 or wider.

    To add a kernel, inherit from this class or from ``BlockKernel``, and put it into ``table`` of kernel_choice.py.

    Attributes:
        name: For reports and messages.
        head_multiple: Head sizes are padded with zeros to a multiple of it.
        by_heads: Whether it would copy queries whose heads do not lie one after the other.
        operators: Private operators of aten that it calls.
        part: Which slices it is used for, in words, if not for all.
    """

    name: ClassVar[str]
    head_multiple: ClassVar[int] = 1
    by_heads: ClassVar[bool] = False
    operators: ClassVar[Operators] = ()
    part: ClassVar[str] = ""

    @property
    def title(self) -> str:
        """Its name, with what is behind it: a version, for one."""
        return self.name

    @abstractmethod
    def refusal(self, need: KernelRequest) -> str | None:
        """Why it cannot do what is asked for; None if it can.

        Args:
            need: What a layer asks for. The same answer holds for all of its slices.
        """

    def takes(self, seen: Visibility) -> bool:
        """Whether it can do a slice that sees this. Another kernel does the others.

        Args:
            seen: What the slice sees.
        """
        return True

    def pays(self, q: Tensor, seen: Visibility) -> bool:
        """Whether it is worth its costs.

        Args:
            q: The slice's queries.
            seen: What they see.
        """
        return True

    @abstractmethod
    def forward(self, q: Tensor, store: KeyValueStore, seen: Visibility, scores: Scores) -> tuple[Tensor, Tensor]:
        """Computes the attention of one slice.

        Args:
            q: The slice's queries.
            store: Holds keys and values up to the end of the slice.
            seen: Which of them each query sees.
            scores: How scores are made.

        Returns:
            The output, of the shape of ``q``, and the log-sum-exp of each row.
        """

    @abstractmethod
    def backward(
        self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, store: KeyValueStore, seen: Visibility, scores: Scores
    ) -> Iterator[Gradients]:
        """Computes all gradients of one slice, in parts.

        Args:
            grad: The gradient of the output.
            q: The slice's queries.
            out: The slice's output, of whole rows, with sinks if there are any.
            lse: Its log-sum-exps, likewise. Weights are exp(score - lse), so a kernel must use these, not its own.
            store: Holds keys and values up to the end of the slice.
            seen: Which of them each query sees.
            scores: How scores are made.
        """


# Kernels of blocks


class BlockKernel(Kernel):
    """A kernel that knows rectangles and causal squares. A subclass computes one block; this class merges them.

    Attributes:
        largest: Rows and keys of a block at most, where more would take too much memory.
    """

    largest: tuple[int, int] | None = None

    @abstractmethod
    def block(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scores: Scores) -> tuple[Tensor, Tensor]:
        """Computes one block.

        Args:
            q: Some rows of the slice.
            k: Consecutive keys, of which the rows see all, or with ``causal`` row ``t`` those up to ``t``.
            v: Their values.
            causal: Only for squares, with as many rows as keys.
            scores: How scores are made.

        Returns:
            Output and log-sum-exp as if there were no other keys.
        """

    @abstractmethod
    def block_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scores: Scores
    ) -> Three:
        """Computes the gradients of q, k and v of one block.

        Args:
            grad: The gradient of the rows' output.
            q: Some rows of the slice.
            k: Consecutive keys.
            v: Their values.
            out: The output of whole rows, which the block is a part of.
            lse: Their log-sum-exps. So exp(score - lse) is a key's weight among all keys, and the gradients are this
                block's part of the whole ones.
            causal: As in ``block``.
            scores: How scores are made.
        """

    def forward(self, q: Tensor, store: KeyValueStore, seen: Visibility, scores: Scores) -> tuple[Tensor, Tensor]:
        merged = _Merged(q)
        for block in seen.blocks(self.largest):
            at = (block.sequences, EVERY, block.rows)
            rows, keys, values = _flip(block, q[at], *store.read(block.sequences, block.keys))
            out, lse = self.block(rows, keys, values, block.shape != "full", scores)
            (out,), (lse,) = _flip(block, out), _flip(block, lse)
            merged.add(out, lse, at)
        return merged.result(q.dtype)

    def backward(
        self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, store: KeyValueStore, seen: Visibility, scores: Scores
    ) -> Iterator[Gradients]:
        for block in seen.blocks(self.largest):
            at = (block.sequences, EVERY, block.rows)
            keys = store.read(block.sequences, block.keys)
            dout, rows, k, v, o, s = _flip(block, grad[at], q[at], *keys, out[at], lse[at])
            gradients = self.block_backward(dout, rows, k, v, o, s, block.shape != "full", scores)
            dq, dk, dv = _flip(block, *gradients)
            yield Gradients(block.rows, dq, block.keys, dk, dv, block.sequences)


def _flip(block: Block, *tensors: Tensor) -> tuple[Tensor, ...]:
    """An upper triangle read backwards, rows and keys, is a lower one, which causal kernels know::

    x x x                 x
      x x    backwards    x x
        x                 x x x
    """
    return tuple(x.flip(2) for x in tensors) if block.shape == "upper" else tensors


class _Merged:
    """Outputs of several blocks, some of which concern the same rows.

    A new block's share of a row is exp(lse_new) / (exp(lse_old) + exp(lse_new)) = sigmoid(lse_new - lse_old): computed
    so, no exponential overflows. A first block that has all rows is taken as it is; what is merged is in float32 or
    wider.
    """

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._wide = torch.promote_types(q.dtype, torch.float32)
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, out: Tensor, lse: Tensor, at: tuple[slice, ...]) -> None:
        """Merges one block.

        Args:
            out: Its output.
            lse: Its log-sum-exps.
            at: Its place in the slice: sequences, all heads, rows.
        """
        whole = out.shape == self._q.shape
        if self._out is None and whole:
            self._out, self._lse = out, lse
            return
        if self._out is None or self._lse is None:
            self._out = torch.zeros_like(self._q, dtype=self._wide)
            self._lse = lse.new_full(self._q.shape[:3], -torch.inf)
        self._out = self._out.to(self._wide)
        share = torch.sigmoid(lse - self._lse[at]).unsqueeze(-1).to(self._wide)
        total = torch.logaddexp(self._lse[at], lse)
        if whole:
            self._out, self._lse = torch.lerp(self._out, out.to(self._wide), share), total
        else:
            self._out[at], self._lse[at] = torch.lerp(self._out[at], out.to(self._wide), share), total

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        assert self._out is not None and self._lse is not None
        return self._out.to(dtype), self._lse


class Plain(BlockKernel):
    """Written out with matrix products: any device, dtype and head size, and softcaps; slower. It is the last one of
    every table, so that there is always a kernel."""

    name = "plain"
    by_heads = True
    largest = (512, 1024)

    @classmethod
    def workspace(cls) -> int:
        """Bytes of the matrices of one head and sequence that a backward holds at once."""
        rows, keys = cls.largest
        return 5 * rows * keys * torch.float32.itemsize

    def refusal(self, need: KernelRequest) -> str | None:
        return None

    def block(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scores: Scores) -> tuple[Tensor, Tensor]:
        products = self._scores(q, k, causal, scores)[0]
        lse = products.logsumexp(-1)
        weights = (products - lse.unsqueeze(-1)).exp()
        return (weights @ _spread(v, q).to(weights.dtype)).to(q.dtype), lse

    def block_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scores: Scores
    ) -> Three:
        """With weights P = exp(S - lse), as in FlashAttention's backward::

            dV = P^T dO        dP = dO V^T        dS = P * (dP - rowsum(dO * O))        dQ = dS K        dK = dS^T Q

        ``rowsum(dO * O)`` is that of whole rows: a block's own would be wrong, because its weights do not add up to 1.
        """
        products, slope = self._scores(q, k, causal, scores)
        weights = (products - lse.unsqueeze(-1)).exp()
        wide = weights.dtype
        dout = grad.to(wide)
        dweights = dout @ _spread(v, q).to(wide).transpose(-1, -2)
        dscores = weights * (dweights - (dout * out.to(wide)).sum(-1, keepdim=True)) * slope
        dq = dscores @ _spread(k, q).to(wide)
        dk = _gather(dscores.transpose(-1, -2) @ q.to(wide), k)
        dv = _gather(weights.transpose(-1, -2) @ dout, v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _scores(self, q: Tensor, k: Tensor, causal: bool, scores: Scores) -> tuple[Tensor, Tensor | float]:
        """The scores, in float32 or wider, and the derivative of each with respect to its product of query and key."""
        wide = torch.promote_types(q.dtype, torch.float32)
        products = (q.to(wide) @ _spread(k, q).to(wide).transpose(-1, -2)) * scores.scale
        slope: Tensor | float = scores.scale
        if scores.softcap is not None:
            bent = torch.tanh(products / scores.softcap)
            products, slope = bent * scores.softcap, scores.scale * (1 - bent**2)
        if causal:
            hidden = torch.ones(products.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            products = products.masked_fill(hidden, -math.inf)
        return products, slope


def _spread(x: Tensor, q: Tensor) -> Tensor:
    """Repeats the heads of keys or values so that there are as many as of queries."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _gather(grad: Tensor, x: Tensor) -> Tensor:
    """The reverse for gradients: sums those of the repeated heads."""
    if grad.shape[1] == x.shape[1]:
        return grad
    batch, _, *rest = grad.shape
    return grad.reshape(batch, x.shape[1], -1, *rest).sum(2)


class CpuFlash(BlockKernel):
    """torch's FlashAttention for CPUs. Its causal mask begins at the first key, so a slice behind others takes two
    blocks."""

    name = "flash for CPUs"
    operators = (
        ("_scaled_dot_product_flash_attention_for_cpu", "query key value dropout_p is_causal attn_mask scale"),
        (
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale",
        ),
    )

    def refusal(self, need: KernelRequest) -> str | None:
        if need.dtype not in (torch.float64, torch.float32, torch.bfloat16):
            return f"no {need.dtype}"
        return "no softcap" if need.softcap else None

    def block(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scores: Scores) -> tuple[Tensor, Tensor]:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scores.scale)
        return out, lse

    def block_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scores: Scores
    ) -> Three:
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scores.scale
        )
        return dq, dk, dv


class Cudnn(BlockKernel):
    """cuDNN's attention, which torch itself prefers on Hopper and Blackwell. Its causal mask begins at the first key
    (top left), so a slice behind others takes two calls: all of what is before it, unmasked, and itself, causal."""

    name = "cudnn"
    # cuDNN has a plan for each shape, which takes it a tenth of a second or more to make. What sees documents, chunks
    # or windows has other shapes with every slice or batch, and FlashAttention does it in one call.
    MOST_SHAPES = 128
    # Two calls and the merge of their results keep the host busy about 0.15 ms longer than one call of FlashAttention,
    # which on an H100 takes 0.25 ms for so many multiplications and additions. An estimate: nobody has measured it.
    LEAST_WORK = 1e11
    part = "long slices without windows and documents"
    operators: ClassVar[Operators] = (
        (
            "_scaled_dot_product_cudnn_attention",
            "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale",
        ),
        (
            "_scaled_dot_product_cudnn_attention_backward",
            "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q "
            "max_k dropout_p is_causal scale",
        ),
    )

    def __init__(self) -> None:
        self._shapes: set[tuple[torch.Size, int]] = set()

    def refusal(self, need: KernelRequest) -> str | None:
        if need.dtype not in HALF:
            return "half precision only"
        if need.softcap or need.window or need.segments:
            return "no softcaps, windows, documents and chunks"
        if need.head_size % 16:  # which other kernels of the table need not pad: they share a layer's keys with it
            return "heads of multiples of 16"
        return cudnn_refusal(need[:3], Settings.now(need.device))

    def takes(self, seen: Visibility) -> bool:
        """No slice of one token, and none behind one token: cuDNN knows no rectangle with a single key."""
        return seen.length > 1 and seen.context != 1  # no single key

    def pays(self, q: Tensor, seen: Visibility) -> bool:
        """Whether it has work enough for two calls, and a shape that cuDNN has a plan for or may still make one for."""
        if 4 * q.numel() * (seen.context + seen.length / 2) < self.LEAST_WORK:
            return False
        shape = (q.shape, seen.context)
        if shape not in self._shapes and len(self._shapes) < self.MOST_SHAPES:
            self._shapes.add(shape)
        return shape in self._shapes

    def block(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scores: Scores) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scores.scale
        )
        return out, lse.view(q.shape[:3])

    def block_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scores: Scores
    ) -> Three:
        # torch looks plans up by the layouts of queries, keys and values alone: a plan that was made for another layout
        # of outputs and their gradients would read these wrongly. Log-sum-exps are read as if they were contiguous.
        dout, o = (x if x.stride() == q.stride() else torch.empty_like(q).copy_(x) for x in (grad, out))
        none = torch.empty((), dtype=torch.int64, device=q.device)  # the generator's state, for dropout
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, o, lse.contiguous().unsqueeze(-1), none, none, None, None, None, q.shape[2], k.shape[2], 0.0,
            causal, scale=scores.scale,
        )  # fmt: skip
        return dq, dk, dv


@cache
def cudnn_refusal(asked: tuple[torch.device, torch.dtype, int], settings: Settings) -> str | None:
    """Why torch itself would not take cuDNN for plain attention here: it knows which versions are wrong or slow for
    which GPUs.

    Asked in a thread of its own, as self-tests are.

    Args:
        asked: Device, dtype and head size.
        settings: Those of torch now, by which the answer is remembered.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_ask_torch, *asked).result()


def _ask_torch(device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    torch.cuda.set_device(device)
    q, k = (torch.empty(1, heads, 256, head_size, dtype=dtype, device=device) for heads in (2, 1))
    chosen = torch._fused_sdp_choice(q, k, k, None, 0.0, True, enable_gqa=True)
    if chosen == SDPBackend.CUDNN_ATTENTION.value:
        return None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        able = torch.backends.cuda.can_use_cudnn_attention(SDPAParams(q, k, k, None, 0.0, True, True), debug=True)
    if able:
        return "torch prefers another on this GPU"
    reasons = [str(each.message).partition(" (Triggered")[0] for each in said]
    return "torch does not take it: " + ("; ".join(reasons) or "it does not say why")


class Efficient(BlockKernel):
    """Memory-efficient attention: float32, and half precision on GPUs that are too old for FlashAttention. It wants as
    many heads of keys as of queries: those that share keys are made one batch, and their keys repeated by a stride."""

    name = "memory-efficient"
    by_heads = True
    head_multiple = 8  # any alignment that one of its variants asks for
    operators = (
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

    def refusal(self, need: KernelRequest) -> str | None:
        if need.dtype not in (torch.float32, *HALF):
            return f"no {need.dtype}"
        if need.dtype is torch.bfloat16 and torch.cuda.get_device_capability(need.device) < (8, 0):
            return "bfloat16 needs compute capability 8.0"
        return "no softcap" if need.softcap else None

    def block(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scores: Scores) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            *_group_heads(q, k, v), None, True, 0.0, causal, scale=scores.scale
        )
        return out.reshape(q.shape), lse.narrow(-1, 0, q.shape[2]).unflatten(0, (q.shape[0], -1)).flatten(1, 2)

    def block_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scores: Scores
    ) -> Three:
        rows, keys, values = _group_heads(q, k, v)
        dout, o = (_as_rows(x.reshape(rows.shape)) for x in (grad, out))
        padded = F.pad(lse.reshape(rows.shape[:3]), (0, -lse.shape[-1] % 32))  # it reads whole blocks of 32 rows
        none = torch.empty((), dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            dout, rows, keys, values, None, o, padded, none, none, 0.0, [True, True, True, False], causal,
            scale=scores.scale,
        )  # fmt: skip
        return dq.reshape(q.shape), dk.sum(1).view(k.shape), dv.sum(1).view(v.shape)


def _group_heads(q: Tensor, k: Tensor, v: Tensor) -> Three:
    """(batch, heads, ...) as (batch * heads of keys, queries that share one, ...)."""
    batch, heads, group = q.shape[0], k.shape[1], q.shape[1] // k.shape[1]
    rows = q.reshape(batch * heads, group, *q.shape[2:])
    keys, values = (x.flatten(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for x in (k, v))
    return rows, keys, values


def _as_rows(x: Tensor) -> Tensor:
    """The same numbers, lying as (batch, tokens, heads, head size): in half precision the kernel takes that for
    granted."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
