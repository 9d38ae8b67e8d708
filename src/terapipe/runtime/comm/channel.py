"""Messages from one rank of a pipeline to another, whose failures become one message on all ranks."""

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor

from terapipe.runtime.comm.failures import Failure
from terapipe.runtime.comm.links import Links
from terapipe.runtime.comm.ranks import Line


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
