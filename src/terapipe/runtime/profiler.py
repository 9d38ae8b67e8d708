"""Measures one stage of a model on a grid of slices, on all ranks at the same time, as in a real step.

All ranks measure together because they share what they run on: cores and memory of a host, the power and heat of its
GPUs. One rank alone would seem faster than it is in a step. A point of the grid is a shape of slice: sequences, tokens,
and tokens of context before them (profile_grid.py). What is measured at a point::

    forward, backward      of a stage of several layers; short slices three in a row
    weights                the half of a backward that orders with split backwards put off
    block                  what block recomputation adds to a backward
    head                   loss and its gradient, from hidden states
    embedding              first stage less a stage without an embedding, forward and backward

The last four do not depend on the context, and are measured at a few lengths without any.
"""

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import inf
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from terapipe.modeling.gpt import GPT
from terapipe.modeling.kernel_choice import kernel_for
from terapipe.modeling.kernels import KernelRequest
from terapipe.modeling.slice_cache import SliceCache
from terapipe.modeling.stage import Autocast, PipelineModel, SlicedStage, Stage
from terapipe.modeling.weight_grads import accumulate_deferred, drop_main_grads
from terapipe.planning.device import blas_workspaces
from terapipe.planning.presets import GPTConfig
from terapipe.planning.profile import Profile, Sample, Transfer, typical
from terapipe.planning.recompute import Recompute
from terapipe.planning.slices import Plan
from terapipe.runtime.comm.environment import host_name, local_device
from terapipe.runtime.comm.transport import Transport
from terapipe.runtime.profile_grid import Point, ProfileGrid
from terapipe.runtime.stopwatch import Stopwatch, copy_bandwidth

LEAST, MOST = 3, 15  # measurements of each point
TIGHT = 0.02  # relative uncertainty at which measuring stops
MESSAGES = tuple(2**n for n in range(12, 25, 2))  # bytes
CUDA_MESSAGES = tuple(2**n for n in range(12, 29, 2))  # on fast links, smaller ones show the latency only
HOST_ROUNDS = 3  # over the shortest points, to time the host of a GPU
SENDING = 4.0  # seconds for messages over one kind of link, if that is enough for the three smallest
SHARE = 0.1  # of the time, at most, for those messages, for the optimizer, and for a round that only warms up
TURNS = 9  # of each message, or at least LEAST

Progress = Callable[[float], None]  # the share that is done
Clock = Callable[..., list[float]]  # seconds of some actions, one after the other: the device's, or the host's alone


class Profiler:
    """Measures stages of a model. Every rank creates one with the same arguments, and all call ``run`` together.

    Args:
        model: of which single layers are measured. If it is on the meta device, only the measured stages are
            materialized.
        layers: number of layers of the measured stage.
        seq_len: tokens of a sequence.
        sizes: of microbatches, in sequences.
        shape: the GPT that the planner computes memory and message sizes with. A GPT has its own, ``shape_of`` finds it
            from a Hugging Face decoder, and for a model of your own a rough one will do.
        dtype: of parameters and hidden states, by default the model's.
        max_tokens: of microbatch sizes after the first, leaves out slices that hold more tokens with their context.
        transport: of a program that has met the other ranks before; by default they meet here.
    """

    def __init__(
        self,
        model: PipelineModel,
        *,
        layers: int,
        seq_len: int,
        sizes: Sequence[int] = (1,),
        shape: GPTConfig | None = None,
        dtype: torch.dtype | None = None,
        max_tokens: int | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.transport = transport or Transport.join(local_device())
        self.device = self.transport.device
        self._timed = Stopwatch(self.device)
        self._clock: Clock = self._timed  # ``_time_host`` exchanges it for a while
        self.transport.connect(list(pairwise(range(self.transport.size))))
        self._reserved = reserved_memory(self.device)
        self._autocast = Autocast.current(self.device)
        self.hosts = tuple(self.transport.gather(host_name()))
        count = model.num_layers
        self.shape = _shape(model, shape)
        if not 1 <= layers <= count:
            raise ValueError(f"at least one and at most all {count} layers can be measured, got {layers}")
        self.layers, self.seq_len = min(layers, max(1, count - 1)), seq_len
        # The last layers: their stage takes hidden states, unless it is all, and its head is only called for the loss.
        self.stage = model.stage(count - self.layers, count, self.device)
        self.plain, self.first = model.stage(count - 1, count, self.device), model.stage(0, 1, self.device)
        self._sliced = {stage: SlicedStage(stage) for stage in (self.stage, self.plain, self.first)}
        modes: tuple[Recompute, ...] = ("light", "block")
        self._again = tuple(mode for mode in modes if _takes(model, seq_len, mode))  # that layers can be computed by
        self.dtype = self._convert(dtype)
        self._caches: dict[tuple[int, int, int], SliceCache] = {}  # by stage, size and context
        self._carrying: set[int] = set()  # stages with other states than keys and values
        self._taken: dict[tuple[str, Point], list[float]] = {}
        self._queued: dict[tuple[str, Point], list[float]] = {}  # seconds of the host
        most = inf if max_tokens is None else max_tokens

        def takes(p: Point) -> bool:
            fits = p.size == sizes[0] or p.size * (p.length + p.context) <= most
            return _takes(model, p.length) and fits

        self._grid = ProfileGrid(seq_len, sizes, takes)
        self.points = self._grid.points

    def _convert(self, dtype: torch.dtype | None) -> torch.dtype:
        """Converts all stages to this dtype; by default they are left as they are. Returns the dtype that they have.

        Stages of a model on the meta device are copies of their own. Otherwise they share its parameters, and to
        convert those would change the user's model behind their back.
        """
        own = next(self.stage.parameters()).dtype
        if dtype in (None, own):
            return own
        if set(self.stage.parameters()) & set(self.plain.parameters()):  # then they are also the model's
            raise ValueError(
                f"the model has parameters of {own}, {dtype} is to be measured; convert it with .to({dtype}), or build "
                "it on the meta device"
            )
        for stage in (self.stage, self.plain, self.first):
            stage.to(dtype)
        return dtype

    def run(self, seconds: float = 45.0, progress: Progress = lambda share: None) -> Profile:
        """Measures round after round over all points, until everything is known well enough or the time is up.

        Whole rounds, not one point after the other: what a machine does beside us comes and goes, and then touches all
        points alike instead of spoiling one. The first round warms up, and is forgotten where it was quick.

        Args:
            seconds: for everything. A tenth of it is for messages, a tenth for the optimizer.
            progress: is called with the share that is done, from 0 to 1.

        Returns:
            The profile of all ranks, the same on each. Points for which there was no time are not in it.
        """
        began = time.monotonic()
        deadline = began + seconds * (1 - 2 * SHARE)
        points = self._grid.measurement_order()
        whole = self.round(points, until=deadline)
        quick = time.monotonic() - began < SHARE * seconds
        if all(self.transport.gather(quick)):
            self._taken.clear()  # that was to warm up; where a round takes long, it counts
        self._time_host()
        for turn in range(MOST):
            todo = [p for p in points if turn < LEAST or not self._tight(p)]
            progress(min(1.0, max(turn / MOST, 1 - (deadline - time.monotonic()) / seconds)))
            if not whole or not todo or not self.round(todo, until=deadline):
                break
        progress(1.0)
        return self._profile(self._transfers(SHARE * seconds), self._optimizer(SHARE * seconds))

    def round(self, points: Sequence[Point] | None = None, until: float = inf) -> bool:
        """Measures every point once. When a rank's time is up, all stop, and only points without which there is no
        profile are still measured.

        Args:
            points: in this order; by default all of the grid.
            until: the end of the time, as ``time.monotonic`` counts.

        Returns:
            Whether no point was left out.
        """
        whole, first = True, self._grid.required()
        for point in self.points if points is None else points:
            # Asked before every point: ranks must decide alike, and start a point at the same moment anyway.
            late = self._together(time.monotonic() > until)
            if late and (point not in first or ("forward", point) in self._taken):
                whole = False
                continue
            for kind, seconds in self._slices(point):
                self._taken.setdefault((kind, point), []).append(seconds)
        return whole

    def _time_host(self) -> None:
        """Measures how long the host of a GPU takes to queue each kind of work. It is the same for all lengths, so
        short slices tell: they leave the device idle. The planner must know when slices are too short."""
        if self.device.type != "cuda":
            return
        shortest = sorted(self._grid.sparse_lengths & {p.length for p in self.points})[:2]
        self._clock = self._timed.queueing
        for point in [
            p for p in self.points if p.length in shortest and not p.context and not p.held_out
        ] * HOST_ROUNDS:
            self._together()
            for kind, seconds in self._slices(point):
                self._queued.setdefault((kind, point), []).append(seconds)
        self._clock = self._timed

    def profile(self) -> Profile:
        """Returns what has been measured so far, on all ranks, with the host, messages and the optimizer measured now.
        All ranks call it together."""
        self._time_host()
        return self._profile(self._transfers(), self._optimizer())

    def _profile(self, transfers: Sequence[Transfer], optimizer: Sequence[float]) -> Profile:
        """Gathers all ranks' measurements. They go into one sample for each kind and point: ranks are alike, and where
        one is slower the planner should know how far times spread.

        Args:
            transfers: the same on all ranks.
            optimizer: this rank's seconds per parameter.
        """
        taken, queued = self.transport.gather(self._taken), self.transport.gather(self._queued)

        def all_ranks(of: Sequence[Mapping[tuple[str, Point], list[float]]], kind: str, p: Point) -> tuple[float, ...]:
            return tuple(seconds for rank in of for seconds in rank.get((kind, p), ()))

        samples = tuple(
            Sample(kind, *p[:3], all_ranks(taken, kind, p), p.held_out, all_ranks(queued, kind, p))
            for kind, p in self._taken
        )
        rates = tuple(rate for rank in self.transport.gather(tuple(optimizer)) for rate in rank)
        versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
        return Profile(
            self.shape, self.layers, self.seq_len, self.transport.size, samples, tuple(transfers), rates,
            self._machine(), versions, self.hosts,
        )  # fmt: skip

    def _machine(self) -> dict[str, Any]:
        """Describes where the profile was measured, for readers and for the planner, which takes the attention kernel
        and the memory that context and NCCL leave from here."""
        dtype = self._autocast.dtype or self.dtype
        machine: dict[str, Any] = {
            "platform": platform.platform(),
            "processor": platform.machine(),
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "points": len(self.points),  # as many as there was time for are among the samples
            "dtype": str(self.dtype).removeprefix("torch."),
            "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        }
        machine["copies"] = min(self.transport.gather(copy_bandwidth(self.device)))
        machine["attention"] = kernel_for(KernelRequest(self.device, dtype, self.shape.head_size)).name
        if self._autocast.dtype is not None:
            machine["autocast"] = str(dtype).removeprefix("torch.")
        if self.device.type == "cuda":
            # Kernels that were loaded since are in the context now.
            reserved = max(self.transport.gather(max(self._reserved, reserved_memory(self.device))))
            machine["device_memory"], machine["reserved"] = torch.cuda.mem_get_info(self.device)[1], reserved
            machine["blas"] = blas_workspaces(torch.cuda.get_device_capability(self.device)[0])
        return machine

    # One point

    def _slices(self, point: Point) -> Iterator[tuple[str, float]]:
        """Measures some slices of this shape as in a step: forwards after each other, then their backwards.

        Yields:
            Kind of work and seconds, several of a kind for short slices: one of them is too quick for a clock to tell.
        """
        short = point.length <= self.seq_len // 8
        forwards, backwards, _ = self._passes(self.stage, point, 3 if short else 1, warm=short)
        for forward, backward in zip(forwards, backwards, strict=True):
            yield "forward", forward
            yield "backward", backward
        # What follows grows evenly with the tokens and does not see the context: three lengths are enough for a line.
        if point.context or point.held_out or point.length not in self._grid.sparse_lengths:
            return
        yield "weights", self._passes(self.stage, point, 1, deferred=True)[2][0]
        for mode in self._again:
            yield mode, self._recomputation(point, mode)
        yield "head", self._clock(lambda: self._loss(self.stage, point))[0]
        # Of the embedding alone a model has no function: two stages of one layer each differ by it.
        bare, first = self._passes(self.plain, point, 1), self._passes(self.first, point, 1)
        yield "embedding", max(0.0, first[0][0] - bare[0][0])
        yield "embedding_backward", max(0.0, first[1][0] - bare[1][0])

    def _recomputation(self, point: Point, mode: Recompute) -> float:
        """Seconds that recomputation of layers adds to a backward. Measured in one go with a plain one, not as a
        difference to an earlier measurement: the machine may have been busier then."""
        modes: tuple[Recompute, ...] = ("none", mode)
        (plain,), (again,) = (self._passes(self.stage, point, 1, recompute=each)[1] for each in modes)
        return max(0.0, again - plain)

    def _passes(
        self,
        stage: Stage,
        point: Point,
        count: int,
        *,
        warm: bool = False,
        deferred: bool = False,
        recompute: Recompute = "none",
    ) -> tuple[list[float], list[float], list[float]]:
        """Times some slices of one shape, each with a cache of its own, so that all have the same context. ::

            F F F | B W  B W  B W        W takes no time unless the backwards defer it

        A short slice after a pause is slower than one of many; with ``warm`` the first is not counted.

        Args:
            stage: which stage.
            point: the shape of the slices.
            count: how many are counted.
            warm: whether one more comes before them.
            deferred: whether backwards put gradients of weights off.
            recompute: what layers compute again.

        Returns:
            Seconds of forwards, of their backwards, and of what these put off.
        """
        shape = stage.hidden_shape(point.size, point.length)
        gradient = torch.randn(shape, dtype=self.dtype, device=self.device)
        done: list[tuple[SliceCache, Tensor]] = []
        caches = [self._begin_slice(stage, point, deferred) for _ in range(count + warm)]
        sliced = self._sliced[stage]
        forwards = self._clock(
            *(partial(self._forward, sliced, self._input(stage, point), cache, recompute, done) for cache in caches)
        )
        for cache in caches:
            self._fill_state_grads(cache)

        def backward() -> None:
            cache, out = done.pop()
            self._backward(sliced, cache, out, gradient)

        halves = [(backward, partial(_accumulate, cache)) for cache in reversed(caches)]
        times = self._clock(*(half for both in halves for half in both))
        return forwards[warm:], times[2 * warm :: 2], times[2 * warm + 1 :: 2]

    def _begin_slice(self, stage: Stage, point: Point, deferred: bool) -> SliceCache:
        """Returns a cache with the point's context in it. A clone: slices of one shape must not see each other's
        states.

        Args:
            stage: whose layers the cache is for.
            point: gives the context, and how many tokens follow.
            deferred: whether backwards put gradients of weights off.
        """
        cache = self._cache(stage, point.size, point.context).clone()
        cache.begin(point.context, point.length, defer=deferred, main_grads=True)
        return cache

    def _fill_state_grads(self, cache: SliceCache) -> None:
        """Gives states other than keys and values gradients, as if a later slice had found some. Without, autograd
        would leave out their part of the backward, and the slice would seem cheaper than it is in a step. The last
        slice of a sequence has no later one."""
        if cache.end < self.seq_len:
            for state in cache.next_states():
                state.grad = torch.zeros_like(state) if state.requires_grad else None

    def _input(self, stage: Stage, point: Point) -> Tensor:
        """Returns token ids for a stage with an embedding, hidden states for others. Values do not change times."""
        if stage is self.first or self.layers == self.shape.layers:
            return torch.zeros(point.size, point.length, dtype=torch.int64, device=self.device)
        return self._hidden(point)

    def _hidden(self, point: Point) -> Tensor:
        """Returns hidden states of some stage before; they need a gradient, which a backward computes for that one."""
        shape = self.stage.hidden_shape(point.size, point.length)
        return torch.randn(shape, dtype=self.dtype, device=self.device).requires_grad_()

    def _loss(self, stage: Stage, point: Point) -> None:
        """Computes the loss of a slice and its gradient, as the last rank does. Backwards run without autocast, as
        torch advises: each operation keeps the dtype of its forward."""
        hidden = self._hidden(point)
        labels = torch.zeros(point.size, point.length, dtype=torch.int64, device=self.device)
        with self._autocast.on():
            loss = stage.loss(hidden, labels)
        with self._autocast.off():
            loss.backward()  # type: ignore[no-untyped-call]

    def _forward(
        self,
        stage: SlicedStage,
        x: Tensor,
        cache: SliceCache,
        recompute: Recompute,
        done: list[tuple[SliceCache, Tensor]],
    ) -> None:
        with self._autocast.on():
            done.append((cache, stage.forward(x, cache, recompute=recompute)))

    def _backward(self, stage: SlicedStage, cache: SliceCache, out: Tensor, gradient: Tensor) -> None:
        if out.requires_grad:  # a first stage may have nothing to train
            with self._autocast.off():
                stage.backward(cache, out, gradient.to(out.dtype))

    def _together(self, late: bool = False) -> bool:
        """Lets all ranks begin at the same time. An all-reduce is also the cheapest question to all.

        Args:
            late: whether this rank's time is up.

        Returns:
            Whether that of any rank is.
        """
        return bool(self.transport.all_reduce(torch.full((1,), float(late), device=self.device)).item())

    def _cache(self, stage: Stage, size: int, context: int) -> SliceCache:
        """Returns the cache after some tokens. Callers must clone it before use. ::

            keys and values        one cache for all contexts: slices read as many of its tokens as they are told
            recurrent states       one cache for each context: a state sums up all tokens before it

        Args:
            stage: whose layers the cache is for.
            size: sequences in the microbatch.
            context: tokens before the slice.
        """
        start, here = (id(stage), size, 0), (id(stage), size, context)
        if start not in self._caches:
            self._caches[start] = self._fill_cache(stage, size)
        if id(stage) not in self._carrying:
            return self._caches[start]  # keys and values are those of all tokens
        if here not in self._caches:
            cache = self._caches[here] = self._caches[start].clone()
            cache.begin(0, context)
            with torch.no_grad(), self._autocast.on():
                stage(self._input(stage, Point(size, context, 0)), cache)
        return self._caches[here]

    def _fill_cache(self, stage: Stage, size: int) -> SliceCache:
        """Makes a cache in which all keys, values and their gradients have been written once, by two slices. Memory
        that was never written is slow at first touch (the system hands it out page by page), which a step pays only
        once."""
        cache = stage.make_cache(size, self.seq_len)
        half = self.seq_len // 2 or 1
        halves = [Point(size, half, 0), Point(size, self.seq_len - half, half)] if self.seq_len > 1 else []
        outs = []
        for p in halves:
            cache.begin(p.context, p.length)
            with self._autocast.on():
                outs.append((p, self._sliced[stage].forward(self._input(stage, p), cache)))
            if cache.next_states():
                self._carrying.add(id(stage))
        for p, out in reversed(outs):
            cache.begin(p.context, p.length)
            self._backward(self._sliced[stage], cache, out, torch.ones_like(out))
        cache.clear()
        return cache

    def _tight(self, point: Point) -> bool:
        """Whether this point is measured well, on every rank. Ranks agree, or one would measure alone and wait for
        ever."""
        mine = all(_spread(taken) < TIGHT for (_, p), taken in self._taken.items() if p == point)
        return all(self.transport.gather(mine))

    # Beside the slices

    def _transfers(self, seconds: float = inf) -> list[Transfer]:
        """Measures messages between the first neighbors on one host, and between the first on two. Not between all:
        links of a kind are alike, and all ranks wait while two of them talk.

        Args:
            seconds: for either kind of link, if there is one.
        """
        transfers = []
        for apart in (False, True):
            first = next((rank for rank, (a, b) in enumerate(pairwise(self.hosts)) if (a != b) == apart), None)
            if first is not None:
                messages = self._messages(first, min(SENDING, seconds))
                posted = self._posted(first)
                transfers += [Transfer(nbytes, taken, apart, posted) for nbytes, taken in messages]
        return transfers

    def _posted(self, first: int) -> tuple[float, ...]:
        """Seconds in which the host of a GPU posts one end of a message and its wait. ``first`` and the rank after it
        exchange one; on a CPU the result is empty, as the host itself moves the bytes."""
        if self.device.type != "cuda":
            return ()
        payload = torch.zeros(1, device=self.device)
        mine = [self._there_and_back(payload, first, self._timed.queueing) / 2 for _ in range(LEAST)]
        return tuple(self.transport.gather(mine)[first])

    def _messages(self, first: int, left: float = SENDING) -> Iterator[tuple[int, tuple[float, ...]]]:
        """Times ever larger messages while there is time left for them. The planner fits latency and bandwidth, for
        which it needs small and large ones, and three sizes at least, however slow the link is.

        Args:
            first: the rank that sends to the one after it.
            left: seconds for all of them.

        Yields:
            Bytes, and seconds one way. The first turn of each size warms up.
        """
        expected = 1e-6
        for number, nbytes in enumerate(CUDA_MESSAGES if self.device.type == "cuda" else MESSAGES):
            turns = max(LEAST, min(TURNS, int(left / 2 / expected)))
            if number >= LEAST and (turns + 1) * expected > left:
                return
            payload = torch.zeros(nbytes // 4, device=self.device)
            mine = [self._there_and_back(payload, first) for _ in range(turns + 1)]
            taken = self.transport.gather(mine)[first]  # so that all ranks decide alike
            left -= sum(taken)
            expected = 4 * typical(taken)  # the next message is four times as large
            yield nbytes, tuple(seconds / 2 for seconds in taken[1:])

    def _there_and_back(self, payload: Tensor, first: int, clock: Clock | None = None) -> float:
        """Times a message to the next rank and back, since no clock is shared by two hosts. ::

            first     one number ->              | payload ->               -> payload |
            second    receives are posted first  |           payload, then send back   |
                                                 ^ the clock runs from here            ^ to here

        Args:
            payload: as large as the message; sent both ways.
            first: one of the two ranks. All ranks call this, the others only wait for the start.
            clock: the device's by default.

        Returns:
            Seconds, on the first rank; 0 on all others.
        """
        transport, channel, second, why = self.transport, self.transport.channel, first + 1, "a measured message"
        shape, dtype = tuple(payload.shape), payload.dtype

        def exchange() -> None:
            sent = channel.send(payload, second, why)
            channel.wait(channel.receive(shape, dtype, second, why)[1], second, why)
            channel.wait(sent, second, why)

        self._together()
        if transport.rank == first:
            # When this is gone, the other rank is known to have posted its receives, as it has in a step.
            channel.wait(channel.send(payload[:1], second, why), second, why)
            return (clock or self._timed)(exchange)[0]
        if transport.rank == second:
            for _, work in [channel.receive(n, dtype, first, why) for n in ((1,), shape)]:
                channel.wait(work, first, why)
            channel.wait(channel.send(payload, first, why), first, why)
        return 0.0

    def _optimizer(self, seconds: float = inf) -> list[float]:
        """Seconds per parameter of an AdamW step over the measured stage; the first, which makes the state, counts only
        where it takes all the time. Weights do not change: the learning rate is 0.

        Args:
            seconds: after which no further step begins.
        """
        parameters = [p for p in self.stage.parameters() if p.requires_grad]
        if not parameters:
            return [0.0]
        count = sum(p.numel() for p in parameters)
        optimizer = torch.optim.AdamW(parameters, lr=0.0)
        for p in parameters:
            p.grad = torch.zeros_like(p)
        self._together()
        steps: list[float] = []
        while len(steps) <= LEAST and sum(steps) < seconds:
            steps += self._timed(optimizer.step)
        for p in (p for stage in (self.stage, self.plain, self.first) for p in stage.parameters()):
            p.grad = None  # they may be the model's own
        drop_main_grads(p for stage in (self.stage, self.plain, self.first) for p in stage.parameters())
        return [step / count for step in steps[1:] or steps]


def _shape(model: PipelineModel, shape: GPTConfig | None) -> GPTConfig:
    """Returns the shape that the planner computes with: the one of the caller, or a GPT's own. Of other models nothing
    tells how many bytes a token keeps, so it is refused to guess."""
    if shape is None and isinstance(model, GPT):
        shape = model.config
    if shape is None:
        raise ValueError(
            f"the shape of a {type(model).__name__} must be told, for the planner: Decoder.shape of a Hugging Face "
            "decoder, for others a GPTConfig that is about as large"
        )
    if shape.layers != model.num_layers:
        raise ValueError(f"shape and model must have as many layers, got {shape.layers} and {model.num_layers}")
    return shape


def _takes(model: PipelineModel, length: int, recompute: Recompute = "none") -> bool:
    """Whether slices may be so short, with this mode of recomputation. The model is asked as a pipeline asks it, by a
    plan: there is no second statement of what it can do."""
    try:
        model.check_plan(Plan((1,), ((length,),), (0, model.num_layers), recompute=recompute))
    except ValueError:
        return False
    return True


def _accumulate(cache: SliceCache) -> None:
    """Computes the gradients of weights that the backward of a cache's slice has put off, if any."""
    accumulate_deferred(cache.current.pop_deferred())


def reserved_memory(device: torch.device) -> int:
    """Bytes of a GPU that tensors of this process cannot have: taken by contexts, by NCCL, by other processes.

    Args:
        device: of this process; 0 bytes on a CPU.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _spread(taken: Sequence[float]) -> float:
    """Returns the relative uncertainty of the median: the width of the middle half of the measurements, less by the
    root of their number. Not the standard deviation, which a single interruption would make useless."""
    if len(taken) < LEAST:
        return 1.0
    low, high = np.quantile(taken, (0.25, 0.75))
    return float((high - low) / max(median(taken), 1e-9) / len(taken) ** 0.5)
