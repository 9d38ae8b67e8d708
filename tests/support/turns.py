"""Several ranks in one process: threads that take turns, and a transport between them.

Only the thread whose turn it is runs, until it must wait for another. So a pipeline of four ranks costs what its
computations cost, every run of a case is the same, and a deadlock is seen at once: nobody can go on. Transfers are as
unkind as they may be: a buffer that waits for a message is full of NaN, messages arrive as late as possible, and one
that was changed before it arrived is an error.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from terapipe.planning.cost import Ints
from terapipe.runtime.comm.channel import Channel, Guard, Links
from terapipe.runtime.comm.failures import Failure
from terapipe.runtime.comm.mesh import ALL, DP, PP, Line, Ranks
from terapipe.runtime.comm.transport import Transport


class StoppedError(Exception):
    """Another rank has failed, and so this one cannot go on."""


class DeadlockError(Exception):
    """Every rank waits for another."""


class Turns:
    """Threads of which one runs at a time.

    Args:
        size: The number of threads.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._gates = [threading.Semaphore(0) for _ in range(size)]
        self._alive, self._stuck = set(range(size)), set[int]()
        self._error: BaseException | None = None
        self._done = threading.Semaphore(0)

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """What the function returns for each number. The first error of any thread ends all of them, and is raised.

        Args:
            function: Called with the number of each thread.
        """
        if self.size == 1:
            return [function(0)]
        results: list[Any] = [None] * self.size

        def work(rank: int) -> None:
            self._gates[rank].acquire()
            try:
                if self._error is None:
                    results[rank] = function(rank)
            except StoppedError:
                pass
            except BaseException as error:
                self._error = self._error or error
            self._alive.discard(rank)
            self._stuck.clear()
            self._pass_on(rank)

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        self._gates[0].release()
        self._done.acquire()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return results

    def wait_until(self, rank: int, is_ready: Callable[[], bool], why: object) -> None:
        """Lets others run until something is so.

        Args:
            rank: The number of the thread that waits.
            is_ready: Whether it is so.
            why: What it waits for, in words.
        """
        while not is_ready():
            self._stuck.add(rank)
            if self._alive <= self._stuck:
                self._error = self._error or DeadlockError(f"rank {rank} waits for {why}, and all others wait, too")
            if self._error is None:
                self._pass_on(rank)
                self._gates[rank].acquire()
            if self._error is not None:
                raise StoppedError
        self._stuck.clear()

    def _pass_on(self, rank: int) -> None:
        after = sorted(self._alive - (self._stuck if self._error is None else set()))
        if not after:
            self._done.release()
        else:
            self._gates[next((other for other in after if other > rank), after[0])].release()


class World:
    """What ranks of one process share: whose turn it is, and what was said.

    Args:
        dp: Replicas.
        pp: Ranks of each pipeline.
    """

    def __init__(self, dp: int, pp: int) -> None:
        self.dp, self.pp, self.turns = dp, pp, Turns(dp * pp)
        self.meetings: dict[Any, dict[int, Any]] = defaultdict(dict)
        self.sent: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self.received: dict[tuple[int, int], deque[Message]] = defaultdict(deque)

    def run(self, function: Callable[[Transport], Any]) -> list[Any]:
        """What every rank's call of the function returns, in the order of ranks.

        Args:
            function: Is given the rank's transport, for ``Pipeline(transport=...)``.
        """
        return self.turns.run(lambda rank: function(TurnsTransport(self, rank)))


class _Line(Line):
    @property
    def has_peers(self) -> bool:
        return self.size > 1


class Message(dist.Work):
    """One end of a transfer.

    Args:
        tensor: What is sent, or where it is to arrive.
    """

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor, self.version, self.is_through = tensor, tensor._version, False


class _TurnsLinks(Links):
    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank
        self._first = rank - rank % world.pp  # the rank that has the first place in this pipeline

    def connect(self, pairs: Collection[tuple[int, int]], guard: Guard) -> None:
        pass

    def send(self, tensor: Tensor, peer: int) -> dist.Work:
        message = Message(tensor.detach())
        self._world.sent[self._rank, self._first + peer].append(message)
        return message

    def receive(self, buffer: Tensor, peer: int) -> dist.Work:
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
        message = Message(buffer)
        self._world.received[self._first + peer, self._rank].append(message)
        return message

    def wait(self, work: dist.Work) -> None:
        assert isinstance(work, (Message, _Sum))
        self._world.turns.wait_until(self._rank, lambda: work.is_through or self._deliver(work), "a transfer")

    def _deliver(self, work: "Message | _Sum") -> bool:
        """Completes all transfers of which both ends are there."""
        for pair, sent in self._world.sent.items():
            received = self._world.received[pair]
            while sent and received:
                source, target = sent.popleft(), received.popleft()
                assert source.tensor.shape == target.tensor.shape, "the ends of a transfer have different shapes"
                assert source.tensor.dtype == target.tensor.dtype, "the ends of a transfer have different dtypes"
                assert source.tensor._version == source.version, "a message was changed before it arrived"
                target.tensor.copy_(source.tensor)
                source.is_through = target.is_through = True
        return work.is_through


class _Sum(Message):
    """A sum over replicas that has begun."""

    def __init__(self, tensor: Tensor, meeting: Any) -> None:
        super().__init__(tensor)
        self.meeting = meeting


class TurnsTransport(Transport):
    """What one of the ranks of a process says to the others.

    Args:
        world: Of all ranks.
        rank: This one.
    """

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._here, self._rounds = world, rank, defaultdict[Any, int](int)
        replica, place = divmod(rank, world.pp)
        pipe = tuple(range(replica * world.pp, (replica + 1) * world.pp))
        lines = {
            PP: _Line(pipe, place),
            DP: _Line(tuple(range(place, world.dp * world.pp, world.pp)), replica),
            ALL: _Line(tuple(range(world.dp * world.pp)), rank),
        }
        ranks, device = Ranks(lines), torch.device("cpu")
        failure = Failure(ranks, device, 0.0)
        channel = Channel(device, lines[PP], failure, _TurnsLinks(world, rank))
        super().__init__(device, 0.0, ranks, channel, failure)

    def _post(self, over: str, value: Any) -> Any:
        members = self.ranks[over].members
        self._rounds[over] += 1
        key = (over, members, self._rounds[over])
        self._world.meetings[key][self._here] = value
        return key

    def _meet(self, key: Any) -> list[Any]:
        members, meeting = key[1], self._world.meetings[key]
        self._world.turns.wait_until(self._here, lambda: len(meeting) == len(members), f"others to meet over {key[0]}")
        return [meeting[member] for member in members]

    def _say(self, over: str, value: Any) -> list[Any]:
        return self._meet(self._post(over, value))

    def broadcast(self, tensor: Tensor, source: int, why: str, over: str = PP) -> Tensor:
        values = self._say(over, tensor.detach().clone())
        if self.ranks[over].rank != source:
            tensor.copy_(values[source])
        return tensor

    def all_reduce(self, tensor: Tensor, over: str = ALL, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        values = torch.stack(self._say(over, tensor.detach().clone()))
        return tensor.copy_(values.amax(0) if op == dist.ReduceOp.MAX else values.sum(0, dtype=values.dtype))

    def start_sum(self, tensor: Tensor) -> dist.Work:
        work = _Sum(tensor, self._post(DP, tensor.detach().clone()))
        tensor.fill_(torch.nan)  # until it is through
        work.version = tensor._version
        return work

    def finish_sum(self, work: dist.Work) -> None:
        assert isinstance(work, _Sum)
        values = self._meet(work.meeting)
        assert work.tensor._version == work.version, "a gradient was changed while it was summed over replicas"
        work.tensor.copy_(torch.stack(values).sum(0))

    def gather(self, value: Any, over: str = PP) -> list[Any]:
        return self._say(over, value)

    def gather_numbers(self, numbers: Sequence[int], over: str = PP) -> Ints:
        return np.array(self._say(over, tuple(numbers)), dtype=np.int64)

    def collect(self, value: Any, over: str = PP) -> list[Any] | None:
        values = self._say(over, value)
        return None if self.ranks[over].rank else values
