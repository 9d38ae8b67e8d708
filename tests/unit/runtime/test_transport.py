"""Messages between ranks, and who is blamed when one does not come."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from terapipe.runtime.comm.environment import local_device
from terapipe.runtime.comm.errors import PipelineError
from terapipe.runtime.comm.mesh import ALL
from terapipe.runtime.comm.transport import Transport
from tests.support.ranks import Ranks


def gather_both_ways(names: tuple[str, str]) -> tuple[list[int], list[list[int]], list[int]]:
    mesh = init_device_mesh(local_device().type, (2, 2), mesh_dim_names=names)
    transport = Transport.join(local_device(), mesh, timeout=300.0)
    own = [10 * transport.global_rank, -transport.global_rank]
    return transport.gather(own[0], ALL), transport.gather_numbers(own, ALL).tolist(), [*transport.ranks[ALL].members]


@pytest.mark.parametrize("names", [("dp", "pp"), ("pp", "dp"), ("tp", "pp"), ("dp", "tp")], ids=str)
def test_numbers_of_all_ranks_come_in_their_order(ranks: Callable[[int], Ranks], names: tuple[str, str]) -> None:
    """They go along one dimension of the mesh after the other, objects around one ring of all ranks."""
    for objects, numbers, members in ranks(4)(gather_both_ways, names):
        assert members == [0, 1, 2, 3]
        assert objects == [10 * rank for rank in members]
        assert numbers == [[10 * rank, -rank] for rank in members]


def tell_the_loss(told: Path) -> str:
    transport = Transport.join(torch.device("cpu"), timeout=300.0)
    transport.gather(0)  # all are connected, however long that takes; only then is the wait a short one
    for role in ("pp", "all"):
        _set_pg_timeout(timedelta(seconds=1), transport.ranks[role].tensors)
    if transport.rank == 0:  # hangs, until the other has noticed
        while not told.exists():
            time.sleep(0.01)
        return ""
    try:
        transport.broadcast(torch.zeros(1 << 20), 1, "the loss")
    except PipelineError as error:
        return str(error)
    finally:
        told.touch()
    return "nothing was noticed"


def test_who_tells_all_others_waits_for_them(fresh_ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """The last stage, which tells the loss, said that it had waited for itself."""
    assert fresh_ranks(2)(tell_the_loss, tmp_path / "told")[1].startswith("rank 0 did not answer in time")
