"""Counts the bytes of tensors that are alive, whatever made them."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from terapipe.modeling.dtensor import to_local


class MemoryCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages on a device that are alive, now and at most."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._alive: set[int] = set()
        self.current = self.peak = 0

    def count(self, module: nn.Module) -> None:
        for x in (*module.parameters(), *module.buffers()):
            self._add(to_local(x.detach()))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and not isinstance(x, DTensor):  # the parts of those are seen by themselves
                self._add(x)
        return out

    def _add(self, x: Tensor) -> None:
        if x.device.type != self._device.type:
            return
        storage = x.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._alive:
            return
        self._alive.add(key)
        self.current += nbytes
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._drop, key, nbytes)

    def _drop(self, key: int, nbytes: int) -> None:
        self._alive.discard(key)
        self.current -= nbytes
