"""The pipeline's connections: groups, devices, sends and receives. The only code that reads RANK and the like."""

import os
import platform
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from terapipe.runtime.failures import (
    Board,
    PipelineError,
    Record,
    in_words,
    is_connection_error,
    is_out_of_memory,
)

T = TypeVar("T")

DP, PP, TP, ALL = "dp", "pp", "tp", "all"  # lines of ranks through the mesh
ROLES = (DP, PP, TP)  # of the dimensions of a mesh

BEAT = 0.5  # seconds between signs of life
_NEVER_SENT = 1 << 16  # a tag that no message has


def local_rank() -> int:
    """This process among those that torchrun started on this host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def rank_and_size() -> tuple[int, int]:
    """This process among all that torchrun started, before they have met."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def host_name() -> str:
    """This host, told apart from others of the same name by the number that torchrun gave it."""
    number = os.environ.get("GROUP_RANK")
    return platform.node() if number is None else f"{platform.node()} (node {number})"


def restarts() -> int:
    """How often torchrun has started the processes again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def job() -> str:
    """What torchrun calls the run, the same on all hosts and after restarts; nothing where it was given no name."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name


def under_torchrun() -> bool:
    return "RANK" in os.environ and "MASTER_ADDR" in os.environ


def local_device() -> torch.device:
    """The device of this process: under torchrun, each takes the GPU of its local rank, if there are GPUs."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank() % torch.cuda.device_count())
    return torch.device("cpu")


def ensure_process_group(device: torch.device) -> bool:
    """Joins the processes that torchrun started, if nobody has yet. False where there is only this process."""
    if not dist.is_initialized() and under_torchrun():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store, rank, size = next(iter(rendezvous("env://")))
        # torchrun keeps its store when it restarts processes, and gloo would find the addresses of dead ones in it.
        store = PrefixStore(f"terapipe/{restarts()}", store)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    return dist.is_initialized()


class Transport:
    """Tagless sends and receives between the ranks of one pipeline, and what they decide together.

    ``rank`` and ``size`` count within the pipeline. There may be ``replicas`` of it, and each of its ranks may be
    several ``parts`` that share every operator. The groups of the pipeline and of all ranks are this object's own;
    those of replicas and parts are the mesh's. ``mesh_dims`` maps ``dp``, ``pp`` and ``tp`` to the mesh's own names.
    """

    def __init__(
        self,
        device: torch.device,
        mesh: DeviceMesh | None = None,
        timeout: float = 300.0,
        mesh_dims: Mapping[str, str] | None = None,
    ) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
        self.device = device
        self.timeout = timeout
        self._span = timedelta(seconds=timeout)
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._failure: PipelineError | None = None
        self._mesh, self.mesh_dims = _with_roles(mesh, mesh_dims)
        if mesh is not None or ensure_process_group(device):
            self._join(_lines(self._mesh, self.mesh_dims))
        self.rank, self.size = self._place(PP)
        self.dp_rank, self.dp_size = self._place(DP)
        self.tp_rank, self.tp_size = self._place(TP)
        store = PrefixStore("terapipe/failures", self._groups[ALL].get_group_store()) if self._groups else None
        self._board = Board(store, dict.fromkeys(self._ranks(ALL), ""))  # until the names are known
        self.hosts = dict(zip(self._ranks(ALL), self.gather(host_name(), ALL), strict=True))
        self._board = Board(store, self.hosts)

    def _join(self, lines: Mapping[str, tuple[list[int], dist.ProcessGroup | None]]) -> None:
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        for name, (ranks, group) in lines.items():
            if group is not None:
                _set_pg_timeout(self._span, group)
            elif name == ALL and ranks == lines[PP][0]:
                group = self._groups[PP]
            else:
                group = _group(tuple(ranks), self._span, backend)
            self._groups[name] = group

    def _place(self, line: str) -> tuple[int, int]:
        group = self._groups.get(line)
        return (dist.get_rank(group), group.size()) if group else (0, 1)

    def _ranks(self, line: str) -> list[int]:
        """As torch.distributed counts them, and as messages name them."""
        return dist.get_process_group_ranks(self._groups[line]) if self._groups else [0]

    @property
    def global_rank(self) -> int:
        return self._ranks(PP)[self.rank]

    def submesh(self, role: str) -> DeviceMesh:
        """The dimension of the mesh with this role; only where there is more than one rank along it."""
        assert self._mesh is not None
        return self._mesh[self.mesh_dims[role]]

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        return self._groups.get(ALL)

    def others(self, *lines: str) -> tuple[int, ...]:
        return tuple(
            sorted({r for line in lines if line in self._groups for r in self._ranks(line)} - {self.global_rank})
        )

    def name(self, place: int) -> str:
        """The rank at this place among all, as messages name it."""
        return self._board.name(self._ranks(ALL)[place])

    # Point to point

    def send(self, tensor: Tensor, peer: int, why: object) -> dist.Work:
        with self._waiting(self._peer(peer), why):
            return _work(dist.isend(tensor, group=self._groups[PP], group_dst=peer))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, why: object) -> tuple[Tensor, dist.Work]:
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        with self._waiting(self._peer(peer), why):
            return buffer, _work(dist.irecv(buffer, group=self._groups[PP], group_src=peer))

    def wait(self, work: dist.Work, peer: int, why: object) -> None:
        with self._waiting(self._peer(peer), why):
            work.wait(self._span)

    def _peer(self, peer: int) -> tuple[int, ...]:
        return (self._ranks(PP)[peer],)

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        """The sum of this rank's tensor and its peer's, the same on both to the last bit."""
        why = "the gradient of a shared parameter"
        tensor = tensor.contiguous()
        # Without tags both ends must begin with the same transfer: that of the lower rank.
        sent = self.send(tensor, peer, why) if self.rank < peer else None
        other, arriving = self.receive(tuple(tensor.shape), tensor.dtype, peer, why)
        sent = sent or self.send(tensor, peer, why)
        self.wait(arriving, peer, why)
        self.wait(sent, peer, why)
        return other.add_(tensor)

    # Together

    def broadcast(self, tensor: Tensor, source: int, why: str, over: str = PP) -> Tensor:
        place, size = self._place(over)
        if size > 1:
            peers = self.others(over) if place == source else (self._ranks(over)[source],)  # the source waits, too
            with self._waiting(peers, why):
                dist.broadcast(tensor, group=self._groups[over], group_src=source)
        return tensor

    def all_reduce(self, tensor: Tensor, over: str = ALL, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        if self._place(over)[1] > 1:
            with self._waiting(self.others(over), "a reduction"):
                dist.all_reduce(tensor, op, group=self._groups[over])
        return tensor

    def gather(self, value: T, over: str = PP) -> list[T]:
        """Every rank's value, on every rank."""
        size = self._place(over)[1]
        if size == 1:
            return [value]
        values: list[T | None] = [None] * size
        with self._waiting(self.others(over), "an exchange between all ranks"):
            dist.all_gather_object(values, value, group=self._groups[over])
        return values  # type: ignore[return-value]

    def gather_numbers(self, numbers: Sequence[int], over: str = PP) -> list[list[int]]:
        """As ``gather``, for as many whole numbers on every rank: one message instead of several."""
        size = self._place(over)[1]
        if size == 1:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        found = [torch.empty_like(mine) for _ in range(size)]
        with self._waiting(self.others(over), "an exchange between all ranks"):
            dist.all_gather(found, mine, group=self._groups[over])
        rows: list[list[int]] = torch.stack(found).tolist()
        return rows

    def collect(self, value: T, over: str = PP) -> list[T] | None:
        """Every rank's value, on the first of them only; None on the others."""
        place, size = self._place(over)
        if size == 1:
            return [value]
        values: list[T | None] | None = None if place else [None] * size
        with self._waiting(self.others(over), "what the first rank collects"):
            dist.gather_object(value, values, group=self._groups[over], group_dst=0)
        return values  # type: ignore[return-value]

    def await_one(self, work: Future[T] | None) -> T | None:
        """Waits for what one rank does in a thread, however long it takes: ranks hear of each other all the while.
        The one that works gives its future, the others None."""
        self.until_all(lambda span: work is None or bool(wait([work], span).done))
        return None if work is None else work.result()

    def until_all(self, done: Callable[[float], bool]) -> None:
        """Waits until it is so on all ranks. Each is asked again and again, and given some seconds to find out."""
        span = 0.0
        while not all(self.gather(done(span), ALL)):
            span = BEAT

    def start_sum(self, tensor: Tensor) -> dist.Work:
        """Over replicas, in place, while this rank goes on."""
        with self._waiting(self.others(DP), "the sum of gradients"):
            return _work(dist.all_reduce(tensor, group=self._groups[DP], async_op=True))

    def finish_sum(self, work: dist.Work) -> None:
        with self._waiting(self.others(DP), "the sum of gradients"):
            work.wait(self._span)

    # Failing

    @contextmanager
    def failing_together(self, at: Callable[[], object] = lambda: "") -> Iterator[None]:
        """An error inside stops the other ranks too, with this rank's error. ``at`` tells where this rank stands."""
        try:
            yield
        except PipelineError:
            raise
        except Exception as error:
            place, others = str(at() or ""), self.others(DP, TP)
            if others and is_connection_error(error):  # within an operator, or while gathering a stage
                raise self.lost(error, place or "the end of a step", others) from None
            self.fail(Record(self.global_rank, in_words(error), place))
            raise

    @contextmanager
    def _waiting(self, peers: tuple[int, ...], why: object) -> Iterator[None]:
        if self._failure is not None:
            raise PipelineError(f"this pipeline stopped before: {self._failure}")
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):  # this rank's own failure, for which no other is to blame
                raise
            raise self.lost(error, why, peers, time.monotonic() - start) from None

    def lost(self, error: Exception, why: object, peers: tuple[int, ...], seconds: float = 0.0) -> PipelineError:
        """What to raise where an operation between ranks failed."""
        late = seconds >= 0.95 * self.timeout or "timed out" in str(error).lower()
        return self.fail(Record(self.global_rank, str(error), str(why), peers, seconds or self.timeout, late))

    def fail(self, record: Record) -> PipelineError:
        """Tells the other ranks and cuts the connections; returns what to raise here."""
        self._board.post(record)
        _forget(self._groups.values())
        self._cut()
        self._failure = PipelineError(self._board.explain(record))
        return self._failure

    def _cut(self) -> None:
        """Wakes everyone who waits for this rank.

        gloo offers no way to close a group that its peers would notice, short of leaving the process; but a receive
        that times out takes all of the group's connections down with it.
        """
        if self.device.type != "cpu":
            return
        for group in {id(group): group for group in self._groups.values()}.values():
            for peer in range(group.size()):
                if peer != dist.get_rank(group):
                    with suppress(RuntimeError):  # from the time-out, or because this connection is down already
                        nothing = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=_NEVER_SENT)
                        _work(nothing).wait(timedelta(milliseconds=1))


# Process-wide, as torch's own list of groups is: a group cannot be closed (see Transport._cut) and keeps threads and
# connections, so a later Transport over the same ranks takes the groups of an earlier one. They are never used at the
# same time. Passing one Transport around would not do: a Pipeline may be made after another was dropped.
_groups: dict[tuple[object, ...], dist.ProcessGroup] = {}


def _group(ranks: tuple[int, ...], timeout: timedelta, backend: str) -> dist.ProcessGroup:
    key = (dist.group.WORLD, ranks, timeout, backend)
    if key not in _groups:
        _groups[key] = dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True)
    return _groups[key]


def _forget(cut: Collection[dist.ProcessGroup]) -> None:
    for key in [key for key, group in _groups.items() if group in cut]:
        del _groups[key]


def _with_roles(
    mesh: DeviceMesh | None, mesh_dims: Mapping[str, str] | None
) -> tuple[DeviceMesh | None, dict[str, str]]:
    """The part of the mesh that has roles, and the name of each role's dimension."""
    if mesh is None:
        if mesh_dims is not None:
            raise ValueError(f"mesh_dims names dimensions of a mesh, got {dict(mesh_dims)} without mesh=")
        return None, {}
    names = mesh.mesh_dim_names or ()
    if mesh_dims is not None:
        _check_mesh_dims(mesh_dims, names)
        kept = tuple(name for name in names if name in mesh_dims.values())
        return (mesh if kept == names else mesh[kept]), dict(mesh_dims)
    if mesh.ndim == 1 and names not in ((DP,), (TP,)):
        return mesh, {PP: names[0] if names else ""}
    if not names or not set(names) <= set(ROLES):
        raise ValueError(
            f"the dimensions of a mesh are dp, pp and tp, got {names or f'{mesh.ndim} without names'}; make it with "
            "terapipe.device_mesh, say which is which with mesh_dims={'pp': ...}, or pass one dimension of it"
        )
    return mesh, {name: name for name in names}


def _check_mesh_dims(mesh_dims: Mapping[str, str], names: tuple[str, ...]) -> None:
    dims = list(mesh_dims.values())
    if not dims or not set(mesh_dims) <= set(ROLES) or not set(dims) <= set(names) or len(set(dims)) < len(dims):
        raise ValueError(
            f"mesh_dims must map some of dp, pp and tp to different dimensions of the mesh, which are {names}, got "
            f"{dict(mesh_dims)}"
        )


def _lines(mesh: DeviceMesh | None, dims: Mapping[str, str]) -> dict[str, tuple[list[int], dist.ProcessGroup | None]]:
    """The ranks of this process's lines through the mesh, and the groups it has for them."""
    if mesh is None:
        everyone = list(range(dist.get_world_size()))
        return {PP: (everyone, None), ALL: (everyone, None)}
    everyone = mesh.mesh.flatten().tolist()
    if mesh.ndim == 1 and PP in dims:
        return {PP: (everyone, None), ALL: (everyone, None)}
    pipe = mesh[dims[PP]].mesh.tolist() if PP in dims else [dist.get_rank()]
    groups = {role: mesh.get_group(name) for role, name in dims.items() if role != PP}
    sides = {role: (dist.get_process_group_ranks(group), group) for role, group in groups.items()}
    return {PP: (pipe, None), ALL: (everyone, None), **sides}


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None  # only a rank outside the group gets none
    return work
