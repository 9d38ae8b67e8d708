"""Measures one stage of a model on a grid of slices, on all ranks at the same time, as in a real step."""

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from terapipe.modeling.cache import SliceCache
from terapipe.modeling.gpt import GPT
from terapipe.modeling.linear import settle
from terapipe.modeling.stage import Stage
from terapipe.planning.profile import Profile, Sample, Transfer, typical
from terapipe.runtime.transport import Transport, host_name, local_device

LEAST, MOST = 3, 15  # measurements of each point
TIGHT = 0.02  # relative uncertainty at which measuring stops
MESSAGES = tuple(2**n for n in range(12, 25, 2))  # bytes
SENDING = 4.0  # seconds for messages over one kind of link, if that is enough for the three smallest
TURNS = 9  # of each message, or at least LEAST

Progress = Callable[[float], None]  # the share that is done


class Point(NamedTuple):
    """A slice to measure; ``held_out`` ones only judge the fit."""

    size: int
    length: int
    context: int
    held_out: bool = False


def grid(tokens: int, sizes: Sequence[int]) -> list[Point]:
    """Lengths from short to whole without context; a few of them behind some contexts; two that are held out."""
    lengths = {n for n in (16, 32, 64, 128, 192, 256) if n < tokens}
    lengths |= {tokens * i // 16 for i in (2, 3, 4, 6, 8, 12, 16) if tokens * i >= 16} | {min(64, tokens)}
    points = [Point(size, length, 0) for size in sizes for length in sorted(lengths)]
    behind = [n for n in (tokens // 32, tokens // 12, tokens // 6, tokens // 3) if n >= 1]
    for size in sizes:
        for context in (tokens // 4, tokens // 2, tokens * 3 // 4):
            points += [Point(size, n, context) for n in behind if n + context <= tokens and context]
    size = sizes[0]
    held_out = [(tokens // 10, tokens * 3 // 5), (tokens // 5, tokens // 3), (tokens * 7 // 16, 0)]
    return points + [Point(size, n, c, True) for n, c in held_out if n >= 1]


class Profiler:
    """All ranks make the same one and call ``run`` together."""

    def __init__(self, model: GPT, *, layers: int, tokens: int, sizes: Sequence[int] = (1,)) -> None:
        self.device = local_device()
        self.transport = Transport(self.device)
        self.hosts = tuple(self.transport.gather(host_name()))
        self.model, self.tokens, self.layers, self.sizes = model, tokens, layers, sizes
        count = model.num_layers
        # The last layers: their stage takes hidden states, and its head is only called for the loss.
        self.stage = model.stage(count - layers, count, self.device)
        self.plain, self.first = model.stage(count - 1, count, self.device), model.stage(0, 1, self.device)
        # What grows evenly with the tokens is measured at a few lengths only.
        self._sparse = {min(64, tokens), tokens // 8 or 1, tokens // 2 or 1}
        self._caches: dict[tuple[int, int], SliceCache] = {}
        self._taken: dict[tuple[str, Point], list[float]] = {}
        self.points = grid(tokens, sizes)

    def run(self, seconds: float = 45.0, progress: Progress = lambda share: None) -> Profile:
        """Round after round over all points, until everything is known well enough or the time is up."""
        deadline = time.monotonic() + seconds
        self.round()
        self._taken.clear()  # that was to warm up
        for turn in range(MOST):
            todo = [p for p in self.points if turn < LEAST or not self._tight(p)]
            progress(min(1.0, max(turn / MOST, 1 - (deadline - time.monotonic()) / seconds)))
            self.round(todo)
            if not todo or any(self.transport.gather(time.monotonic() > deadline)):
                break
        progress(1.0)
        return self.profile()

    def round(self, points: Sequence[Point] | None = None) -> None:
        """Measures every point once."""
        for point in self.points if points is None else points:
            self._together()
            for kind, seconds in self._slices(point):
                self._taken.setdefault((kind, point), []).append(seconds)

    def profile(self) -> Profile:
        """What has been measured so far, on all ranks, with messages and the optimizer measured now."""
        return self._profile(self._transfers(), self._optimizer())

    def _profile(self, transfers: Sequence[Transfer], optimizer: Sequence[float]) -> Profile:
        """All ranks' measurements together."""
        taken = self.transport.gather(self._taken)
        samples = tuple(
            Sample(kind, p.size, p.length, p.context, tuple(s for rank in taken for s in rank[kind, p]), p.held_out)
            for kind, p in self._taken
        )
        rates = tuple(rate for rank in self.transport.gather(tuple(optimizer)) for rate in rank)
        machine = {
            "platform": platform.platform(),
            "processor": platform.machine(),
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        }
        versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
        return Profile(
            self.model.config, self.layers, self.tokens, self.transport.size, samples, tuple(transfers), rates,
            machine, versions, self.hosts,
        )  # fmt: skip

    # One point

    def _slices(self, point: Point) -> Iterator[tuple[str, float]]:
        """Some slices of this shape as in a step: forwards after each other, then their backwards."""
        short = point.length <= self.tokens // 8
        forwards, backwards, _ = self._passes(self.stage, point, 3 if short else 1, warm=short)
        for forward, backward in zip(forwards, backwards, strict=True):
            yield "forward", forward
            yield "backward", backward
        if point.context or point.held_out or point.length not in self._sparse:
            return
        yield "weights", self._passes(self.stage, point, 1, deferred=True)[2][0]
        yield "head", self._timed(lambda: self._loss(cast(Stage, self.stage), point))
        bare, first = self._passes(self.plain, point, 1), self._passes(self.first, point, 1)
        yield "embedding", max(0.0, first[0][0] - bare[0][0])
        yield "embedding_backward", max(0.0, first[1][0] - bare[1][0])

    def _passes(
        self, stage: nn.Module, point: Point, count: int, *, warm: bool = False, deferred: bool = False
    ) -> tuple[list[float], list[float], list[float]]:
        """Seconds of forwards, of their backwards, and of what these put off.

        A short slice after a pause is slower than one of many; with ``warm`` the first is not counted.
        """
        cache = self._cache(stage, point.size)
        cache.begin(point.context, point.length)
        cache.defer = deferred
        gradient = torch.randn(point.size, point.length, self.model.config.hidden, device=self.device)
        forwards, backwards, weights = [], [], []
        outs: list[Tensor] = []
        for _ in range(count + warm):
            x = self._input(stage, point)
            forwards.append(self._timed(lambda x=x: outs.append(stage(x, cache))))  # type: ignore[misc]
        for _ in range(count + warm):
            backwards.append(self._timed(lambda: outs.pop().backward(gradient)))  # type: ignore[no-untyped-call]
            owed = cache.take_owed()
            weights.append(self._timed(lambda owed=owed: settle(owed)))  # type: ignore[misc]
        return forwards[warm:], backwards[warm:], weights[warm:]

    def _input(self, stage: nn.Module, point: Point) -> Tensor:
        if stage is self.first:
            return torch.zeros(point.size, point.length, dtype=torch.int64, device=self.device)
        return self._hidden(point)

    def _hidden(self, point: Point) -> Tensor:
        return torch.randn(point.size, point.length, self.model.config.hidden, device=self.device).requires_grad_()

    def _loss(self, stage: Stage, point: Point) -> None:
        hidden = self._hidden(point)
        labels = torch.zeros(point.size, point.length, dtype=torch.int64, device=self.device)
        stage.loss(hidden, labels).backward()  # type: ignore[no-untyped-call]

    def _timed(self, action: Callable[[], object]) -> float:
        self._wait()
        start = time.perf_counter()
        action()
        self._wait()
        return time.perf_counter() - start

    def _together(self) -> None:
        """All ranks begin at the same time."""
        self.transport.all_reduce(torch.zeros(1, device=self.device))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _cache(self, stage: nn.Module, size: int) -> SliceCache:
        """A cache in which all keys, values and their gradients have been written once, by two slices."""
        key = (id(stage), size)
        if key not in self._caches:
            cache = self._caches[key] = cast(Stage, stage).make_cache(size, self.tokens)
            half = self.tokens // 2 or 1
            halves = [Point(size, half, 0), Point(size, self.tokens - half, half)] if self.tokens > 1 else []
            outs = []
            for p in halves:
                cache.begin(p.context, p.length)
                outs.append((p, stage(self._input(stage, p), cache)))
            for p, out in reversed(outs):
                cache.begin(p.context, p.length)
                out.sum().backward()
            cache.take_owed()
        return self._caches[key]

    def _tight(self, point: Point) -> bool:
        """Whether this point is known well, on every rank."""
        mine = all(_spread(taken) < TIGHT for (_, p), taken in self._taken.items() if p == point)
        return all(self.transport.gather(mine))

    # Beside the slices

    def _transfers(self) -> list[Transfer]:
        """Messages between the first neighbours on one host, and between the first on two."""
        found = []
        for apart in (False, True):
            first = next((rank for rank, (a, b) in enumerate(pairwise(self.hosts)) if (a != b) == apart), None)
            if first is not None:
                found += [Transfer(nbytes, seconds, apart) for nbytes, seconds in self._messages(first)]
        return found

    def _messages(self, first: int) -> Iterator[tuple[int, tuple[float, ...]]]:
        """Bytes, and seconds to the next rank, of ever larger messages while there is time for them."""
        left, expected = SENDING, 1e-6
        for number, nbytes in enumerate(MESSAGES):
            turns = max(LEAST, min(TURNS, int(left / 2 / expected)))
            if number >= LEAST and (turns + 1) * expected > left:
                return
            payload = torch.zeros(nbytes // 4, device=self.device)
            mine = [self._there_and_back(payload, first) for _ in range(turns + 1)]
            taken = self.transport.gather(mine)[first]  # so that all ranks decide alike
            left -= sum(taken)
            expected = 4 * typical(taken)  # the next message is four times as large
            yield nbytes, tuple(seconds / 2 for seconds in taken[1:])

    def _there_and_back(self, payload: Tensor, first: int) -> float:
        """Seconds, on the first of the two ranks."""
        transport, second, why = self.transport, first + 1, "a measured message"
        shape, dtype = tuple(payload.shape), payload.dtype

        def exchange() -> None:
            sent = transport.send(payload, second, why)
            transport.wait(transport.receive(shape, dtype, second, why)[1], second, why)
            transport.wait(sent, second, why)

        self._together()
        if transport.rank == first:
            # When this is gone, the other rank is known to have posted its receives, as it has in a step.
            transport.wait(transport.send(payload[:1], second, why), second, why)
            return self._timed(exchange)
        if transport.rank == second:
            for _, work in [transport.receive(n, dtype, first, why) for n in ((1,), shape)]:
                transport.wait(work, first, why)
            transport.wait(transport.send(payload, first, why), first, why)
        return 0.0

    def _optimizer(self) -> list[float]:
        """Seconds per parameter of an AdamW step over the measured stage."""
        parameters = list(self.stage.parameters())
        count = sum(p.numel() for p in parameters)
        optimizer = torch.optim.AdamW(parameters, lr=0.0)
        for p in parameters:
            p.grad = torch.zeros_like(p)
        self._together()
        rates = [self._timed(optimizer.step) / count for _ in range(LEAST + 1)]
        return rates[1:]


def _spread(taken: Sequence[float]) -> float:
    """The relative uncertainty, by the middle half of the measurements."""
    if len(taken) < LEAST:
        return 1.0
    low, high = np.quantile(taken, (0.25, 0.75))
    return float((high - low) / max(median(taken), 1e-9) / len(taken) ** 0.5)
