"""The dtype of what two stages send each other.

Both ends must know it before anything is sent, because no message announces another. Without autocast it is that of the
parameters. With it, a stage's output has the dtype that the stage's last operation gives it, which nobody knows before
it has run. So in the first run each message has room for the widest dtype and tells its own. From the second run on,
both ends know.

Some messages also carry a note: numbers in float64 behind the tensor.
"""

from math import prod

import torch
from torch import Tensor

from terapipe.modeling.autocast import Autocast

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TAG = 8  # bytes before the data, a multiple of every dtype's size

_NUMBER = torch.float64.itemsize

Shape = tuple[int, ...]


class Wire:
    """Of one pipeline. A boundary has the number of the stage before it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.parameters = dtype
        self.wide = torch.promote_types(dtype, torch.float32)  # of losses, which half precisions are too coarse for
        self._learned: dict[Autocast, dict[int, torch.dtype]] = {}
        self._known: dict[int, torch.dtype] = {}  # in the current run
        self._now: dict[int, torch.dtype] = {}
        self._autocast = Autocast("", None)

    def begin(self, autocast: Autocast) -> None:
        """Before a run. What is learned in it counts from the next on, for both ends alike."""
        self._autocast = autocast
        self._now = self._learned.setdefault(autocast, {})
        self._known = dict(self._now)

    def dtype(self, boundary: int) -> torch.dtype | None:
        """None where it is not known yet."""
        return self.parameters if self._autocast.dtype is None else self._known.get(boundary)

    def layout(self, shape: Shape, boundary: int, note: int = 0) -> tuple[Shape, torch.dtype]:
        """Of the message that holds a tensor of this shape and a note of so many numbers in float64."""
        dtype = self.dtype(boundary)
        message = (shape, dtype) if dtype is not None else ((_TAG + prod(shape) * self._widest,), torch.uint8)
        return ((_noted(*message) + note * _NUMBER,), torch.uint8) if note else message

    def pack(self, tensor: Tensor, boundary: int, note: Tensor | None = None) -> Tensor:
        """The message. The tensor must be of the dtype that is known, or of one that there is room for."""
        message = self._pack(tensor, boundary)
        if note is None:
            return message
        data = message.flatten().view(torch.uint8)
        room = data.new_zeros(_noted(tuple(message.shape), message.dtype) - data.numel())
        return torch.cat([data, room, note.view(torch.uint8)])

    def _pack(self, tensor: Tensor, boundary: int) -> Tensor:
        self._now[boundary] = tensor.dtype
        if self.dtype(boundary) is not None:
            return tensor.contiguous()
        (size,), _ = self.layout(tuple(tensor.shape), boundary)
        message = torch.zeros(size, dtype=torch.uint8, device=tensor.device)
        message[0] = _DTYPES.index(tensor.dtype)
        data = tensor.contiguous().flatten().view(torch.uint8)
        message[_TAG : _TAG + data.numel()] = data
        return message

    def unpack(self, message: Tensor, shape: Shape, boundary: int, note: int = 0) -> tuple[Tensor, Tensor | None]:
        """The tensor and the note."""
        if not note:
            return self._unpack(message, shape, boundary), None
        inner, dtype = self.layout(shape, boundary)
        data = message[: prod(inner) * dtype.itemsize].view(dtype).view(inner)
        return self._unpack(data, shape, boundary), message[-note * _NUMBER :].clone().view(torch.float64)

    def _unpack(self, message: Tensor, shape: Shape, boundary: int) -> Tensor:
        if self.dtype(boundary) is not None:
            return message
        dtype = _DTYPES[int(message[0])]
        self._now[boundary] = dtype
        data = message[_TAG : _TAG + prod(shape) * dtype.itemsize]
        return data.view(dtype).view(shape).clone()

    def fits(self, dtype: torch.dtype, boundary: int) -> bool:
        known = self.dtype(boundary)
        return dtype == known if known is not None else dtype in _DTYPES and dtype.itemsize <= self._widest

    @property
    def _widest(self) -> int:
        return max(self.parameters.itemsize, torch.float32.itemsize)


def _noted(shape: Shape, dtype: torch.dtype) -> int:
    """Bytes before the note, which begins at a multiple of its numbers' size."""
    return -(-prod(shape) * dtype.itemsize // _NUMBER) * _NUMBER
