"""Counts the bytes of tensors that are alive, whatever made them."""

import weakref
from functools import cache
from math import prod
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from terapipe.modeling.offload import HostMemory
from terapipe.modeling.quantized import is_composed, parts_of
from terapipe.modeling.weight_grads import to_local
from terapipe.planning.device import FLASH
from terapipe.planning.memory import attention_inside

_ASK = "_propagate_tensor_meta_non_cached"  # of torch's class below: not public, and in no other place
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
    A storage counts once, however many views it has, and until the last of them is gone. Of a DTensor its local part
    counts, and what operators do with that; not the tensors of global shape with which torch finds out, once for each
    operator, what shape a result has.

    Attention kernels of GPUs also allocate memory inside, which no result shows. Where tensors are fake and of the CPU,
    ``attention`` names the kernel that they stand for: see planning/memory.py.

    Not ``torch.cuda.max_memory_allocated``: a dry run has no GPU, and its tensors have no memory at all.

    Args:
        device: whose storages count; tensors elsewhere, such as indices on the host, do not.
        attention: the kernel that a step would run on its real device; empty where tensors are real.
        host: memory of the host that does not count although it is of the same kind, where a CPU is the device.
    """

    def __init__(self, device: torch.device, attention: str = "", host: HostMemory | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._attention, self._host = device, attention, host
        self._alive: set[int] = set()
        self.current = self.peak = 0
        self._asks_for_shapes: Any = None  # torch's own method, while it is replaced

    def __enter__(self) -> Self:
        """Begins to count, and hides from itself the tensors of global shape that torch makes for DTensors. Those are
        made by operators, too, and at real size would count as memory that no rank needs."""
        ask: Any = getattr(ShardingPropagator, _ASK, None)
        self._asks_for_shapes = ask

        def ask_uncounted(*arguments: Any) -> Any:
            with _disable_current_modes():
                return ask(*arguments)

        if ask is not None:
            setattr(ShardingPropagator, _ASK, ask_uncounted)
        entered: Self = super().__enter__()  # type: ignore[no-untyped-call]
        return entered

    def __exit__(self, *arguments: Any) -> None:
        super().__exit__(*arguments)  # type: ignore[no-untyped-call]
        if self._asks_for_shapes is not None:
            setattr(ShardingPropagator, _ASK, self._asks_for_shapes)

    def count(self, module: nn.Module) -> None:
        """Adds the parameters and buffers of a module, which were made before the counter was entered.

        Args:
            module: whose tensors count where they are on the counter's device.
        """
        for x in (*module.parameters(), *module.buffers()):
            self._add(to_local(x.detach()))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch calls this in the place of every operator while the counter is entered."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # so that it takes itself apart, and what it does with its parts comes here
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
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
        if is_composed(x):
            for part in parts_of(x):
                self._add(part)
            return
        storage = x.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._alive or (self._host is not None and self._host.owns(storage)):
            return
        self._alive.add(key)
        self.current += nbytes
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._drop, key, nbytes)

    def _drop(self, key: int, nbytes: int) -> None:
        self._alive.discard(key)
        self.current -= nbytes
