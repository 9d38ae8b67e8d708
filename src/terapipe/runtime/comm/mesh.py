"""The mesh of all processes: replicas, stages and tensor parallel ranks, and this process's lines through it."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from terapipe.planning.layout import Layout
from terapipe.runtime.comm.environment import device_of, host_name, nccl_errors_raised_here
from terapipe.runtime.comm.groups import GROUPS
from terapipe.runtime.comm.roll_call import roll_call

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
