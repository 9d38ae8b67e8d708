"""The training loop: steps, evaluations and checkpoints, until all steps are done or a stop is requested.

The life of a step::

    BatchLoader.at(position)   rows of this replica, from the memory map; `accumulate` batches
      |
    DocumentPlanner.plan_for   how to cut this batch into slices (packed documents only)
      |
    Pipeline.step              forward and backward of all slices; the gradients stay in `.grad`
      |
    clip_grad_norm_            over all ranks; here NaN is noticed, on all ranks alike
      |
    optimizer.step             left out if the loss or the norm is not finite
      |
    RunLog.row                 metrics.jsonl, display; every few steps timeline.json and memory
      |
    Evaluator.run              if due
      |
    CheckpointFolder.save      if due, or if the evaluation was the best so far

The state (`RunState`) counts a step before its row is written, and a checkpoint is saved between steps only. So a kill
loses at most the steps since the last checkpoint; they are repeated on the same batches, and their rows replaced.
"""

import math
import os
import resource
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from statistics import median
from types import FrameType
from typing import Any, NamedTuple

import torch

from terapipe import files
from terapipe.modeling.weight_grads import is_half
from terapipe.runtime import ALL
from terapipe.training.checkpoint_folder import CheckpointFolder, folder_of
from terapipe.training.config import PlanConfig
from terapipe.training.data.loader import BatchLoader
from terapipe.training.evaluation import Evaluator
from terapipe.training.logging.display import RunLog
from terapipe.training.optimizer import learning_rate, set_lr
from terapipe.training.state import RunContext, RunState


class StopSignal:
    """Notes SIGINT and SIGTERM. The first one asks the run to finish its step, save and end; the second ends this
    process at once.

    Signals do not raise here: an exception in the middle of a step would leave the other ranks waiting, and the step
    half done.

    Args:
        before_exit: Called before the second signal ends the process, to leave the terminal as it was.
    """

    def __init__(self, before_exit: Callable[[], None] = lambda: None) -> None:
        self.received = ""  # the name of the signal
        self._before_exit = before_exit
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs between two bytecodes of the main thread, so it does next to nothing."""
        if self.received:
            self._before_exit()
            os._exit(128 + number)
        self.received = signal.Signals(number).name


class Outcome(Enum):
    """How `Trainer.run` ended. REPLAN: everything is saved, and the caller builds a pipeline for another plan."""

    FINISHED = "finished"
    STOPPED = "stopped"
    REPLAN = "replan"


class NotFiniteError(ArithmeticError):
    """The loss or the gradients are NaN or infinite."""


class StepResult(NamedTuple):
    """The numbers of one step, equal on all ranks.

    Args:
        loss: Mean over all labels of the step (or over sequences, if that is what the objective counts), before the
            update.
        grad_norm: The norm of all gradients together, over all ranks, before clipping.
        lr: The learning rate of the update.
        metrics: What the objective or the model's routers report beside the loss.
    """

    loss: float
    grad_norm: float
    lr: float
    metrics: Mapping[str, float] = {}

    @property
    def finite(self) -> bool:
        """Whether to update the parameters. A norm is infinite if one gradient is, so it stands for them all."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class StepTimeMonitor:
    """Compares step times with the prediction of the plan. It reports once: only a new plan could change the result.

    The median of a window is compared, not each step: one step in a hundred waits for a checkpoint or for another
    process of the machine.

    Args:
        predicted: Seconds of a step, by simulation; None if nothing was measured.
        config: Says which ratio is worth a report.
    """

    WINDOW = 20  # steps whose median is compared, and steps between comparisons
    WARMUP = 3  # first steps, which are slower and do not count

    def __init__(self, predicted: float | None, config: PlanConfig) -> None:
        self._predicted, self._config = predicted, config
        self._times: deque[float] = deque(maxlen=self.WINDOW)
        self._steps = 0
        self.reported = False

    def add(self, seconds: float) -> bool:
        """Adds the time of a step.

        Args:
            seconds: By this rank's clock.

        Returns:
            Whether to compare now. It depends on counts only, so all ranks agree without asking.
        """
        self._steps += 1
        if self._steps > self.WARMUP:
            self._times.append(seconds)
        enabled = self._predicted is not None and self._config.drift > 0 and not self.reported
        return enabled and self._steps % self.WINDOW == 0

    @property
    def ratio(self) -> float:
        """Measured to predicted time, by the latest window of this rank."""
        assert self._predicted is not None
        return median(self._times) / self._predicted

    def report(self, ratio: float) -> str:
        """Returns a message if the ratio is out of bounds, otherwise nothing.

        Args:
            ratio: That of rank 0, on all ranks: clocks differ, and what follows (planning again) must not.
        """
        if abs(ratio - 1.0) <= self._config.drift:
            return ""
        self.reported = True
        remedy = (
            "measuring again at the next checkpoint" if self._config.replan else "plan.replan = true would plan again"
        )
        return f"steps take {ratio:.2f} x the predicted {self._predicted:.3g} s; {remedy}"


class Trainer:
    """The loop of one rank. All ranks call the same methods in the same order, and decide alike: whatever ranks could
    see differently (a signal, a step's time) is agreed on first.

    Args:
        context: The run.
        state: Where to begin; changed by every step.
        log: Takes rows. Those of other ranks than 0 go nowhere.
    """

    def __init__(self, context: RunContext, state: RunState, log: RunLog) -> None:
        config = context.config
        self._context, self._config, self._state, self._log = context, config, state, log
        self._pipe, self._objective, self._file = state.pipe, context.objective, context.data.train
        # The prediction is of sequences of one document each. Others take less time, each batch its own.
        packed = config.data.packing == "packed"
        self._predicted = None if packed else state.run_plan.step_time_of(config.optimizer.accumulate)
        shuffle, rows = config.data.shuffle, context.objective.rows
        self._loader = BatchLoader(self._file, config.data, self._pipe, shuffle=shuffle, rows=rows)
        self._evaluator = Evaluator(context, self._pipe, log)
        self._checkpoints = CheckpointFolder(folder_of(config), config.checkpoints, log.is_main, self.say)
        self._step_times = StepTimeMonitor(self._predicted, config.plan)
        self._first_step = state.step

    @property
    def has_trained(self) -> bool:
        """Whether there was a step since this trainer was made: if not, there is nothing new to save."""
        return self._state.step > self._first_step

    def run(self, stop: StopSignal) -> Outcome:
        """Takes steps until all are done, a stop is requested, or a new plan is due.

        Args:
            stop: Asked after each step. One rank that was signaled stops all of them, after the same step.

        Returns:
            How it ended. Whatever it is, a checkpoint of the last step is on the disk.
        """
        try:
            return self._run(stop)
        except Exception as error:
            self.say("failed", str(error))
            raise

    def _run(self, stop: StopSignal) -> Outcome:
        """The order after a step matters: evaluate before saving, so that the checkpoint knows its evaluation loss;
        finish an older save before starting another, so that at most one copy of the state waits in memory; and ask for
        a stop before a regular save, because the end saves anyway."""
        steps, every = self._config.optimizer.steps, self._config.checkpoints.every
        self._pipe.train()
        while self._state.step < steps:
            self._one_step()
            due = bool(every) and self._state.step % every == 0
            improved = self._evaluate_if_due()
            self._checkpoints.poll()
            if self._any(bool(stop.received)):
                self.say("stopped", f"asked to stop{f' by {stop.received}' if stop.received else ''}; saving")
                return self._end(Outcome.STOPPED)
            if self._state.step < steps and (due or (improved and self._config.checkpoints.best)):
                replan = due and self._step_times.reported and self._config.plan.replan
                if self._save(wait=replan) and replan:
                    return Outcome.REPLAN
        return self._end(Outcome.FINISHED)

    def _end(self, outcome: Outcome) -> Outcome:
        """Saves the last step and waits for it. Here, and only here, a failed save is an error: nobody would notice a
        message after the process has ended."""
        self._checkpoints.finish()
        if self.has_trained and not self._save(wait=True):
            raise OSError(
                f"the run is at step {self._state.step}, which could not be saved in {self._checkpoints.folder}; make "
                "room and start it again"
            )
        return outcome

    def _any(self, local: bool) -> bool:
        """Whether it is true on any rank. One integer is reduced in every step; a signal may reach one rank only."""
        flag = torch.tensor(int(local), device=self._pipe.device)
        return bool(self._pipe.transport.all_reduce(flag, ALL))

    # One step

    def _one_step(self) -> None:
        """Takes one step and writes its row. A row has what there is: keys without a value are left out."""
        began = time.perf_counter()
        result = self._optimize()
        self._state.skipped = 0 if result.finite else self._state.skipped + 1
        self._state.step += 1
        seconds = time.perf_counter() - began
        tokens = self._config.data.batch_size * self._config.data.seq_len * self._config.optimizer.accumulate
        row: dict[str, Any] = {
            "step": self._state.step,
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "seconds": seconds,
            "tokens": self._state.position * self._config.data.seq_len,
            "tokens_per_second": tokens / seconds,
        }
        if result.metrics:
            row["metrics"] = result.metrics
        if not result.finite:
            row["skipped"] = True
        if self._predicted is not None:
            row["predicted"] = self._predicted
        if self._state.step % self._config.logging.every == 0:
            row |= self._inspect()
        self._log.row(row)
        if not result.finite:
            self._handle_not_finite(result)
        self._check_step_time(seconds)

    def _optimize(self) -> StepResult:
        """Accumulates and clips the gradients of a step, then updates the parameters if they are finite.

        All batches of a step are divided by the same total, the labels of all of them: with `accumulate` 4 the update
        is that of one batch four times as large, not the mean of four means, which would weigh labels of short
        documents more.
        """
        config, loader = self._config.optimizer, self._loader
        batches = [loader.at(self._state.position + i * self._config.data.batch_size) for i in range(config.accumulate)]
        total = self._objective.total(loader, batches)  # every label of the step has the same weight
        losses, metrics = [], Counter[str]()
        for batch in batches:
            targets = self._objective.targets(batch, self._file)
            plan = self._state.planner.plan_for(batch.documents) if self._state.planner else None
            losses.append(self._pipe.step(batch.ids, targets, batch.documents, plan=plan, total=total).double())
            if self._objective.has_metrics:
                metrics.update(self._pipe.metrics())
        self._state.position += config.accumulate * self._config.data.batch_size
        norm = self._pipe.clip_grad_norm_(config.max_grad_norm) if config.max_grad_norm else self._pipe.grad_norm()
        lr = learning_rate(self._state.step, self._config.lr, config)
        result = StepResult(float(sum(losses)), float(norm), lr, dict(metrics))
        if result.finite:
            set_lr(self._state.optimizer, lr)
            self._state.optimizer.step()
        self._pipe.zero_grad(set_to_none=not self._keeps_gradients)
        return result

    @property
    def _keeps_gradients(self) -> bool:
        """Whether zeros are kept for the next step: fresh memory of a CPU is slow to touch. Not where a step computes
        new gradients and adds the old ones: with replicas that are not sharded, and in half precision."""
        layout, half = self._state.run_plan.layout, any(map(is_half, self._pipe.parameters()))
        return self._pipe.device.type == "cpu" and not half and (layout.dp == 1 or layout.shard)

    def _handle_not_finite(self, result: StepResult) -> None:
        """Stops, or reports the skipped step. All ranks decide alike, because they have the same numbers."""
        problem = f"loss {result.loss} and gradient norm {result.grad_norm} at step {self._state.step} are not finite"
        failures = self._config.failures
        if failures.on_nan == "skip" and self._state.skipped < failures.max_skipped:
            self.say("nan", f"{problem}; the step is left out")
            return
        many = f", {self._state.skipped} steps in a row" if self._state.skipped > 1 else ""
        remedy = (
            "leave such steps out with failures.on_nan = 'skip'"
            if failures.on_nan == "stop"
            else f"raise failures.max_skipped from {failures.max_skipped}"
        )
        raise NotFiniteError(
            f"{problem}{many}; nothing was learned from it. Go on from the last checkpoint with a smaller "
            f"optimizer.lr, or {remedy}"
        )

    # Logging

    def _inspect(self) -> dict[str, Any]:
        """Writes the timeline of the step, and returns its idle share and the peak memory of all ranks.

        Only every logging.every steps: events of all ranks are collected, and the file replaced. Other ranks than 0
        take part and return nothing.
        """
        timeline = self._pipe.timeline_on_first()
        memory = self._pipe.transport.collect(_peak_memory(self._pipe.device), ALL)
        if not self._log.is_main or timeline is None:
            return {}
        with suppress(OSError):  # the disk is full; metrics report it
            files.write(self._config.folder / "timeline.json", timeline.to_json())
        return {"idle": timeline.idle, "memory": memory}

    def _check_step_time(self, seconds: float) -> None:
        """Compares by the clock of rank 0, so that all ranks report and plan again in the same step."""
        if self._step_times.add(seconds):
            ratio_on_first = self._pipe.transport.gather(self._step_times.ratio, ALL)[0]
            message = self._step_times.report(ratio_on_first)
            if message:
                self.say("drift", message)

    def say(self, event: str, message: str, step: int | None = None) -> None:
        """Writes an event to the log.

        Args:
            event: Its kind, such as "checkpoint"; the display and the report choose by it.
            message: What to tell.
            step: Which step it is about, if not the current one: a save in the background ends some steps later.
        """
        self._log.row({"step": self._state.step if step is None else step, "event": event, "message": message})

    def _evaluate_if_due(self) -> bool:
        """Whether the loss is the lowest so far. The last step is always evaluated: a run ends with its result."""
        every, is_last = self._config.evaluation.every, self._state.step == self._config.optimizer.steps
        due = bool(every) and (is_last or self._state.step % every == 0)
        self._state.eval_loss = self._evaluator.run(self._state.step) if due else None
        if self._state.eval_loss is None or not self._state.eval_loss < self._state.best:  # also false for NaN
            return False
        self._state.best = self._state.eval_loss
        return True

    def _save(self, *, wait: bool) -> bool:
        """Saves the state. False if that failed; training goes on, and the next save tries again."""
        notes = self._state.take_notes(self._context.identity)
        return self._checkpoints.save(self._state, notes, wait)


def _peak_memory(device: torch.device) -> int:
    """Bytes at the peak since the process began: what torch allocated on a GPU, or what the process occupied."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
