"""Attention kernels: what each can do, and which one to use.

A kernel computes the attention of one slice and the log-sum-exp of every row, and a backward that takes output and
log-sum-exp from outside. Keys and values of earlier slices are read where they lie. torch's own kernels for that have
private names: a kernel that calls one is used only after it has shown, once for each device, dtype, head size and kind
of call, that it computes what this project relies on (kernel_check.py). The order in the table is the order of
preference.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar, Final, NamedTuple

import torch
import torch.nn.attention
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from terapipe.modeling.slice_cache import KeyValueStore
from terapipe.modeling.visibility import EVERY, Visibility

aten: Final[Any] = torch.ops.aten


class Scores(NamedTuple):
    """How scores are made from the products of queries and keys."""

    scale: float
    softcap: float | None = None  # limits their size, by a tanh


class KernelRequest(NamedTuple):
    """What calls of attention by one layer ask of a kernel."""

    device: torch.device
    dtype: torch.dtype
    head_size: int
    softcap: bool = False
    sinks: bool = False  # the backward gets another log-sum-exp than the forward gave
    window: bool = False
    segments: bool = False  # documents or chunks begin inside of sequences


class Settings(NamedTuple):
    """What torch's operators do depends on these, too: what a self-test has shown holds for them alone."""

    flash: str | None = None  # the version of FlashAttention that the user has activated
    deterministic: bool = False
    cudnn: bool = False  # whether torch may take cuDNN's attention

    @classmethod
    def now(cls, device: torch.device) -> "Settings":
        if device.type != "cuda":
            return _NO_SETTINGS
        return cls(active_flash(), is_deterministic(), torch._C._get_cudnn_sdp_enabled())


_NO_SETTINGS = Settings()


def active_flash() -> str | None:
    """The version of FlashAttention that the user has activated in torch; None is torch's own, version 2."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)  # not in torch 2.9
    return None if current is None else current()


def is_deterministic() -> bool:
    """Whether results must repeat to the bit. With ``warn_only`` torch's kernels go on as they are."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


class Gradients(NamedTuple):
    """Of some rows of a slice, and of the keys and values that they see."""

    rows: slice  # of the slice
    dq: Tensor
    keys: slice  # of the sequence
    dk: Tensor
    dv: Tensor
    sequences: slice = EVERY


Operators = tuple[tuple[str, str], ...]  # names, each with its first arguments, which are relied on


class Kernel(ABC):
    """Queries are (batch, heads, tokens, head size), in any order in memory but for the last dimension, whose numbers
    lie side by side; keys and values may have fewer heads. Head sizes are multiples of ``head_multiple``. Rows'
    log-sum-exps are (batch, heads, tokens), natural logarithms, in float32 or wider."""

    name: ClassVar[str]
    head_multiple: ClassVar[int] = 1
    by_heads: ClassVar[bool] = False  # whether it would copy queries whose heads do not lie one after the other
    operators: ClassVar[Operators] = ()  # private ones of aten
    part: ClassVar[str] = ""  # which slices it is used for, in words, if not for all

    @property
    def title(self) -> str:
        """Its name, with what is behind it."""
        return self.name

    @abstractmethod
    def refusal(self, need: KernelRequest) -> str | None:
        """Why it cannot do that, if it cannot."""

    def takes(self, seen: Visibility) -> bool:
        """Whether it can do a slice that sees this; another kernel does the others."""
        return True

    def pays(self, q: Tensor, seen: Visibility) -> bool:
        """Whether it is worth its costs for such a slice."""
        return True

    @abstractmethod
    def forward(self, q: Tensor, store: KeyValueStore, seen: Visibility, scores: Scores) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of each row. The store holds keys and values up to the end of the slice."""

    @abstractmethod
    def backward(
        self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, store: KeyValueStore, seen: Visibility, scores: Scores
    ) -> Iterator[Gradients]:
        """All of them, in parts."""


def table(device_type: str) -> tuple[Kernel, ...]:
    """In order of preference. The last one can do everything. Those that compile come after those that need not."""
    from terapipe.modeling.block_kernels import CpuFlash, Cudnn, Efficient, Plain
    from terapipe.modeling.flash_kernels import Flash, FlashAttnPackage, Flex

    # cuDNN is faster than FlashAttention 2; versions 3 and 4 are faster than cuDNN in two calls and a merge.
    torchs = (Flash, Cudnn) if device_type == "cuda" and active_flash() else (Cudnn, Flash)
    kinds: dict[str, tuple[type[Kernel], ...]] = {
        "cpu": (CpuFlash, Plain),
        "cuda": (*torchs, FlashAttnPackage, Efficient, Flex, Plain),
    }
    return tuple(_instance(kind) for kind in kinds.get(device_type, (Plain,)))


@cache
def _instance(kind: type[Kernel]) -> Kernel:
    return kind()


class _Choice(NamedTuple):
    kernel: Kernel
    refused: tuple[tuple[str, str], ...]  # better ones, and why not


@cache
def _choice(need: KernelRequest, settings: Settings, after: Kernel | None) -> _Choice:
    """The first kernel of the table, or of those behind another, that can do it and passes its self-test."""
    kernels = table(need.device.type)
    *special, plain = kernels if after is None else kernels[kernels.index(after) + 1 :]
    refused: list[tuple[str, str]] = []
    for kernel in special:
        reason = kernel.refusal(need) or _fault(kernel, need, settings)
        if reason is None:
            return _Choice(kernel, tuple(refused))
        refused.append((kernel.title, reason))
    if need.device.type == "cuda" and need.dtype is not torch.float64:  # for which no GPU has another
        _warn_of_plain(need, refused)
    return _Choice(plain, tuple(refused))


def kernel_for(need: KernelRequest, after: Kernel | None = None) -> Kernel:
    """The best kernel; ``after`` is one that does not take the slice in question."""
    return _choice(need, Settings.now(need.device), after).kernel


def kernel_of(q: Tensor, seen: Visibility, need: KernelRequest) -> Kernel:
    """For a slice with these queries."""
    if isinstance(q, FakeTensor):  # which have no numbers, so nothing is tested for them
        able = (kernel for kernel in table(q.device.type) if kernel.refusal(need) is None)
        return next(kernel for kernel in able if kernel.takes(seen) and kernel.pays(q, seen))
    kernel = kernel_for(need)
    while not (kernel.takes(seen) and kernel.pays(q, seen)):
        kernel = kernel_for(need, kernel)
    return kernel


class KernelReport(NamedTuple):
    """Which kernels attention uses, each with the slices that it is used for, and why better ones are not used."""

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
    """What attention of this kind would use here. Runs self-tests that have not been run."""
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
    """Forgets which kernels were chosen and what their self-tests have shown."""
    from terapipe.modeling.block_kernels import _cudnn_refusal

    for memory in (_choice, _fault, _instance, _cudnn_refusal):
        memory.cache_clear()


def _warn_of_plain(need: KernelRequest, refused: list[tuple[str, str]]) -> None:
    from terapipe.modeling.block_kernels import Plain

    size = Plain.workspace() >> 20
    warnings.warn(
        f"attention in {need.dtype} with heads of {need.head_size} uses plain matrix products, exact but slow, "
        f"which take up to {size} MiB for each head and sequence ({'; '.join(': '.join(each) for each in refused)})",
        RuntimeWarning,
        stacklevel=4,
    )


@cache
def _fault(kernel: Kernel, need: KernelRequest, settings: Settings) -> str | None:
    """What keeps a kernel from being trusted, told once. The settings are those of now."""
    from terapipe.modeling.kernel_check import fault_of

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
    """Whether an operator takes other arguments than the kernel gives. Those that newer versions of torch add behind
    them have defaults, which change nothing."""
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
