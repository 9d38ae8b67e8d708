"""Moves what a slice's forward leaves for its backward to the memory of the host, and back.

Autograd saves tensors in the nodes of its graph. While the forward of an offloaded slice runs, hooks put a
``_Saved`` in the place of each, and ``SavedTensors`` remembers the storages behind them::

    forward       pack(tensor) --> _Saved --> _Storage      a storage counts once, however many views of it are saved
    start_out     _Storage --> pinned memory of the host    on a stream of its own, behind the forward
    finish_out    the device's storage is let go of         the device waits for the copy; its memory is free
    start_back    pinned memory --> a new storage           on another stream
    finish_back   the backward may begin                    the device waits for the copy
    backward      unpack(_Saved) --> a view of the storage  gone when autograd is done with the node

The graph alone holds the new storages, so they go while the backward walks through the layers, as they would without
all this. Two tensors at the ends of the graph would stay on the device, because autograd holds them itself: the input,
which gets a gradient, and the output, from which the backward starts. ``stand_in_for_input`` and
``stand_in_for_output`` put tensors without memory in their places.

On a GPU the host never waits: streams wait for events. On a CPU there is one thread and one memory; the same steps are
done one after the other, so that what holds for a GPU can be tested without one.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from terapipe.modeling.weight_grads import to_local

SMALL = 256  # bytes; copying less frees less than it costs
ALIGN = 512  # bytes; where storages begin in the memory of the host
UNIT = 1 << 20  # bytes of the smallest piece of the host's memory


class HostMemory:
    """Pinned memory of the host, made once and used again in every step.

    torch rounds pinned memory up to powers of two, so that nearly half of it may be lost. So the room for a slice is
    put together from pieces that are powers of two of ``UNIT``: 100 MiB from 64, 32 and 4. Any slice can use pieces
    that another gave back.

    Args:
        device: For whose copies it is; memory for a CPU need not be pinned.
    """

    def __init__(self, device: torch.device) -> None:
        self._pins = device.type == "cuda"
        self._free: dict[int, list[Tensor]] = {}  # by bytes
        self._storages: set[int] = set()  # of all pieces; none of them is ever let go of
        self._grows = False  # while a piece is being made, which is in no set yet
        self.nbytes = 0  # of all pieces

    def take(self, nbytes: int) -> "HostRoom":
        """Room for so many bytes.

        Args:
            nbytes: What a slice keeps.
        """
        units, pieces = -(-nbytes // UNIT), []
        for power in reversed(range(units.bit_length())):
            if units >> power & 1:
                size = UNIT << power
                free = self._free.get(size)
                pieces.append(free.pop() if free else self._make(size))
        return HostRoom(pieces)

    def _make(self, size: int) -> Tensor:
        self.nbytes += size
        self._grows = True
        try:
            piece = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._pins)
        finally:
            self._grows = False
        self._storages.add(piece.untyped_storage()._cdata)
        return piece

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is a piece of it. Where the device is a CPU nothing else tells the two memories apart.

        Args:
            storage: That of any tensor.
        """
        return self._grows or storage._cdata in self._storages

    def give_back(self, room: "HostRoom") -> None:
        """Takes room back. Copies from it that are under way must end before later ones to it can begin.

        Args:
            room: What ``take`` returned.
        """
        for piece in room.pieces:
            self._free.setdefault(piece.numel(), []).append(piece)


class HostRoom(NamedTuple):
    """Room in the memory of the host, as if its pieces were one."""

    pieces: list[Tensor]  # the largest first

    def parts(self, start: int, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """A vector of bytes cut where pieces end, each part with its place.

        Args:
            start: Where the vector begins in the room.
            flat: The bytes to be copied there, or from there.
        """
        begin, end = 0, start + len(flat)  # of a piece; of the vector
        for piece in self.pieces:
            first, last = max(start, begin), min(end, begin + len(piece))
            if first < last:
                yield flat[first - start : last - start], piece[first - begin : last - begin]
            begin += len(piece)


class Copier:
    """Copies between a device and its host, beside what the device computes.

    Args:
        device: The one that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.host = device, HostMemory(device)
        self._streams: dict[str, torch.cuda.Stream] = {}

    @property
    def is_beside(self) -> bool:
        """Whether copies go on while the device computes. A CPU copies when it is told to, and not before."""
        return self._device.type == "cuda"

    @contextmanager
    def stream(self, direction: str) -> Iterator[None]:
        """Inside, what is queued runs beside the device's computations, after those that were queued before.

        Args:
            direction: "out" or "back"; each has a stream of its own, as a GPU has an engine for each.
        """
        if not self.is_beside:
            yield
            return
        if direction not in self._streams:
            self._streams[direction] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream = self._streams[direction]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies numbers; on a GPU the host does not wait for it.

        Args:
            target: On the device, and the source in memory of the host; or the other way round.
            source: Of the same length.
        """
        target.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event | None:
        """The end of what was queued so far on the current stream."""
        return torch.cuda.current_stream(self._device).record_event() if self.is_beside else None

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """What the device computes from now on comes after a mark.

        Args:
            mark: What ``mark`` returned.
        """
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)


class _Storage:
    """One storage that autograd saved a part of, or several parts.

    Attributes:
        tensor: One of the tensors in it, while it is on the device for the first time.
        nbytes: Of the whole storage.
        parts: Those that were saved, and their bytes.
        flat: All its bytes, when it is back on the device.
        start: Where it begins in the slice's room in the memory of the host.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.nbytes = tensor.untyped_storage().nbytes()
        self.parts: dict[Any, int] = {}
        self.flat: Tensor | None = None
        self.start = 0

    def as_bytes(self) -> Tensor:
        """The whole storage as a vector of bytes, while ``tensor`` is there."""
        assert self.tensor is not None
        whole = self.tensor.as_strided((self.nbytes // self.tensor.itemsize,), (1,), 0)
        return whole.view(torch.uint8)


class _Saved:
    """What the graph has in the place of a tensor that it saved."""

    def __init__(self, storage: _Storage, local: Tensor, whole: Tensor) -> None:
        self.storage = storage
        self.tensor: Tensor | None = local
        self.version = local._version
        self.dtype = local.dtype
        self.layout = local.shape, local.stride(), local.storage_offset()
        # How devices share it, if they do:
        self.spec: tuple[Any, ...] | None = None
        if isinstance(whole, DTensor):
            self.spec = whole.device_mesh, whole.placements, whole.shape, whole.stride()

    def restore(self) -> Tensor:
        """The tensor, as it was saved or as it came back."""
        local = self.tensor
        if local is None:
            assert self.storage.flat is not None, "a backward began before its slice was back"
            flat = self.storage.flat[: self.storage.nbytes // self.dtype.itemsize * self.dtype.itemsize]
            local = flat.view(self.dtype).as_strided(*self.layout)
        if self.spec is None:
            return local
        mesh, placements, shape, stride = self.spec
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


class SavedTensors:
    """All that one slice keeps from its forward on a stage to its backward there, so that it can be moved.

    Args:
        copier: Copies it.
        device: Where it is computed.
        mark: Tells the time, by the current stream of the device.
    """

    def __init__(self, copier: Copier, device: torch.device, mark: Callable[[], Any]) -> None:
        self._copier, self._device, self._now = copier, device, mark
        self._storages: dict[int, _Storage] = {}
        self._saved: list[_Saved] = []
        self._moved: list[_Storage] = []
        self._room: HostRoom | None = None
        self._done: torch.cuda.Event | None = None  # the last copy
        self.marks: tuple[Any, Any] = (None, None)  # when the last copy began and ended
        self.nbytes = 0  # that are copied in each direction

    def hooks(self) -> AbstractContextManager[None]:
        """A context for the forward, in which autograd saves tensors here."""
        hooks: AbstractContextManager[None] = saved_tensors_hooks(self.pack, self.unpack)
        return hooks

    def pack(self, tensor: Tensor) -> Any:
        """What to keep in the place of a tensor: ``unpack`` gives it back. Tensors of other devices stay themselves.

        Args:
            tensor: What autograd, or anybody else, needs again in the backward.
        """
        local = to_local(tensor)
        if type(local).__name__ not in _MOVABLE or local.device != self._device or local.layout is not torch.strided:
            return tensor
        storage = local.untyped_storage()
        if storage.nbytes() < SMALL:
            return tensor
        entry = self._storages.setdefault(storage._cdata, _Storage(local))
        saved = _Saved(entry, local, tensor)
        entry.parts[saved.layout] = local.numel() * local.itemsize
        self._saved.append(saved)
        return saved

    def unpack(self, saved: Any) -> Tensor:
        """The tensor that ``pack`` was given.

        Args:
            saved: What it returned.
        """
        tensor: Tensor = saved.restore() if isinstance(saved, _Saved) else saved
        return tensor

    def start_out(self, weights: Collection[int]) -> None:
        """Begins to copy to the memory of the host, behind the forward.

        Weights stay, and storages of which a small part was saved: somebody else holds the rest, a batch for one, and
        copying would free nothing.

        Args:
            weights: Storages that others hold (``storages_of``).
        """
        self._moved = [
            entry
            for key, entry in self._storages.items()
            if key not in weights and 2 * sum(entry.parts.values()) >= entry.nbytes
        ]
        self.nbytes = 0
        for entry in self._moved:
            entry.start = self.nbytes
            self.nbytes += -(-entry.nbytes // ALIGN) * ALIGN
        if self._copier.is_beside:
            self._copy_out()

    def _copy_out(self) -> None:
        with self._copier.stream("out"):
            began, self._room = self._now(), self._copier.host.take(self.nbytes)
            for entry in self._moved:
                for part, place in self._room.parts(entry.start, entry.as_bytes()):
                    self._copier.copy(place, part)
            self._done, self.marks = self._copier.mark(), (began, self._now())

    def finish_out(self) -> None:
        """Lets go of the device's memory. What the device computes from now on comes after the copy."""
        self._check_versions()
        if not self._copier.is_beside:
            self._copy_out()
        self._copier.wait(self._done)
        moved = set(map(id, self._moved))
        for saved in self._saved:
            if id(saved.storage) in moved:
                saved.tensor = None
        for entry in self._moved:
            entry.tensor = None
        self._saved.clear()
        self._storages.clear()

    def _check_versions(self) -> None:
        """Autograd compares versions of what it saves itself, but not of what hooks keep for it."""
        for saved in self._saved:
            if saved.tensor is not None and saved.tensor._version != saved.version:
                raise RuntimeError(
                    "a tensor that a backward needs was changed in place after it was saved, of shape "
                    f"{tuple(saved.tensor.shape)}; write x = x * 2 in place of x *= 2 in the layer that made it"
                )

    def start_back(self) -> None:
        """Takes memory of the device, and begins to copy into it."""
        for entry in self._moved:  # made on the device's own stream, so that its memory is reused in order
            entry.flat = torch.empty(entry.nbytes, dtype=torch.uint8, device=self._device)
        with self._copier.stream("back"):
            began = self._now()
            assert self._room is not None
            for entry in self._moved:
                assert entry.flat is not None
                for part, place in self._room.parts(entry.start, entry.flat):
                    self._copier.copy(part, place)
            self._done, self.marks = self._copier.mark(), (began, self._now())

    def finish_back(self) -> None:
        """What the device computes from now on comes after the copy. From here on the graph alone holds the tensors."""
        self._copier.wait(self._done)
        assert self._room is not None
        self._copier.host.give_back(self._room)
        self._moved, self._room = [], None


# By name, because some are classes of torch that not every version has. A parameter that is saved is a weight.
_MOVABLE = {"Tensor", "FakeTensor", "Parameter"}


def storages_of(modules: Iterable[nn.Module], others: Iterable[Tensor] = ()) -> set[int]:
    """The storages of parameters and buffers, which are there anyway.

    Args:
        modules: Whose they are.
        others: Further tensors, such as weights in another dtype.
    """
    weights = [x for module in modules for x in (*module.parameters(), *module.buffers())]
    return {to_local(x).untyped_storage()._cdata for x in (*weights, *others) if type(to_local(x)).__name__ in _MOVABLE}


class _Same(torch.autograd.Function):
    """Gives out one tensor as if it were computed from another, whose gradient it gets."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, result: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _without_memory(x: Tensor) -> Tensor:
    """A tensor of the same shape and dtype, of one number."""
    return x.new_empty(1).expand(x.shape)


def stand_in_for_input(x: Tensor) -> tuple[Tensor, Tensor]:
    """A leaf without memory, and the input as if it were computed from that leaf.

    Autograd holds the leaves of its graph, since they get gradients. Here that is the stand-in, and the input is held
    by nobody but those who saved it.

    Args:
        x: What a stage received.
    """
    leaf = _without_memory(x).requires_grad_()
    return leaf, _Same.apply(leaf, x)  # type: ignore[no-untyped-call]


def stand_in_for_output(out: Tensor) -> Tensor:
    """A tensor without memory from which a backward can start in the place of the output.

    Args:
        out: What a stage computed; it may be let go of when it was sent.
    """
    end: Tensor = _Same.apply(out, _without_memory(out))  # type: ignore[no-untyped-call]
    return end
