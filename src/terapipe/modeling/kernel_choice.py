"""Which attention kernel computes a slice: the best one that can, and that has shown that it does.

torch's own kernels for slices have private names, whose arguments and meaning may change with any version. A kernel
that calls one is used only after it has shown, once for each device, dtype, head size and kind of call, that it
computes what this project relies on. The table's order is the order of preference::

    KernelRequest --> table ----------------> refusal ------------> self-test ---------> takes, pays --> kernel
    device, dtype,    in order of             what it cannot do     against float64      this very slice
    head size, ...    preference              by its own word       on the CPU

The self-test cuts a sequence into uneven slices and runs them as a pipeline does, forwards first, backwards last slice
first. So it covers keys and values read out of longer buffers, rows cut out of a slice, fewer heads of keys than of
queries, log-sum-exps from outside (sinks), windows, documents that differ between sequences, and chunks.
"""

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from terapipe.modeling.flash_kernels import Flash, FlashAttnPackage, Flex
from terapipe.modeling.kernels import (
    CpuFlash,
    Cudnn,
    Efficient,
    Kernel,
    KernelRequest,
    Plain,
    Settings,
    active_flash,
    aten,
    cudnn_refusal,
)
from terapipe.modeling.slice_cache import SliceCache
from terapipe.modeling.visibility import Visibility


def table(device_type: str) -> tuple[Kernel, ...]:
    """All kernels for a type of device, in order of preference.

    The last one can do everything. Those that compile come after those that need not.

    Args:
        device_type: "cpu", "cuda" or any other, for which there are plain products only.
    """
    # cuDNN is faster than FlashAttention 2; versions 3 and 4 are faster than cuDNN in two calls and a merge.
    torchs = (Flash, Cudnn) if device_type == "cuda" and active_flash() else (Cudnn, Flash)
    kinds: dict[str, tuple[type[Kernel], ...]] = {
        "cpu": (CpuFlash, Plain),
        "cuda": (*torchs, FlashAttnPackage, Efficient, Flex, Plain),
    }
    return tuple(_instance(kind) for kind in kinds.get(device_type, (Plain,)))


@cache
def _instance(kind: type[Kernel]) -> Kernel:
    """One object for each class: ``Cudnn`` remembers which shapes it has seen."""
    return kind()


class _Choice(NamedTuple):
    """A kernel, and why better ones were passed over.

    Attributes:
        kernel: The one to use.
        refused: Names of those before it in the table, each with its reason.
    """

    kernel: Kernel
    refused: tuple[tuple[str, str], ...]  # better ones, and why not


@cache
def _choice(need: KernelRequest, settings: Settings, after: Kernel | None) -> _Choice:
    """The first kernel that can do what is needed and passes its self-test.

    It is decided once for each request and settings, and then looked up: on a step this costs a hash.

    Args:
        need: What a layer asks for.
        settings: Those of torch, by which the answer is remembered.
        after: Only kernels behind this one are looked at.
    """
    kernels = table(need.device.type)
    *special, plain = kernels if after is None else kernels[kernels.index(after) + 1 :]
    refused: list[tuple[str, str]] = []
    for kernel in special:
        reason = kernel.refusal(need) or _fault_once(kernel, need, settings)
        if reason is None:
            return _Choice(kernel, tuple(refused))
        refused.append((kernel.title, reason))
    if need.device.type == "cuda" and need.dtype is not torch.float64:  # for which no GPU has another
        _warn_of_plain(need, refused)
    return _Choice(plain, tuple(refused))


def kernel_for(need: KernelRequest, after: Kernel | None = None) -> Kernel:
    """The best kernel for what a layer asks for.

    Args:
        need: What the layer asks for.
        after: A kernel that does not take the slice in question; the best one behind it is returned.
    """
    return _choice(need, Settings.now(need.device), after).kernel


def kernel_of(q: Tensor, seen: Visibility, need: KernelRequest) -> Kernel:
    """The best kernel for one slice: the best one for its layer that also takes, and pays for, this slice.

    Args:
        q: The slice's queries. Fake tensors have no numbers, so nothing is tested for them.
        seen: What the slice sees.
        need: What its layer asks for.
    """
    if isinstance(q, FakeTensor):  # which have no numbers, so nothing is tested for them
        able = (kernel for kernel in table(q.device.type) if kernel.refusal(need) is None)
        return next(kernel for kernel in able if kernel.takes(seen) and kernel.pays(q, seen))
    kernel = kernel_for(need)
    while not (kernel.takes(seen) and kernel.pays(q, seen)):
        kernel = kernel_for(need, kernel)
    return kernel


class KernelReport(NamedTuple):
    """Which kernels attention uses, and why better ones are not used. ``print`` it.

    Attributes:
        used: Names of kernels, each with the slices that it is used for in words; empty words mean all.
        refused: Names of better kernels, each with the reason.
    """

    used: tuple[tuple[str, str], ...]
    refused: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        used = ", ".join(f"{name} ({part})" if part else name for name, part in self.used)
        return "; ".join([used, *(f"{name} is not used: {why}" for name, why in self.refused)])


def kernel_report(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    *,
    softcap: bool = False,
    sinks: bool = False,
    window: bool = False,
    segments: bool = False,
) -> KernelReport:
    """What attention of this kind would use here. Runs self-tests that have not been run.

    Args:
        device: Where it would run.
        dtype: Of queries, keys and values.
        head_size: Of queries.
        softcap: Whether scores are limited by a tanh.
        sinks: Whether there is a score for a token without a value.
        window: Whether tokens see only some of those before them.
        segments: Whether documents or chunks begin inside of sequences.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    need = KernelRequest(device, dtype, head_size, softcap, sinks, window, segments)
    settings = Settings.now(device)
    used: list[tuple[str, str]] = []
    refused: list[tuple[str, str]] = []
    kernel: Kernel | None = None
    while kernel is None or kernel.part:
        kernel, others = _choice(need, settings, kernel)
        used.append((kernel.title, kernel.part or ("all others" if used else "")))
        refused.extend(others)
    return KernelReport(tuple(used), tuple(refused))


def forget() -> None:
    """Forgets which kernels were chosen and what their self-tests have shown. For tests, and after torch was
    patched."""
    for memory in (_choice, _fault_once, _instance, cudnn_refusal):
        memory.cache_clear()


def _warn_of_plain(need: KernelRequest, refused: list[tuple[str, str]]) -> None:
    """A GPU that multiplies whole matrices of scores is a surprise: it is told, with what kept others from being
    used."""
    size = Plain.workspace() >> 20
    warnings.warn(
        f"attention in {need.dtype} with heads of {need.head_size} uses plain matrix products, exact but slow, "
        f"which take up to {size} MiB for each head and sequence ({'; '.join(': '.join(each) for each in refused)})",
        RuntimeWarning,
        stacklevel=4,
    )


@cache
def _fault_once(kernel: Kernel, need: KernelRequest, settings: Settings) -> str | None:
    """What keeps a kernel from being trusted, told once; None if it can be.

    Args:
        kernel: One that says that it can do what is needed.
        need: What a layer asks for.
        settings: Those of torch now, by which the answer is remembered.
    """
    fault = changed_signature(kernel) or fault_of(kernel, need)
    if fault:
        warnings.warn(
            f"the attention kernel {kernel.title} is not used on {need.device.type} in {need.dtype}: {fault}. Use a "
            "version of torch that this release was tested with.",
            RuntimeWarning,
            stacklevel=5,
        )
    return fault


def changed_signature(kernel: Kernel) -> str | None:
    """Whether an operator takes other arguments than the kernel gives; None if it does not.

    Compared by name and order. Those that newer versions of torch add behind them have defaults, which change nothing.
    A changed meaning under the same names is what the self-test is for.
    """
    for name, expected in kernel.operators:
        operator = getattr(aten, name, None)
        if operator is None:
            return f"torch {torch.__version__} has no aten::{name}"
        arguments, first = operator.default._schema.arguments, expected.split()
        names = [argument.name for argument in arguments]
        more = [argument.name for argument in arguments[len(first) :] if not argument.has_default_value()]
        if names[: len(first)] != first or more:
            return f"aten::{name} of torch {torch.__version__} takes ({' '.join(names)}), expected ({expected})"
    return None


# Self-tests


SEQUENCES, HEADS, KV_HEADS = 2, 4, 2
CUTS = (0, 11, 12, 29, 40)  # slices of 11, 1, 17 and 11 tokens
SCALE = 0.3
# Largest error relative to the largest value. Half precision rounds every product; TF32 is allowed for float32.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-3, torch.bfloat16: 3e-2, torch.float16: 5e-3}
FLOAT32 = 1e-5  # where TF32 does not exist


class Case(NamedTuple):
    """One self-test: what attention is asked for, over the made-up sequences.

    Attributes:
        name: For messages.
        window: Tokens that a token sees at most.
        chunk: Tokens of a chunk.
        documents: Where documents begin in each sequence.
        sinks: Whether there are sinks.
        softcap: The limit of scores.
    """

    name: str
    window: int | None = None
    chunk: int | None = None
    documents: tuple[tuple[int, ...], ...] = ()
    sinks: bool = False
    softcap: float | None = None

    def need(self, device: torch.device, dtype: torch.dtype, head_size: int) -> KernelRequest:
        """What this case asks of a kernel. The cases that equal a layer's request are those that are run for it."""
        segments = self.chunk is not None or bool(self.documents)
        return KernelRequest(
            device, dtype, head_size, self.softcap is not None, self.sinks, self.window is not None, segments
        )


DOCUMENTS = ((0, 5, 12, 30), (0, 17))


CASES = (
    Case("causal"),
    Case("window", window=7),
    Case("chunks", chunk=9),
    Case("documents", documents=DOCUMENTS),
    Case("documents and window", window=6, documents=DOCUMENTS),
    Case("sinks", sinks=True),
    Case("sinks and window", window=9, sinks=True),
    Case("sinks and documents", documents=DOCUMENTS, sinks=True),
    Case("sinks, window and documents", window=6, documents=DOCUMENTS, sinks=True),
    Case("softcap", softcap=1.5),
    Case("softcap and window", window=7, softcap=1.5),
    Case("softcap and documents", documents=((0, 8), (0, 17)), softcap=1.5),
    Case("softcap, window and documents", window=6, softcap=1.5, documents=((0, 8), (0, 17))),
)


def fault_of(kernel: Kernel, need: KernelRequest) -> str | None:
    """What a kernel does wrong of what is needed, and of nothing else: kernels that are compiled take long for each
    case.

    It runs in a thread of its own, in which contexts of the caller (no_grad, autocast, hooks, modes) do not apply: a
    self-test may be run in the middle of a step.

    Args:
        kernel: One that says that it can do what is needed.
        need: What a layer asks for.

    Returns:
        A sentence for a warning; None if results and gradients are right.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_run_cases, kernel, need).result()


def _run_cases(kernel: Kernel, need: KernelRequest) -> str | None:
    if need.device.type == "cuda":
        torch.cuda.set_device(need.device)
    cases = [case for case in CASES if case.need(*need[:3]) == need]
    if not cases:
        return "no self-test covers such a call"
    for case in cases:
        try:
            error = error_of(kernel, need.device, need.dtype, need.head_size, case)
        # Kernels refuse in many ways: FlashAttention 4 by assertions, compilers by exceptions of their own.
        except Exception as failure:
            return f"its self-test ({case.name}) failed with {type(failure).__name__}: {failure}"
        if not error <= tolerance(need.device, need.dtype):
            return f"its self-test ({case.name}) was off by {error:.1e} of the largest value"
    return None


def tolerance(device: torch.device, dtype: torch.dtype) -> float:
    """The largest error, relative to the largest value, that rounding explains. TF32 exists on GPUs only."""
    return FLOAT32 if device.type == "cpu" and dtype is torch.float32 else TOLERANCE[dtype]


def error_of(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_size: int, case: Case) -> float:
    """The largest error of outputs and gradients, relative to the largest value of each; NaN if any is.

    Args:
        kernel: What is tested.
        device: Where it runs. The truth is always computed on the CPU in float64, so the device's precision does not
            matter.
        dtype: Of its inputs, which the truth starts from, too.
        head_size: Of queries, keys and values.
        case: What attention is asked for.
    """
    q, k, v, grad, drawn = _inputs(head_size, dtype)
    sinks = drawn if case.sinks else None
    truth = _reference(q, k, v, grad, sinks, case)
    results = _run_slices(kernel, q, k, v, grad, sinks, case, device)
    errors = [(a.double().cpu() - b).abs().max() / b.abs().max() for a, b in zip(results, truth, strict=True)]
    return torch.stack(errors).max().item()  # NaN if any is, which python's max would not be


def _inputs(head_size: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Queries, keys, values, the output's gradient, and sinks."""
    generator = torch.Generator().manual_seed(head_size)
    for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS):
        shape = (SEQUENCES, heads, CUTS[-1], head_size)
        # As large as scores and outputs of any head size should be.
        yield torch.randn(shape, generator=generator).mul(min(1.0, 2 * head_size**-0.25)).to(dtype)
    yield torch.randn(HEADS, generator=generator).to(dtype)


def _reference(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, sinks: Tensor | None, case: Case) -> list[Tensor]:
    """Output and gradients of q, k, v and sinks by whole matrices of scores: the definition of attention, not
    sliced."""
    inputs = [x.double().requires_grad_() for x in (q, k, v, sinks) if x is not None]
    group = HEADS // KV_HEADS
    scores = inputs[0] @ inputs[1].repeat_interleave(group, 1).transpose(-1, -2) * SCALE
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~_visible_keys(case)[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, inputs[3][None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    out = scores.softmax(-1)[..., : CUTS[-1]] @ inputs[2].repeat_interleave(group, 1)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.double())]


def _visible_keys(case: Case) -> Tensor:
    """Which keys each token sees: (sequences, tokens, tokens)."""
    places = torch.arange(CUTS[-1])
    starts = [torch.tensor(row) for row in case.documents or ((0,),) * SEQUENCES]
    document = torch.stack([row[torch.searchsorted(row, places, right=True) - 1] for row in starts])
    i, j = places[:, None], places[None]
    seen = (document[:, :, None] == document[:, None]) & (j <= i)
    if case.window is not None:
        seen &= i - j < case.window
    if case.chunk is not None:
        chunk = (places - document) // case.chunk
        seen &= chunk[:, :, None] == chunk[:, None]
    return seen


def _run_slices(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    sinks: Tensor | None,
    case: Case,
    device: torch.device,
) -> list[Tensor]:
    """Output and gradients of q, k, v and sinks by the kernel, slice after slice.

    Slices of 11, 1, 17 and 11 tokens: a single token, slices longer and shorter than what is before them, edges that
    lie within blocks.
    """
    from terapipe.modeling.attention import attend  # which itself asks this module for a kernel

    inputs = [x.to(device).requires_grad_() for x in (q, k, v, sinks) if x is not None]
    cache = SliceCache(CUTS[-1])
    cache.set_documents(case.documents)
    outs = []
    for start, end in pairwise(CUTS):
        cache.begin(start, end - start)
        rows, keys, values = (x[:, :, start:end] for x in inputs[:3])
        sink = inputs[3] if sinks is not None else None
        limits = {"window": case.window, "chunk": case.chunk}
        # A kernel that cannot do every slice stands beside another one.
        by = kernel if kernel.takes(cache.visibility(case.window, case.chunk)) else Plain()
        outs.append(
            attend(rows, keys, values, cache, 0, scale=SCALE, softcap=case.softcap, sinks=sink, kernel=by, **limits)
        )
    for (start, end), out in reversed(list(zip(pairwise(CUTS), outs, strict=True))):
        cache.begin(start, end - start)
        cache.backward(out, grad[:, :, start:end].to(device))
    return [torch.cat([out.detach() for out in outs], 2), *(x.grad for x in inputs if x.grad is not None)]
