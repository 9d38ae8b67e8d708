"""The training loop: steps, evaluations and checkpoints, until all steps are done or a stop is requested."""

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
from torch import Tensor
from torch.optim import Optimizer

from terapipe import files
from terapipe.modeling.weight_grads import is_half
from terapipe.planning.documents import DocumentPlanner
from terapipe.runtime import ALL, Pipeline, rng_state, seed_rng, set_rng_state
from terapipe.search.result import PlanResult
from terapipe.training.checkpoint_folder import CheckpointFolder, folder_of
from terapipe.training.config import PlanConfig, RunConfig
from terapipe.training.data.loader import BatchLoader
from terapipe.training.data.token_file import Data
from terapipe.training.evaluation import Evaluator
from terapipe.training.identity import NOTE, Identity, same_evaluation, same_rows
from terapipe.training.logging.display import RunLog
from terapipe.training.objective import RunObjective
from terapipe.training.optimizer import learning_rate, set_lr


class StopSignal:
    """The first signal asks the run to stop, the second ends this process at once."""

    def __init__(self, before_exit: Callable[[], None] = lambda: None) -> None:
        """``before_exit`` is called before the second signal ends the process."""
        self.received = ""  # the name of the signal
        self._before_exit = before_exit
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            self._before_exit()
            os._exit(128 + number)
        self.received = signal.Signals(number).name


class Outcome(Enum):
    FINISHED = "finished"
    STOPPED = "stopped"
    REPLAN = "replan"


class NotFiniteError(ArithmeticError):
    """The loss or the gradients are NaN or infinite."""


class StepResult(NamedTuple):
    loss: float
    grad_norm: float
    lr: float
    metrics: Mapping[str, float] = {}  # what the objective found beside the loss

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class StepTimeMonitor:
    """Compares step times with the prediction of the plan. It reports once: only a new plan could change the result."""

    WINDOW = 20  # steps whose median is compared, and steps between comparisons
    WARMUP = 3  # first steps, which are slower and do not count

    def __init__(self, predicted: float | None, config: PlanConfig) -> None:
        self._predicted, self._config = predicted, config
        self._times: deque[float] = deque(maxlen=self.WINDOW)
        self._steps = 0
        self.reported = False

    def add(self, seconds: float) -> bool:
        """Add the time of a step. Returns whether to compare now, the same on all ranks."""
        self._steps += 1
        if self._steps > self.WARMUP:
            self._times.append(seconds)
        enabled = self._predicted is not None and self._config.drift > 0 and not self.reported
        return enabled and self._steps % self.WINDOW == 0

    @property
    def ratio(self) -> float:
        """Measured to predicted time."""
        assert self._predicted is not None
        return median(self._times) / self._predicted

    def report(self, ratio: float) -> str:
        """A message if the ratio is out of bounds."""
        if abs(ratio - 1.0) <= self._config.drift:
            return ""
        self.reported = True
        remedy = (
            "measuring again at the next checkpoint" if self._config.replan else "plan.replan = true would plan again"
        )
        return f"steps take {ratio:.2f} x the predicted {self._predicted:.3g} s; {remedy}"


class Trainer:
    """One rank of a training run. All ranks call the same methods in the same order."""

    def __init__(
        self,
        config: RunConfig,
        pipe: Pipeline,
        optimizer: Optimizer,
        data: Data,
        objective: RunObjective,
        run_plan: PlanResult,
        planner: DocumentPlanner | None,
        log: RunLog,
        random: dict[str, Tensor],
        identity: Identity,
    ) -> None:
        """``planner`` cuts batches by their documents. ``random`` are the tensors that random states are saved from and
        restored to; ``identity`` is saved, too."""
        self._config, self._pipe, self._optimizer = config, pipe, optimizer
        self._objective, self._file = objective, data.train
        self._run_plan, self._planner = run_plan, planner
        self._log, self._random, self._identity = log, random, identity
        # It is of sequences of one document each. Others take less time, each batch its own.
        packed = config.data.packing == "packed"
        self._predicted = None if packed else run_plan.step_time_of(config.optimizer.accumulate)
        self._loader = BatchLoader(data.train, config.data, pipe, shuffle=config.data.shuffle, rows=objective.rows)
        self._evaluator = Evaluator(config, pipe, data, objective, log)
        self._checkpoints = CheckpointFolder(folder_of(config), config.checkpoints, log.is_main, self.say)
        self._step_times = StepTimeMonitor(self._predicted, config.plan)
        self.step = self._first_step = 0
        self._position = 0  # sequences since the start of training
        self._skipped = 0  # steps in a row that were not finite
        self._best = math.inf
        self._eval_loss: float | None = None

    @property
    def _rank(self) -> int:
        return self._pipe.transport.global_rank

    def run(self, stop: StopSignal) -> Outcome:
        try:
            return self._run(stop)
        except Exception as error:
            self.say("failed", str(error))
            raise

    def _run(self, stop: StopSignal) -> Outcome:
        steps, every = self._config.optimizer.steps, self._config.checkpoints.every
        self._pipe.train()
        while self.step < steps:
            self._one_step()
            due = bool(every) and self.step % every == 0
            improved = self._evaluate_if_due()
            self._checkpoints.poll()
            if self._any(bool(stop.received)):
                self.say("stopped", f"asked to stop{f' by {stop.received}' if stop.received else ''}; saving")
                return self._end(Outcome.STOPPED)
            if self.step < steps and (due or (improved and self._config.checkpoints.best)):
                replan = due and self._step_times.reported and self._config.plan.replan
                if self._save(wait=replan) and replan:
                    return Outcome.REPLAN
        return self._end(Outcome.FINISHED)

    def _end(self, outcome: Outcome) -> Outcome:
        self._checkpoints.finish()
        if self.step > self._first_step and not self._save(wait=True):
            raise OSError(
                f"the run is at step {self.step}, which could not be saved in {self._checkpoints.folder}; make room "
                "and start it again"
            )
        return outcome

    def _any(self, local: bool) -> bool:
        """Whether it is true on any rank."""
        flag = torch.tensor(int(local), device=self._pipe.device)
        return bool(self._pipe.transport.all_reduce(flag, ALL))

    # One step

    def _one_step(self) -> None:
        began = time.perf_counter()
        result = self._optimize()
        self._skipped = 0 if result.finite else self._skipped + 1
        self.step += 1
        seconds = time.perf_counter() - began
        tokens = self._config.data.batch_size * self._config.data.seq_len * self._config.optimizer.accumulate
        row: dict[str, Any] = {
            "step": self.step,
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "seconds": seconds,
            "tokens": self._position * self._config.data.seq_len,
            "tokens_per_second": tokens / seconds,
        }
        if result.metrics:
            row["metrics"] = result.metrics
        if not result.finite:
            row["skipped"] = True
        if self._predicted is not None:
            row["predicted"] = self._predicted
        if self.step % self._config.logging.every == 0:
            row |= self._inspect()
        self._log.row(row)
        if not result.finite:
            self._handle_not_finite(result)
        self._check_step_time(seconds)

    def _optimize(self) -> StepResult:
        """Accumulate and clip the gradients of a step, then update the parameters if they are finite."""
        config, loader = self._config.optimizer, self._loader
        batches = [loader.at(self._position + i * self._config.data.batch_size) for i in range(config.accumulate)]
        total = self._objective.total(loader, batches)  # every label of the step has the same weight
        losses, metrics = [], Counter[str]()
        for batch in batches:
            targets = self._objective.targets(batch, self._file)
            plan = self._planner.plan_for(batch.documents) if self._planner else None
            losses.append(self._pipe.step(batch.ids, targets, batch.documents, plan=plan, total=total).double())
            if self._objective.has_metrics:
                metrics.update(self._pipe.metrics())
        self._position += config.accumulate * self._config.data.batch_size
        norm = self._pipe.clip_grad_norm_(config.max_grad_norm) if config.max_grad_norm else self._pipe.grad_norm()
        lr = learning_rate(self.step, self._config.lr, config)
        result = StepResult(float(sum(losses)), float(norm), lr, dict(metrics))
        if result.finite:
            set_lr(self._optimizer, lr)
            self._optimizer.step()
        self._pipe.zero_grad(set_to_none=not self._keeps_gradients)
        return result

    @property
    def _keeps_gradients(self) -> bool:
        """Whether zeros are kept for the next step: fresh memory of a CPU is slow to touch. Not where a step computes
        new gradients and adds the old ones: with replicas that are not sharded, and in half precision."""
        layout, half = self._run_plan.layout, any(map(is_half, self._pipe.parameters()))
        return self._pipe.device.type == "cpu" and not half and (layout.dp == 1 or layout.shard)

    def _handle_not_finite(self, result: StepResult) -> None:
        """Stop or report the skipped step. All ranks decide alike, because they have the same numbers."""
        problem = f"loss {result.loss} and gradient norm {result.grad_norm} at step {self.step} are not finite"
        failures = self._config.failures
        if failures.on_nan == "skip" and self._skipped < failures.max_skipped:
            self.say("nan", f"{problem}; the step is left out")
            return
        many = f", {self._skipped} steps in a row" if self._skipped > 1 else ""
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
        """Write the timeline of the step; idle share and peak memory of all ranks, on rank 0."""
        timeline = self._pipe.timeline_on_first()
        memory = self._pipe.transport.collect(_peak_memory(self._pipe.device), ALL)
        if not self._log.is_main or timeline is None:
            return {}
        with suppress(OSError):  # the disk is full; metrics report it
            files.write(self._config.folder / "timeline.json", timeline.to_json())
        return {"idle": timeline.idle, "memory": memory}

    def _check_step_time(self, seconds: float) -> None:
        if self._step_times.add(seconds):
            ratio_on_first = self._pipe.transport.gather(self._step_times.ratio, ALL)[0]
            message = self._step_times.report(ratio_on_first)
            if message:
                self.say("drift", message)

    def say(self, event: str, message: str, step: int | None = None) -> None:
        self._log.row({"step": self.step if step is None else step, "event": event, "message": message})

    def _evaluate_if_due(self) -> bool:
        """Whether the loss is the lowest so far. The last step is always evaluated: a run ends with its result."""
        every, is_last = self._config.evaluation.every, self.step == self._config.optimizer.steps
        due = bool(every) and (is_last or self.step % every == 0)
        self._eval_loss = self._evaluator.run(self.step) if due else None
        if self._eval_loss is None or not self._eval_loss < self._best:  # also false for NaN
            return False
        self._best = self._eval_loss
        return True

    # Saving and resuming

    def _save(self, *, wait: bool) -> bool:
        notes = {
            "step": self.step,
            "position": self._position,
            "skipped": self._skipped,
            "best": self._best if math.isfinite(self._best) else None,
            "eval_loss": self._eval_loss if math.isfinite(self._eval_loss or 0.0) else None,
            "layout": str(self._run_plan.layout),
            NOTE: self._identity,
        }
        for name, state in rng_state(self._rank).items():
            self._random[name].copy_(state)
        return self._checkpoints.save(self._pipe, self._optimizer, self._random, notes, wait)

    def resume(self, notes: Mapping[str, Any]) -> None:
        """Called after a checkpoint has been loaded into parameters, optimizer and ``random``."""
        self.step = self._first_step = notes["step"]
        self._position, self._skipped = notes["position"], notes["skipped"]
        if not same_rows(notes, self._identity):  # of another run, with another kind of data
            self._position = 0
        comparable = notes["best"] is not None and same_evaluation(notes, self._identity)
        self._best = notes["best"] if comparable else math.inf
        if notes["layout"] == str(self._run_plan.layout):
            set_rng_state(self._random, self._rank)
        else:  # the layout has changed, so the saved states do not apply
            seed_rng(self._config.data.seed + self.step, self._rank)


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
