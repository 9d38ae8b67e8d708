"""Real processes with a real process group, started once and used by many tests. Each has a GPU, if there are any."""

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

PATIENCE = 900.0  # seconds, on a busy machine too
CROWDED = 100  # threads of a process: every group that a test makes leaves some of gloo's, which wake up now and then

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["terapipe.hf", "tests.support.models"])


class Ranks:
    """``ranks(function, *args)`` calls it on every rank and returns the results in order of rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.in_order = True  # whether all ranks are where the next function may begin
        self.folder = tempfile.TemporaryDirectory()
        pipes = [_context.Pipe() for _ in range(size)]
        store = Path(self.folder.name) / "store"
        self.processes = [
            _context.Process(target=_serve, args=(rank, size, str(store), pipes[rank][1]), daemon=True)
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()
        self.connections = [ours for ours, _ in pipes]

    def submit(self, function: Callable[..., Any], *args: Any) -> None:
        for connection in self.connections:
            connection.send((function, args))

    def results(self) -> list[Any]:
        return [self.result(rank) for rank in range(self.size)]

    def result(self, rank: int) -> Any:
        """The rank's result, or the exception it raised, or None if it died or said nothing in time."""
        return _receive(self.connections[rank], PATIENCE)

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        self.submit(function, *args)
        results = self.results()
        for result in results:
            if isinstance(result, Exception):
                self.in_order = isinstance(result, ValueError)  # others may have left groups on some ranks only
                raise result
        return results

    @property
    def usable(self) -> bool:
        """Whether others can go on with it. If not, new processes are better."""
        threads = Path(f"/proc/{self.processes[0].pid}/task")
        return self.in_order and threads.exists() and len(os.listdir(threads)) < CROWDED

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.folder.cleanup()


def _receive(connection: Connection, timeout: float) -> Any:
    try:
        return connection.recv() if connection.poll(timeout) else None
    except EOFError:
        return None


def join(rank: int, size: int, store: str) -> None:
    """Makes this process one of several, which meet at a file."""
    torch.set_num_threads(1)
    has_gpus = torch.cuda.is_available()
    if has_gpus:
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
        torch.cuda.set_device(rank)
    span = timedelta(seconds=PATIENCE)
    meeting = dist.FileStore(store, size)
    backend = "nccl" if has_gpus else "gloo"
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=size, timeout=span)


def _serve(rank: int, size: int, store: str, connection: Connection) -> None:
    join(rank, size, store)
    while True:
        function, args = connection.recv()
        try:
            # Processes can share tensors of the host.
            connection.send(tree_map_only(Tensor, lambda x: x.cpu(), function(*args)))
        except Exception as error:
            error.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
            connection.send(error)
