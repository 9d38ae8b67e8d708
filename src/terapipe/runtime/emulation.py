"""Emulated devices: ranks that are real in all but what they compute.

Processes, transport, executor, schedule, messages and failures are those of any run. Only computations take the time
that a cost model says, in which the process sleeps; so a machine with two cores serves dozens of ranks, and what the
simulator says of a cluster can be measured::

                       simulator             emulated devices                a cluster
    order of actions   the schedule          the schedule                    the schedule
    a computation      seconds of the cost   sleeps those seconds            computes
    a transfer         seconds of the cost   gloo, and not before those      network
    executor, agreeing no time               what they take                  what they take

A stage adds 1 to its input, and the gradient of its one parameter is 1 for each slice. So a step also proves that every
slice went through every stage, forwards and backwards, once: the loss is the number of stages, the gradient that of
slices.
"""

import ctypes
import itertools
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from terapipe.modeling.slice_cache import SliceCache
from terapipe.modeling.stage import PipelineModel, Stage, TensorParallel
from terapipe.modeling.weight_grads import call_hooks
from terapipe.planning.cost import Cost, LinkBehavior, by_side
from terapipe.planning.slices import Plan
from terapipe.runtime.comm.channel import Channel, Guard, Links
from terapipe.runtime.comm.mesh import PP
from terapipe.runtime.comm.transport import Transport
from terapipe.scheduling.orders import schedule
from terapipe.scheduling.simulator import seconds_by_stage, simulate
from terapipe.scheduling.timeline import Timeline

Place = tuple[int, int, int]  # of a slice: sequences, tokens before it, its tokens

_TIMER_SLACK = 29  # of prctl: PR_SET_TIMERSLACK
_STAMP = 8  # bytes behind a message: when it has arrived


class Seconds(NamedTuple):
    """Of one slice on one stage."""

    forward: float
    backward: float
    inputs: float  # the half of a backward that another stage waits for
    weights: float  # the other half


class Wire(NamedTuple):
    """From one rank to another.

    Args:
        seconds: of a message, by sequences and tokens of its slice.
        behavior: whether the sender computes meanwhile, and how much of it is latency.
    """

    seconds: Mapping[tuple[int, int], float]
    behavior: LinkBehavior


@dataclass(frozen=True)
class Emulation:
    """What emulated devices are to take for everything: plain numbers, worked out once and handed to every rank.

    Args:
        plan: what they run.
        stages: seconds of each slice, by stage.
        wires: those of messages, by the ranks that send and receive.
        slowdown: for each rank, by how much it is slower than the costs say; empty: by nothing.
        jitter: standard deviation of a computation's seconds, relative to them.
    """

    plan: Plan
    stages: tuple[Mapping[Place, Seconds], ...]
    wires: Mapping[tuple[int, int], Wire]
    slowdown: tuple[float, ...] = ()
    jitter: float = 0.0

    @classmethod
    def of(
        cls, plan: Plan, cost: Cost, *, stretch: float = 1.0, slowdown: Sequence[float] = (), jitter: float = 0.0
    ) -> Self:
        """Asks a cost model for all that will be needed.

        Args:
            plan: what is to be run.
            cost: of devices and links. What a host takes beside its device is left out: the host here is real.
            stretch: by how much everything is to take longer, so that this machine's own time matters less.
            slowdown: as in the class.
            jitter: as in the class.
        """
        if plan.offloads:
            raise ValueError(
                "emulated devices have no activations to copy to the host, got a plan with offload; plan without it"
            )
        if stretch <= 0 or jitter < 0 or len(slowdown) not in (0, plan.num_ranks) or min(slowdown, default=1.0) <= 0:
            raise ValueError(
                f"stretch is above 0, jitter at least 0, and slowdown one number above 0 for each of the "
                f"{plan.num_ranks} ranks, got {stretch}, {jitter} and {list(slowdown)}"
            )
        device = by_side(cost)[0]
        tables = stretch * seconds_by_stage(plan, device)[:, :4]
        stages = tuple(_by_place(plan, k, table) for k, table in enumerate(tables))
        return cls(plan, stages, _wires(plan, device, stretch), tuple(slowdown), jitter)

    @property
    def has_wires(self) -> bool:
        """Whether any message takes time."""
        return any(seconds for wire in self.wires.values() for seconds in wire.seconds.values())


def _by_place(plan: Plan, k: int, table: np.ndarray[Any, Any]) -> dict[Place, Seconds]:
    """Seconds by what a stage is told of a slice. It is not told the microbatch."""
    places: dict[Place, Seconds] = {}
    for s, column in zip(plan.slices, table.T.tolist(), strict=True):
        seconds = Seconds(*column)
        if places.setdefault((s.size, s.context, s.length), seconds) != seconds:
            raise ValueError(
                f"slices of {s.size} sequences and tokens {s.context} to {s.end} must take the same on stage {k} in "
                "all microbatches, got different modes of recomputation; give all microbatches the same"
            )
    return places


def _wires(plan: Plan, cost: Cost, stretch: float) -> dict[tuple[int, int], Wire]:
    shapes = sorted({(s.size, s.length) for s in plan.slices})
    ranks = [plan.rank_of(k) for k in range(plan.num_stages)]
    pairs = {pair for a, b in itertools.pairwise(ranks) if a != b for pair in ((a, b), (b, a))}
    wires = {}
    for a, b in sorted(pairs):
        overlapped, latency = cost.link_behavior(a, b)
        seconds = {shape: stretch * float(cost.transfer(a, b, *shape)) for shape in shapes}
        wires[a, b] = Wire(seconds, LinkBehavior(overlapped, stretch * latency))
    return wires


# Sleeping


def sharpen_sleep() -> None:
    """Lets this thread's sleeps end when they should. Linux ends them up to 50 microseconds late to save power, and
    spinning instead would take the cores from other ranks."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_TIMER_SLACK, 1, 0, 0, 0)


def sleep_until(deadline: float) -> None:
    """Returns at this moment of ``time.perf_counter``, or at once if it has passed.

    Args:
        deadline: on a clock that all processes of a host share.
    """
    while (left := deadline - time.perf_counter()) > 0:
        time.sleep(left)


# The model


class EmulatedModel(PipelineModel):
    """A model whose stages sleep.

    Args:
        emulation: what everything takes.
        rank: of this process in the pipeline, for its slowdown and its own jitter.
    """

    def __init__(self, emulation: Emulation, rank: int) -> None:
        self.num_layers = emulation.plan.num_layers
        self._emulation = emulation
        self._factor = emulation.slowdown[rank] if emulation.slowdown else 1.0
        self._random = random.Random(rank)

    @property
    def is_verified(self) -> bool:
        """There is nothing that slices could make inexact, and a check would sleep."""
        return True

    def traits(self) -> Mapping[str, Any]:
        """None: ranks may be slower than others."""
        return {}

    def make_stage(self, plan: Plan, k: int, device: torch.device, tp: TensorParallel | None = None) -> Stage:
        """A stage that sleeps, of the plan that it was worked out for."""
        if plan.placement != self._emulation.plan.placement or tp is not None:
            raise ValueError("emulated devices run the plan that they were made for, one process for each of its ranks")
        return EmulatedStage(k, self._emulation.stages[k], self.draw_factor)

    def stage(self, first: int, last: int, device: torch.device, tp: TensorParallel | None = None) -> Stage:
        """Refused: what a stage takes depends on the plan."""
        raise ValueError("a stage of an emulated model depends on its plan; call make_stage(plan, k, device)")

    def draw_factor(self) -> float:
        """Draws by how much the next computation takes longer than the costs say."""
        jitter = self._emulation.jitter
        return self._factor * (max(0.0, self._random.gauss(1.0, jitter)) if jitter else 1.0)


class EmulatedStage(Stage):
    """Sleeps in place of computing. Hidden states are one number for each token.

    Args:
        k: number of the stage.
        seconds: of each slice.
        draw_factor: is asked before each computation by how much it takes longer.

    Attributes:
        late: seconds by which all computations so far ended too late, because the machine woke this process late.
    """

    hidden_size = 1

    def __init__(self, k: int, seconds: Mapping[Place, Seconds], draw_factor: Any) -> None:
        super().__init__()
        self._is_first, self._seconds, self._draw_factor = k == 0, seconds, draw_factor
        self.late = 0.0
        self.register_parameter(f"stage{k}", nn.Parameter(torch.zeros(())))

    @property
    def weight(self) -> nn.Parameter:
        """The one parameter, whose gradient counts backwards."""
        return next(self.parameters())

    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        assert isinstance(cache, EmulatedCache)
        out: Tensor = _Compute.apply(x, self.weight, self, cache)  # type: ignore[no-untyped-call]
        return out

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return hidden.sum()

    def make_cache(self, size: int, seq_len: int) -> "EmulatedCache":
        return EmulatedCache(seq_len)

    def next_hidden(self, x: Tensor) -> Tensor:
        """The numbers that a forward returns: how many stages the slice went through."""
        return torch.ones(*x.shape, 1) if self._is_first else x + 1.0

    def seconds_of(self, x: Tensor, cache: SliceCache) -> Seconds:
        """Returns the seconds of the current slice."""
        place = x.shape[0], cache.context, cache.length
        if place not in self._seconds:
            raise ValueError(
                f"emulated devices run the plan that they were made for, got a slice of {place[0]} sequences and "
                f"tokens {place[1]} to {place[1] + place[2]}; emulate the other plan"
            )
        return self._seconds[place]

    def sleep(self, seconds: float, start: float) -> None:
        """Returns when a computation would have ended.

        Args:
            seconds: that it takes by the costs.
            start: when it began.
        """
        deadline = start + seconds * self._draw_factor()
        sleep_until(deadline)
        self.late += time.perf_counter() - deadline


class EmulatedCache(SliceCache):
    """Knows which slices had their forward: the second one is a recomputation, whose time is the backward's."""

    def __init__(self, seq_len: int) -> None:
        super().__init__(seq_len)
        self._had_forward: set[int] = set()

    def note_forward(self) -> bool:
        """Whether it is the current slice's first."""
        is_first = self.context not in self._had_forward
        self._had_forward.add(self.context)
        return is_first

    def clear(self) -> None:
        super().clear()
        self._had_forward.clear()


class _Compute(torch.autograd.Function):
    """A forward, and its backward, or the half of it that another stage waits for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: EmulatedStage, cache: EmulatedCache) -> Tensor:
        start = time.perf_counter()
        ctx.seconds, ctx.stage, ctx.cache = stage.seconds_of(x, cache), stage, cache
        out = stage.next_hidden(x)
        if cache.note_forward():
            stage.sleep(ctx.seconds.forward, start)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        start, current = time.perf_counter(), ctx.cache.current
        into = gradient if ctx.needs_input_grad[0] else None
        if current.defer:
            current.deferred.append(_Weights(ctx.stage.weight, ctx.stage, ctx.seconds.weights))
            ctx.stage.sleep(ctx.seconds.inputs, start)
            return into, None, None, None
        ctx.stage.sleep(ctx.seconds.backward, start)
        return into, torch.ones(()), None, None


class _Weights(NamedTuple):
    """The weight half of a backward, in the place of a ``DeferredGrad``."""

    weight: Tensor
    stage: EmulatedStage
    seconds: float

    def add(self) -> None:
        start, one = time.perf_counter(), torch.ones(())
        self.weight.grad = one if self.weight.grad is None else self.weight.grad.add_(one)
        self.stage.sleep(self.seconds, start)
        if self.weight._post_accumulate_grad_hooks:
            call_hooks(self.weight)


# Links


class _Message(dist.Work):
    """A transfer with the bytes that it is about.

    Args:
        work: gloo's.
        message: those that travel, with a stamp behind.
        buffer: where they are wanted; None at the sender.
    """

    def __init__(self, work: dist.Work, message: Tensor, buffer: Tensor | None = None) -> None:
        super().__init__()
        self.work, self.message, self.buffer = work, message, buffer


class EmulatedLinks(Links):
    """Messages that arrive when an emulated link would have brought them, if the real one does so sooner.

    The sender knows when its link is free, works out when the message will be there, and writes that behind it; all
    processes of a host have one clock. The receiver sleeps until then::

        sender      F1 ends, link free from t0: arrives at max(now, t0) + seconds      [message | arrival]
        link        |---- message 0 ----|---- message 1 ----|
        receiver    waits for gloo, then until the arrival

    Args:
        links: the real ones.
        rank: this process's place in the pipeline.
        wires: seconds of messages.
    """

    def __init__(self, links: Links, rank: int, wires: Mapping[tuple[int, int], Wire]) -> None:
        self._links, self._rank, self._wires = links, rank, wires
        self._free: dict[int, float] = {}  # when the link to a rank is free again

    def connect(self, pairs: Any, guard: Guard) -> None:
        self._links.connect(pairs, guard)

    def send(self, tensor: Tensor, peer: int) -> dist.Work:
        stamp = torch.tensor([self._arrival(tensor, peer)], dtype=torch.float64)
        message = torch.cat([tensor.flatten().view(torch.uint8), stamp.view(torch.uint8)])
        return _Message(self._links.send(message, peer), message)

    def _arrival(self, tensor: Tensor, peer: int) -> float:
        wire, now = self._wires[self._rank, peer], time.perf_counter()
        size, length, *_ = tensor.shape
        seconds, (overlapped, latency) = wire.seconds[size, length], wire.behavior
        if not overlapped:
            sleep_until(now + seconds)
            return now + seconds
        arrival = max(now, self._free.get(peer, 0.0)) + seconds
        self._free[peer] = arrival - latency
        return arrival

    def receive(self, buffer: Tensor, peer: int) -> dist.Work:
        message = torch.empty(buffer.numel() * buffer.itemsize + _STAMP, dtype=torch.uint8)
        return _Message(self._links.receive(message, peer), message, buffer)

    def wait(self, work: dist.Work) -> None:
        assert isinstance(work, _Message)
        self._links.wait(work.work)
        if work.buffer is not None:
            sleep_until(work.message[-_STAMP:].clone().view(torch.float64).item())
            work.buffer.view(torch.uint8).view(-1).copy_(work.message[:-_STAMP])


def emulated_transport(transport: Transport, emulation: Emulation) -> Transport:
    """The same transport, over links that take the time that the costs say.

    Args:
        transport: of this process.
        emulation: what messages take.
    """
    if not emulation.has_wires or transport.size == 1:
        return transport
    links = EmulatedLinks(transport.channel.links, transport.rank, emulation.wires)
    channel = Channel(transport.device, transport.ranks[PP], transport.failure, links)
    return Transport(transport.device, transport.timeout, transport.ranks, channel, transport.failure)


def predict(plan: Plan, cost: Cost, slowdown: Sequence[float] = ()) -> Timeline:
    """The simulator's word on what emulated devices will do.

    Args:
        plan: what they run.
        cost: as for ``Emulation.of``.
        slowdown: as in ``Emulation``.
    """
    return simulate(schedule(plan), by_side(cost)[0], slowdown)
