"""The format of what two stages send each other.

Both ends must know shape and dtype before anything is sent, because no message announces another. Without autocast the
dtype is that of the parameters. With it, a stage's output has the dtype that the stage's last operation gives it, which
nobody knows before it has run. So in the first run each message has room for the widest dtype and tells its own. From
the second run on, both ends know.

Some messages also carry an extra, numbers in float64 behind the tensor: sums for auxiliary losses::

    dtype known                [ tensor ]
    dtype not known yet        [ tag, 8 bytes | tensor | room up to the widest dtype ]
    either, with an extra      [ one of these | room up to a multiple of 8 bytes | extra ]
"""

from math import prod

import torch
from torch import Tensor

from terapipe.modeling.stage import Autocast

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TAG = 8  # bytes before the data, a multiple of every dtype's size

_NUMBER = torch.float64.itemsize

Shape = tuple[int, ...]


class MessageFormat:
    """The format of one pipeline's messages. A boundary between two stages has the number of the first.

    Args:
        dtype: that of the parameters.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.parameters = dtype
        self.wide = torch.promote_types(dtype, torch.float32)  # of losses, which half precisions are too coarse for
        self._learned: dict[Autocast, dict[int, torch.dtype]] = {}
        self._known: dict[int, torch.dtype] = {}  # in the current run
        self._now: dict[int, torch.dtype] = {}
        self._autocast = Autocast("", None)

    def begin(self, autocast: Autocast) -> None:
        """To be called before a run. What is learned in it counts from the next on, for both ends alike.

        Args:
            autocast: what the caller of the run has switched on.
        """
        self._autocast = autocast
        self._now = self._learned.setdefault(autocast, {})
        self._known = dict(self._now)

    def dtype(self, boundary: int) -> torch.dtype | None:
        """The dtype of tensors that cross a boundary; None where it is not known yet.

        Args:
            boundary: between two stages.
        """
        return self.parameters if self._autocast.dtype is None else self._known.get(boundary)

    def layout(self, shape: Shape, boundary: int, extra: int = 0) -> tuple[Shape, torch.dtype]:
        """The shape and dtype of a message.

        Args:
            shape: that of the tensor in it.
            boundary: that it crosses.
            extra: how many numbers in float64 it also carries.
        """
        dtype = self.dtype(boundary)
        message = (shape, dtype) if dtype is not None else ((_TAG + prod(shape) * self._widest,), torch.uint8)
        return ((_padded_size(*message) + extra * _NUMBER,), torch.uint8) if extra else message

    def pack(self, tensor: Tensor, boundary: int, extra: Tensor | None = None) -> Tensor:
        """The message.

        Args:
            tensor: of the dtype that is known, or of one that there is room for.
            boundary: that it crosses.
            extra: numbers in float64.
        """
        message = self._pack(tensor, boundary)
        if extra is None:
            return message
        data = message.flatten().view(torch.uint8)
        room = data.new_zeros(_padded_size(tuple(message.shape), message.dtype) - data.numel())
        return torch.cat([data, room, extra.view(torch.uint8)])

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

    def unpack(self, message: Tensor, shape: Shape, boundary: int, extra: int = 0) -> tuple[Tensor, Tensor | None]:
        """The tensor and the extra.

        Args:
            message: what ``pack`` made at the other end.
            shape: that of the tensor.
            boundary: that it crossed.
            extra: how many numbers it also carries.
        """
        if not extra:
            return self._unpack(message, shape, boundary), None
        inner, dtype = self.layout(shape, boundary)
        data = message[: prod(inner) * dtype.itemsize].view(dtype).view(inner)
        return self._unpack(data, shape, boundary), message[-extra * _NUMBER :].clone().view(torch.float64)

    def _unpack(self, message: Tensor, shape: Shape, boundary: int) -> Tensor:
        if self.dtype(boundary) is not None:
            return message
        dtype = _DTYPES[int(message[0])]
        self._now[boundary] = dtype
        data = message[_TAG : _TAG + prod(shape) * dtype.itemsize]
        return data.view(dtype).view(shape).clone()

    def fits(self, dtype: torch.dtype, boundary: int) -> bool:
        """Whether a tensor can be sent.

        Args:
            dtype: that of the tensor.
            boundary: that it would cross.
        """
        agreed = self.dtype(boundary)
        return dtype == agreed if agreed is not None else dtype in _DTYPES and dtype.itemsize <= self._widest

    @property
    def _widest(self) -> int:
        return max(self.parameters.itemsize, torch.float32.itemsize)


class NullFormat(MessageFormat):
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


def _padded_size(shape: Shape, dtype: torch.dtype) -> int:
    """Bytes before the extra, which begins at a multiple of its numbers' size."""
    return -(-prod(shape) * dtype.itemsize // _NUMBER) * _NUMBER
