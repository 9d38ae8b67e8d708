"""``python -m tests.fuzz``: random cases, each against the plain model. The last line is one JSON object."""

import argparse
import json
import multiprocessing as mp
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing import connection as connections
from typing import Any

import torch

from tests.fuzz.breaks import BREAKS
from tests.fuzz.case import Case, program
from tests.fuzz.check import CRASHED, EQUAL, REFUSED, WRONG, Outcome, close_groups, outcome_of
from tests.fuzz.draw import draw, features, is_quick
from tests.fuzz.shrink import shrink

Finding = tuple[int, Outcome, list[str], float]  # a case's number, what came of it, its features, CPU seconds
SHOWN = 5  # failures that are shrunk; the others are counted
ROOM = 8  # cases that a worker is given at a time


def main() -> int:
    arguments = _arguments()
    print(
        f"SEED={arguments.seed} CASES={arguments.cases} SECONDS={arguments.seconds} JOBS={arguments.jobs}", flush=True
    )
    begun, totals, drawn, refusals = time.monotonic(), Counter[str](), Counter[str](), Counter[str]()
    failures, busy = list[tuple[int, Outcome]](), 0.0
    for number, outcome, names, seconds in _until_interrupted(_outcomes(arguments)):
        totals[outcome.kind] += 1
        drawn.update(names)
        busy += seconds
        if outcome.kind == REFUSED:
            refusals[re.sub(r"\d+", "N", outcome.reason)[:160]] += 1
        elif outcome.kind != EQUAL:
            failures.append((number, outcome))
            print(f"case {number} of seed {arguments.seed}: {outcome.kind}: {outcome.reason[-600:]}", flush=True)
            if arguments.stop:
                break
    done = time.monotonic() - begun
    for number, outcome in sorted(failures, key=lambda pair: pair[0])[:SHOWN]:
        _explain(arguments, number, outcome)
    _print_table(drawn, refusals, totals.total())
    summary = {
        "cases": totals.total(),
        "equal": totals[EQUAL],
        "wrong": totals[WRONG],
        "refused": totals[REFUSED],
        "crashed": totals[CRASHED],
        "cpu_seconds": round(busy, 1),
        "seconds": round(done, 1),
    }
    print(json.dumps(summary), flush=True)
    return 1 if failures or not totals[EQUAL] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"), help="repeats a run")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further case is begun")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; 0 for this one alone")
    parser.add_argument("--quick", action="store_true", help="without types of transformers and other processes")
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    parser.add_argument("--break", dest="broken", choices=BREAKS, help="break the library first, to see it noticed")
    return parser.parse_args()


def _until_interrupted(findings: Iterator[Finding]) -> Iterator[Finding]:
    """Ctrl-C ends a run early, with what it has seen."""
    try:
        yield from findings
    except KeyboardInterrupt:
        print("interrupted", flush=True)


def _outcomes(arguments: argparse.Namespace) -> Iterator[Finding]:
    """What came of each case, in the order in which they end."""
    numbers: Sequence[int] = range(arguments.first, arguments.first + arguments.cases)
    if arguments.quick:
        numbers = [number for number in numbers if is_quick(draw(arguments.seed, number))]
    end = time.monotonic() + arguments.seconds
    if not arguments.jobs:
        _prepare(arguments.broken)
        for number in numbers:
            if time.monotonic() > end:
                break
            yield _run((arguments.seed, number))
        close_groups()
        return
    context = mp.get_context("spawn")
    chunks = [numbers[i : i + ROOM] for i in range(0, len(numbers), ROOM)]
    with ExitStack() as stack:
        workers = [_Worker(context, arguments.seed, arguments.broken) for _ in range(arguments.jobs)]
        for worker in workers:
            stack.callback(worker.close)
        yield from _share_out(workers, chunks, end)


def _share_out(workers: "list[_Worker]", chunks: list[Sequence[int]], end: float) -> Iterator[Finding]:
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
        except EOFError:  # the case killed the process
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
    _prepare(broken)
    try:
        while True:
            for number in connection.recv():
                connection.send(_run((seed, number)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        close_groups()


_broken = ExitStack()


def _prepare(broken: str | None) -> None:
    torch.set_num_threads(1)
    if broken:
        _broken.enter_context(BREAKS[broken]())


def _run(name: tuple[int, int]) -> Finding:
    case, begun = draw(*name), time.process_time()
    outcome = outcome_of(case)
    return name[1], outcome, features(case), time.process_time() - begun


def _explain(arguments: argparse.Namespace, number: int, outcome: Outcome) -> None:
    """Prints the smallest case that fails alike, as a program."""
    if arguments.jobs:
        _prepare(arguments.broken)
        arguments.jobs = 0
    last = [outcome]

    def fails(case: Case) -> bool:
        other = outcome_of(case)
        alike = other.kind == outcome.kind and (
            outcome.kind == WRONG or other.reason.partition(":")[0] == outcome.reason.partition(":")[0]
        )
        last[0] = other if alike else last[0]
        return alike

    case = draw(arguments.seed, number)
    small, tried = shrink(case, fails)
    close_groups()
    print(f"\ncase {number} of seed {arguments.seed}, {outcome.kind}, as a program:\n\n{program(case)}")
    print(f"the smallest of {tried} that fail alike, with: {last[0].reason[-1500:]}\n\n{program(small)}", flush=True)


def _print_table(drawn: Counter[str], refusals: Counter[str], total: int) -> None:
    width = max(map(len, drawn), default=0)
    for name, count in sorted(drawn.items()):
        print(f"{name:{width}} {count:6} {100 * count / total:5.1f} %")
    for reason, count in refusals.most_common():
        print(f"refused {count} x {reason}")


if __name__ == "__main__":
    sys.exit(main())
