"""The format of messages that are not sent."""

import torch
from torch import Tensor

from terapipe.runtime.messages import Wire


class SilentWire(Wire):
    """The format of messages that go nowhere: tensors as they are. What is received is of the parameters' dtype, the
    gradient of an output of the output's. Under autocast, real messages may be of others, which nobody knows yet."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._sent: dict[int, torch.dtype] = {}

    def dtype(self, boundary: int) -> torch.dtype:
        return self._sent.get(boundary, self.parameters)

    def pack(self, tensor: Tensor, boundary: int, note: Tensor | None = None) -> Tensor:
        self._sent[boundary] = tensor.dtype
        return super().pack(tensor, boundary, note)

    def fits(self, dtype: torch.dtype, boundary: int) -> bool:
        return True
