"""Transfers without other ranks: one rank's list of actions can be run by itself, on made-up numbers.

Nothing may be learned from these: ranks must know the same of real messages.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from terapipe.runtime.comm.transport import Transport
from terapipe.runtime.messages import MessageFormat


class Nothing(dist.Work):
    """A transfer that is through."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class SilentTransport(Transport):
    """What is sent goes nowhere; what is received has the right shape, and zeros."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self.device, self.rank = device, rank

    def send(self, tensor: Tensor, peer: int, why: object) -> dist.Work:
        return Nothing()

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, why: object) -> tuple[Tensor, dist.Work]:
        return torch.zeros(shape, dtype=dtype, device=self.device), Nothing()

    def wait(self, work: dist.Work, peer: int, why: object) -> None:
        pass

    def all_reduce(self, tensor: Tensor, over: str = "", op: Any = None) -> Tensor:
        return tensor


class SilentFormat(MessageFormat):
    """The format of messages that go nowhere: tensors as they are. What is received is of the parameters' dtype, the
    gradient of an output of the output's. Under autocast, real messages may be of others, which nobody knows yet."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._sent: dict[int, torch.dtype] = {}

    def dtype(self, boundary: int) -> torch.dtype:
        return self._sent.get(boundary, self.parameters)

    def pack(self, tensor: Tensor, boundary: int, extra: Tensor | None = None) -> Tensor:
        self._sent[boundary] = tensor.dtype
        return super().pack(tensor, boundary, extra)

    def fits(self, dtype: torch.dtype, boundary: int) -> bool:
        return True
