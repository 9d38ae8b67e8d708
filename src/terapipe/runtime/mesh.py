"""One DeviceMesh of replicas, stages and tensor parallel ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from terapipe.planning.layout import Layout
from terapipe.runtime.transport import DP, PP, TP, ensure_process_group, host_name, local_device


def device_mesh(layout: Layout, *, device: torch.device | str | None = None) -> DeviceMesh:
    """All processes as a mesh with the dimensions ``dp``, ``pp`` and ``tp``, for ``Pipeline(mesh=...)``.

    Consecutive ranks are tensor parallel, then come the stages, then the replicas: the most traffic is between
    neighbors.
    """
    device = local_device() if device is None else torch.device(device)
    several = ensure_process_group(device)
    size = dist.get_world_size() if several else 1
    if size != layout.devices:
        raise ValueError(
            f"{layout} needs {layout.devices} processes, got {size}; start so many with torchrun, or change the layout"
        )
    if not several:
        raise ValueError("a mesh needs processes started by torchrun, even if it is one; a Pipeline alone needs none")
    hosts: list[str] = [""] * size
    dist.all_gather_object(hosts, host_name())
    check_hosts(layout, hosts)
    return init_device_mesh(device.type, (layout.dp, layout.pp, layout.tp), mesh_dim_names=(DP, PP, TP))


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
