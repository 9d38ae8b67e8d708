"""Messages from one stage to another: what they look like, how they are sent, and over which connection.

::

    Executor      SEND_F(stage 0, slice 3): a tensor
      MessageFormat  .pack      the tensor's bytes, with dtype tag and extra numbers where there are any
      Channel        .send      names the peer and the action, so that a failure can say who waited for whom at what
        GlooLinks / NcclLinks   the connection: torch.distributed's own send
                                                  ~~~ network ~~~
      Channel        .receive   posts a buffer of the size that MessageFormat.layout says; does not wait
      Channel        .wait      what is computed next may read the buffer
      MessageFormat  .unpack    the tensor
    Executor      F(stage 1, slice 3)

**Format.** Both ends must know shape and dtype before anything is sent, because no message announces another. Without
autocast the dtype is that of the parameters. With it, a stage's output has the dtype that the stage's last operation
gives it, which nobody knows before it has run. So in the first run each message has room for the widest dtype and tells
its own. From the second run on, both ends know. Some messages also carry an extra, numbers in float64 behind the
tensor: sums for auxiliary losses::

    dtype known                [ tensor ]
    dtype not known yet        [ tag, 8 bytes | tensor | room up to the widest dtype ]
    either, with an extra      [ one of these | room up to a multiple of 8 bytes | extra ]

**Connections.** gloo has one group for all, whose transfers are told apart by their order; waits block the host until
their timeout. NCCL has a communicator for each pair of ranks and direction, made and used once before the first step,
because making one blocks the host until the peer makes it too, and must not happen between operations that are on their
way. Waits are the device's: the host goes on. Whether a peer answers at all is the watcher's business (watcher.py).
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from terapipe.modeling.stage import Autocast
from terapipe.runtime.comm.failures import Failure
from terapipe.runtime.comm.groups import GROUPS
from terapipe.runtime.comm.mesh import Line

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
        self._agreed: dict[int, torch.dtype] = {}  # in the current run
        self._now: dict[int, torch.dtype] = {}
        self._autocast = Autocast("", None)

    def begin(self, autocast: Autocast) -> None:
        """To be called before a run. What is learned in it counts from the next on, for both ends alike.

        Args:
            autocast: what the caller of the run has switched on.
        """
        self._autocast = autocast
        self._now = self._learned.setdefault(autocast, {})
        self._agreed = dict(self._now)

    def learn(self, autocast: Autocast, dtypes: Mapping[int, torch.dtype]) -> None:
        """Takes dtypes that were found out without messages, as a dry run must: fake messages have no tag to read.

        Args:
            autocast: under which they hold.
            dtypes: of tensors that cross a boundary, by the number of the boundary.
        """
        self._learned.setdefault(autocast, {}).update(dtypes)

    def dtype(self, boundary: int) -> torch.dtype | None:
        """The dtype of tensors that cross a boundary; None where it is not known yet.

        Args:
            boundary: between two stages.
        """
        return self.parameters if self._autocast.dtype is None else self._agreed.get(boundary)

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


# Sending


Guard = Callable[[Callable[[], None], int], None]  # calls a function that may wait for a peer for ever


class Links(ABC):
    """Connections of one rank to others of its pipeline. ``peer`` is a rank's place in the pipeline."""

    @abstractmethod
    def connect(self, pairs: Collection[tuple[int, int]], guard: Guard) -> None:
        """Makes what transfers between these pairs of ranks need. All ranks of the pipeline call it together.

        Args:
            pairs: ranks that will send each other something, in any order.
            guard: calls a function that may wait for this peer for ever, and raises when the peer does not answer.
        """

    @abstractmethod
    def send(self, tensor: Tensor, peer: int) -> dist.Work: ...

    @abstractmethod
    def receive(self, buffer: Tensor, peer: int) -> dist.Work: ...

    @abstractmethod
    def wait(self, work: dist.Work) -> None:
        """Returns when what is computed next on this device may use the message."""

    def first(self, peer: int, *, sends: bool) -> dist.Work | None:
        """The first message of a connection: NCCL tells through it what has gone wrong later; see ``nccl_message``."""
        return None


class GlooLinks(Links):
    """Messages by gloo.

    Args:
        group: of the pipeline's ranks.
        timeout: after which a wait fails.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self._group, self._timeout = group, timeout

    def connect(self, pairs: Collection[tuple[int, int]], guard: Guard) -> None:
        """Does nothing: a group of gloo is connected when it is made."""

    def send(self, tensor: Tensor, peer: int) -> dist.Work:
        return not_none(dist.isend(tensor, group=self._group, group_dst=peer))

    def receive(self, buffer: Tensor, peer: int) -> dist.Work:
        return not_none(dist.irecv(buffer, group=self._group, group_src=peer))

    def wait(self, work: dist.Work) -> None:
        work.wait(self._timeout)


class NcclLinks(Links):
    """Messages by NCCL.

    Args:
        group: of the pipeline's ranks, for objects; its store brings the pairs together.
        rank: this process's place in the pipeline.
        device: its GPU.
        timeout: of torch's own watchdog, times ``PATIENCE``.
        own: called with every communicator as soon as it exists, for whoever must abort it after a failure.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        device: torch.device,
        timeout: timedelta,
        own: Callable[[Any], None],
    ) -> None:
        self._group, self._rank, self._device, self._timeout, self._own = group, rank, device, timeout, own
        self._outgoing: dict[int, Any] = {}
        self._incoming: dict[int, Any] = {}
        self._first: dict[tuple[int, bool], dist.Work] = {}

    def connect(self, pairs: Collection[tuple[int, int]], guard: Guard) -> None:
        for source, target in _connection_order(pairs):
            if self._rank in (source, target):
                guard(partial(self._connect, source, target), target if self._rank == source else source)

    def _connect(self, source: int, target: int) -> None:
        """Makes one pair. Its first message sets up NCCL's buffers."""
        pair = GROUPS.pair(self._group, self._rank, source, target, self._device, self._timeout)
        self._own(pair)
        nothing, sends = torch.zeros(1, device=self._device), self._rank == source
        if sends:
            self._outgoing[target] = pair
            work = self.send(nothing, target)
        else:
            self._incoming[source] = pair
            work = self.receive(nothing, source)
        self.wait(work)
        self._first[target if sends else source, sends] = work

    def first(self, peer: int, *, sends: bool) -> dist.Work | None:
        return self._first.get((peer, sends))

    def send(self, tensor: Tensor, peer: int) -> dist.Work:
        work: dist.Work = self._outgoing[peer].send([tensor], 1, 0)
        return work

    def receive(self, buffer: Tensor, peer: int) -> dist.Work:
        work: dist.Work = self._incoming[peer].recv([buffer], 0, 0)
        return work

    def wait(self, work: dist.Work) -> None:
        work.wait()

    @property
    def groups(self) -> list[Any]:
        """The communicators of this rank's pairs."""
        return [*self._outgoing.values(), *self._incoming.values()]


def _connection_order(pairs: Collection[tuple[int, int]]) -> list[tuple[int, int]]:
    """Both directions of each pair, in the order in which all ranks connect.

    Making a pair waits for the peer. One order for all ranks keeps them from waiting in a circle. Neighbors from even
    ranks come first, so that many pairs are made at the same time::

        at the same time   0-1   2-3   4-5
        then                  1-2   3-4   5-6
    """
    both = {pair for a, b in pairs for pair in ((a, b), (b, a)) if a != b}
    return sorted(both, key=lambda pair: (min(pair) % 2, min(pair), max(pair), pair))


class Channel:
    """Sends to and receives from the other ranks of a pipeline. ``peer`` is a rank's place in the pipeline.

    Nothing announces a message: both ends know shape and dtype from the plan, and messages between two ranks arrive in
    the order in which they were sent.

    Args:
        device: where messages arrive.
        line: the ranks of the pipeline.
        failure: is told of errors.
        links: the connections; None where this process is alone.
    """

    def __init__(self, device: torch.device, line: Line, failure: Failure, links: Links | None) -> None:
        self._device, self._line, self._failure, self._links = device, line, failure, links

    @property
    def links(self) -> Links:
        assert self._links is not None, "this process is alone"
        return self._links

    def connect(self, pairs: Collection[tuple[int, int]]) -> None:
        """Prepares transfers between these pairs of ranks. All ranks call it, with the same pairs."""
        if self._links is not None and self._line.size > 1:
            self._links.connect(pairs, lambda make, peer: self._failure.call_guarded(make, self._peer(peer)))

    def send(self, tensor: Tensor, peer: int, why: object) -> dist.Work:
        """Begins to send a tensor.

        Args:
            tensor: must stay as it is until the transfer is through.
            peer: that receives it.
            why: what it is, for messages about failures.
        """
        with self._failure.waiting(self._peer(peer), why):
            work = self.links.send(tensor, peer)
            return self._failure.watch(work, self.links.first(peer, sends=True), self._peer(peer), why)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, why: object) -> tuple[Tensor, dist.Work]:
        """Begins to receive a tensor. It may be read after ``wait``.

        Args:
            shape: of the tensor.
            dtype: of the tensor.
            peer: that sends it.
            why: what it is, for messages about failures.
        """
        buffer = torch.empty(shape, dtype=dtype, device=self._device)
        with self._failure.waiting(self._peer(peer), why):
            work = self.links.receive(buffer, peer)
            return buffer, self._failure.watch(work, self.links.first(peer, sends=False), self._peer(peer), why)

    def wait(self, work: dist.Work, peer: int, why: object) -> None:
        """Returns when what is computed next may use the message: on a GPU the device waits, not the host."""
        with self._failure.waiting(self._peer(peer), why):
            self.links.wait(work)

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        """Returns the sum of this rank's tensor and its peer's, the same on both to the last bit."""
        why = "the gradient of a shared parameter"
        tensor = tensor.contiguous()
        # Without tags both ends must begin with the same transfer: that of the lower rank.
        sent = self.send(tensor, peer, why) if self._line.rank < peer else None
        other, arriving = self.receive(tuple(tensor.shape), tensor.dtype, peer, why)
        sent = sent or self.send(tensor, peer, why)
        self.wait(arriving, peer, why)
        self.wait(sent, peer, why)
        return other.add_(tensor)

    def _peer(self, peer: int) -> tuple[int, ...]:
        return (self._line.members[peer],)


class Done(dist.Work):
    """A transfer that is through."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class NullChannel(Channel):
    """Sends nothing, and counts what it would have sent, by the word before the parenthesis: ``SEND_F`` of
    ``SEND_F(0, 1)``. What arrives is zeros: with anything else, made-up steps could compute NaN.

    Args:
        device: where messages seem to arrive.
        line: the ranks of the pipeline, on paper.
        failure: of a process that is alone.
    """

    def __init__(self, device: torch.device, line: Line, failure: Failure) -> None:
        super().__init__(device, line, failure, None)
        self.sent: Counter[str] = Counter()

    def send(self, tensor: Tensor, peer: int, why: object) -> dist.Work:
        self.sent[str(why).partition("(")[0]] += 1
        return Done()

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, why: object) -> tuple[Tensor, dist.Work]:
        return torch.zeros(shape, dtype=dtype, device=self._device), Done()

    def wait(self, work: dist.Work, peer: int, why: object) -> None:
        pass


def not_none(work: dist.Work | None) -> dist.Work:
    """Returns what an operation with ``async_op`` returned; only a rank outside of its group would get None."""
    assert work is not None
    return work
