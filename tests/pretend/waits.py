"""Counts where the host would wait for the device: each such wait leaves a GPU without work while it catches up.

Calls that say so, such as ``torch.cuda.synchronize``, note it themselves. Operators are watched by a dispatch mode, and
autograd puts it in place in the thread that runs a device's backward, too.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_OURS = re.compile(r".*/(?:src|site-packages)/((?:terapipe|transformers)/.*)")
_INDEXING = {"aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class Wait(NamedTuple):
    """What made the host wait, and the line of terapipe or transformers that did it, or "elsewhere"."""

    kind: str
    where: str


_counting: list[list[Wait]] = []  # of all threads


@contextmanager
def counting_waits() -> Iterator[list[Wait]]:
    """The waits of what is run inside, of its backwards, and of its communication."""
    found: list[Wait] = []
    _counting.append(found)
    try:
        with _Watch(found):
            yield found
    finally:
        _counting[:] = [other for other in _counting if other is not found]


def note(kind: str) -> None:
    """A wait that a call makes, rather than an operator."""
    for found in _counting:
        found.append(Wait(kind, _where()))


def _where() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        if match := _OURS.fullmatch(frame.f_code.co_filename):
            return f"{match[1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


class _Watch(TorchDispatchMode):
    def __init__(self, found: list[Wait]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if types:  # of a subclass, such as DTensor: this mode sees the operators that it becomes
            return NotImplemented
        given = kwargs or {}
        if (kind := kind_of_wait(func, args, given)) is not None:
            self._found.append(Wait(kind, _where()))
        return func(*args, **given)


def kind_of_wait(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Why this call of an operator would make the host wait, if it would."""
    name = func._schema.name
    if name in _RULES:
        return _RULES[name](args, kwargs)
    if name in _INDEXING:
        return _indexing(args)
    depends = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
    return name.removeprefix("aten::") if depends and any(map(_on_device, args)) else None


def _on_device(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_cuda


def _copy(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    target, source = args[:2]
    asynchronous = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if _on_device(source) and target.device.type == "cpu":
        return None if asynchronous and target.is_pinned() else "copy to the host"
    if _on_device(target) and source.device.type == "cpu":
        return _copy_from_host(source, asynchronous)
    return None


def _to_copy(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    (source,), device = args, kwargs.get("device")
    target = source.device if device is None else torch.device(device)
    asynchronous = bool(kwargs.get("non_blocking"))
    if _on_device(source) and target.type == "cpu":
        return None if asynchronous else "copy to the host"  # else torch takes pinned memory for the result
    if source.device.type == "cpu" and target.type == "cuda":
        return _copy_from_host(source, asynchronous)
    return None


def _copy_from_host(source: Tensor, asynchronous: bool) -> str | None:
    if source.numel() == 0 or (asynchronous and source.is_pinned()):
        return None
    return "copy from the host" if source.is_pinned() else "copy from pageable memory"


def _repeat_interleave(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    known = kwargs.get("output_size") is not None
    return None if known or not any(map(_on_device, args)) else "repeat_interleave"


def _indexing(args: tuple[Any, ...]) -> str | None:
    """Masks become indices, whose number the host must know; indices on the host must be copied."""
    target, indices = args[:2]
    given = [x for x in indices if x is not None]
    if not _on_device(target):
        return None
    if any(not _on_device(x) for x in given):
        return "index on the host"
    if not any(x.dtype in (torch.bool, torch.uint8) for x in given):
        return None
    filled = len(args) > 2 and args[2].numel() == 1 and not _on_device(args[2])  # which is masked_fill
    return None if filled and len(given) == 1 else "index by a mask"


_RULES: dict[str, Callable[[tuple[Any, ...], Mapping[str, Any]], str | None]] = {
    "aten::copy_": _copy,
    "aten::_to_copy": _to_copy,
    "aten::repeat_interleave": _repeat_interleave,
}
