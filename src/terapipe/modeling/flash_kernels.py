"""Kernels that take a whole slice in one call: queries of the slice against all keys up to its end.

Their causal mask is aligned at the lower right, so the last query sees the last key: that *is* the slice. Tokens 4 to 7
of a sequence::

    keys     0 1 2 3 4 5 6 7
    token 4  x x x x x          as many keys as the sequence has so far, as many queries as the slice has:
    token 5  x x x x x x        the mask of is_causal, aligned at the lower right, is what a slice sees
    token 6  x x x x x x x
    token 7  x x x x x x x x    (aligned at the upper left, token 4 would see key 0 only: torch's other kernels do that)

A window is an argument; documents and chunks are segments of variable length. Output and log-sum-exp are those of whole
rows: there is nothing to merge, unlike in kernels.py.

Nobody but this file and kernels.py calls operators of attention that torch keeps private. What they must do is tested
before they are used, see kernel_choice.py.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from terapipe.modeling.kernels import (
    HALF,
    Gradients,
    Kernel,
    KernelRequest,
    Operators,
    Scores,
    active_flash,
    aten,
    is_deterministic,
)
from terapipe.modeling.key_values import KeyValueStore
from terapipe.modeling.slice_cache import on_device
from terapipe.modeling.visibility import EVERY, Segment, Visibility

LONGEST_HEAD = 256
MOST_GRAPHS = 64  # of FlexAttention in one process


class _Ragged(NamedTuple):
    """Segments that follow each other in one sequence, as FlashAttention's variable-length calls take them.

    A segment's queries are those from its entry of ``queries`` to the next entry, and its keys likewise. The first
    segment of a slice may have more keys than queries: its document began in an earlier slice. A slice of tokens 4 to 7
    with a document that begins at token 6::

        document 0 .. 5      queries 0, 1 of the slice    keys 0 .. 5      queries = [0, 2, 4]
        document 6 ..        queries 2, 3 of the slice    keys 6, 7        keys    = [0, 6, 8]

    Attributes:
        queries: Where the queries of each segment begin, and the end, as int32 on the device.
        keys: The same for keys, counted from the first key that is read.
        longest_queries: Queries of the longest segment, by which the kernel lays out its work.
        longest_keys: Keys of the segment that has most.
    """

    queries: Tensor
    keys: Tensor
    longest_queries: int
    longest_keys: int


class _Part(NamedTuple):
    """What one call of a kernel is about.

    Attributes:
        sequences: Those of the microbatch.
        keys: Tokens of the sequence whose keys and values are read.
        ragged: Segments, if there are several in a sequence. None for one causal rectangle.
    """

    sequences: slice
    keys: slice
    ragged: _Ragged | None


def _parts(seen: Visibility, sequences: int, device: torch.device) -> list[_Part]:
    """The calls that a slice takes: one for all sequences if each is one segment, else one for each sequence.

    It is the same for all layers with the same window, so it is made once, with its tensors on the device. Otherwise
    the host would copy lengths to the GPU for every layer.
    """
    key = ("flash", sequences, device)
    if key not in seen.memo:
        seen.memo[key] = list(_make_parts(seen, sequences, device))
    parts: list[_Part] = seen.memo[key]
    return parts


def _make_parts(seen: Visibility, sequences: int, device: torch.device) -> Iterator[_Part]:
    """Segments that differ between sequences take a call for each sequence: the ragged form packs segments one behind
    the other, and a sequence's keys lie apart from those of the next, in a store with room for later slices."""
    if seen.is_one_segment:
        yield _Part(EVERY, slice(seen.segments[0].first_key(seen.window), seen.end), None)
        return
    by_starts: dict[tuple[int, ...], tuple[int, _Ragged]] = {}  # by where segments begin: rows that agree share tensors
    for row in range(sequences):
        segments = [s for s in seen.segments if s.sequences in (EVERY, slice(row, row + 1))]
        starts = tuple(s.start for s in segments)
        if starts not in by_starts:
            first = segments[0].first_key(seen.window)
            by_starts[starts] = first, _make_ragged(segments, seen, first, device)
        first, ragged = by_starts[starts]
        yield _Part(slice(row, row + 1), slice(first, seen.end), ragged)


def _make_ragged(segments: list[Segment], seen: Visibility, first: int, device: torch.device) -> _Ragged:
    """The segments of one sequence.

    Args:
        segments: In order, without gaps: the slice's tokens belong to them one after the other.
        seen: What the slice sees.
        first: The first key that is read; keys count from it.
        device: Where the kernel runs.
    """
    queries = [0, *(s.last - seen.context for s in segments)]
    keys = [0, *(s.last - first for s in segments)]
    longest = (max(b - a for a, b in pairwise(edges)) for edges in (queries, keys))
    both = on_device(torch.tensor([queries, keys], dtype=torch.int32), device)
    return _Ragged(both[0], both[1], *longest)


class Flash(Kernel):
    """FlashAttention as torch ships it.

    ``torch.nn.attention.activate_flash_attention_impl`` puts later versions of it behind the same operators. ``title``
    names the version, and a self-test's result holds for that version alone.
    """

    name = "flash"
    head_multiple = 8
    operators: ClassVar[Operators] = (
        (
            "_flash_attention_forward",
            "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask scale "
            "window_size_left window_size_right",
        ),
        (
            "_flash_attention_backward",
            "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal rng_state "
            "unused scale window_size_left window_size_right",
        ),
    )

    @property
    def title(self) -> str:
        version = active_flash()
        return f"{self.name} ({version})" if version else self.name

    def refusal(self, need: KernelRequest) -> str | None:
        if need.dtype not in HALF:
            return "half precision only"
        if need.head_size > LONGEST_HEAD:
            return f"heads of at most {LONGEST_HEAD}"
        if torch.cuda.get_device_capability(need.device) < (8, 0):
            return "needs compute capability 8.0"
        return "no softcap" if need.softcap else None

    def forward(self, q: Tensor, store: KeyValueStore, seen: Visibility, scores: Scores) -> tuple[Tensor, Tensor]:
        """As ``Kernel.forward``. Keys and values are read out of the store without a copy, as views of (batch, tokens,
        heads, size)."""
        outs, sums = [], []
        for part in _parts(seen, q.shape[0], q.device):
            keys, values = store.read(part.sequences, part.keys)
            rows, keys, values = _to_flash_layout(part, q[part.sequences], keys, values)
            out, lse = self._run(rows, keys, values, part.ragged, seen.window, scores)
            outs.append(_from_flash_layout(part, out))
            sums.append(lse if part.ragged is None else lse[None])
        return (outs[0], sums[0]) if len(outs) == 1 else (torch.cat(outs), torch.cat(sums))

    def backward(
        self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, store: KeyValueStore, seen: Visibility, scores: Scores
    ) -> Iterator[Gradients]:
        """Yields one part of ``Kernel.backward`` for each call of the forward."""
        for part in _parts(seen, q.shape[0], q.device):
            at = part.sequences
            dout, rows, k, v, o = _to_flash_layout(part, grad[at], q[at], *store.read(at, part.keys), out[at])
            # The kernel reads it as it lies in memory, whatever its strides.
            sums = (lse if part.ragged is None else lse[at][0]).contiguous()
            gradients = self._run_backward(dout, rows, k, v, o, sums, part.ragged, seen.window, scores)
            dq, dk, dv = (_from_flash_layout(part, x) for x in gradients)
            yield Gradients(slice(0, seen.length), dq, part.keys, dk, dv, at)

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, ragged: _Ragged | None, window: int | None, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Tensors are (batch, tokens, heads, size), or without the batch where they are ragged."""
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, *_lengths(q, k, ragged), 0.0, True, False, scale=scores.scale, **_window(window)
        )
        return out, lse

    def _run_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        ragged: _Ragged | None,
        window: int | None,
        scores: Scores,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, laid out as these are. ``out`` and ``lse`` may come from outside: with sinks,
        ``lse`` has one more term than the forward of the kernel knew, and the gradients are right nevertheless, because
        the backward computes weights as exp(score - lse)."""
        # The state of the generator for dropout: there is none, but the operator wants a place to read it from.
        state = torch.empty(2, dtype=torch.uint64, device=q.device)
        gradients: tuple[Tensor, Tensor, Tensor] = aten._flash_attention_backward(
            grad, q, k, v, out, lse, *_lengths(q, k, ragged), 0.0, True, state, state[0], scale=scores.scale,
            **_window(window),
        )  # fmt: skip
        return gradients


def _lengths(q: Tensor, k: Tensor, ragged: _Ragged | None) -> tuple[Tensor | None, Tensor | None, int, int]:
    """The four arguments that say where segments lie. None, not an empty tensor: whether it is there decides between
    the dense and the ragged form."""
    return (None, None, q.shape[1], k.shape[1]) if ragged is None else ragged


def _window(window: int | None) -> dict[str, int]:
    """FlashAttention counts the tokens to the left of a token, without itself; -1 is all of them."""
    return {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}


def _to_flash_layout(part: _Part, *tensors: Tensor) -> tuple[Tensor, ...]:
    """From (batch, heads, tokens, size) to (batch, tokens, heads, size), or without the batch if the part is ragged. A
    view: nothing is copied."""
    turned = (x.transpose(1, 2) for x in tensors)
    return tuple(turned) if part.ragged is None else tuple(x[0] for x in turned)


def _from_flash_layout(part: _Part, x: Tensor) -> Tensor:
    """The reverse of ``_to_flash_layout``, for one tensor."""
    return (x if part.ragged is None else x[None]).transpose(1, 2)


class FlashAttnPackage(Flash):
    """The package flash-attn, version 2.7 or newer, which also has softcaps. It is used if it is installed.

    It differs from ``Flash`` in the functions it calls, and in nothing else: layouts, segments and log-sum-exps are the
    same.
    """

    name = "flash-attn"
    operators: ClassVar[Operators] = ()

    @property
    def title(self) -> str:
        return self.name

    def refusal(self, need: KernelRequest) -> str | None:
        if reason := super().refusal(need._replace(softcap=False)):
            return reason
        if need.sinks and need.softcap:
            return "no sinks with a softcap"  # the order of the two is not defined by any model that we know
        return package_fault()

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, ragged: _Ragged | None, window: int | None, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        package, common = _package(), {**_common(window, scores), "return_softmax": False}
        if ragged is None:
            out, lse, *_ = package._flash_attn_forward(q, k, v, **common)
        else:
            out, lse, *_ = package._flash_attn_varlen_forward(q, k, v, *ragged, **common)
        return out, lse

    def _run_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        ragged: _Ragged | None,
        window: int | None,
        scores: Scores,
    ) -> tuple[Tensor, Tensor, Tensor]:
        package, common = _package(), {**_common(window, scores), "deterministic": is_deterministic()}
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        if ragged is None:
            package._flash_attn_backward(grad, q, k, v, out, lse, dq, dk, dv, **common)
        else:
            package._flash_attn_varlen_backward(grad, q, k, v, out, lse, dq, dk, dv, *ragged, **common)
        return dq, dk, dv


def _common(window: int | None, scores: Scores) -> dict[str, Any]:
    """The arguments that forward and backward of the package share."""
    return {
        "dropout_p": 0.0,
        "softmax_scale": scores.scale,
        "causal": True,
        "softcap": scores.softcap or 0.0,
        "alibi_slopes": None,
        **_window(window),
    }


def _package() -> Any:
    """Imported here, not at the top: the package is optional."""
    from flash_attn import flash_attn_interface  # type: ignore[import-not-found]

    return flash_attn_interface


@cache
def package_fault() -> str | None:
    """Why the installed package cannot be used; None if it can. Its functions are private, so their arguments are
    looked at."""
    try:
        package = _package()
    except ImportError:
        return "the package flash-attn is not installed"
    wanted = {"softcap", "window_size_left", "softmax_scale"}
    for name in ("forward", "varlen_forward", "backward", "varlen_backward"):
        function = getattr(package, f"_flash_attn_{name}", None)
        function = getattr(function, "_init_fn", function)  # a torch.library custom op wraps it
        if function is None or not wanted <= set(inspect.signature(function).parameters):
            return f"the installed flash-attn has another _flash_attn_{name}; version 2.7 or newer is needed"
    return None


class Flex(Kernel):
    """FlexAttention, compiled: softcaps and heads of any size.

    The backward computes the forward again, so it needs no output and log-sum-exp from outside, and takes none: that is
    why it has no sinks, which the kernel's own log-sum-exp does not know. In the table it comes behind kernels that
    need no compiler.

    Args:
        backend: The compiler; None computes it uncompiled, with whole matrices of scores, for tests.
    """

    name = "flex"
    head_multiple = 16
    BLOCK = 128  # rows and keys of a block, of which the kernel skips those that nobody sees

    def __init__(self, backend: str | Callable[..., Any] | None = "inductor") -> None:
        self._backend = backend

    def refusal(self, need: KernelRequest) -> str | None:
        if need.dtype not in (torch.float32, *HALF):
            return f"no {need.dtype}"
        if need.sinks:
            return "no sinks"
        return "needs triton" if self._backend == "inductor" and not _has_triton() else None

    def forward(self, q: Tensor, store: KeyValueStore, seen: Visibility, scores: Scores) -> tuple[Tensor, Tensor]:
        """As ``Kernel.forward``. Nothing is recorded for autograd: the backward computes it again."""
        with torch.no_grad():
            # Without their history, which torch would compile another graph for.
            out, lse = self._run(q.detach(), *store.read(EVERY, self._keys(seen)), seen, scores)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, store: KeyValueStore, seen: Visibility, scores: Scores
    ) -> Iterator[Gradients]:
        """As ``Kernel.backward``, in one part. ``out`` and ``lse`` are not looked at: the forward is computed again."""
        keys = self._keys(seen)
        inputs = [x.detach().requires_grad_() for x in (q, *store.read(EVERY, keys))]
        with torch.enable_grad():
            again, _ = self._run(inputs[0], inputs[1], inputs[2], seen, scores)
        dq, dk, dv = torch.autograd.grad(again, inputs, grad)
        yield Gradients(slice(0, seen.length), dq, keys, dk, dv)

    @staticmethod
    def _keys(seen: Visibility) -> slice:
        """From the oldest key that any token of the slice sees. Of layers with a window, older keys are not read."""
        return slice(min(s.first_key(seen.window) for s in seen.segments), seen.end)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, seen: Visibility, scores: Scores) -> Any:
        """Output and log-sum-exp of all rows. ``enable_gqa`` repeats the heads of keys where queries have more."""
        from torch.nn.attention.flex_attention import AuxRequest

        attention = _flex_attention(self._backend)
        out, aux = attention(
            q, k, v, score_mod=_softcap(scores.softcap), block_mask=self._mask(q, seen), scale=scores.scale,
            enable_gqa=q.shape[1] != k.shape[1], return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        return out, aux.lse

    def _mask(self, q: Tensor, seen: Visibility) -> Any:
        """Made once for all layers that see the same; it holds tensors on the device."""
        key = ("flex", q.shape[0], q.device)
        if key not in seen.memo:
            seen.memo[key] = _block_mask(seen, q.shape[0], self._keys(seen), q.device, self.BLOCK)
        return seen.memo[key]


def _has_triton() -> bool:
    """Without triton, torch's compiler has no kernels for GPUs."""
    from torch.utils._triton import has_triton

    return has_triton()


@cache
def _flex_attention(backend: str | Callable[..., Any] | None) -> Callable[..., Any]:
    """FlexAttention, compiled for shapes that vary, in one piece: what cannot be compiled so must raise, or torch would
    compute whole matrices of scores.

    Shapes need a few graphs (one row or several, the same number of keys or more, with gradients or without), which are
    more than torch allows by default. Numbers such as a softcap are parts of a graph: as variables torch cannot
    differentiate them.
    """
    from torch.nn.attention.flex_attention import flex_attention

    if backend is None:
        return flex_attention
    compiled = torch.compile(flex_attention, backend=backend, dynamic=True, fullgraph=True)

    def attention(*args: Any, **kwargs: Any) -> Any:
        limit = max(MOST_GRAPHS, torch._dynamo.config.recompile_limit)
        with torch._dynamo.config.patch(specialize_float=True, recompile_limit=limit):
            return compiled(*args, **kwargs)

    return attention


@cache
def _softcap(limit: float | None) -> Callable[..., Tensor] | None:
    """The change of scores that ``flex_attention`` takes. Cached: torch compiles again for every new function."""
    if limit is None:
        return None
    return lambda score, b, h, i, j: limit * torch.tanh(score / limit)


def _block_mask(seen: Visibility, sequences: int, keys: slice, device: torch.device, size: int) -> Any:
    """Which blocks are seen in whole, in part or not at all, computed from the segments: a mask is never made.

    torch's own ``create_block_mask`` evaluates the mask for every row and key, which takes memory that grows with their
    product. Here two numbers for each token, its oldest and newest visible key, are enough. They are also what the
    kernel compares in blocks that are seen in part.

    Args:
        seen: What the slice sees.
        sequences: Those of the microbatch.
        keys: Tokens of the sequence that are read; the mask's columns count from its start.
        device: Where the kernel runs.
        size: Rows and keys of a block.
    """
    from torch.nn.attention.flex_attention import BlockMask

    oldest = np.empty((sequences, seen.length), dtype=np.int64)  # key that each token sees
    for segment in seen.segments:
        places = np.arange(segment.first, segment.last)
        first = segment.start if seen.window is None else np.maximum(segment.start, places - seen.window + 1)
        oldest[segment.sequences, segment.first - seen.context : segment.last - seen.context] = first
    newest = np.arange(seen.context, seen.end)
    oldest, newest = oldest - keys.start, newest - keys.start
    tables = [torch.from_numpy(x)[:, None] for x in _tables(oldest, newest, keys.stop - keys.start, size)]
    partly, which, wholly, whole = (on_device(x, device) for x in tables)
    low, high = on_device(torch.from_numpy(oldest), device), on_device(torch.from_numpy(newest), device)
    return BlockMask.from_kv_blocks(
        partly,
        which,
        wholly,
        whole,
        BLOCK_SIZE=size,
        mask_mod=lambda b, h, i, j: (j >= low[b, i]) & (j <= high[i]),
        seq_lengths=(seen.length, keys.stop - keys.start),
    )


def _tables(oldest: Any, newest: Any, keys: int, size: int) -> list[Any]:
    """For each sequence and block of rows: how many blocks of keys are seen in part, and which; then those in whole.

    ::

        keys that some row sees       |<------------------------------------------->|
        keys that every row sees                |<---------------------->|
        blocks of keys           skip   | part  | part  | whole | whole | part  |     skip

    A block is seen in whole if every row's oldest key is at or before its first, and every row's newest at or behind
    its last. The last block of rows may have fewer rows than ``size``; it counts as seen in part, so that the kernel
    compares.

    Args:
        oldest: (sequences, rows), the oldest key that each row sees.
        newest: (rows,), the newest.
        keys: The number of keys.
        size: Rows and keys of a block.
    """
    rows, columns = -(-len(newest) // size), -(-keys // size)
    shape = (len(oldest), rows)
    counts = np.zeros((2, *shape), dtype=np.int32)
    indices = np.zeros((2, *shape, columns), dtype=np.int32)
    for sequence, row in np.ndindex(*shape):
        at = slice(row * size, (row + 1) * size)
        low, high = oldest[sequence, at], newest[at]
        for column in range(low.min() // size, high.max() // size + 1):
            whole = low.max() <= column * size and min((column + 1) * size, keys) - 1 <= high.min()
            kind = int(whole and (row + 1) * size <= len(newest))
            indices[kind, sequence, row, counts[kind, sequence, row]] = column
            counts[kind, sequence, row] += 1
    return [counts[0], indices[0], counts[1], indices[1]]
