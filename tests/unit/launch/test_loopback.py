"""Ranks on one host talk to each other, and listen to nobody else."""

import os
import sys

import pytest
import torch

from terapipe.launch.loopback import LoopbackRendezvous
from terapipe.launch.processes import launch
from tests.support import hosts
from tests.support.sockets import listening

LOOPBACK = {"127.0.0.1"}
ON_A_HOST = "from tests.unit.launch.test_loopback import *; print(*sorted(launch(talk, 2)), sep=',')"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc/net is Linux's")


def talk() -> set[str]:
    """Where the ranks and their launcher listen, once they have talked."""
    from terapipe.runtime.comm.transport import Transport

    world = Transport.join(torch.device("cpu"))
    own = world.gather((os.getpid(), os.getppid()))
    addresses = listening({pid for pids in own for pid in pids})
    world.gather(None)  # nobody ends before all have looked
    return addresses


def test_ranks_of_one_host_listen_on_the_loopback_only() -> None:
    assert launch(talk, 2) == LOOPBACK


@pytest.mark.skipif(hosts.why_not() is not None, reason="hosts need network namespaces")
def test_a_host_whose_name_has_an_address_listens_on_the_loopback_only() -> None:
    """gloo takes the address of the host's name, which here is that of the network between hosts."""
    with hosts.hosts(1) as (host,):
        (told,) = hosts.finish([host.start(sys.executable, "-c", ON_A_HOST)])
    assert set(told.strip().split(",")) == LOOPBACK


def test_each_restart_has_keys_of_its_own() -> None:
    meeting = LoopbackRendezvous("run")
    first, second = meeting.next_rendezvous(), meeting.next_rendezvous()
    first.store.set("rank", "0")
    assert not second.store.check(["rank"])
    assert first.bootstrap_store_info == second.bootstrap_store_info
