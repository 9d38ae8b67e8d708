"""Copies of a state in the host's memory, from which a checkpoint is written while training goes on.

From a GPU they go to pinned memory that is kept from save to save, without the host waiting: what is computed after the
copies were queued may change the originals, and the thread that writes waits for the copies.
"""

import torch
from torch import Tensor

from terapipe.modeling.dtensor import laid_out_like, to_local

State = dict[str, dict[str, Tensor]]  # tensors by the part of the checkpoint that they belong to, and by name


class Staging:
    """One state at a time: a copy is overwritten by the next."""

    def __init__(self) -> None:
        self._pinned: dict[tuple[str, str], Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def copy(self, state: State) -> State:
        found = {
            part: {name: self._copy(x.detach(), (part, name)) for name, x in tensors.items()}
            for part, tensors in state.items()
        }
        devices = {x.device for tensors in state.values() for x in tensors.values() if x.is_cuda}
        for device in devices:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(device))
        return found

    def wait(self) -> None:
        """Until the copies are there. For the thread that writes."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, x: Tensor, key: tuple[str, str]) -> Tensor:
        """Of a tensor in parts, this rank's."""
        if not x.is_cuda:
            return x.to("cpu", copy=True)
        part, room = to_local(x), self._pinned.get(key)
        if room is None or (room.shape, room.dtype) != (part.shape, part.dtype):
            room = self._pinned[key] = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
        room.copy_(part, non_blocking=True)
        return laid_out_like(x, room)
