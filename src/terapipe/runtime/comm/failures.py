"""How a failure on one rank becomes one message on all of them.

A rank that cannot go on posts a report on a board that all ranks can read, then cuts its connections. Whoever waits for
it is woken at once, reads the board, and raises what it says: the error of the rank that failed, or else the name of
the rank that others waited for and that has posted nothing. The rank that failed raises its own error::

      rank 0                    rank 1                       rank 2
        |                         |                            |
        | recv from 1             | its forward raises         | recv from 1
        |   (waits)               | post report on the board   |   (waits)
        |                         | cut all connections        |
        | <---- closed ---------- | ------------- closed ----> |
        | read the board          | raise ValueError           | read the board
        | raise "rank 1 stopped at F(stage 1, ...): ValueError"| raise the same

On CPUs a wait is a call of gloo's, which raises when the connection is closed. On GPUs the host does not wait, so a
thread watches for it (watcher.py), and the main thread raises at its next operation.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from terapipe.runtime.comm.environment import start_thread
from terapipe.runtime.comm.errors import (
    PipelineError,
    describe_error,
    is_connection_error,
    is_out_of_memory,
    is_timeout,
    nccl_cause,
    nccl_message,
)
from terapipe.runtime.comm.groups import GROUPS
from terapipe.runtime.comm.mesh import ALL, DP, TP, Ranks, rank_name
from terapipe.runtime.comm.watcher import Watcher

T = TypeVar("T")

GRACE = 2.0  # seconds that a woken rank gives the others to post their reports, one after the other
SETTLE = 0.25  # ... and to the one that others wait for, once all others have
BEAT = 0.5  # seconds between looks whether another rank has failed


@dataclass(frozen=True)
class FailureReport:
    """Why one rank stopped: an error of its own, or a wait for other ranks.

    Args:
        rank: that stopped, as torch.distributed counts it.
        error: its own error, in words.
        at: what it was doing then: an action, or an operation in words.
        peers: the ranks that it waited for; none if the error is its own.
        seconds: how long it waited.
        timed_out: whether it gave up, rather than being woken.
    """

    rank: int
    error: str = ""
    at: str = ""
    peers: tuple[int, ...] = ()
    seconds: float = 0.0
    timed_out: bool = False

    def describe(self, name: Callable[[int], str]) -> str:
        """Puts the report into words.

        Args:
            name: names a rank.
        """
        if not self.peers:
            at = f" at {self.at}" if self.at else ""
            return f"{name(self.rank)} stopped{at}: {self.error}"
        how = f"waited {self.seconds:.1f} s" if self.timed_out else "was waiting"
        cause = f" ({self.error})" if self.error else ""
        return f"{name(self.rank)} {how} at {self.at} for {' or '.join(map(name, self.peers))}{cause}"


class Board:
    """The reports of all ranks, in the store through which the processes met.

    They are numbered as they come, so that a look costs one question however many ranks there are. All of them look
    again and again, and one process answers. If each of 64 ranks asked for every other by name, it would have to answer
    4032 questions for every look::

        reports    3                     how many there are
        report1    rank 17: ...          each is read once
        report2    rank 16: ...
        report3    rank 18: ...

    Args:
        store: of the job, None where this process is alone.
        hosts: the host of every rank.
    """

    def __init__(self, store: Store | None, hosts: Mapping[int, str]) -> None:
        self._store, self._hosts = store, hosts
        self._seen, self._unread = 0, set[int]()  # numbers that were taken; those whose report was not there yet
        self._reports: dict[int, FailureReport] = {}  # by rank

    def _name(self, rank: int) -> str:
        return rank_name(rank, self._hosts)

    def post(self, report: FailureReport) -> None:
        """Adds a report to those that all ranks can read.

        Args:
            report: of this rank.
        """
        if self._store is None:
            return
        try:
            self._store.set_timeout(timedelta(seconds=GRACE))  # it may be on a host that is cut off
            number = self._store.add("reports", 1)
            self._store.set(f"report{number}", json.dumps(asdict(report)))
        except RuntimeError:  # the store went down with the rank that hosted it; the others will see that rank gone
            self._store = None

    def read(self) -> list[FailureReport]:
        """All reports so far, of any rank."""
        if self._store is not None:
            try:
                self._read_new(self._store)
            except RuntimeError:
                self._store = None
        return list(self._reports.values())

    def _read_new(self, store: Store) -> None:
        count = store.add("reports", 0)
        self._unread |= set(range(self._seen + 1, count + 1))
        self._seen = count
        for number in sorted(self._unread):
            if store.check([f"report{number}"]):  # who took the number may not have written yet, or have died
                report = json.loads(store.get(f"report{number}"))
                self._reports[report["rank"]] = FailureReport(**dict(report, peers=tuple(report["peers"])))
                self._unread.discard(number)

    def explain(self, mine: FailureReport, grace: float = GRACE) -> str:
        """Returns one message about all that has been posted, the same on every rank that had time to post.

        Suspects are ranks that others wait for and that have posted nothing. It reads the board again and again until
        the cause is plain::

            a report of an error of its own    that is the cause: no need to wait for more
            all have posted but one suspect    wait SETTLE: it may be about to post; then it is the cause
            anything else                      wait for those that are woken one after the other, until nobody has
                                               posted for ``grace`` seconds: 64 ranks on two cores take longer

        Args:
            mine: the report of this rank.
            grace: seconds to wait for another report after each.
        """
        news, count = time.monotonic(), 0
        while True:
            others = [report for report in self.read() if report.rank != mine.rank]
            if len(others) > count:
                news, count = time.monotonic(), len(others)
            reports = sorted([mine, *others], key=lambda report: report.rank)
            suspects = {peer for report in reports for peer in report.peers} - {report.rank for report in reports}
            # Of several suspects, some may only be slow to tell what they wait for themselves; and so may the other
            # end of a transfer that has failed.
            at_most = 0 if any(report.error for report in reports) else 1
            complete = len(reports) + len(suspects) >= len(self._hosts) and len(suspects) <= at_most
            waited = time.monotonic() - news
            is_plain = any(not report.peers for report in reports)
            if is_plain or self._store is None or waited > (SETTLE if complete else grace):
                return self._describe(reports, suspects)
            time.sleep(0.02)

    def _describe(self, reports: list[FailureReport], suspects: set[int]) -> str:
        """Causes first, then who waited for whom."""
        causes = [report.describe(self._name) for report in reports if not report.peers]
        if not causes:
            # Nobody waits long for a rank that is gone; who waits for whom may hang together over several ranks.
            late = any(report.timed_out for report in reports)
            causes = [_suspicion(self._name(rank), late) for rank in sorted(suspects)]
        by_error = sorted(reports, key=lambda report: not report.error)
        return "; ".join([*causes, *(report.describe(self._name) for report in by_error if report.peers)])


def _suspicion(rank: str, late: bool) -> str:
    if late:
        return f"{rank} did not answer in time: it is stuck, cut off, or slower than the timeout allows"
    return f"{rank} is gone: its process died or lost its connection"


class Failure:
    """What this rank does when it or another rank fails: the board, the watcher, and cutting connections.

    One object serves all that a process sends: where one pipeline has failed, all that share its transport have.

    Args:
        ranks: all ranks, and this process among them.
        device: of this process.
        timeout: seconds that a rank waits for another.
    """

    def __init__(self, ranks: Ranks, device: torch.device, timeout: float) -> None:
        self._ranks, self._device, self._timeout = ranks, device, timeout
        everyone = ranks[ALL].objects
        self._store = None if everyone is None else PrefixStore("terapipe/failures", everyone.get_group_store())
        self._board = Board(self._store, ranks.hosts)  # which has the names as soon as ranks have told them
        self._watcher: Watcher | None = None
        self._gloo: dict[int, dist.ProcessGroup] = {}  # to be cut, by id
        self._nccl: dict[int, Any] = {}  # likewise
        self._error: PipelineError | None = None
        self._lock = threading.Lock()
        self._cut_by: tuple[int, ...] = ()  # the ranks because of which connections were cut, before there are words
        self._was_raised = False  # whether a step has raised the error
        self.own_lines(ranks)

    def own_lines(self, ranks: Ranks) -> None:
        """From now on the groups of these lines are cut after a failure."""
        for line in ranks.lines.values():
            for group in filter(None, (line.tensors, line.objects)):
                if self._device.type == "cuda" and group is not line.objects:
                    self.own_communicator(group)
                else:
                    self._gloo[id(group)] = group

    def own_communicator(self, communicator: Any) -> None:
        """From now on this communicator of NCCL's is aborted after a failure."""
        self._nccl[id(communicator)] = communicator

    def start_watcher(self) -> None:
        """On GPUs, where the host does not wait for transfers: a thread does (see watcher.py)."""
        if self._store is not None and self._device.type == "cuda":
            rank = self._ranks.global_rank
            self._watcher = Watcher(self._store, rank, self._device, self._timeout, self.report_transfer, self.hear)

    # Waiting

    @contextmanager
    def waiting(self, peers: tuple[int, ...], why: object) -> Iterator[None]:
        """For operations that wait for other ranks: an error inside is told to all ranks, as theirs is told here.

        Args:
            peers: the ranks that it waits for.
            why: what it waits for, in words.
        """
        self._raise_stopped(why)
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):  # this rank's own failure, for which no other is to blame
                raise
            if self.has_stopped:
                raise self._fail_too(why) from error
            raise self.lost(error, why, peers, time.monotonic() - start) from error

    def watch(self, work: dist.Work, first: dist.Work | None, peers: tuple[int, ...], why: object) -> dist.Work:
        """On a GPU, lets the watcher see that a transfer ends.

        Args:
            work: the transfer.
            first: the first transfer of its communicator, which tells what has gone wrong and holds no message in
                memory.
            peers: the ranks that it needs.
            why: what it is, in words.
        """
        if self._watcher is not None:
            self._watcher.watch(work, lambda: nccl_message(first), peers, why)
        return work

    def call_guarded(self, connect: Callable[[], None], peers: tuple[int, ...]) -> None:
        """Calls a function that connects this rank with others.

        NCCL waits for them without a deadline, inside of a call that nothing ends. So it is called in a thread, which
        is left behind where they do not answer in time.

        Args:
            connect: the function.
            peers: the ranks that must answer.
        """
        why = "NCCL's connection (NCCL_DEBUG=INFO says what it tries, NCCL_SOCKET_IFNAME which network)"
        with self.waiting(peers, why):
            if self._watcher is None:
                return connect()
            answer: Future[None] = Future()
            self._watcher.watch_call(answer, peers, why)
            start_thread(lambda: _answer(answer, connect), self._device, "terapipe-connecting")
            while not wait([answer], BEAT).done:
                self._raise_stopped(why)
            return answer.result()

    # Failing

    @contextmanager
    def failing_together(self, at: Callable[[], object] = lambda: "") -> Iterator[None]:
        """An error inside stops the other ranks too, with this rank's error.

        Which error this rank raises depends on whose it is::

            error inside                       this rank tells        this rank raises
            PipelineError                      (was told before)      the same
            any, after another rank failed     -                      that rank's, as PipelineError
            of a connection, within operators  that it waited         PipelineError, with the peers
            any other                          its words and place    the error itself

        Args:
            at: tells where this rank stands, such as the action that it runs.
        """
        try:
            self._raise_stopped("a step")
            yield
            self._raise_stopped("the end of a step")
        except PipelineError:
            self._was_raised = True
            raise
        except Exception as error:
            place, others = str(at() or ""), self._ranks.others(DP, TP)
            about_connections = is_connection_error(error)
            if self._error is not None or (self.has_stopped and about_connections):  # the watcher has cut them
                raise self._fail_too(place) from error
            if others and about_connections:  # within an operator, or while gathering a stage
                raise self.lost(error, place or "the end of a step", others) from error
            self.fail(FailureReport(self._ranks.global_rank, describe_error(error), place))
            raise

    @property
    def has_stopped(self) -> bool:
        """Whether this rank has failed, or has heard that another has.

        It turns True before connections are cut. After that a GPU goes on with buffers that no message came into; so
        nothing has been computed from such a buffer while this is still False.
        """
        return bool(self._cut_by) or self._error is not None

    def refuse_stopped(self, what: str) -> None:
        """Refuses to use gradients or weights after a failure between ranks.

        Args:
            what: would use them, as the subject of a sentence.
        """
        if self.has_stopped and self._store is not None:
            raise PipelineError(
                f"{what} needs gradients or weights that are whole; where a transfer has failed they may be made of "
                f"messages that never came: load the last checkpoint in a new process. {self._fail_too(what)}"
            )

    def _raise_stopped(self, why: object) -> None:
        """Raises a failure that the watcher has learned of. The first time in its own words."""
        if self.has_stopped:
            error = self._fail_too(why)
            raise PipelineError(f"this pipeline stopped before: {error}") if self._was_raised else error

    def _fail_too(self, why: object) -> PipelineError:
        """Stops this rank because of another's failure, and returns what to raise: posts that it stood at ``why`` and
        cuts its connections, so that those who wait for it are woken in turn. The second time it only returns the
        error."""
        return self.fail(FailureReport(self._ranks.global_rank, "", str(why), self._cut_by))

    def lost(self, error: Exception, why: object, peers: tuple[int, ...], seconds: float = 0.0) -> PipelineError:
        """Tells the other ranks that an operation between ranks failed; returns what to raise here.

        Args:
            error: of the operation.
            why: what it was, in words.
            peers: the ranks that it waited for.
            seconds: how long it waited.
        """
        late = seconds >= 0.95 * self._timeout or is_timeout(error)
        rank, waited = self._ranks.global_rank, seconds or self._timeout
        return self.fail(FailureReport(rank, nccl_cause(error), str(why), peers, waited, late))

    def fail(self, report: FailureReport) -> PipelineError:
        """Tells the other ranks and cuts the connections; returns what to raise here."""
        with self._lock:  # the main thread and the watcher's may both be here: the first of them counts
            if self._error is None:
                self._board.post(report)
                if self._watcher is not None:
                    self._watcher.post()
                self.cut(report.peers or (report.rank,))
                self._error = PipelineError(self._board.explain(report))
            return self._error

    def cut(self, because_of: tuple[int, ...]) -> None:
        """Wakes everyone who waits for this rank, and this rank where it waits.

        Args:
            because_of: the ranks that have failed or do not answer.
        """
        if not self._cut_by:
            self._cut_by = because_of  # first: who reads what comes after knows that it may be wrong
            GROUPS.cut(list(self._gloo.values()), list(self._nccl.values()), self._device)

    # Called by the watcher

    def report_transfer(self, why: object, peers: tuple[int, ...], seconds: float, is_dead: bool, cause: str) -> None:
        """A transfer has failed, does not come to an end, or its peer is dead."""
        peers = peers or self._ranks.others(ALL)
        self.fail(FailureReport(self._ranks.global_rank, cause, str(why), peers, seconds, not is_dead))

    def hear(self, why: object | None, peers: tuple[int, ...]) -> None:
        """Another rank has failed.

        If this one is not known to wait for anybody, only the connections are cut: where it waits inside an operator,
        that fails and tells; or it is the one that others wait for.
        """
        if why is None:
            self.cut(peers)
        else:
            self.fail(FailureReport(self._ranks.global_rank, "", str(why), peers))


def _answer(answer: Future[T], function: Callable[[], T]) -> None:
    try:
        answer.set_result(function())
    except BaseException as error:
        answer.set_exception(error)
