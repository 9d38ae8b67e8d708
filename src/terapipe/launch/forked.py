"""Starts many ranks on this machine quickly: all are forked from one process that has imported torch.

Importing torch takes seconds and some two hundred megabytes. A rank that computes nothing needs neither a second time::

    this process --- forkserver: imports terapipe once --+-- fork --> rank 0    calls the function
      hosts the store                                    +-- fork --> rank 1    as under torchrun
      reads results                                      +-- fork --> ...

Ranks that compute are started by ``processes.py``: they need cores of their own, restarts, and numbers of threads.
"""

import multiprocessing as mp
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Self

import torch

from terapipe.launch.loopback import ADDRESS, open_store
from terapipe.launch.processes import end_with_parent
from terapipe.runtime.comm.environment import become_rank, on_loopback


class Answer(NamedTuple):
    """What one rank said, and when.

    Args:
        seconds: since the ranks were started.
        value: what the function returned.
        error: what it raised instead, or how the process ended; empty if neither.
    """

    seconds: float
    value: Any = None
    error: str = ""


class ForkedRanks:
    """Processes that call a function as ranks of one job. As a context it ends those that are left. ::

        with ForkedRanks(64, function, argument) as ranks:
            answers = ranks.answers(timeout=60)

    Args:
        size: how many.
        function: one that pickle can name, called on every rank; ``rank_and_size`` says which it is.
        *args: of the function, the same for all.
    """

    def __init__(self, size: int, function: Callable[..., Any], *args: Any) -> None:
        self.start = time.monotonic()
        self._store = open_store()
        context = mp.get_context("forkserver")
        # Also the program itself, which multiprocessing would run again in each process.
        context.set_forkserver_preload(["__main__", function.__module__, "terapipe.runtime", __name__])
        self._answers: dict[int, Answer] = {}
        self._processes, self._connections = [], list[Connection]()
        try:
            with on_loopback():
                for rank in range(size):
                    ours, theirs = context.Pipe(duplex=False)
                    work = (rank, size, self._store.port, theirs, function, args)
                    process = context.Process(target=_serve, args=work, daemon=True)
                    process.start()
                    theirs.close()
                    self._processes.append(process)
                    self._connections.append(ours)
        except BaseException:  # those that run already would wait for the rest
            self._end()
            raise

    def kill(self, rank: int) -> None:
        """Ends a rank as a crash would.

        Args:
            rank: which.
        """
        self._processes[rank].kill()

    def hear(self, timeout: float) -> dict[int, Answer]:
        """What ranks have said so far, after waiting for one that has said nothing yet.

        Args:
            timeout: seconds to wait at most.
        """
        silent = {c: rank for rank, c in enumerate(self._connections) if rank not in self._answers}
        for connection in wait(list(silent), timeout):
            assert isinstance(connection, Connection)
            rank = silent[connection]
            try:
                value, error = connection.recv()
            except EOFError:
                self._processes[rank].join(1.0)
                value, error = None, f"ended with exit code {self._processes[rank].exitcode}"
            self._answers[rank] = Answer(time.monotonic() - self.start, value, error)
        return dict(self._answers)

    def answers(self, timeout: float) -> list[Answer]:
        """What all ranks said, in order. Those that say nothing in time have an error that says so.

        Args:
            timeout: seconds from now.
        """
        deadline = time.monotonic() + timeout
        while len(self._answers) < len(self._processes) and time.monotonic() < deadline:
            self.hear(max(0.0, deadline - time.monotonic()))
        late = Answer(time.monotonic() - self.start, error=f"said nothing within {timeout:g} s")
        return [self._answers.get(rank, late) for rank in range(len(self._processes))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve(
    rank: int, size: int, port: int, connection: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Runs in the rank. Its process ends without Python's own end, in which threads of gloo might abort it."""
    end_with_parent()
    become_rank(rank, size, ADDRESS, port)
    torch.set_num_threads(1)
    try:
        connection.send((function(*args), ""))
    except Exception as error:
        connection.send((None, f"{type(error).__name__}: {error}"))
    connection.close()
    os._exit(0)
