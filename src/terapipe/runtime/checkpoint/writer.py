"""Writes what is to be saved, in a thread of its own and over connections of its own: training may go on."""

import io
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from terapipe.files import beside, flush, put_in_place, recover
from terapipe.runtime.checkpoint.manifest import Sum, SummedFile, write_manifest
from terapipe.runtime.checkpoint.staging import Staging
from terapipe.runtime.comm.errors import is_connection_error
from terapipe.runtime.comm.mesh import ALL
from terapipe.runtime.comm.threads import start_thread
from terapipe.runtime.comm.transport import Transport

PATIENCE = timedelta(hours=1)  # for the slowest rank's disk; one that dies is noticed at once


class Saving:
    """A checkpoint on its way to the disk. The process must not end before it is done.

    Not torch's ``async_save``: its thread ends with the data, and what follows (checksums, the manifest, the rename,
    one answer for all ranks) must be done in the background, too; and Python would wait for its thread at exit.
    """

    def __init__(self, work: Callable[[], None], transport: Transport) -> None:
        self._transport = transport
        self._future: Future[None] = Future()
        # A daemon, of which Python does not wait for the end: it may wait itself, for a rank that is gone.
        start_thread(lambda: self._run(work), transport.device, "terapipe-saving")

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            self._future.set_exception(error.with_traceback(None))  # which would keep what was to be saved in memory
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(None)

    def done(self) -> bool:
        return self._future.done()

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it is done, at the latest after so long."""
        return bool(wait([self._future], seconds).done)

    def result(self) -> None:
        """Waits for its end. An OSError, the same on all ranks, if it could not be written; training can go on then."""
        try:
            self._future.result()
        except RuntimeError as error:
            if is_connection_error(error):
                raise self._transport.failure.lost(
                    error, "saving a checkpoint", self._transport.ranks.others(ALL)
                ) from None
            raise


@dataclass
class Channel:
    """Over which ranks talk about saving. One save at a time: what is written next waits in memory for nobody."""

    group: dist.ProcessGroup | None
    latest: Saving | None = None
    staging: Staging = field(default_factory=Staging)


# Process-wide because groups are (see transport.py): of all pipelines over the same ranks, one saves at a time.
_channels: dict[tuple[object, ...], Channel] = {}


def _key(transport: Transport) -> tuple[object, ...]:
    return (dist.group.WORLD if dist.is_initialized() else None, *transport.ranks.hosts)


def known_channel(transport: Transport) -> Channel | None:
    return _channels.get(_key(transport))


def new_channel(transport: Transport) -> Channel:
    """All ranks make it together. On CPUs whatever the devices are: the thread must not disturb their queues."""
    group = None
    if transport.ranks[ALL].objects is not None:
        ranks = list(transport.ranks.hosts)
        group = dist.new_group(ranks, PATIENCE, "gloo", use_local_synchronization=True)
    _channels[_key(transport)] = channel = Channel(group)
    return channel


def ensure_channel(transport: Transport) -> None:
    """All ranks call it together."""
    if known_channel(transport) is None:
        new_channel(transport)


def begin(
    channel: Channel, state: dict[str, Any], folder: Path, texts: Mapping[str, str], transport: Transport
) -> Saving:
    """``texts`` are further files, by name; the first rank writes them."""

    def work() -> None:
        try:
            channel.staging.wait()
            transport.failure.refuse_stopped("a checkpoint")  # of what the device has copied just now
            _write(state, folder, texts, channel.group)
        except RuntimeError:
            _channels.pop(_key(transport), None)  # ranks may be out of step
            raise

    channel.latest = Saving(work, transport)
    return channel.latest


def _write(state: dict[str, Any], folder: Path, texts: Mapping[str, str], group: dist.ProcessGroup | None) -> None:
    """Beside, then renamed by the first rank: a crash at any moment leaves the old one or the new one whole."""
    partial = beside(folder, "partial")
    is_main = group is None or dist.get_rank(group) == 0
    failures: dict[int, BaseException] = {}
    try:
        # Returns on the first rank after its ``finish``, and that runs when it has gathered what all have written.
        writer = _Writer(partial)
        _save(state, writer, group)
        sums = _gathered(writer.sums, group)
        if is_main:
            _finish(folder, partial, texts, sums)
    except CheckpointException as error:
        failures = {rank: cause for rank, (cause, _) in error.failures.items()}
    except Exception as error:
        if not is_main or is_connection_error(error):
            raise
        failures = {0: error}
    if failures and is_main:
        with suppress(OSError):
            recover(folder)
        shutil.rmtree(partial, ignore_errors=True)
    problem = [_problem(folder, failures, group)]
    if group is not None:  # the first rank may have met one that the others know nothing of
        dist.broadcast_object_list(problem, group=group, group_src=0)
    if problem[0] is not None:
        raise problem[0]


def _gathered(sums: dict[str, Sum], group: dist.ProcessGroup | None) -> dict[str, Sum]:
    """Those of the files that all ranks have written."""
    if group is None:
        return sums
    found: list[dict[str, Sum]] = [{}] * group.size()
    dist.all_gather_object(found, sums, group=group)
    return {name: x for part in found for name, x in part.items()}


def _finish(folder: Path, partial: Path, texts: Mapping[str, str], sums: dict[str, Sum]) -> None:
    for name, text in texts.items():
        with SummedFile(partial / name) as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        sums = {**sums, name: file.sum}
    write_manifest(partial, sums)
    flush(partial)
    put_in_place(folder, partial)
    flush(folder.parent)


def _problem(folder: Path, failures: dict[int, BaseException], group: dist.ProcessGroup | None) -> Exception | None:
    """What all ranks are to raise."""
    if not failures:
        return None
    rank, cause = min(failures.items(), key=lambda item: (not isinstance(item[1], OSError), item[0]))
    who = rank if group is None else dist.get_global_rank(group, rank)
    start = f"the checkpoint {folder} could not be saved, rank {who}: "
    if isinstance(cause, OSError):
        return OSError(cause.errno, f"{start}{cause.strerror or cause}; what was saved before is whole")
    return RuntimeError(f"{start}{type(cause).__name__}: {cause}")


def _save(state: dict[str, Any], writer: FileSystemWriter, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        save(state, storage_writer=writer, process_group=group)
        return
    # The same without torch.distributed, of which ``save`` would warn; warnings cannot be silenced in one thread only.
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, index = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(index, [writer.write_data(plan, planner).wait()])


class _Files(FileSystem):
    """Takes the checksums of the files that a FileSystemWriter writes, shards and index alike."""

    def __init__(self) -> None:
        self.sums: dict[str, Sum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", mode
        with SummedFile(path) as file:
            yield file
        self.sums[Path(path).name] = file.sum

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _Writer(FileSystemWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)
        self.fs = files = _Files()
        self.sums = files.sums

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """torch's file format hides that the disk is full behind an error of its own."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            raise _system_error(error) or error from None


def _system_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
