"""What ``torch.cuda`` lacks in a torch for CPUs: its bindings in ``torch._C``, streams, events and properties.

``torch.cuda``'s own python code runs on top of them, unchanged.
"""

import os
import platform
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import _C

from tests.pretend import GPUS
from tests.pretend.waits import note

NAME = "Pretend GPU"
NCCL = (2, 27, 5)  # the version that is pretended
_pretend: Any = torch.ops.pretend
_forked = False
_first = 0  # the number of the first device that this process sees, among all of the host


def install() -> None:
    count = int(os.environ[GPUS])
    for name, function in _bindings(count).items():
        setattr(_C, name, function)
    cuda: Any = torch.cuda
    cuda._exchange_device = _C._cuda_exchangeDevice
    cuda._maybe_exchange_device = _C._cuda_maybeExchangeDevice
    cuda._is_in_bad_fork = lambda: _forked
    cuda._cudart = SimpleNamespace(
        cudaError=SimpleNamespace(success=0), cudaMemGetInfo=lambda device: _C._accelerator_getMemoryInfo(device)
    )
    cuda.graphs._cuda_isCurrentStreamCapturing = lambda: False
    cuda.Stream = cuda.streams.Stream = Stream
    cuda.Event = cuda.streams.Event = Event
    storage: Any = torch.UntypedStorage
    storage.resize_, storage.__new__ = _resize, staticmethod(_new_storage)


def _bindings(count: int) -> dict[str, Any]:
    synchronize = _C._accelerator_synchronizeDevice
    modes = [0]
    return {
        "_has_cuda": True,
        "_accelerator_synchronizeDevice": _noted("torch.accelerator.synchronize", synchronize),
        "_cuda_synchronize": _noted("torch.cuda.synchronize", lambda: synchronize(_C._accelerator_getDeviceIndex())),
        "_cuda_init": lambda: _initialize(count),
        "_cuda_getDeviceCount": _pretend.device_count,
        "_cuda_getDevice": _C._accelerator_getDeviceIndex,
        "_cuda_setDevice": _set_device,
        "_cuda_exchangeDevice": _C._accelerator_exchangeDevice,
        "_cuda_maybeExchangeDevice": _C._accelerator_maybeExchangeDevice,
        "_cuda_hasPrimaryContext": lambda device: True,
        "_cuda_canDeviceAccessPeer": lambda device, peer: True,
        "_cuda_getArchFlags": lambda: None,
        "_cuda_getCurrentStream": lambda device: _data(_C._accelerator_getStream(device)),
        "_cuda_getDefaultStream": lambda device: (0, device, _CUDA),
        "_cuda_getCurrentRawStream": lambda device: _C._accelerator_getStream(device).stream_id,
        "_cuda_setStream": _set_stream,
        "_cuda_emptyCache": _C._accelerator_emptyCache,
        "_cuda_memoryStats": _C._accelerator_getDeviceStats,
        "_cuda_resetPeakMemoryStats": _C._accelerator_resetPeakStats,
        "_cuda_resetAccumulatedMemoryStats": _C._accelerator_resetAccumulatedStats,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_sleep": lambda cycles: time.sleep(min(cycles / 2e9, 0.005)),  # a real host goes on at once
        "_cuda_set_sync_debug_mode": lambda mode: modes.__setitem__(0, mode),
        "_cuda_get_sync_debug_mode": lambda: modes[0],
        "_nccl_version": lambda: NCCL[0] << 32 | NCCL[1] << 16 | NCCL[2],
        "_nccl_version_suffix": lambda: b"",
    }


def _set_device(device: int) -> None:
    torch.cuda.init()
    _C._accelerator_setDeviceIndex(device)


def _noted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any) -> Any:
        note(kind)
        return function(*args)

    return noted


def _initialize(count: int) -> None:
    """When CUDA is first used. As with a real one, a process that is forked after that cannot use it."""
    cuda: Any = torch.cuda
    cuda.default_generators = tuple(_pretend.default_generator(device) for device in range(count))
    cuda._get_device_properties = _properties
    os.register_at_fork(after_in_child=_set_forked)


def _set_forked() -> None:
    global _forked
    _forked = True


def _properties(device: int) -> SimpleNamespace:
    major, minor = _pretend.capability()
    place = _first + device
    return SimpleNamespace(
        name=NAME,
        major=major,
        minor=minor,
        total_memory=_C._accelerator_getMemoryInfo(device)[1],
        multi_processor_count=132,
        max_threads_per_multi_processor=2048,
        warp_size=32,
        L2_cache_size=50 << 20,
        is_integrated=0,
        is_multi_gpu_board=0,
        uuid=uuid.uuid5(uuid.NAMESPACE_DNS, f"{platform.node()}/{place}"),
        pci_bus_id=place + 1,
        pci_device_id=0,
        pci_domain_id=0,
    )


@contextmanager
def capability(major: int, minor: int) -> Iterator[None]:
    """The devices are of another compute capability than 9.0."""
    before = _pretend.capability()
    _pretend.set_capability(major, minor)
    try:
        yield
    finally:
        _pretend.set_capability(*before)


@contextmanager
def memory(size: int, device: int = 0) -> Iterator[None]:
    """The device has so many bytes."""
    before = _C._accelerator_getMemoryInfo(device)[1]
    _pretend.set_memory(device, size)
    try:
        yield
    finally:
        _pretend.set_memory(device, before)


@contextmanager
def one_visible(place: int) -> Iterator[None]:
    """This process sees one device of its host, as the first: so do launchers that set ``CUDA_VISIBLE_DEVICES``."""
    global _first
    before, current = _pretend.device_count(), torch.cuda.current_device()
    torch.cuda.set_device(0)
    _first = place
    _pretend.set_device_count(1)
    try:
        yield
    finally:
        _first = 0
        _pretend.set_device_count(before)
        torch.cuda.set_device(current)


# Streams and events

_CUDA = 1  # the number of the device type


def _data(stream: torch.Stream) -> tuple[int, int, int]:
    return stream.stream_id, stream.device_index, stream.device_type


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    _C._accelerator_setStream(torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type))


class Stream(torch.Stream):
    """torch.cuda.Stream, by what all accelerators have in common."""

    def __new__(cls, device: Any = None, priority: int = 0, **data: int) -> "Stream":
        if data:
            return super().__new__(cls, **data)
        torch.cuda.init()
        index = torch.cuda._utils._get_device_index(device, optional=True)
        return super().__new__(cls, device=torch.device("cuda", index), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_stream(self, stream: torch.Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        note("Stream.synchronize")
        super().synchronize()


class Event(torch.Event):
    """torch.cuda.Event, likewise. It has happened when it is recorded."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> "Event":
        torch.cuda.init()
        made = super().__new__(cls, "cuda", enable_timing=enable_timing)
        made._time = time.perf_counter() if enable_timing else None
        return made

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(torch.cuda.current_stream() if stream is None else stream)
        if self._time is not None:
            self._time = time.perf_counter()

    def elapsed_time(self, other: "Event") -> float:  # type: ignore[override]
        if self._time is None or other._time is None:
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        return 1000 * (other._time - self._time)

    def synchronize(self) -> None:
        note("Event.synchronize")
        super().synchronize()


# Storages

_resize_on_host = torch.UntypedStorage.resize_


def _new_storage(cls: type[torch.UntypedStorage], *args: Any, device: Any = None, **more: Any) -> torch.UntypedStorage:
    if device is None or torch.device(device).type != "cuda":
        return _C.StorageBase.__new__(cls, *args, device=device, **more)
    return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=device).untyped_storage()


def _resize(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    if self.device.type != "cuda":
        return _resize_on_host(self, size)
    _pretend.resize_storage(self, size)
    return self
