"""Processes that run cases, and outlive none that fails: one that is ended by a case is started anew."""

import multiprocessing as mp
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing import connection as connections
from typing import Any

import torch

from tests.fuzz.breaks import BREAKS
from tests.fuzz.check import CRASHED, Outcome, close_groups, outcome_of
from tests.fuzz.draw import draw, features

Finding = tuple[int, Outcome, list[str], float]  # a case's number, what came of it, its features, CPU seconds
ROOM = 8  # cases that a worker is given at a time


def share_out(numbers: Sequence[int], seed: int, jobs: int, broken: str | None, end: float) -> Iterator[Finding]:
    """What came of each case, in the order in which they end.

    Args:
        numbers: Of the cases.
        seed: Of the run.
        jobs: Processes.
        broken: How the library is broken first, or None.
        end: The time after which no further case is begun.
    """
    context = mp.get_context("spawn")
    chunks = [numbers[i : i + ROOM] for i in range(0, len(numbers), ROOM)]
    with ExitStack() as stack:
        workers = [_Worker(context, seed, broken) for _ in range(jobs)]
        for worker in workers:
            stack.callback(worker.close)
        yield from _findings(workers, chunks, end)


def _findings(workers: "list[_Worker]", chunks: list[Sequence[int]], end: float) -> Iterator[Finding]:
    waiting = list(reversed(chunks))
    for worker in workers:
        if waiting:
            worker.begin(waiting.pop())
    while busy := [worker for worker in workers if worker.left]:
        for connection in connections.wait([worker.connection for worker in busy]):
            worker = next(worker for worker in busy if worker.connection is connection)
            yield worker.receive()
            if not worker.left and waiting and time.monotonic() < end:
                worker.begin(waiting.pop())


class _Worker:
    """A process that runs cases, and is started anew when one ends it."""

    def __init__(self, context: Any, seed: int, broken: str | None) -> None:
        self._context, self._seed, self._broken = context, seed, broken
        self.left: list[int] = []
        self._start()

    def _start(self) -> None:
        self.connection, theirs = self._context.Pipe()
        self._process = self._context.Process(target=_work, args=(theirs, self._seed, self._broken))
        self._process.start()
        theirs.close()

    def begin(self, numbers: Sequence[int]) -> None:
        self.left = list(numbers)
        self.connection.send(self.left)

    def receive(self) -> Finding:
        try:
            finding: Finding = self.connection.recv()
        except (EOFError, ConnectionResetError):  # the case killed the process
            number = self.left[0]
            self._process.join()
            outcome = Outcome(CRASHED, f"the process ended with {self._process.exitcode}")
            left = self.left[1:]
            self._start()
            self.left = left
            self.connection.send(left)
            return number, outcome, [], 0.0
        self.left.remove(finding[0])
        return finding

    def close(self) -> None:
        self.connection.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _work(connection: Any, seed: int, broken: str | None) -> None:
    prepare(broken)
    try:
        while True:
            for number in connection.recv():
                connection.send(run(seed, number))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        close_groups()


_broken = ExitStack()


def prepare(broken: str | None) -> None:
    """Makes this process ready to run cases.

    Args:
        broken: How the library is broken first, or None.
    """
    torch.set_num_threads(1)
    if broken:
        _broken.enter_context(BREAKS[broken]())


def run(seed: int, number: int) -> Finding:
    """Runs one case.

    Args:
        seed: Of the run.
        number: Of the case.
    """
    case, begun = draw(seed, number), time.process_time()
    outcome = outcome_of(case)
    return number, outcome, features(case), time.process_time() - begun
