"""What the executor adds to each computation of an emulated device, beside a loop that sleeps and sends the same."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.growth.plain import PlainRank
from benchmarks.harness import on_ranks, table
from terapipe import Pipeline, Plan, SliceCache, Stage
from terapipe.runtime import EmulatedModel, Emulation, Seconds, predict, sharpen_sleep, sleep_until
from tests.support.costs import SimpleCost


class SleepingStage(Stage):
    """Adds 1 to hidden states and sleeps as long as a cost model says, and does nothing else.

    Args:
        k: number of the stage.
        seconds: of each slice, by the tokens before it.
    """

    hidden_size = 1

    def __init__(self, k: int, seconds: dict[int, Seconds]) -> None:
        super().__init__()
        self._is_first, self._seconds = k == 0, seconds
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        hidden = x[..., None].float() if self._is_first else x
        out: Tensor = _Sleep.apply(hidden, self.weight, self._seconds[cache.context])  # type: ignore[no-untyped-call]
        return out

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return hidden.sum()


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: Seconds) -> Tensor:
        start = time.perf_counter()
        ctx.seconds, out = seconds, x + 1.0
        sleep_until(start + seconds.forward)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        start, one = time.perf_counter(), torch.ones(())
        sleep_until(start + ctx.seconds.backward)
        return gradient, one, None


def overhead(rounds: int) -> dict[str, float]:
    """Microseconds by which a step of many short computations takes longer than simulated, for each computation: in a
    plain loop, where it is gloo's messages, autograd and waking up, and in the executor; and the difference."""
    plan = Plan.uniform(batch_size=1, seq_len=1024, num_slices=128, boundaries=(0, 1, 2), order="terapipe-1f1b")
    cost = SimpleCost(token=1e-3 / 8)
    spans = on_ranks(2, measure, plan, Emulation.of(plan, cost), rounds)
    predicted = predict(plan, cost)
    count = max(map(len, predicted.by_rank))
    plain, executor = (1e6 * (span - predicted.makespan) / count for span in spans)
    header = ("computations", "plain loop, us", "executor, us", "difference, us")
    table("Added to each computation of 1 to 2 ms", header, [[count, plain, executor, executor - plain]])
    return {"plain_us": plain, "executor_us": executor, "overhead_us": executor - plain}


def measure(plan: Plan, emulation: Emulation, rounds: int) -> tuple[float, ...]:
    """Seconds of the fastest step in a plain loop and in the executor, which take turns. On each rank."""
    sharpen_sleep()
    rank = dist.get_rank()
    pipe = Pipeline(EmulatedModel(emulation, rank), plan)
    stages = {k: SleepingStage(k, {place[1]: s for place, s in emulation.stages[k].items()}) for k in pipe.stages}
    ids = torch.zeros(1, plan.seq_len, dtype=torch.int64)
    plain = PlainRank(plan, rank, pipe.schedule.ranks[rank], stages)
    contenders = plain.step, partial(pipe.step, ids, ids)
    return tuple(map(min, zip(*([timed(each) for each in contenders] for _ in range(rounds)), strict=True)))


def timed(step: Callable[[], object]) -> float:
    """Seconds until both ranks are through."""
    dist.barrier()
    start = time.perf_counter()
    step()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()
