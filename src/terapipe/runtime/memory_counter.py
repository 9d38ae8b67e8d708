"""Counts the bytes of tensors that are alive, whatever made them."""

import weakref
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from terapipe.modeling.weight_grads import to_local
from terapipe.planning.device import FLASH
from terapipe.planning.memory import attention_inside

_CPU_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_CUDNN_BACKWARD: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


@cache
def _backwards() -> set[Any]:
    """Operators of attention's backward, which begin with the gradient of the output, queries and keys."""
    package = getattr(torch.ops, "flash_attn", None)  # registered by the package of that name, if it is there
    names = ("_flash_attn_backward", "_flash_attn_varlen_backward")
    others = {getattr(package, name) for name in names if hasattr(package, name)}
    return {_CPU_BACKWARD, _CUDNN_BACKWARD, torch.ops.aten._flash_attention_backward, *others}


class MemoryCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages on a device that are alive, now (``current``) and at most (``peak``).

    ::

        with MemoryCounter(device) as counter:
            counter.count(pipe)             # what was there before: parameters and buffers
            pipe.step(input_ids, labels)
        counter.peak

    Every operator passes through it (a ``TorchDispatchMode``), so it sees results whatever made them, fake tensors too.
    A storage counts once, however many views it has, and until the last of them is gone.

    Attention kernels of GPUs also allocate memory inside, which no result shows. Where tensors are fake and of the CPU,
    ``attention`` names the kernel that they stand for: see planning/memory.py.
    """

    def __init__(self, device: torch.device, attention: str = "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._attention = device, attention
        self._alive: set[int] = set()
        self.current = self.peak = 0

    def count(self, module: nn.Module) -> None:
        """Adds the parameters and buffers of a module, which were made before the counter was entered.

        Args:
            module: whose tensors count where they are on the counter's device.
        """
        for x in (*module.parameters(), *module.buffers()):
            self._add(to_local(x.detach()))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and not isinstance(x, DTensor):  # the parts of those are seen by themselves
                self._add(x)
        if function.overloadpacket in _backwards():
            self.peak = max(self.peak, self.current + self._inside(function.overloadpacket, *args[1:3]))
        return out

    def _inside(self, operator: Any, q: Tensor, k: Tensor) -> int:
        """Bytes that a backward of attention allocates beside its results."""
        if operator in (_CPU_BACKWARD, _CUDNN_BACKWARD):
            q, k = (x.transpose(1, 2) for x in (q, k))
        kernel = self._attention if operator is _CPU_BACKWARD else FLASH
        (*rows, heads, size), (*keys, kv_heads, _) = q.shape, k.shape
        return int(attention_inside(kernel, prod(rows), prod(keys), heads, kv_heads, size, q.element_size()))

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
