"""Attention kernels: what each can do, and which one to use.

A kernel computes the attention of one slice and the log-sum-exp of every row, and a backward that takes output and
log-sum-exp from outside. Keys and values of earlier slices are read where they lie. torch's own kernels for that have
private names: a kernel that calls one is used only after it has shown, once for each device, dtype and head size, that
it computes what this project relies on (kernel_check.py). The order in the table is the order of preference.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from terapipe.modeling.cache import KeyValueStore
from terapipe.modeling.visibility import EVERY, Visibility

aten: Final[Any] = torch.ops.aten


class Scores(NamedTuple):
    """How scores are made from the products of queries and keys."""

    scale: float
    softcap: float | None = None  # limits their size, by a tanh


class Need(NamedTuple):
    """What a call of attention asks of a kernel."""

    device: torch.device
    dtype: torch.dtype
    head_size: int
    softcap: bool = False
    sinks: bool = False  # the backward gets another log-sum-exp than the forward gave


class Gradients(NamedTuple):
    """Of some rows of a slice, and of the keys and values that they see."""

    rows: slice  # of the slice
    dq: Tensor
    keys: slice  # of the sequence
    dk: Tensor
    dv: Tensor
    sequences: slice = EVERY


Operators = tuple[tuple[str, str], ...]  # names, each with the arguments that are relied on


class Kernel(ABC):
    """Queries are (batch, heads, tokens, head size); keys and values may have fewer heads. Head sizes are multiples of
    ``head_multiple``. Rows' log-sum-exps are (batch, heads, tokens), natural logarithms, in float32 or wider."""

    name: ClassVar[str]
    head_multiple: ClassVar[int] = 1
    operators: ClassVar[Operators] = ()  # private ones of aten

    @abstractmethod
    def refusal(self, need: Need) -> str | None:
        """Why it cannot do that, if it cannot."""

    @abstractmethod
    def forward(self, q: Tensor, store: KeyValueStore, seen: Visibility, scores: Scores) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of each row. The store holds keys and values up to the end of the slice."""

    @abstractmethod
    def backward(
        self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, store: KeyValueStore, seen: Visibility, scores: Scores
    ) -> Iterator[Gradients]:
        """All of them, in parts."""


def table(device_type: str) -> tuple[Kernel, ...]:
    """In order of preference. The last one can do everything."""
    from terapipe.modeling.block_kernels import CpuFlash, Efficient, Plain
    from terapipe.modeling.flash_kernels import Flash, FlashAttnPackage, Flex

    kinds: dict[str, tuple[type[Kernel], ...]] = {
        "cpu": (CpuFlash, Plain),
        "cuda": (Flash, FlashAttnPackage, Flex, Efficient, Plain),
    }
    return tuple(kind() for kind in kinds.get(device_type, (Plain,)))


@cache
def kernel_for(need: Need) -> Kernel:
    """The first kernel of the table that can do it and passes its self-test."""
    *special, plain = table(need.device.type)
    for kernel in special:
        if kernel.refusal(need) is None and _is_trusted(kernel, need):
            return kernel
    if need.device.type == "cuda" and need.dtype is not torch.float64:  # for which no GPU has another
        _warn_of_plain(need, special)
    return plain


def kernel_of(q: Tensor, softcap: float | None, sinks: Tensor | None) -> Kernel:
    """For these queries. Fake tensors have no numbers, so nothing is tested for them."""
    need = Need(q.device, q.dtype, q.shape[3], softcap is not None, sinks is not None)
    if isinstance(q, FakeTensor):
        return next(kernel for kernel in table(q.device.type) if kernel.refusal(need) is None)
    return kernel_for(need)


def _warn_of_plain(need: Need, kernels: list[Kernel]) -> None:
    from terapipe.modeling.block_kernels import Plain

    reasons = [f"{kernel.name}: {kernel.refusal(need) or 'failed its self-test'}" for kernel in kernels]
    size = Plain.workspace() >> 20
    warnings.warn(
        f"attention in {need.dtype} with heads of {need.head_size} uses plain matrix products, exact but slow, "
        f"which take up to {size} MiB for each head and sequence ({'; '.join(reasons)})",
        RuntimeWarning,
        stacklevel=3,
    )


@cache
def _is_trusted(kernel: Kernel, need: Need) -> bool:
    from terapipe.modeling.kernel_check import fault_of

    fault = changed_signature(kernel) or fault_of(kernel, need)
    if fault:
        warnings.warn(
            f"the attention kernel {kernel.name} is not used on {need.device.type} in {need.dtype}: {fault}. Use a "
            "version of torch that this release was tested with.",
            RuntimeWarning,
            stacklevel=4,
        )
    return not fault


def changed_signature(kernel: Kernel) -> str | None:
    for name, expected in kernel.operators:
        operator = getattr(aten, name, None)
        if operator is None:
            return f"torch {torch.__version__} has no aten::{name}"
        found = " ".join(argument.name for argument in operator.default._schema.arguments)
        if found != expected:
            return f"aten::{name} of torch {torch.__version__} takes ({found}), expected ({expected})"
    return None
