"""The mesh of all processes: replicas, stages and tensor parallel ranks, and this process's lines through it."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from terapipe.planning.layout import Layout
from terapipe.runtime.comm.environment import device_of, ensure_process_group, errors_left_to_us, host_name
from terapipe.runtime.comm.roll_call import roll_call

DP, PP, TP, ALL = "dp", "pp", "tp", "all"  # lines of ranks through the mesh
ROLES = (DP, PP, TP)  # of the dimensions of a mesh


def device_mesh(layout: Layout, *, device: torch.device | str | None = None, timeout: float = 300.0) -> DeviceMesh:
    """All processes as a mesh with the dimensions ``dp``, ``pp`` and ``tp``, for ``Pipeline(mesh=...)``.

    Consecutive ranks are tensor parallel, then come the stages, then the replicas: the most traffic is between
    neighbors. Ranks that do not call it within ``timeout`` seconds are named on all others.
    """
    device = device_of(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # torch would take that of LOCAL_RANK, where a process may see one GPU only
    several = ensure_process_group(device, timeout)
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
    with errors_left_to_us():
        return init_device_mesh(device.type, (layout.dp, layout.pp, layout.tp), mesh_dim_names=(DP, PP, TP))


def await_ranks(ranks: Sequence[int], timeout: float, what: str) -> None:
    """Returns when all of these ranks have come here; names those that have not in time."""
    roll_call(dist.distributed_c10d._get_default_store(), dist.get_rank(), ranks, timeout, what)


def check_hosts(layout: Layout, hosts: Sequence[str]) -> None:
    """Refuses operators that are split over hosts: their every layer would wait for the network."""
    for first in range(0, layout.devices, layout.tp):
        found = sorted(set(hosts[first : first + layout.tp]))
        if len(found) > 1:
            raise ValueError(
                f"the devices that share an operator must be of one host, got ranks {first} to "
                f"{first + layout.tp - 1} on {', '.join(found)} for {layout}; take a tp that divides "
                "the processes of every host"
            )


def with_roles(
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


def lines_of(mesh: DeviceMesh | None, dims: Mapping[str, str]) -> dict[str, tuple[list[int], dist.ProcessGroup | None]]:
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
