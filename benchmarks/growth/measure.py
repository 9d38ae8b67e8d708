"""What grows with the cluster: seconds to plan, seconds of a rank's start, microseconds of the executor per action."""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

import terapipe as tp
from benchmarks.growth.idle import Idle, IdleStage
from benchmarks.growth.plain import PlainRank
from benchmarks.harness import arguments, on_ranks, summary, table
from terapipe import Pipeline, Plan
from terapipe.scheduling import validated_actions

CASES = (("llama3-8b", "dgx-h100:1", 8), ("llama3-70b", "dgx-h100:8", 16), ("llama3-405b", "dgx-h100:512", 512))
CHUNKS = {"terapipe": 1, "terapipe-deferred": 1, "terapipe-v": 2, "terapipe-1f1b": 1, "interleaved": 2}
RANKS, SLICES = 96, 1000


def main() -> None:
    rounds = 1 if arguments(__doc__ or "").quick else 3
    planned = {model: planning(model, cluster, batch, rounds) for model, cluster, batch in CASES}
    rows = [[model, cluster, f"{batch} x 8192", *planned[model]] for model, cluster, batch in CASES]
    table("Planning", ("model", "cluster", "batch", "CPU s", "order", "step, s"), rows)
    started = {order: starting(order, rounds) for order in CHUNKS}
    executed = {order: on_ranks(2, executing, order, rounds) for order in CHUNKS}
    times = ("us/action, plainly", "us/action, executor", "difference")
    header = ("order", f"start with {RANKS} ranks x {SLICES} slices, CPU s", *times)
    table("Starting, and executing next to nothing", header, [[o, started[o], *executed[o]] for o in CHUNKS])
    name, own = f"startup_{RANKS}x{SLICES}_s", {order: difference for order, (_, _, difference) in executed.items()}
    figures = {
        "plan_405b_4096_s": planned["llama3-405b"][0],
        name: max(started.values()),
        "action_us": max(own.values()),
    }
    figures |= {f"{name}_{order}": seconds for order, seconds in started.items()}
    summary(figures | {f"action_us_{order}": each for order, each in own.items()})


def planning(model: str, cluster: str, batch: int, rounds: int) -> tuple[float, str, float]:
    """CPU seconds, and the plan's order and predicted step."""
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        result = tp.plan(model, cluster, batch_size=batch, seq_len=8192)
        seconds.append(time.process_time() - start)
    return min(seconds), result.plan.order, result.step_time


def starting(order: str, rounds: int) -> float:
    """CPU seconds until one rank has its list of actions, and the proof that the lists of all ranks fit together. What
    follows is about this rank alone."""
    seconds = []
    for extra in range(rounds):  # a shape that the process has not seen yet
        plan = plan_of(order, RANKS, SLICES + extra)
        start = time.process_time()
        validated_actions(plan, RANKS // 2)
        seconds.append(time.process_time() - start)
    return min(seconds)


def plan_of(order: str, ranks: int, slices: int) -> Plan:
    chunks = CHUNKS[order]
    cuts = range(ranks * chunks + 1)
    return Plan.uniform(
        batch_size=1, seq_len=8 * slices, num_slices=slices, boundaries=cuts, order=order, chunks=chunks
    )


def executing(order: str, rounds: int) -> tuple[float, float, float]:
    """Microseconds per action of rank 0: plainly, by the executor, and the difference. CPU time of the thread that
    executes, so waiting does not count."""
    plan = plan_of(order, 2, SLICES)
    pipe = Pipeline(Idle(plan.num_stages), plan)
    actions = pipe.schedule.ranks[pipe.rank]
    ids = torch.zeros(1, plan.seq_len, dtype=torch.int64)
    stages = {k: IdleStage(k) for k in plan.stages_of(pipe.rank)}
    contenders = PlainRank(plan, pipe.rank, actions, stages).step, partial(pipe.step, ids, ids)
    times = [[timed(contender) for contender in contenders] for _ in range(5 * rounds)]
    plain, executor = (1e6 * min(column) / len(actions) for column in zip(*times, strict=True))
    return plain, executor, executor - plain


def timed(contender: Callable[[], object]) -> float:
    dist.barrier()
    start = time.thread_time()
    contender()
    return time.thread_time() - start
