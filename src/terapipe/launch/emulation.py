"""Runs a plan on emulated devices of this machine, and puts what was measured beside what was predicted.

::

    run = emulate(plan, cost)
    run.predicted.makespan, run.measured.makespan      both in the plan's own seconds, however they were stretched

See ``runtime/emulation.py`` for what is real in such a run and what is not.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from terapipe.launch.forked import ForkedRanks
from terapipe.planning.cost import Cost
from terapipe.planning.slices import Plan
from terapipe.runtime.comm.errors import PipelineError
from terapipe.runtime.comm.transport import Transport
from terapipe.runtime.emulation import (
    EmulatedModel,
    EmulatedStage,
    Emulation,
    emulated_transport,
    predict,
    sharpen_sleep,
)
from terapipe.runtime.pipeline import Pipeline
from terapipe.scheduling.timeline import Timeline

MOST_RANKS = 256  # of which each needs some 30 MiB, and all of them the same few cores
STEPS = 3  # of which the first finds everything cold
LEAST = 5e-3  # seconds of a mean computation below which sleeping is not exact enough
SHARE = 2e-3  # ... and for each rank that shares a core: several times what a computation costs the core itself
PATIENCE = 120.0  # seconds for ranks to start, and for what they do beside sleeping


class RankReport(NamedTuple):
    """What one rank tells of its run.

    Args:
        ready: seconds from the launcher's start until all ranks had their pipelines.
        joined: until this rank had met the others.
        mebibytes: of memory that it has for itself.
        steps: of each step, its timeline; on the first rank only.
        cpu: of each step, seconds that the process computed.
        late: of each step, seconds by which its sleeps ended too late.
        loss: of the last step: the number of stages if every slice went through all.
        backwards: how many backwards each of its stages had in one step.
    """

    ready: float
    joined: float
    mebibytes: float
    steps: tuple[Timeline | None, ...]
    cpu: tuple[float, ...]
    late: tuple[float, ...]
    loss: float
    backwards: tuple[float, ...]


@dataclass(frozen=True)
class EmulatedRun:
    """What emulated devices did, beside what the simulator says.

    Args:
        predicted: the simulated step.
        timelines: all measured steps but the first, in the same seconds.
        stretch: by how much everything was slowed down for the measurement.
        reports: of all ranks.
    """

    predicted: Timeline
    timelines: tuple[Timeline, ...]
    stretch: float
    reports: tuple[RankReport, ...]

    @property
    def measured(self) -> Timeline:
        """The fastest step: whatever else the machine did can only have taken time."""
        return self.timelines[self._fastest]

    @property
    def _fastest(self) -> int:
        return min(range(len(self.timelines)), key=lambda step: self.timelines[step].makespan)

    @property
    def ratio(self) -> float:
        """Measured by predicted makespan."""
        return self.measured.makespan / self.predicted.makespan

    @property
    def ready(self) -> float:
        """Seconds until all ranks had their pipelines."""
        return max(report.ready for report in self.reports)

    @property
    def actions(self) -> int:
        """Computations of the rank that has most."""
        return max(map(len, self.predicted.by_rank))

    @property
    def overhead(self) -> float:
        """Seconds for each computation by which the step took longer than predicted, unstretched: the executor, its
        messages, and this machine's scheduler."""
        return self.stretch * (self.measured.makespan - self.predicted.makespan) / self.actions

    @property
    def late(self) -> float:
        """The part of it by which sleeps ended too late: the mean over ranks, since each waits for the others."""
        return sum(report.late[self._fastest + 1] for report in self.reports) / len(self.reports) / self.actions


def emulate(
    plan: Plan,
    cost: Cost,
    *,
    steps: int = STEPS,
    stretch: float | None = None,
    slowdown: Sequence[float] = (),
    jitter: float = 0.0,
    timeout: float = PATIENCE,
) -> EmulatedRun:
    """Runs some steps of a plan, one process of this machine for each of its ranks, and counts that every slice went
    through every stage.

    Args:
        plan: what to run.
        cost: seconds of computations and transfers.
        steps: how many; the first is not measured.
        stretch: by how much everything takes longer; by default ``stretch_of(plan, cost)``.
        slowdown: for each rank, by how much it is slower than the costs say.
        jitter: standard deviation of a computation's seconds, relative to them.
        timeout: seconds for all but the steps themselves.
    """
    if steps < 2:
        raise ValueError(f"the first step finds everything cold and is not measured; take at least 2, got {steps}")
    if plan.num_ranks > MOST_RANKS:
        raise ValueError(
            f"at most {MOST_RANKS} ranks are emulated on one machine, got {plan.num_ranks}; emulate a plan with fewer "
            "pipeline ranks"
        )
    predicted = predict(plan, cost, slowdown)
    stretch = stretch_of(predicted) if stretch is None else stretch
    emulation = Emulation.of(plan, cost, stretch=stretch, slowdown=slowdown, jitter=jitter)
    patience = timeout + 4 * steps * stretch * predicted.makespan
    with ForkedRanks(plan.num_ranks, run_steps, emulation, time.monotonic(), steps, timeout) as ranks:
        answers = ranks.answers(patience)
    if errors := [f"rank {rank}: {answer.error}" for rank, answer in enumerate(answers) if answer.error]:
        raise PipelineError(f"{len(errors)} of {plan.num_ranks} emulated ranks failed; {errors[0]}")
    reports = tuple(answer.value for answer in answers)
    _check_counts(plan, reports)
    measured = tuple(_unstretched(timeline, stretch) for timeline in reports[0].steps[1:])
    return EmulatedRun(predicted, measured, stretch, reports)


def stretch_of(predicted: Timeline) -> float:
    """By how much a plan must be slowed down for this machine: its mean computation must be long beside what the
    machine's cores spend on each of those that are at work at the same time; at least 1.

    Args:
        predicted: the simulated step.
    """
    seconds = [event.end - event.start for event in predicted.computations]
    mean = sum(seconds) / len(seconds)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1.0, max(LEAST, SHARE * predicted.plan.num_ranks / cores) / mean) if mean > 0 else 1.0


def run_steps(emulation: Emulation, start: float, steps: int, timeout: float) -> RankReport:
    """What each rank does.

    Args:
        emulation: what everything takes.
        start: when the launcher began, by the clock of the host.
        steps: how many.
        timeout: seconds that a rank waits for another.
    """
    pipe = emulated_pipeline(emulation, timeout)
    joined = time.monotonic() - start
    pipe.transport.gather(None)
    ready = time.monotonic() - start
    stages = [stage for stage in pipe.stages.values() if isinstance(stage, EmulatedStage)]
    timelines, cpu, late, plan, loss = [], [], list[float](), emulation.plan, torch.zeros(())
    ids = torch.zeros(plan.batch_size, plan.seq_len, dtype=torch.int64)
    for _ in range(steps):
        pipe.transport.gather(None)
        spent = time.process_time()
        loss = pipe.step(ids, ids + 1)
        cpu.append(time.process_time() - spent)
        late.append(sum(stage.late for stage in stages) - sum(late))
        timelines.append(pipe.timeline_on_first())
    backwards = tuple(0.0 if s.weight.grad is None else float(s.weight.grad) / steps for s in stages)
    each = tuple(timelines), tuple(cpu), tuple(late)
    report = RankReport(ready, joined, own_mebibytes(), *each, float(loss), backwards)
    pipe.transport.gather(None)  # nobody leaves while others still send
    return report


def emulated_pipeline(emulation: Emulation, timeout: float) -> Pipeline:
    """Meets the other ranks and makes this one's pipeline.

    Args:
        emulation: what everything takes.
        timeout: seconds that a rank waits for another.
    """
    sharpen_sleep()
    transport = Transport.join(torch.device("cpu"), timeout=timeout)
    model = EmulatedModel(emulation, transport.rank)
    return Pipeline(model, emulation.plan, transport=emulated_transport(transport, emulation))


def own_mebibytes() -> float:
    """Memory that this process does not share with others; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return 0.0
    kibibytes = {line.split()[0]: int(line.split()[1]) for line in lines}
    return (kibibytes["Private_Clean:"] + kibibytes["Private_Dirty:"]) / 1024


def _check_counts(plan: Plan, reports: Sequence[RankReport]) -> None:
    slices, stages = float(len(plan.slices)), float(plan.num_stages)
    least = min(s.size * s.length for s in plan.slices) / (plan.batch_size * plan.seq_len)  # of the mean, for one stage
    for rank, report in enumerate(reports):
        if abs(report.loss - stages) > least / 2 or set(report.backwards) != {slices}:
            raise PipelineError(
                f"every one of {slices:g} slices must go through {stages:g} stages, forwards and backwards; on rank "
                f"{rank} slices saw {report.loss:g} stages, and stages had {report.backwards} backwards"
            )


def _unstretched(timeline: Timeline, stretch: float) -> Timeline:
    events = (event._replace(start=event.start / stretch, end=event.end / stretch) for event in timeline.events)
    return Timeline(timeline.plan, tuple(events))
