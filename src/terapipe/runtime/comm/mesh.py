"""The mesh of all processes, and which of them this one works with: its lines through the mesh.

A mesh of 2 replicas, 3 pipeline ranks and 2 tensor parallel ranks has 12 processes. Each is on four lines::

                 pp ->                            process 8 is at dp 1, pp 1, tp 0:
      dp 0     0,1    2,3    4,5                    pp   (6, 8, 10)   the ranks of its pipeline
      dp 1     6,7    8,9   10,11                   dp   (2, 8)       the same stages in the other replica
               ^ ^                                  tp   (8, 9)       the ranks that share its operators
            tp 0 tp 1                               all  (0 .. 11)

Every line has two process groups: one for tensors (NCCL on GPUs), and one for Python objects and small numbers, which
is always gloo's. So nothing that ranks agree on waits for a device, and ranks can talk while NCCL is broken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from terapipe.planning.layout import Layout
from terapipe.runtime.comm.environment import device_of, host_name, nccl_errors_raised_here, stay_on_this_host
from terapipe.runtime.comm.groups import GROUPS, MAX_CTAS, PATIENCE, roll_call

DP, PP, TP, ALL = "dp", "pp", "tp", "all"  # lines of ranks through the mesh
ROLES = (DP, PP, TP)  # of the dimensions of a mesh


def device_mesh(layout: Layout, *, device: torch.device | str | None = None, timeout: float = 300.0) -> DeviceMesh:
    """Arranges all processes as a mesh with the dimensions ``dp``, ``pp`` and ``tp``, for ``Pipeline(mesh=...)``.

    Consecutive ranks are tensor parallel, then come the stages, then the replicas: the most traffic is between
    neighbors.

    Args:
        layout: the sizes of the dimensions. There must be as many processes as it has devices.
        device: of this process; by default its GPU, or the CPU where there is none.
        timeout: seconds after which ranks that have not called it are named on all others.
    """
    device = device_of(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # torch would take that of LOCAL_RANK, where a process may see one GPU only
    several = GROUPS.join(device, timeout)
    size = dist.get_world_size() if several else 1
    if size != layout.devices:
        raise ValueError(
            f"{layout} needs {layout.devices} processes, got {size}; start so many with torchrun, or change the layout"
        )
    if not several:
        raise ValueError("a mesh needs processes started by torchrun, even if it is one; a Pipeline alone needs none")
    await_ranks(range(size), timeout, "call device_mesh")
    hosts: list[str] = [""] * size
    dist.all_gather_object(hosts, host_name())
    check_hosts(layout, hosts)
    with nccl_errors_raised_here():
        return init_device_mesh(device.type, (layout.dp, layout.pp, layout.tp), mesh_dim_names=(DP, PP, TP))


def await_ranks(ranks: Sequence[int], timeout: float, what: str) -> None:
    """Returns when all of these ranks have come here; names those that have not in time."""
    roll_call(dist.distributed_c10d._get_default_store(), dist.get_rank(), ranks, timeout, what)


def check_hosts(layout: Layout, hosts: Sequence[str]) -> None:
    """Refuses operators that are split over hosts: their every layer would wait for the network."""
    for first in range(0, layout.devices, layout.tp):
        several = sorted(set(hosts[first : first + layout.tp]))
        if len(several) > 1:
            raise ValueError(
                f"the devices that share an operator must be of one host, got ranks {first} to "
                f"{first + layout.tp - 1} on {', '.join(several)} for {layout}; take a tp that divides "
                "the processes of every host"
            )


@dataclass(frozen=True)
class Line:
    """The ranks along one dimension of the mesh, or all of them.

    A line of several ranks without groups is one that only exists on paper: see ``NullTransport``.
    """

    members: tuple[int, ...] = (0,)  # as torch.distributed counts them, and as messages name them
    rank: int = 0  # this process's place among the members
    tensors: dist.ProcessGroup | None = None
    objects: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def has_peers(self) -> bool:
        """Whether there are other ranks to talk to, and not only on paper."""
        return self.tensors is not None and self.size > 1

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(member for place, member in enumerate(self.members) if place != self.rank)


class Ranks:
    """This process's place in the mesh, its lines, and the names of all ranks.

    Args:
        lines: the lines of this process by role: ``pp``, ``all``, and ``dp`` and ``tp`` where the mesh has them.
        mesh: the mesh, None for a pipeline over all processes.
        mesh_dims: the name of the mesh's dimension for each role.
    """

    def __init__(
        self, lines: Mapping[str, Line], mesh: DeviceMesh | None = None, mesh_dims: Mapping[str, str] | None = None
    ) -> None:
        self._lines = dict(lines)
        self.mesh, self.mesh_dims = mesh, dict(mesh_dims or {})
        self.hosts = dict.fromkeys(self[ALL].members, "")  # the host of every rank, as soon as ranks have told

    @classmethod
    def join(
        cls, device: torch.device, timeout: float, mesh: DeviceMesh | None, mesh_dims: Mapping[str, str] | None
    ) -> "Ranks":
        """Meets the other ranks and makes the groups of this process's lines. All ranks of the mesh call it together.

        Groups for objects come first: ranks must be able to talk when tensors cannot be sent. The groups of replicas
        and of tensor parallel ranks are the mesh's own; those of the pipeline and of all ranks are made here.

        Args:
            device: the device of this process.
            timeout: seconds that an operation of these groups may take, and that ranks may be late.
            mesh: the mesh, None for a pipeline over all processes.
            mesh_dims: the name of the mesh's dimension for each role, None if they are called ``dp``, ``pp``, ``tp``.
        """
        mesh, dims = name_dimensions(mesh, mesh_dims)
        stay_on_this_host()  # whoever made the process group
        if mesh is None and not GROUPS.join(device, timeout):
            return cls({})
        span, is_cuda = timedelta(seconds=timeout), device.type == "cuda"
        members = _members_of_lines(mesh, dims)
        await_ranks(members[ALL], timeout, "make a Pipeline")
        objects = {role: GROUPS.group(members[role], span, "gloo") for role in (PP, ALL)}
        lines = {}
        for role, ranks in members.items():
            group = None if role in (PP, ALL) else mesh.get_group(dims[role])  # type: ignore[union-attr]
            if group is not None:
                _set_pg_timeout(PATIENCE * span if is_cuda else span, group)
            elif is_cuda:
                # Weights travel along a pipeline, too, when a whole model is gathered: more channels than for numbers.
                group = GROUPS.group(ranks, span, "nccl", MAX_CTAS if role == PP else 1)
            else:
                group = objects[role]
            if role in (TP, DP):
                objects[role] = GROUPS.group(ranks, span, "gloo") if is_cuda else group
            lines[role] = Line(tuple(ranks), dist.get_rank(group), group, objects.get(role))
        return cls(lines, mesh, dims)

    def __getitem__(self, role: str) -> Line:
        """The line with this role; one of this process alone where the mesh has no such dimension."""
        line = self._lines.get(role)
        if line is not None:
            return line
        return Line((self.global_rank,)) if role != PP else Line()

    @property
    def lines(self) -> dict[str, Line]:
        return dict(self._lines)

    @property
    def global_rank(self) -> int:
        """This process, as torch.distributed counts it."""
        line = self[PP]
        return line.members[line.rank]

    @property
    def dimensions(self) -> list[Line]:
        """The dimensions of the mesh, innermost first: what is gathered along one after the other comes together on
        every rank, in the order of ranks. One line where there is no mesh."""
        names = () if self.mesh is None or self.mesh.ndim == 1 else self.mesh.mesh_dim_names or ()
        roles = {name: role for role, name in self.mesh_dims.items()}
        return [self[roles[name]] for name in reversed(names)] or [self[ALL]]

    def submesh(self, role: str) -> DeviceMesh:
        """The dimension of the mesh with this role. There is one where several ranks are along it."""
        assert self.mesh is not None
        return self.mesh[self.mesh_dims[role]]

    def others(self, *roles: str) -> tuple[int, ...]:
        """The other ranks on these lines, in ascending order."""
        return tuple(sorted({rank for role in roles for rank in self[role].others}))

    def name(self, place: int) -> str:
        """The rank at this place among all, as messages name it."""
        return rank_name(self[ALL].members[place], self.hosts)


def rank_name(rank: int, hosts: Mapping[int, str]) -> str:
    """Names a rank in messages, with its host where there are several.

    Args:
        rank: as torch.distributed counts it.
        hosts: the host of every rank.
    """
    return f"rank {rank} on {hosts[rank]}" if len(set(hosts.values())) > 1 else f"rank {rank}"


def name_dimensions(
    mesh: DeviceMesh | None, mesh_dims: Mapping[str, str] | None
) -> tuple[DeviceMesh | None, dict[str, str]]:
    """Returns the part of a mesh that has roles, and the name of each role's dimension.

    Args:
        mesh: a mesh of ``device_mesh``, one of the user's, or one dimension of any mesh.
        mesh_dims: the user's names for ``dp``, ``pp`` and ``tp``; dimensions that it does not name are left out.
    """
    if mesh is None:
        if mesh_dims is not None:
            raise ValueError(f"mesh_dims names dimensions of a mesh, got {dict(mesh_dims)} without mesh=")
        return None, {}
    names = mesh.mesh_dim_names or ()
    if mesh_dims is not None:
        _check_mesh_dims(mesh_dims, names)
        own = tuple(name for name in names if name in mesh_dims.values())
        return (mesh if own == names else mesh[own]), dict(mesh_dims)
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


def _members_of_lines(mesh: DeviceMesh | None, dims: Mapping[str, str]) -> dict[str, Sequence[int]]:
    """The ranks of this process's lines through the mesh, by role."""
    everyone = list(range(dist.get_world_size())) if mesh is None else mesh.mesh.flatten().tolist()
    if mesh is None or (mesh.ndim == 1 and PP in dims):
        return {PP: everyone, ALL: everyone}
    pipe = mesh[dims[PP]].mesh.tolist() if PP in dims else [dist.get_rank()]
    sides = {role: dist.get_process_group_ranks(mesh.get_group(name)) for role, name in dims.items() if role != PP}
    return {PP: pipe, ALL: everyone, **sides}
