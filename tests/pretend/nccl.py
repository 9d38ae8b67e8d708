"""A double of NCCL: a process group with its semantics, over gloo, for tensors of pretend GPUs.

Communicators are made when they are first used, and the host waits until all ranks of one have come: one for the
collectives of a group, and one for each pair of ranks that send to each other. Each runs its operations in the order of
posting, and later than the host may think. A group that was given a device has one communicator, made at once, for
everything. Where two ranks disagree about what comes next, NCCL hangs or mixes up data: here both get an error, from
the next operator.

Aborting waits for the device, making a communicator for ever. What torch does when a transfer fails is set by the
environment in which a group is made, as with the original.

What is stricter than the original: tensors must be on the current device, and descriptions must match.
"""

import atexit
import copy
import json
import os
import platform
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from tests.pretend.channel import AsynchronousError, Channel, Monitor, Settings, Work, await_device
from tests.pretend.cuda import NCCL
from tests.pretend.waits import note

Gloo = Any  # ProcessGroupGloo
Host = Callable[[Any], Any]  # a tensor or a list of them, as the CPU sees them

_FOREVER = timedelta(days=1)  # gloo must not give up: whoever waits does
_ROOM = 256  # bytes of a description
_pretend: Any = torch.ops.pretend
_made = count()  # groups, in this process
_groups: "weakref.WeakSet[ProcessGroupNCCL]" = weakref.WeakSet()
UNDESTROYED = "WARNING: destroy_process_group() was not called before program exit, which can leak resources."
SERIALIZED = "An unbatched P2P op (send/recv) was called on this ProcessGroup. In eager initialization mode, ..."


def install() -> None:
    atexit.register(_warn_of_groups)  # first, so that it runs after those of others
    for module in (distributed_c10d, dist, c10d):
        module.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined]
    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d.default_pg_nccl_timeout = timedelta(minutes=10)
    helper = distributed_c10d._new_process_group_helper

    def with_host(size: int, rank: int, ranks: list[int], backend: str, *args: Any, **kwargs: Any) -> Any:
        """torch takes a process group that is written in python for all of its devices, and drops the one that it has
        made for the CPU: while the peers may still be connecting to it."""
        made: list[Gloo] = []

        class Kept(dist.ProcessGroupGloo):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                made.append(self)

        with mock.patch.object(distributed_c10d, "ProcessGroupGloo", Kept):
            group, store = helper(size, rank, ranks, backend, *args, **kwargs)
        if isinstance(group, ProcessGroupNCCL) and made:
            group.host = made[0]
        return group, store

    distributed_c10d._new_process_group_helper = with_host


def _warn_of_groups() -> None:
    """As the destructor of a group does, when all else has ended."""
    if not all(group.is_terminated for group in _groups):
        print(UNDESTROYED, file=sys.stderr)


def _is_set(variable: str, otherwise: str) -> bool:
    return os.environ.get(variable, otherwise).lower() not in ("0", "false", "n", "no")


# Errors on purpose


class _Fault:
    """The operation with this number, counted from one, fails with this text: when it is posted, or if ``late``, when
    it runs."""

    def __init__(self, operation: int, text: str, *, late: bool = False) -> None:
        self._left, self._text, self._late = operation, text, late

    def of_next(self) -> str | None:
        """What the operation that is posted now is to fail with when it runs."""
        self._left -= 1
        if self._left != 0:
            return None
        if not self._late:
            raise dist.DistBackendError(self._text)
        return self._text


def fail(group: dist.ProcessGroup, operation: int, text: str, *, late: bool = False) -> None:
    """Lets an operation of the group fail on this rank, counted from now."""
    assert isinstance(group, ProcessGroupNCCL)
    group.faults.append(_Fault(operation, text, late=late))


def _fault_of_environment() -> list[_Fault]:
    """``TERAPIPE_PRETEND_NCCL_FAULT=RANK:OPERATION:TEXT``, counted over all groups of the rank."""
    rank, _, rest = os.environ.get("TERAPIPE_PRETEND_NCCL_FAULT", "").partition(":")
    operation, _, text = rest.partition(":")
    return [_Fault(int(operation), text)] if rest and rank == os.environ.get("RANK", "0") else []


_faults = _fault_of_environment()


# Communicators


class _Communicator:
    """Some ranks of a group and their devices. ``ranks`` are those of the group."""

    def __init__(self, group: "ProcessGroupNCCL", name: str, ranks: Sequence[int], device: torch.device) -> None:
        self._ranks = ranks
        self._sent: dict[int, int] = {}  # messages exchanged with each peer
        store = dist.PrefixStore(f"communicator/{name}", group.store)
        self._check_devices(group, store, device)
        place = ranks.index(group.rank())
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), place, len(ranks), _FOREVER)
        self.channel = Channel()

    def _check_devices(self, group: "ProcessGroupNCCL", store: dist.Store, device: torch.device) -> None:
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        mine = {"gpu": f"{platform.node()}/{uuid}", "bus": f"{device.index + 1:x}000"}
        store.set(str(group.rank()), json.dumps(mine))
        keys = [str(rank) for rank in self._ranks]
        group.wait_until(lambda: Settings.answers and store.check(keys), "the communicator")
        found = [json.loads(store.get(key)) for key in keys]
        for i, one in enumerate(found):
            for j, other in enumerate(found[:i]):
                if one["gpu"] == other["gpu"]:
                    raise dist.DistBackendError(_duplicate(j, i, one["bus"]))

    def match_all(self, mine: str) -> None:
        """All ranks must have posted the same operation."""
        found = [torch.empty(_ROOM, dtype=torch.uint8) for _ in self._ranks]
        self.gloo.allgather([found], [_encoded(mine)], c10d.AllgatherOptions()).wait()
        for rank, text in zip(self._ranks, map(_decoded, found), strict=True):
            if text != mine:
                raise RuntimeError(f"operations do not match: rank {self._own} has {mine}, rank {rank} has {text}")

    @property
    def _own(self) -> int:
        return self._ranks[self.gloo.rank()]

    def transfer(self, peer: int, tensor: Tensor, is_send: bool) -> None:
        """Both ends must have posted halves of the same message."""
        place = self._ranks.index(peer)
        number = self._sent[peer] = self._sent.get(peer, -1) + 1
        what = f"{tensor.numel()} of {tensor.dtype}"
        mine, wanted = (f"send {what}", f"recv {what}") if is_send else (f"recv {what}", f"send {what}")
        theirs = torch.empty(_ROOM, dtype=torch.uint8)
        arriving = self.gloo.recv([theirs], place, 2 * number)
        self.gloo.send([_encoded(mine)], place, 2 * number).wait()
        arriving.wait()
        if _decoded(theirs) != wanted:
            raise RuntimeError(
                f"operation {number} between ranks {self._own} and {peer} does not match: rank {self._own} has "
                f"{mine}, rank {peer} has {_decoded(theirs)}"
            )
        run = self.gloo.send if is_send else self.gloo.recv
        run([tensor], place, 2 * number + 1).wait()


def _encoded(text: str) -> Tensor:
    return torch.tensor(list(text.encode()[:_ROOM].ljust(_ROOM)), dtype=torch.uint8)


def _decoded(room: Tensor) -> str:
    return bytes(room.tolist()).decode(errors="replace").rstrip()


def _duplicate(first: int, second: int, bus: str) -> str:
    version = ".".join(map(str, NCCL))
    return (
        "NCCL error in: NCCLUtils.cpp, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version "
        f"{version}\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
        f"Duplicate GPU detected : rank {second} and rank {first} both on CUDA device {bus}"
    )


# The process group


class _Config:
    """ncclConfig_t. Nothing of it matters here."""

    def __init__(self) -> None:
        self.blocking, self.cga_cluster_size, self.min_ctas, self.max_ctas = 1, 4, 1, 32
        self.net_name, self.split_share, self.traffic_class = "", 0, 0


class _Options:
    """Of ProcessGroupNCCL."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = _Config()
        self._timeout = timedelta(minutes=10)
        self.split_from: ProcessGroupNCCL | None = None
        self.split_color = 0
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Options":
        return copy.copy(self)


class ProcessGroupNCCL(dist.ProcessGroup):
    """A process group and its only backend in one."""

    Options = _Options
    NCCLConfig = _Config

    def __init__(self, store: dist.Store, rank: int, size: int, options: _Options) -> None:
        super().__init__(rank, size)
        self.store, self.options = store, options
        self._name = self._description = ""
        self.faults: list[_Fault] = []
        self._communicators: dict[str, _Communicator] = {}
        self._eager = False
        self._error: str | None = None  # of a group that was aborted
        self._posted = self._splits = 0
        self.host: Gloo = None  # for tensors of the CPU
        self.is_terminated = False
        self._tears_down = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") != "0"
        self._warns = _is_set("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "1")
        self._number, self._monitor = next(_made), None
        _groups.add(self)
        if self._number == 0:
            self._monitor = Monitor(
                getattr(store, "_underlying_non_prefix_store", store),
                dumps=_is_set("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
                ends=_is_set("TORCH_NCCL_ENABLE_MONITORING", "1"),
            )

    # What torch asks of process groups and of backends

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda"), *([torch.device("cpu")] if self.host is not None else [])]

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cuda":
            return self
        if device.type == "cpu" and self.host is not None:
            return self.host
        raise RuntimeError(f"No backend type associated with device type {device.type}")

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    @property
    def supports_splitting(self) -> bool:
        return True

    @property
    def supports_coalescing(self) -> bool:
        return False

    @property
    def uid(self) -> int:
        return self._number

    def name(self) -> str:
        return "nccl"

    def getBackendName(self) -> str:  # noqa: N802
        return "nccl"

    def get_group_store(self) -> dist.Store:
        return self.store

    def comm_split_count(self) -> int:
        return self._splits

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None: ...

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None: ...

    def _group_start(self) -> None: ...

    def _group_end(self) -> None: ...

    def _is_initialized(self) -> bool:
        return bool(self._communicators)

    def abort(self) -> None:
        """Waits for the device, see ``Channel.abort``. Communicators that are being made go on."""
        self._error = f"NCCL communicator was aborted on rank {self.rank()}."
        for communicator in list(self._communicators.values()):
            communicator.channel.abort()
        self._terminate()

    def shutdown(self) -> None:
        for communicator in list(self._communicators.values()):
            communicator.channel.flush()
            communicator.channel.close()
        self._terminate()

    def _terminate(self) -> None:
        self.is_terminated = True
        if self._monitor is not None:
            self._monitor.stopped.set()

    # Communicators

    def eager_connect_single_device(self, device: torch.device) -> None:
        """For a group that is given its device: one communicator for everything, now."""
        if self.options.split_from is not None:
            self.options.split_from.perform_nocolor_split(device)
        self.bound_device_id = device
        self._eager = True
        self._communicator(device)

    def perform_nocolor_split(self, device: torch.device | None = None) -> None:
        """All ranks of a group must take part when a communicator is split off from its own."""
        key, self._splits = f"split/{self._splits}", self._splits + 1
        self.store.add(key, 1)
        self.wait_until(lambda: self.store.add(key, 0) >= self.size(), "ncclCommSplit")

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: _Options | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> "ProcessGroupNCCL | None":
        if self.rank() not in new_ranks:
            self.perform_nocolor_split()
            return None
        options = opts or _Options()
        options._timeout = timeout or self.options._timeout
        options.split_from = self
        store = dist.PrefixStore(f"{group_name}/", self.store)
        child = ProcessGroupNCCL(store, new_ranks.index(self.rank()), len(new_ranks), options)
        child._set_group_name(group_name or "")
        child._set_group_desc(group_desc or "")
        if self.host is not None:
            child.host = dist.ProcessGroupGloo(
                dist.PrefixStore("host", child.store), child.rank(), child.size(), child.options._timeout
            )
        child.eager_connect_single_device(self.bound_device_id)
        return child

    def _communicator(self, device: torch.device, peer: int | None = None) -> _Communicator:
        """For messages between this rank and a peer, or for operations of all ranks."""
        shared = peer is None or self._eager
        ranks = list(range(self.size())) if shared else sorted((self.rank(), peer))
        name = "all" if shared else "-".join(map(str, ranks))
        if name not in self._communicators:
            self._communicators[name] = _Communicator(self, name, ranks, device)
        return self._communicators[name]

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Until the other ranks have come; the host does nothing else, and nothing ends it."""
        start = time.monotonic()
        while not ready():
            if Settings.gives_up is not None and time.monotonic() - start > Settings.gives_up:
                raise dist.DistBackendError(f"gave up waiting for other ranks at {what}")
            time.sleep(0.002)

    def _check_aborted(self) -> None:
        if self._error is not None:
            raise dist.DistBackendError(self._error)

    # Posting

    def _check(self, tensors: Sequence[Tensor]) -> torch.device:
        """Of an operation before it is posted. Where it runs."""
        self._check_aborted()
        current = torch.device("cuda", torch.cuda.current_device())
        for tensor in tensors:
            if not tensor.is_cuda:
                raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
            if not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")
            if tensor.device != current:
                raise ValueError(f"tensors must be on the current device, got one on {tensor.device}, not {current}")
        return current

    def _post(self, channel: Channel, name: str, tensors: Sequence[Tensor], run: Callable[[], None]) -> Work:
        said = [text for fault in (*_faults, *self.faults) if (text := fault.of_next()) is not None]

        def fail_or_run() -> None:
            if said:
                raise AsynchronousError(said[0])
            run()

        self._posted += 1
        work = Work(name, self._posted, list(tensors), self.options._timeout, self._tears_down)
        return channel.post(fail_or_run, work)

    def _point_to_point(self, tensors: list[Tensor], peer: int, tag: int, is_send: bool) -> Any:
        (tensor,) = tensors
        if not tensor.is_cuda and self.host is not None:
            return (self.host.send if is_send else self.host.recv)(tensors, peer, tag)
        device = self._check(tensors)
        communicator = self._communicator(device, peer)
        if self._eager and self._warns:
            warnings.warn(SERIALIZED, stacklevel=2)
        return self._post(
            communicator.channel,
            "SEND" if is_send else "RECV",
            tensors,
            lambda: communicator.transfer(peer, _on_host(tensor), is_send),
        )

    def _collective(
        self, name: str, tensors: Any, run: Callable[[Gloo, Host], Any], *, described: Any = None, op: Any = None
    ) -> Any:
        """``tensors`` are all that take part; ``described``, those that must be alike on all ranks."""
        flat = list(_flat(tensors))
        if flat and self.host is not None and not any(x.is_cuda for x in flat):
            return run(self.host, lambda x: x)
        device = self._check(flat)
        communicator = self._communicator(device)
        alike = flat if described is None else list(_flat(described))
        what = f"{name} of {', '.join(f'{x.numel()} {x.dtype}' for x in alike) or 'nothing'}"
        what += f" by {_name(op)}" if op is not None else ""

        def match_and_run() -> None:
            communicator.match_all(what)
            run(communicator.gloo, _on_host).wait()

        return self._post(communicator.channel, name, flat, match_and_run)

    # Operations, by the names that torch.distributed calls them by

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Any:
        return self._point_to_point(tensors, dst, tag, is_send=True)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Any:
        return self._point_to_point(tensors, src, tag, is_send=False)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        opts = opts or c10d.AllreduceOptions()
        run = _averaging(opts, self.size(), lambda gloo, host: gloo.allreduce(host(tensors), opts), tensors)
        return self._collective("ALLREDUCE", tensors, run, op=opts.reduceOp)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        one = c10d.AllreduceOptions()
        one.reduceOp = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        return self._each([self.allreduce([x], one) for x in tensors])

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        run = _averaging(opts, self.size(), lambda gloo, host: gloo.reduce(host(tensors), opts), tensors)
        return self._collective("REDUCE", tensors, run, op=opts.reduceOp)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        name = f"BROADCAST from {opts.rootRank}"
        return self._collective(name, tensors, lambda gloo, host: gloo.broadcast(host(tensors), opts))

    def allgather(self, outs: list[list[Tensor]], ins: list[Tensor], opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        return self._collective(
            "ALLGATHER", [ins, outs], lambda gloo, host: gloo.allgather(host(outs), host(ins), opts), described=ins
        )

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        return self._collective(
            "ALLGATHER_BASE", [x, out], lambda gloo, host: gloo._allgather_base(host(out), host(x), opts)
        )

    def all_gather_single_coalesced(self, outs: list[Tensor], ins: list[Tensor], opts: Any = None) -> Any:
        return self._each([self.all_gather_single(out, x) for out, x in zip(outs, ins, strict=True)])

    def reduce_scatter(self, outs: list[Tensor], ins: list[list[Tensor]], opts: Any = None) -> Any:
        (out,), (parts,) = outs, ins
        return self.reduce_scatter_single(out.flatten(), torch.cat([x.flatten() for x in parts]), opts)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        run = _averaging(
            opts, self.size(), lambda gloo, host: gloo._reduce_scatter_base(host(out), host(x), opts), [out]
        )
        return self._collective("REDUCE_SCATTER_BASE", [x, out], run, op=opts.reduceOp)

    def reduce_scatter_single_coalesced(self, outs: list[Tensor], ins: list[Tensor], opts: Any = None) -> Any:
        return self._each([self.reduce_scatter_single(out, x, opts) for out, x in zip(outs, ins, strict=True)])

    def gather(self, outs: list[list[Tensor]], ins: list[Tensor], opts: Any) -> Any:
        return self._collective(
            f"GATHER to {opts.rootRank}", [ins, outs], lambda gloo, host: gloo.gather(host(outs), host(ins), opts),
            described=ins,
        )  # fmt: skip

    def scatter(self, outs: list[Tensor], ins: list[list[Tensor]], opts: Any) -> Any:
        return self._collective(
            f"SCATTER from {opts.rootRank}", [outs, ins], lambda gloo, host: gloo.scatter(host(outs), host(ins), opts),
            described=outs,
        )  # fmt: skip

    def all_to_all_single(
        self, out: Tensor, x: Tensor, out_sizes: list[int], in_sizes: list[int], opts: Any = None
    ) -> Any:
        opts = opts or c10d.AllToAllOptions()
        return self._collective(
            "ALLTOALL_BASE",
            [x, out],
            lambda gloo, host: gloo.alltoall_base(host(out), host(x), out_sizes, in_sizes, opts),
            described=[],
        )

    def alltoall(self, outs: list[Tensor], ins: list[Tensor], opts: Any = None) -> Any:
        """Of lists of tensors. gloo has none: each pair of ranks, one after the other."""
        raise NotImplementedError("the pretend NCCL has no all_to_all of lists")

    def barrier(self, opts: Any = None) -> Any:
        """The host waits for a real one, too."""
        if self.host is not None and opts is not None and opts.device is not None and opts.device.type == "cpu":
            return self.host.barrier()
        note("barrier")
        work = self._collective("BARRIER", [], lambda gloo, host: gloo.barrier())
        work.wait()
        await_device()
        return work

    def _each(self, works: list[Any]) -> Any:
        """One work for several operations of one communicator: it ends with the last."""
        return works[-1]

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single


def _name(op: Any) -> str:
    """An operation has no name of its own."""
    names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    return next((name for name in names if op == getattr(dist.ReduceOp, name)), "another reduction")


def _flat(tensors: Any) -> Iterator[Tensor]:
    if isinstance(tensors, Tensor):
        yield tensors
    else:
        for each in tensors:
            yield from _flat(each)


def _on_host(tensors: Any) -> Any:
    if isinstance(tensors, Tensor):
        return _pretend.memory_of(tensors.detach())
    return [_on_host(each) for each in tensors]


def _averaging(opts: Any, size: int, run: Callable[[Gloo, Host], Any], results: list[Tensor]) -> Any:
    """gloo knows no average: the sum is divided afterwards."""
    if opts.reduceOp != dist.ReduceOp.AVG:
        return run
    opts.reduceOp = dist.ReduceOp.SUM

    class Divided:
        def __init__(self, work: Any, host: Host) -> None:
            self._work, self.host = work, host

        def wait(self) -> None:
            self._work.wait()
            for x in self.host(results):
                x.div_(size)

    return lambda gloo, host: Divided(run(gloo, host), host)
