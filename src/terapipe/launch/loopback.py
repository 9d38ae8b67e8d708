"""How the ranks of one host meet: at a store that listens on the loopback interface only.

torch's own stores listen on all interfaces, and its c10d rendezvous unpickles what it reads there, so whoever reaches
the port can run code in the launcher. For one host nothing has to be agreed on: the launcher opens the socket itself,
hands it to the store, and reads nothing from the store but what torchelastic writes there as JSON.
"""

import socket

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "terapipe-loopback"  # torchelastic's name for it
ADDRESS = "127.0.0.1"


def open_store() -> TCPStore:
    """A store of this process that listens on the loopback interface, at any port."""
    listener = socket.create_server((ADDRESS, 0), backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of one launcher, which hosts the store of its ranks. Nobody else joins or leaves, so most of
    torchelastic's questions have a constant answer.

    Args:
        run: names the run; keys in the store begin with it.
    """

    def __init__(self, run: str) -> None:
        self._run, self._rounds = run, 0
        self._store = open_store()

    def get_backend(self) -> str:
        """The name that a LaunchConfig calls it by."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Ranks meet at this store, too, instead of opening one of their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns the store for the next start of the ranks. Each restart has keys of its own: old ones are stale."""
        self._rounds += 1
        store = PrefixStore(f"{self._run}/{self._rounds}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(ADDRESS, self._store.port))

    def is_closed(self) -> bool:
        """Never: the launcher ends before anybody could close it."""
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        """None: torchelastic would restart the ranks to let a waiting host in."""
        return 0

    def get_run_id(self) -> str:
        return self._run

    def shutdown(self) -> bool:
        """Nothing to do: the store ends with this process."""
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)


rendezvous_handler_registry.register(BACKEND, _create)  # so that a LaunchConfig can name it
