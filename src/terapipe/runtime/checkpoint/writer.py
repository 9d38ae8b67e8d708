"""Writes what is to be saved, in a thread of its own and over connections of its own: training may go on::

    Checkpoint.begin     main thread      copies the tensors (Staging), returns a Saving
    CheckpointWriter     saving thread    _write: shards, checksums, manifest, rename
    Saving.result        main thread      raises what went wrong, the same on all ranks

The folder of a checkpoint is never half written. It grows under another name beside, and gets its own by a rename.
"""

import io
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from terapipe.files import flush, recover, replace_folder, sibling
from terapipe.modeling.weight_grads import as_dtensor_like, to_local
from terapipe.runtime.checkpoint.manifest import Sum, SummedFile, write_manifest
from terapipe.runtime.comm.environment import start_thread
from terapipe.runtime.comm.errors import is_connection_error
from terapipe.runtime.comm.groups import GROUPS
from terapipe.runtime.comm.mesh import ALL
from terapipe.runtime.comm.transport import Transport

PATIENCE = timedelta(hours=1)  # for the slowest rank's disk; one that dies is noticed at once


State = dict[str, dict[str, Tensor]]  # tensors by the part of the checkpoint that they belong to, and by name


class Saving:
    """A checkpoint on its way to the disk. The process must not end before it is done.

    Not torch's ``async_save``: its thread ends with the data, and what follows (checksums, the manifest, the rename,
    one answer for all ranks) must be done in the background, too; and Python would wait for its thread at exit.

    Args:
        work: writes it.
        transport: is told where ranks lost each other meanwhile.
    """

    def __init__(self, work: Callable[[], None], transport: Transport) -> None:
        self._transport = transport
        self._future: Future[None] = Future()
        # A daemon thread: it may block on a dead rank and must not keep the interpreter alive.
        start_thread(lambda: self._run(work), transport.device, "terapipe-saving")

    def _run(self, work: Callable[[], None]) -> None:
        """Runs in the thread. Every error becomes the future's: one that is raised here, nobody would see."""
        try:
            work()
        except OSError as error:
            self._future.set_exception(error.with_traceback(None))  # which would keep what was to be saved in memory
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(None)

    def done(self) -> bool:
        """Tells whether the save has ended, well or not."""
        return self._future.done()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until the save is done, and tells whether it is.

        Args:
            seconds: to wait at most; None to wait until the end.
        """
        return bool(wait([self._future], seconds).done)

    def result(self) -> None:
        """Waits until the save is done. It raises an OSError, the same on all ranks, if the checkpoint could not be
        written; training can go on then. A rank that is gone is named, and the pipeline has failed with it."""
        try:
            self._future.result()
        except RuntimeError as error:
            if is_connection_error(error):
                others = self._transport.ranks.others(ALL)
                raise self._transport.failure.lost(error, "saving a checkpoint", others) from None
            raise


class Staging:
    """Copies of a state in the host's memory, from which a checkpoint is written while training goes on.

    From a GPU they go to pinned memory that stays from save to save, without the host waiting::

        main thread    queue copies, record event | next step, which may change the originals after the copies
        device         ... | copies | next step ...
        saving thread      wait for the event | write the copies

    There is one copy at a time: the next one overwrites it. torch's ``DefaultStager`` would wait for the copies in the
    main thread or in one of its own, and knows nothing of a failure in between.
    """

    def __init__(self) -> None:
        self._pinned: dict[tuple[str, str], Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def copy(self, state: State) -> State:
        """Begins to copy a state; the copies may be read after ``wait``.

        Args:
            state: tensors on any devices. They may be changed as soon as this returns, by work on the current stream,
                which the device does after the copies.
        """
        copies = {
            part: {name: self._copy(x.detach(), (part, name)) for name, x in tensors.items()}
            for part, tensors in state.items()
        }
        devices = {x.device for tensors in state.values() for x in tensors.values() if x.is_cuda}
        for device in devices:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(device))
        return copies

    def wait(self) -> None:
        """Returns when the copies are there. The thread that writes calls it."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, x: Tensor, key: tuple[str, str]) -> Tensor:
        """Copies a tensor; of a DTensor, this rank's part. Pinned memory is used again where shape and dtype are the
        same, as pinning some gigabytes takes seconds."""
        if not x.is_cuda:
            return x.to("cpu", copy=True)
        part, room = to_local(x), self._pinned.get(key)
        if room is None or (room.shape, room.dtype) != (part.shape, part.dtype):
            room = self._pinned[key] = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
        room.copy_(part, non_blocking=True)
        return as_dtensor_like(x, room)


class CheckpointWriter:
    """Writes checkpoints for the ranks of a transport, in a thread of its own and over a group of its own.

    At most one save is in flight, so at most one copy of the state is held. Of all pipelines over the same ranks one
    saves at a time: ``ProcessGroups`` owns the writer. All ranks make it together. Its group is gloo's whatever the
    devices are: the thread must not disturb their queues.

    Args:
        transport: of the ranks that save together.
    """

    def __init__(self, transport: Transport) -> None:
        self.staging = Staging()
        self.latest: Saving | None = None
        self._group: dist.ProcessGroup | None = None
        if transport.ranks[ALL].has_peers:
            ranks = list(transport.ranks[ALL].members)
            self._group = dist.new_group(ranks, PATIENCE, "gloo", use_local_synchronization=True)
        GROUPS.writers[_key(transport)] = self

    @staticmethod
    def of(transport: Transport) -> "CheckpointWriter | None":
        """Returns the writer of these ranks; None if there is none yet, or a save of the last one failed."""
        return GROUPS.writers.get(_key(transport))

    @classmethod
    def ensure(cls, transport: Transport) -> None:
        """Makes the writer of these ranks if there is none. All ranks call it together."""
        if cls.of(transport) is None:
            cls(transport)

    def begin(self, state: dict[str, Any], folder: Path, texts: Mapping[str, str], transport: Transport) -> Saving:
        """Begins to write a checkpoint. All ranks call it together.

        Args:
            state: this rank's tensors; copies, if training is to go on.
            folder: of the checkpoint, seen by all ranks.
            texts: further files, by name; the first rank writes them.
            transport: is told where ranks lose each other.
        """

        def work() -> None:
            try:
                self.staging.wait()
                transport.failure.refuse_stopped("a checkpoint")  # of what the device has copied just now
                _write(state, folder, texts, self._group)
            except RuntimeError:
                GROUPS.writers.pop(_key(transport), None)  # ranks may be out of step
                raise

        self.latest = Saving(work, transport)
        return self.latest


def _key(transport: Transport) -> tuple[object, ...]:
    """Returns what a writer belongs to: its ranks, and the world they met in. A world that was destroyed and made anew
    has the same ranks, but the old writer's group is gone."""
    return (dist.group.WORLD if dist.is_initialized() else None, *transport.ranks.hosts)


def _write(state: dict[str, Any], folder: Path, texts: Mapping[str, str], group: dist.ProcessGroup | None) -> None:
    """Writes a checkpoint beside its folder; the first rank renames it in the end. So a crash at any moment leaves
    the old one or the new one whole::

        all ranks    write shards to "partial", take their sums | gather the sums
        first rank                                              | texts, manifest, flush, rename
        all ranks                                                 get the first rank's problem, if any, and raise it
    """
    partial = sibling(folder, "partial")
    is_main = group is None or dist.get_rank(group) == 0
    failures: dict[int, BaseException] = {}
    try:
        # Returns on the first rank after its ``finish``, and that runs when it has gathered what all have written.
        writer = _Writer(partial)
        _save(state, writer, group)
        sums = _gather_sums(writer.sums, group)
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


def _gather_sums(sums: dict[str, Sum], group: dist.ProcessGroup | None) -> dict[str, Sum]:
    """Gathers the sums of the files that all ranks have written. Names do not clash: torch puts a rank's number into
    those of its shards, and the first rank alone writes the index."""
    if group is None:
        return sums
    everyone: list[dict[str, Sum]] = [{}] * group.size()
    dist.all_gather_object(everyone, sums, group=group)
    return {name: x for part in everyone for name, x in part.items()}


def _finish(folder: Path, partial: Path, texts: Mapping[str, str], sums: dict[str, Sum]) -> None:
    """Completes a checkpoint and puts it in place. It flushes before it renames: a name must not precede its bytes."""
    for name, text in texts.items():
        with SummedFile(partial / name) as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        sums = {**sums, name: file.sum}
    write_manifest(partial, sums)
    flush(partial)
    replace_folder(folder, partial)
    flush(folder.parent)


def _problem(folder: Path, failures: dict[int, BaseException], group: dist.ProcessGroup | None) -> Exception | None:
    """Returns what all ranks are to raise: the first failure of a disk, if there is one, as that is mostly the
    cause."""
    if not failures:
        return None
    # False sorts before True: errors of the system first, and among equals the lowest rank's.
    rank, cause = min(failures.items(), key=lambda item: (not isinstance(item[1], OSError), item[0]))
    who = rank if group is None else dist.get_global_rank(group, rank)
    start = f"the checkpoint {folder} could not be saved, rank {who}: "
    if isinstance(cause, OSError):
        return OSError(cause.errno, f"{start}{cause.strerror or cause}; what was saved before is whole")
    return RuntimeError(f"{start}{type(cause).__name__}: {cause}")


def _save(state: dict[str, Any], writer: FileSystemWriter, group: dist.ProcessGroup | None) -> None:
    """Writes shards and index by torch.distributed.checkpoint.

    Args:
        state: nested dictionaries of tensors; DTensors are saved as this rank's part of the whole.
        writer: to the partial folder.
        group: of the ranks that save together; None for one process, which may never have begun torch.distributed.
    """
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
        """Opens a file for torch to write; its sum is there as soon as torch has closed it."""
        assert mode == "wb", mode
        with SummedFile(path) as file:
            yield file
        self.sums[Path(path).name] = file.sum

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """torch writes the index under another name first; the sum follows it."""
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _Writer(FileSystemWriter):
    """torch's own writer, which also sums what it writes.

    Args:
        folder: to write to; made if it is missing. Nothing is copied ahead from a GPU, which torch would do on a stream
            of its own, beside those of training.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)
        self.fs = files = _Files()
        self.sums = files.sums

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Raises the system's error where there is one: torch hides that the disk is full behind an error of its
        own."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            raise _system_error(error) or error from None


def _system_error(error: BaseException | None) -> OSError | None:
    """Finds the error of the system in the chain of errors that one came from; None if there is none."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
